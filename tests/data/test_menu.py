"""The menu costs nothing, and its entries fit their kinds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from titancli.data import COMPONENTS
from titancli.registry.component import component_info, load_target


def test_menu_imports_nothing_heavy() -> None:
    code = (
        "import sys, titancli.data;"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'datasets', 'pydantic', 'rich', 'xxhash'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("config", COMPONENTS, ids=lambda config: config.__name__)
def test_every_component_names_code_that_exists_and_says_what_it_is(config: type) -> None:
    assert callable(load_target(component_info(config).target))
    assert (config.__doc__ or "").strip().splitlines()[0]
