"""Every error that a user can cause: what is wrong, where, and what to do; and the exit codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `titan`. They are part of the interface: see docs/interfaces.md."""

    OK = 0
    FAILED = 1
    """The run failed, or titan itself did."""
    USAGE = 2
    RECIPE = 3
    PLUGIN = 4
    """A plugin or a component is missing, ambiguous or broken."""
    ENVIRONMENT = 5
    """A file, a disk, a device, a run folder in use."""
    STOPPED = 75
    """Stopped on a signal after saving; the run can be resumed. (`EX_TEMPFAIL` of sysexits.h.)"""
    INTERRUPTED = 130
    """Ctrl-C. (128 + SIGINT, as shells have it.)"""


EXIT_OK = ExitCode.OK
EXIT_FAILED = ExitCode.FAILED
EXIT_USAGE = ExitCode.USAGE
EXIT_RECIPE = ExitCode.RECIPE
EXIT_PLUGIN = ExitCode.PLUGIN
EXIT_ENVIRONMENT = ExitCode.ENVIRONMENT
EXIT_STOPPED = ExitCode.STOPPED
EXIT_INTERRUPTED = ExitCode.INTERRUPTED


@dataclass(frozen=True)
class Location:
    """A place in a text: a recipe file, or an override on the command line (its `path` says so)."""

    path: str
    line: int
    """1-based."""
    column: int
    """1-based, in characters."""
    length: int
    """Characters to underline, at least 1."""
    source: str
    """The whole line of text."""


@dataclass(frozen=True)
class Problem:
    """One mistake."""

    code: str
    """Short and stable, e.g. `unknown-key`."""
    message: str
    location: Location | None = None
    hint: str | None = None
    """What to write instead, one line."""


class TitanError(Exception):
    """An error with a remedy. The command line prints it without a traceback."""

    exit_code: int = EXIT_FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def __reduce__(self):  # keyword-only arguments do not survive the default
        blamed = {key: value for key, value in vars(self).items() if key == "blamed"}
        return _rebuild, (type(self), self.message, self.hint), blamed or None


def _rebuild(cls: type[TitanError], message: str, hint: str | None) -> TitanError:
    return cls(message, hint=hint)


class RankFailure(TitanError):
    """Another rank failed, or cannot be reached: the consequence, on this rank, of that failure."""


class UsageError(TitanError):
    """The command line itself is wrong."""

    exit_code = EXIT_USAGE


NOT_INSTALLED = ("unknown-component", "ambiguous-component", "requires")
"""Codes of problems that are a missing or ambiguous plugin or component, wherever it is named."""


class RecipeError(TitanError):
    """A recipe is wrong; holds every problem that was found, in order of place. The first gives the code."""

    exit_code = EXIT_RECIPE

    def __init__(self, problems: list[Problem] | str, *, hint: str | None = None) -> None:
        if isinstance(problems, str):
            problems = [Problem("recipe", problems, hint=hint)]
        self.problems = problems
        if problems and problems[0].code in NOT_INSTALLED:
            self.exit_code = EXIT_PLUGIN
        super().__init__("\n".join(p.message for p in problems), hint=hint)

    def __reduce__(self):
        return RecipeError, (self.problems,)


class PluginError(TitanError):
    """A plugin or a component is missing, ambiguous or broken."""

    exit_code = EXIT_PLUGIN


class EnvironmentProblem(TitanError):
    """Something outside the recipe: a file, a disk, a device, a run folder in use."""

    exit_code = EXIT_ENVIRONMENT


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, each once: an error may have been raised from itself."""
    seen: list[BaseException] = []
    while error is not None and not any(error is one for one in seen):
        seen.append(error)
        yield error
        error = error.__cause__


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that looks most like this one; None if none does."""
    import difflib  # only an error needs it

    found = difflib.get_close_matches(name, list(names), n=1)
    return found[0] if found else None
