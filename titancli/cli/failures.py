"""The place where an exception becomes a message on stderr and an exit code."""

from __future__ import annotations

import sys
import traceback as tracebacks
from collections.abc import Sequence
from dataclasses import replace

import click

from titancli.cli.output import colored, error_line, print_json
from titancli.errors import (
    EXIT_ENVIRONMENT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PLUGIN,
    EXIT_RECIPE,
    EXIT_USAGE,
    ExitCode,
    Problem,
    RecipeError,
    TitanError,
)
from titancli.files import denied
from titancli.signals import drop, say
from titancli.terminal import pasteable

KINDS = {
    EXIT_USAGE: "usage",
    EXIT_RECIPE: "recipe",
    EXIT_PLUGIN: "plugin",
    EXIT_ENVIRONMENT: "environment",
}
"""The code of the one problem of an error that is no RecipeError, by exit code."""


def report(
    error: Exception | KeyboardInterrupt,
    arguments: Sequence[str] = (),
    *,
    traceback: bool = False,
    as_json: bool = False,
) -> int:
    """Report in words what a command raised, and return the exit code.

    Args:
        arguments: the command line.
        traceback: whether to print tracebacks as well.
        as_json: whether to print an error to stdout too, as a document on one line.
    """
    if isinstance(error, BrokenPipeError):
        drop(sys.stdout)
        return EXIT_FAILED
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return EXIT_INTERRUPTED
    if traceback and not isinstance(error, click.ClickException):
        tracebacks.print_exception(error)
    code = print_error(error, arguments, traceback=traceback)
    try:
        if as_json:
            print_json("error", {"exit_code": int(code), "problems": _problems(error, code)}, one_line=True)
        sys.stdout.flush()
    except (OSError, ValueError):  # it is full, or closed
        drop(sys.stdout)
    return code


def print_error(error: Exception, arguments: Sequence[str] = (), *, traceback: bool = False) -> int:
    """Print what went wrong and return the exit code that stands for it."""
    if isinstance(error, click.ClickException):
        _print_click_error(error, arguments)
        return error.exit_code
    if isinstance(error, RecipeError):
        from titancli.recipe import render_problems

        shown = [
            replace(found, hint=pasteable(found.hint)) if found.hint else found for found in error.problems
        ]
        say(render_problems(shown, color=colored(sys.stderr)).rstrip())
        return error.exit_code
    where = _where(error)
    if isinstance(error, TitanError):
        error_line(error.message + where, hint=error.hint or denied(error))
        return error.exit_code
    hint = None if traceback else "use --traceback to see where"
    if isinstance(error, OSError) and error.strerror:
        text = ": ".join([error.strerror, *filter(None, [str(error.filename or "")])])
        error_line(text, hint=denied(error) or hint)
        return EXIT_ENVIRONMENT
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    error_line(f"unexpected {words}{where}", hint=hint)
    return EXIT_FAILED


def _where(error: Exception) -> str:
    """Return the line that names the plugin's component an error came through; empty if there is none."""
    from titancli.registry.error_source import blame

    found = blame(error)
    return f"\n in {found}" if found and found.place not in str(error) else ""


def _problems(error: Exception, code: int) -> list[dict[str, str | int | None]]:
    from titancli.recipe.problems import problems_data

    if isinstance(error, RecipeError):
        return problems_data(error.problems)
    message, hint = str(error) or type(error).__name__, None
    if isinstance(error, TitanError):
        message, hint = error.message, error.hint
    elif isinstance(error, click.ClickException):
        message = error.format_message()
    return problems_data([Problem(KINDS.get(ExitCode(code), "failed"), message, hint=hint)])


def _print_click_error(error: click.ClickException, arguments: Sequence[str]) -> None:
    context = getattr(error, "ctx", None)
    message = error.format_message()
    if context is None or message == context.get_help():  # without any argument the help is the message
        error.show()
        return
    if isinstance(error, click.NoSuchOption):
        from titancli.cli.override_hints import hint_for

        if hint := hint_for(error.option_name, arguments, context.command):
            error_line(f"no such option {error.option_name!r}", hint=hint)
            return
    usage = " ".join(context.get_usage().removeprefix("Usage:").split())
    message = " ".join(message.split()).rstrip(".")
    error_line(message[:1].lower() + message[1:], hint=f"usage: {usage} (--help shows more)")
