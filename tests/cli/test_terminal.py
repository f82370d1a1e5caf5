"""What a person at a terminal sees, and what everyone else gets."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest


def on_a_terminal(*arguments: str, **env: str) -> tuple[str, str]:
    """stdout and stderr of `titan` where each is a terminal, 80 columns wide."""
    texts = []
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    pairs = [pty.openpty() for _ in range(2)]
    command = [sys.executable, "-m", "titancli", *arguments]
    environment = {**kept, "TERM": "xterm-256color", "COLUMNS": "80", **env}
    process = subprocess.Popen(command, stdout=pairs[0][1], stderr=pairs[1][1], env=environment)
    for reader, writer in pairs:
        os.close(writer)
        text = b""
        while True:
            try:
                piece = os.read(reader, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not piece:
                break
            text += piece
        os.close(reader)
        texts.append(text.decode())
    process.wait(60)
    return texts[0], texts[1]


def test_a_table_has_a_header_and_colour_at_a_terminal() -> None:
    out, _ = on_a_terminal("list-components", "loss")
    assert "\x1b[" in out
    assert "summary" in out and "titan/cross_entropy" in out


def test_no_color_is_honoured() -> None:
    out, _ = on_a_terminal("list-components", "loss", NO_COLOR="1")
    assert "\x1b[" not in out
    assert "titan/cross_entropy" in out


@pytest.mark.parametrize(
    "arguments", [["show", "qqq"], ["validate", "llama3_debug", "training.stpes=1"], ["qqq"]]
)
def test_errors_are_coloured_at_a_terminal_unless_no_color(arguments: list[str]) -> None:
    _, err = on_a_terminal(*arguments)
    assert "\x1b[1;31m" in err
    _, err = on_a_terminal(*arguments, NO_COLOR="1")
    assert "error" in err and "\x1b[" not in err


def test_without_a_terminal_there_are_plain_columns() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "titancli", "list-components", "loss"], capture_output=True, text=True
    )
    assert "\x1b[" not in done.stdout
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert ["loss", "titan/cross_entropy"] in rows and all(row[0] == "loss" for row in rows)
