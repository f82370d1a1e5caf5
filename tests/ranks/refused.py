"""Schedules that titan refuses by name on the torch that is installed, where it is too old for them.

`tests/recipe/test_layout_checks.py` shows with any torch that it does.
"""

from __future__ import annotations

from typing import Any

import pytest

from titancli.layout.stages import SCHEDULES
from titancli.torch_version import SPLIT_BACKWARD, lacks, torch_version


def refused(recipe: Any) -> str | None:
    """The schedule of a recipe, or of a layout of the tests, if it is such a one."""
    section = getattr(recipe, "pipeline", None)
    name = section.get("schedule") if isinstance(section, dict) else getattr(section, "schedule", None)
    return name if name in SCHEDULES and SCHEDULES[name].splits_backward and lacks(SPLIT_BACKWARD) else None


def skip_where_refused(*recipes: Any) -> None:
    for name in filter(None, map(refused, recipes)):
        pytest.skip(f"titan refuses {name} on torch {torch_version()}")
