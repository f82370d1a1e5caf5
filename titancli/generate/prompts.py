"""Sources of prompts: an argument, standard input, or a file. Torch-free."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

from titancli.errors import EnvironmentProblem, UsageError

LARGEST = 1 << 26
"""Bytes of a file of prompts."""
JSON_LINES = (".jsonl", ".ndjson")


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """Return the prompts of a command line; at least one.

    Args:
        prompt: text; `-`, or None where standard input is no terminal: all of standard input.
        file: see `read_file`.

    Raises:
        UsageError: there is none, there are two sources, or one is not what it should be.
        EnvironmentProblem: the file cannot be read.
    """
    if file is not None:
        if prompt is not None:
            raise UsageError("both a PROMPT and a file of prompts were given", hint="give only one of them")
        return read_file(file)
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError(
            "no prompt was given",
            hint='titan generate SRC "Once upon a time"; or use --prompts FILE, or pipe prompts into '
            "standard input",
        )
    if prompt is None or prompt == "-":
        return [_read_stdin()]
    return [_checked(prompt, "the prompt")]


def _read_stdin() -> str:
    """All of it, without one final newline, which `echo` adds."""
    text = _decoded(sys.stdin.buffer.read(), "standard input")
    return text.removesuffix("\n").removesuffix("\r")


def read_file(path: Path) -> list[str]:
    """Return one prompt for each line that is not empty. In `*.jsonl` each line is an object with "prompt".

    Raises:
        UsageError: it holds no prompt, or a line is not what it should be; names the line.
        EnvironmentProblem: it cannot be read.
    """
    try:
        with open(path, "rb") as file:  # a pipe, too: `--prompts <(command)`
            pieces: list[bytes] = []
            while piece := file.read(1 << 20):
                pieces.append(piece)
                if len(pieces) > LARGEST >> 20:
                    raise OSError(errno.EFBIG, f"it has more than {LARGEST:,} bytes", str(path))
        text = _decoded(b"".join(pieces), str(path)).removeprefix("\ufeff")
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from error
    lines = [(n, line.removesuffix("\r")) for n, line in enumerate(text.split("\n"), start=1)]
    lines = [(n, line) for n, line in lines if line.strip()]
    if not lines:
        raise UsageError(f"{path} contains no prompts", hint="write one prompt per line")
    if path.suffix.lower() in JSON_LINES:
        return [_from_json(line, f"{path}:{n}") for n, line in lines]
    return [line for _, line in lines]


def _from_json(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise UsageError(f'{where} has no string "prompt"', hint='write {"prompt": "Once upon a time"}')
    return _checked(prompt, where)


def _checked(text: str, where: str) -> str:
    """Bytes of an argument that are no UTF-8, and lone surrogates of JSON, are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} is not valid Unicode text") from error
    return text


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8: byte {error.start + 1} is invalid") from error
