"""`titan convert-checkpoint … --to gguf`: runs of the command, and what goes wrong in the middle."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf_cases import PYTHON, there

from tests.run.conftest import Finished, here, train  # noqa: F401 - fixtures
from titan_gguf.newfile import new_file
from titancli.errors import EnvironmentProblem

SMALL = ("training.steps=2", "checkpoint.interval=2", "model.n_layers=1")


@pytest.fixture
def run(here: Path, train: Any) -> Path:  # noqa: F811
    assert train("tiny.toml", "--run-dir", "run", *SMALL).code == 0
    return Path("run")


@pytest.fixture
def titan(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    from tests.run.conftest import in_this_process

    monkeypatch.delenv("TITAN_LLAMACPP", raising=False)
    return in_this_process(capfd)


def gguf(titan: Any, *words: Any) -> Finished:
    found: Finished = titan("convert-checkpoint", *words, "--to", "gguf")
    return found


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_becomes_a_file_and_twice_the_same_bytes(run: Path, titan: Any) -> None:
    for out in ("a", "b"):
        done = gguf(titan, run, f"{out}/m.gguf", "--type", "q8_0", "--verify")
        assert done.code == 0, done.err
        assert "Q8_0: largest error" in done.out and "verified: yes" in done.out
        assert "bytes per weight" in done.out and "not run by llama.cpp" in done.out
        assert files(Path(out)) == ["m.gguf"]
    assert Path("a/m.gguf").read_bytes() == Path("b/m.gguf").read_bytes()
    again = gguf(titan, run, "a/m.gguf")
    assert again.code == 5 and "a/m.gguf exists; existing data is never overwritten" in again.err


def test_the_group_of_checkpoints_has_it_and_the_options_of_other_formats_are_unknown(
    run: Path, titan: Any
) -> None:
    assert titan("convert-checkpoint", "--to=gguf", run, "m.gguf", "--type", "f32").code == 0
    assert titan("convert-checkpoint", run, "n.gguf", "--to", "gguf", "--quantise", "fp8").code == 2
    assert titan("convert-checkpoint", run, "n.gguf", "--to", "ggfu").code == 2
    assert "q4_k_m" in titan("convert-checkpoint", "--to", "gguf", "--help").out
    assert "q4_k_m" not in titan("convert-checkpoint", "--help").out


def test_without_the_plugin_the_answer_says_how_to_install_it(run: Path, titan: Any) -> None:
    done = titan("-p", "no:titan-gguf", "convert-checkpoint", run, "m.gguf", "--to", "gguf")
    assert done.code == 4 and "titan convert-checkpoint --to gguf comes with titan-gguf" in done.err


def test_adapters_are_merged(here: Path, train: Any, titan: Any) -> None:  # noqa: F811
    assert train("tiny.toml", "--run-dir", "base", *SMALL).code == 0
    lora = 'converters=[{type="lora", rank=2, alpha=4.0}]'
    base = f'weights="{Path("base/checkpoints/step-2").absolute()}"'
    assert train("tiny.toml", "--run-dir", "lora", *SMALL, lora, base, "optimizer.lr=0.1").code == 0
    done = gguf(titan, "lora", "m.gguf", "--type", "f32", "--verify")
    assert done.code == 0 and "merging the adapters" in done.err, done.err
    assert gguf(titan, "base", "b.gguf", "--type", "f32").code == 0
    assert Path("m.gguf").stat().st_size == Path("b.gguf").stat().st_size
    assert Path("m.gguf").read_bytes() != Path("b.gguf").read_bytes()


def test_verify_finds_a_file_that_is_not_what_was_to_be_written(
    run: Path, titan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_gguf import mix

    real = mix._encoded

    def wrong(name: str, values: Any, kind: Any) -> Any:
        return real(name, values * (1.5 if name == "blk.0.ffn_up.weight" else 1), kind)

    monkeypatch.setattr(mix, "_encoded", wrong)
    done = gguf(titan, run, "m.gguf", "--type", "q4_k_m", "--verify")
    assert done.code == 1
    assert "not what the checkpoint has: blk.0.ffn_up.weight" in done.out and "verified: NO" in done.out


def test_an_error_in_the_middle_leaves_nothing(
    run: Path, titan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_gguf import export

    before = files(Path())

    def stopped(name: str, *_: Any) -> Any:
        if name == "blk.0.ffn_up.weight":
            raise KeyboardInterrupt
        return real(name, *_)

    real = export.stored
    monkeypatch.setattr(export, "stored", stopped)
    assert gguf(titan, run, "m.gguf").code == 130
    assert files(Path()) == before


def test_a_damaged_checkpoint_is_not_exported(run: Path, titan: Any) -> None:
    file = run / "checkpoints/step-2/rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-8] ^= 1
    file.write_bytes(data)
    done = gguf(titan, run / "checkpoints/step-2", "m.gguf")
    assert done.code == 5 and "is damaged" in done.err and not Path("m.gguf").exists()


def test_a_tokenizer_without_files_is_refused(run: Path, titan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titancli.data.byte_tokenizer.ByteTokenizer.fingerprint", "of a plugin")
    done = gguf(titan, run, "m.gguf")
    assert done.code == 2 and "has no tokenizer.json" in done.err and not Path("m.gguf").exists()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentProblem, match=r"m\.gguf cannot be written: No space left on device"),
        new_file(tmp_path / "m.gguf", 1 << 60),
    ):
        raise AssertionError
    with pytest.raises(EnvironmentProblem, match="It needs 10 bytes, and"), new_file(tmp_path / "m.gguf", 10):
        raise OSError(28, os.strerror(28))
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(tmp_path: Path) -> None:
    left, other = tmp_path / ".m.gguf.tmp-0123abcd", tmp_path / ".n.gguf.tmp-0123abcd"
    left.write_bytes(b"x")
    other.write_bytes(b"x")
    said: list[str] = []
    with new_file(tmp_path / "m.gguf", 1, say=said.append) as hidden:
        hidden.write_bytes(b"whole")
    assert files(tmp_path) == [other.name, "m.gguf"] and len(said) == 1
    with open(other, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            pytest.raises(EnvironmentProblem, match="is being written by another process"),
            new_file(tmp_path / "n.gguf", 1),
        ):
            raise AssertionError
    assert other.exists()


def test_a_file_that_another_process_has_written_meanwhile_stays(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentProblem, match="exists; existing data"),
        new_file(tmp_path / "m.gguf", 1) as hidden,
    ):
        hidden.write_bytes(b"late")
        (tmp_path / "m.gguf").write_bytes(b"first")
    assert files(tmp_path) == ["m.gguf"] and (tmp_path / "m.gguf").read_bytes() == b"first"


def test_a_python_without_llama_cpp_is_told(run: Path, titan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_LLAMACPP", shutil.which("true") or "/bin/true")
    done = gguf(titan, run, "m.gguf", "--verify")
    assert done.code == 5 and "llama.cpp cannot run" in done.err
    assert Path("m.gguf").exists()


def test_a_python_that_is_not_there_is_told_before_the_conversion(
    run: Path, titan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_LLAMACPP", "/no/such/python")
    done = gguf(titan, run, "m.gguf", "--verify")
    assert done.code == 5 and "TITAN_LLAMACPP names /no/such/python" in done.err
    assert not Path("m.gguf").exists()


@pytest.mark.llamacpp
@there
def test_llama_cpp_takes_part_where_it_is_named(
    run: Path, titan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_LLAMACPP", PYTHON)
    done = gguf(titan, run, "m.gguf", "--verify")
    assert done.code == 0, done.err
    assert "64 of 64 greedy tokens equal" in done.out and "the same tokens for 6 texts" in done.out
