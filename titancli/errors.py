"""Every error that a user can cause: what is wrong, where, and what to do.

Exit codes are part of the interface: 1 the run failed, 2 usage, 3 recipe, 4 plugin or component,
5 environment (a file, a disk, a device), 75 stopped on a signal after saving, 130 interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_RECIPE = 3
EXIT_PLUGIN = 4
EXIT_ENVIRONMENT = 5
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130


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

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def __reduce__(self):  # keyword-only arguments do not survive the default
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(cls: type[TitanError], message: str, hint: str | None) -> TitanError:
    return cls(message, hint=hint)


class UsageError(TitanError):
    """The command line itself is wrong."""

    exit_code = EXIT_USAGE


class RecipeError(TitanError):
    """A recipe is wrong; holds every problem that was found, in order of place."""

    exit_code = EXIT_RECIPE

    def __init__(self, problems: list[Problem] | str, *, hint: str | None = None) -> None:
        if isinstance(problems, str):
            problems = [Problem("recipe", problems, hint=hint)]
        self.problems = problems
        super().__init__("\n".join(p.message for p in problems), hint=hint)

    def __reduce__(self):
        return RecipeError, (self.problems,)


class PluginError(TitanError):
    """A plugin or a component is missing, ambiguous or broken."""

    exit_code = EXIT_PLUGIN


class EnvironmentProblem(TitanError):
    """Something outside the recipe: a file, a disk, a device, a run folder in use."""

    exit_code = EXIT_ENVIRONMENT
