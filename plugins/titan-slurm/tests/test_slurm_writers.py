"""titan-slurm: bash hands each text of a script to `titan train` as it is, and runs nothing else."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.security.writers import HOSTILE, UTF8, Writer, check_comments, check_rows
from titan_slurm import Slurm
from titan_slurm.jobs import SlurmFiles, _quoted, script
from titancli.errors import EnvironmentProblem
from titancli.runs import RunFolder, write_atomically

WRITERS = [
    Writer("option of sbatch", "titan_slurm.jobs:_quoted", "titan_slurm.jobs"),
    Writer("script", "titan_slurm.jobs:script", "titan_slurm.jobs"),
]


def test_what_writes_has_a_row() -> None:
    check_rows("titan_slurm", WRITERS)
    check_comments("titan_slurm", {})


@pytest.mark.parametrize("text", HOSTILE)
def test_an_option_is_one_line(text: str) -> None:
    try:
        made = _quoted(text)
    except EnvironmentProblem:
        assert not text.isprintable()
        return
    assert made.isprintable()
    if made != text:  # in quotes, a backslash is followed by what it stands for
        assert re.fullmatch(r'"(?:[^"\\]|\\.)*"', made)
        assert re.sub(r"\\(.)", r"\1", made[1:-1]) == text


def made(folder: Path, run: str, text: str) -> str:
    """Return the script of a run, with this text in each place that others fill."""
    files = SlurmFiles(RunFolder(folder / run))
    return script(
        Slurm(), files, name=text, nodes=(None, 1), nproc=None, plugins=[text], env={"X": text}, flags=[text]
    )


def head(text: str) -> list[str]:
    """Return the lines that sbatch reads: it stops at the first command (sbatch(1))."""
    lines = text.split("\n")
    return lines[: next(number for number, line in enumerate(lines) if line and line[0] != "#")]


def ran(folder: Path, text: str) -> list[str]:
    """Return what a script hands to srun, and check that it leaves nothing in its folder."""
    stand_in, seen = folder / "bin" / "srun", folder / "seen"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN"\n')
    stand_in.chmod(0o755)
    write_atomically(folder / "job.sh", text)
    before = {*os.listdir(folder), "seen"}
    environment = {"PATH": f"{stand_in.parent}:/usr/bin:/bin", "SEEN": str(seen), "SLURM_JOB_ID": "1"}
    command = ["bash", str(folder / "job.sh")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert set(os.listdir(folder)) == before
    return seen.read_bytes().decode().split("\0")[:-1]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_script_hands_on_what_it_is_given(text: str, tmp_path: Path) -> None:
    if text not in UTF8:
        with pytest.raises(EnvironmentProblem, match="is not valid UTF-8"):
            ran(tmp_path, made(tmp_path, "run", text))
        return
    text = text.replace("\0", "")  # no argument has one
    plain, job = made(tmp_path, "run", "plain"), made(tmp_path, "run", text)
    assert [line.partition("=")[0] for line in head(job)] == [line.partition("=")[0] for line in head(plain)]
    given = ran(tmp_path, job)
    assert given[-5:] == [text, "-p", text, "--env", f"X={text}"]
    assert given[given.index("--run-dir") + 1] == str(tmp_path / "run")


@pytest.mark.parametrize("text", UTF8)
def test_a_run_folder_is_one_word_or_refused(text: str, tmp_path: Path) -> None:
    name = text.replace("\0", "").replace("/", "") or "x"
    try:
        job = made(tmp_path, name, "plain")
    except EnvironmentProblem:
        assert not name.isprintable() or set(name) & set("%\\")
        return
    given = ran(tmp_path, job)
    assert given[given.index("--run-dir") + 1] == str(tmp_path / name)
