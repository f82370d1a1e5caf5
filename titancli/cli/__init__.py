"""The command line: one click command a file, words in and words out, no logic.

`main` is the script `titan`. It takes out the options that stand before or after any command, and is the
one place where an error becomes a message and an exit code (`titancli.cli.failures`). Nothing imported here
imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise

from titancli.cli.common import Common, split_common
from titancli.cli.failures import report
from titancli.cli.output import be_quiet, prepare_streams
from titancli.signals import leave

VERBOSE = "titan -v"
"""The name of the handler that writes the log to stderr."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `titan` with these arguments (default: the process's) and return its exit code."""
    code = _main(argv)
    return leave(code) if argv is None else code


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:
        # These flags are looked up by hand: they must work for an error in the other options too.
        as_json = {"--json", "--format=json"} & {*arguments} or ("--format", "json") in pairwise(arguments)
        return report(error, arguments, traceback="--traceback" in arguments, as_json=bool(as_json))


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
    if common.color is not None:  # as environment variables it reaches rich and the workers too
        chosen, other = (
            ("FORCE_COLOR", "NO_COLOR") if common.color == "always" else ("NO_COLOR", "FORCE_COLOR")
        )
        os.environ.pop(other, None)
        os.environ[chosen] = "1"
    be_quiet(common.verbosity < 0)
    if common.verbosity or "logging" in sys.modules:
        _configure_logging(common.verbosity)


def _configure_logging(verbosity: int) -> None:
    """Set the level of titan's loggers, which a run's output follows (WARNING: only warnings)."""
    import logging

    logger = logging.getLogger("titancli")
    logger.handlers = [handler for handler in logger.handlers if handler.name != VERBOSE]
    level = logging.WARNING if verbosity < 0 else logging.DEBUG if verbosity > 0 else logging.NOTSET
    logger.setLevel(level)
    if verbosity > 0:
        handler = logging.StreamHandler()
        handler.name = VERBOSE
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


def _print_version() -> int:
    from titancli.version import __version__

    print(f"titan {__version__}")
    return 0
