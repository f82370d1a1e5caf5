"""Users' notes about a run: `note.json` in its folder, which no run reads or writes, so that a note can be
written while the run is under way. Torch-free."""

from __future__ import annotations

from pathlib import Path

from titancli.checksum import RECORD_CHECKSUM
from titancli.errors import EnvironmentProblem, UsageError
from titancli.files import json_text, parse_json, read_bytes
from titancli.runs import timestamp, write_atomically

FILE = "note.json"
FORMAT = 1
LONGEST = 4000
"""Characters."""


def read(folder: Path) -> str | None:
    """Return the note of a run; None if it has none.

    Raises:
        EnvironmentProblem: the file is damaged, or is not one of titan's.
    """
    file = folder / FILE
    try:
        data = read_bytes(file, limit=1 << 20)
        found = parse_json(data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"cannot read {file}: {error}") from error
    text = found.get("text") if isinstance(found, dict) and found.get("format") == FORMAT else None
    if RECORD_CHECKSUM.holds(data) is False or not isinstance(text, str):
        raise EnvironmentProblem(
            f"{file} is damaged, was edited, or is of another version of titan",
            hint="write the note anew: titan runs note RUN TEXT",
        )
    return text


def write(folder: Path, text: str) -> None:
    """Replace the note of a run; an empty one is removed.

    Raises:
        UsageError: it is too long, or not UTF-8.
        EnvironmentProblem: the folder cannot be written.
    """
    file, text = folder / FILE, " ".join(text.split())
    if len(text) > LONGEST:
        raise UsageError(f"the note has {len(text):,} characters; {LONGEST:,} are possible")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{text!a} is not valid UTF-8") from error
    if not text:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentProblem(f"cannot remove {file}: {error.strerror}") from error
        return
    record = {"format": FORMAT, "written": timestamp(), "text": text}
    body = json_text(record, indent=2)
    write_atomically(file, RECORD_CHECKSUM.put(body.removeprefix("{\n") + "\n"))
