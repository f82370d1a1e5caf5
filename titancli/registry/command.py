"""`Command`: a command of a plugin whose code is imported when it is run, and not before."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Command:
    """What `titan --help` shows of a command, and where its code is."""

    name: str
    """`report`; of one that is added to a group of titan's, `recipe from-torchtitan`."""
    help: str
    """One line."""
    target: str
    """`"module:command"`, a click command."""
