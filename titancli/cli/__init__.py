"""The command line: one click command a file, words in and words out, no logic.

`main` is the script `titan`. It takes out the options that stand before or after any command, and is the
one place where an error becomes a message and an exit code. Nothing imported here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from titancli.cli.common import Common, split_common
from titancli.cli.failures import guard


def main(argv: Sequence[str] | None = None) -> int:
    """Run `titan` with these arguments (default: the process's) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The flag is looked up by hand: it must work for an error in the other options too.
    return guard(lambda: _run(arguments), traceback="--traceback" in arguments)


def _run(arguments: list[str]) -> int:
    rest, common = split_common(arguments)
    if common.version:
        return _print_version()
    _configure(common)
    from titancli.cli.group import titan

    result = titan.main(rest, prog_name="titan", standalone_mode=False, obj=common)
    return result if isinstance(result, int) else 0


def _configure(common: Common) -> None:
    from titancli import registry

    registry.configure(files=common.plugin_files, blocked=common.blocked)


def _print_version() -> int:
    from titancli import __version__

    print(f"titan {__version__}")
    return 0
