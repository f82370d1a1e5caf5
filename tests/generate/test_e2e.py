"""The installed `titan`: train a little, then generate from what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

TITAN = str(Path(sys.executable).with_name("titan"))
TINY = ["model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.hidden_dim=64", "training.steps=80"]
TINY += ["training.seq_len=64", "training.local_batch_size=4", "dataset.type=text_files", "optimizer.lr=1e-2"]
TEXT = "the quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a run `mine`."""
    folder = tmp_path_factory.mktemp("e2e")
    (folder / "text.txt").write_text(TEXT * 500)
    paths = 'dataset.paths=["text.txt"]'
    done = titan(folder, "train", "llama3_debug", *TINY, paths, "--run-dir", "mine")
    assert done.returncode == 0, done.stderr.decode()
    return folder


def titan(folder: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([TITAN, *arguments], cwd=folder, capture_output=True, timeout=120, **options)  # type: ignore[call-overload]


def test_a_run_generates_text_of_its_kind(folder: Path) -> None:
    options = ["--max-new-tokens", "40", "--temperature", "0", "--json"]
    done = titan(folder, "generate", "mine", TEXT[:20], *options, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr.decode()
    [row] = json.loads(done.stdout)["prompts"]
    text = row["completions"][0]["text"]
    assert text == (TEXT * 3)[20:60]  # it has learnt the one line that there is
    # piped in, and as plain text, it is the same
    piped = titan(folder, "generate", "mine", *options[:4], input=TEXT[:20].encode() + b"\n")
    assert piped.stdout.decode() == text + "\n"


def test_text_streams_and_an_interrupt_leaves_130(folder: Path) -> None:
    command = [TITAN, "generate", "mine", "the", "--max-new-tokens", "100000"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = os.read(process.stdout.fileno(), 1)
        assert first  # it came long before the end
        assert process.poll() is None
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read().decode()
        assert process.wait(30) == 130
    assert "Traceback" not in errors


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    command = [TITAN, "generate", "mine", "the", "--max-new-tokens", "3000"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert len(process.stdout.read(5)) == 5
        assert process.poll() is None
        process.stdout.close()
        errors = process.stderr.read()
    assert b"Traceback" not in errors and b"error" not in errors
