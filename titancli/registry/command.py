"""`Command`: a plugin's command, whose code is imported only when it runs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Command:
    """A command's entry in `titan --help`, and the location of its code."""

    name: str
    """`report`; in one of titan's groups, `recipe from-torchtitan`."""
    help: str
    """One line."""
    target: str
    """`"module:command"`, a click command."""
