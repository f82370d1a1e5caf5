"""Token shards hold every document in order, whoever wrote them and however often that was interrupted."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.data.deadly_plugin import Deadly
from tests.data.helpers import stream
from titancli import fingerprint
from titancli.data import ByteTokenizer, HFTokenizer, TokenShards
from titancli.data.shards import INDEX, PROGRESS, Index, faults, read_index, require_sound
from titancli.data.shards import tokenize as job
from titancli.data.shards.reader import document_of, lengths
from titancli.data.shards.sources import Options, open_inputs
from titancli.data.shards.tokenize import Job, tokenize
from titancli.data.shards.writer import ShardWriter
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols import TokenizerDefaults
from titancli.registry.component import build

TEXTS = [f"document {number}, ü: " + "ab" * (number * 7 % 23) for number in range(40)]


def run(sources: list[Path] | list[str], out: Path, **options: Any) -> Index:
    chosen = {"tokenizer": ByteTokenizer(), "shard_tokens": 300, "workers": 1, **options}
    return tokenize(Job(inputs=open_inputs([str(s) for s in sources], Options()), out=out, **chosen))


def ids(out: Path) -> list[int]:
    """All tokens, as NumPy alone reads them."""
    index = json.loads((out / INDEX).read_text())
    maps = [np.memmap(out / f"{s['name']}.bin", f"<{'u2'}", "r") for s in index["shards"]]
    return np.concatenate(maps).tolist()


def contents(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(out.glob("*.[bi]*")) if file.name != INDEX}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [json.dumps({"text": text}) for text in TEXTS]
    path.write_text("\n".join([*rows[:7], "no JSON", *rows[7:], '{"text": ""}']) + "\n")
    return path


def write_forms(folder: Path) -> dict[str, Path]:
    """The same documents in every form that is read."""
    import datasets

    folder.mkdir()
    data = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    forms = {
        name: folder / name for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "hf", "text")
    }
    forms["a.jsonl"].write_bytes(data)
    forms["a.jsonl.gz"].write_bytes(gzip.compress(data))
    frames = [zstandard.compress(part) for part in (data[:700], data[700:])]
    forms["a.jsonl.zst"].write_bytes(b"".join(frames))
    pq.write_table(pa.table({"text": TEXTS, "n": range(len(TEXTS))}), forms["a.parquet"], row_group_size=9)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(forms["hf"]))
    forms["text"].mkdir()
    for number, text in enumerate(TEXTS):
        (forms["text"] / f"{number:03}.txt").write_text(text)
    return forms


def test_every_form_gives_the_same_shards(tmp_path: Path) -> None:
    expected = stream(TEXTS)
    found = {}
    for name, path in write_forms(tmp_path / "forms").items():
        index = run([path], tmp_path / f"out-{name}")
        assert ids(index.folder) == expected, name
        assert (index.tokens, index.documents, index.dtype) == (len(expected), len(TEXTS), "uint16")
        assert len(index.shards) > 3 and list(faults(index, whole=True)) == []
        found[name] = (contents(index.folder), index.digest)
    assert all(one == found["text"] for one in found.values())


def test_documents_are_found_by_their_numbers(lines: Path, tmp_path: Path) -> None:
    index = run([lines], tmp_path / "out")
    assert index.skipped == 2
    assert index == read_index(tmp_path / "out")
    for number, text in enumerate(TEXTS):
        found, shard = document_of(index, number)
        assert found == [*text.encode(), 256]
        assert shard in {s.name for s in index.shards}
    counts = lengths(index)
    assert sum(counts.values()) == len(TEXTS)
    assert counts["16-31"] == sum(16 <= len(text.encode()) + 1 < 32 for text in TEXTS)


def test_a_large_vocabulary_is_kept_whole(tmp_path: Path, bpe_folder: Path, lines: Path) -> None:
    config = HFTokenizer(path=bpe_folder)
    index = run([lines], tmp_path / "out", tokenizer=config)
    assert ids(index.folder) == stream(TEXTS, build(config))

    class Large(TokenizerDefaults):
        vocab_size, eos_id, files = 200_000, 199_999, {}

        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [[150_000 + len(text)] for text in texts]

    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(job, "build", lambda config: Large())
        index = run([lines], tmp_path / "large")
        patched.setattr(Large, "eos_id", 200_000)
        with pytest.raises(EnvironmentProblem, match="end marker is 200000, but its vocabulary has 200,000"):
            run([lines], tmp_path / "beyond")
    assert index.dtype == "uint32"
    assert document_of(index, 3)[0] == [150_000 + len(TEXTS[3]), 199_999]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small groups, a position after each of them, and small chunks."""
    monkeypatch.setattr(job, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(job, "GROUP_PIECES", 3)
    for module in (fingerprint, sys.modules[ShardWriter.__module__], sys.modules[read_index.__module__]):
        monkeypatch.setattr(module, "CHUNK_BYTES", 128)


@pytest.mark.usefixtures("eager")
def test_interrupted_anywhere_it_goes_on_and_leaves_the_same_bytes(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = tmp_path / "more"
    more.mkdir()
    for name in "abc":
        (more / name).write_text(name * 500)
    sources = [lines, more, lines.parent / "corpus.jsonl"]
    whole = run(sources, tmp_path / "whole")
    add, added = ShardWriter.add, 0

    def failing(self: ShardWriter, tokens: np.ndarray, *, ends: bool) -> None:
        nonlocal added
        added += 1
        add(self, tokens, ends=ends)
        if added % 6 == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "add", failing)
    attempts, index = 0, None
    while index is None and attempts < 40:
        attempts += 1
        try:
            index = run(sources, tmp_path / "out")
        except KeyboardInterrupt:
            with pytest.raises(EnvironmentProblem, match="not complete"):
                read_index(tmp_path / "out")
    assert index is not None and attempts > 5
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert (index.digest, index.skipped) == (whole.digest, whole.skipped)
    assert not (tmp_path / "out" / PROGRESS).exists()


@pytest.mark.usefixtures("eager")
def test_a_text_of_any_length_goes_on_in_its_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titancli.data.files.PIECE_BYTES", 64)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} line\n" * 200)
    sources = [tmp_path / "a.txt", tmp_path / "b.txt"]
    whole = run(sources, tmp_path / "whole")
    interrupt(monkeypatch, sources, tmp_path / "out", adds=9)
    [state] = [json.loads(file.read_text()) for file in (tmp_path / "out").glob(PROGRESS)]
    assert state["writer"]["open"]["tokens"] > 300 and state["writer"]["open"]["documents"] == 0
    assert run(sources, tmp_path / "out").digest == whole.digest
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def interrupt(
    monkeypatch: pytest.MonkeyPatch, sources: list[Path], out: Path, *, adds: int, **options: Any
) -> None:
    """Run until so many documents, or pieces of them, were written."""
    add, left = ShardWriter.add, adds

    def failing(self: ShardWriter, tokens: np.ndarray, *, ends: bool) -> None:
        nonlocal left
        if not (left := left - 1):
            raise KeyboardInterrupt
        add(self, tokens, ends=ends)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ShardWriter, "add", failing)
        run(sources, out, **options)


@pytest.mark.usefixtures("eager")
def test_bytes_that_were_lost_meanwhile_are_not_filled_with_zeros(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, [lines], tmp_path / "out", adds=12, shard_tokens=1 << 20)
    os.truncate(tmp_path / "out" / "00000.bin", 10)
    with pytest.raises(EnvironmentProblem, match=r"00000\.bin has only 10 bytes of the \d+ that were"):
        run([lines], tmp_path / "out", shard_tokens=1 << 20)
    (tmp_path / "out" / "00000.bin").unlink()
    with pytest.raises(EnvironmentProblem, match=r"00000\.bin has only 0 bytes of the \d+ that were"):
        run([lines], tmp_path / "out", shard_tokens=1 << 20)


def test_a_full_disk_is_named_and_the_command_goes_on_later(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a line\n" * 9000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # a write beyond fails as on a full disk
    try:
        with pytest.raises(EnvironmentProblem, match=r"cannot write .*out") as told:
            run([tmp_path / "a.txt"], tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free some space, then run the command again" in str(told.value)
    run([tmp_path / "a.txt"], tmp_path / "whole")
    run([tmp_path / "a.txt"], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_complete_folder_stays_as_it_is_and_takes_nothing_else(lines: Path, tmp_path: Path) -> None:
    index = run([lines], tmp_path / "out")
    assert run([lines], tmp_path / "out") == index
    other = tmp_path / "other.txt"
    other.write_text("x")
    with pytest.raises(EnvironmentProblem, match="holds token shards of something else: sources was"):
        run([other], tmp_path / "out")
    with pytest.raises(EnvironmentProblem, match=r"holds other files, for example corpus\.jsonl"):
        run([lines], tmp_path)
    assert read_index(tmp_path / "out") == index


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"settings": 1', '{"format": 1}'])
def test_an_index_or_progress_that_is_none_is_refused(lines: Path, tmp_path: Path, text: str) -> None:
    for name in (PROGRESS, INDEX):
        out = tmp_path / name.replace(".", "-")
        out.mkdir()
        (out / name).write_text(text)
        with pytest.raises(EnvironmentProblem, match=rf"{name} cannot be read"):
            run([lines], out)
    with pytest.raises(EnvironmentProblem, match=r"corpus\.jsonl is a file, not a folder of token shards"):
        read_index(lines)


def test_two_at_once_are_refused(lines: Path, tmp_path: Path) -> None:
    with (
        job._held(tmp_path / "out"),
        pytest.raises(EnvironmentProblem, match=r"out is in use by process \d+"),
    ):
        run([lines], tmp_path / "out")
    run([lines], tmp_path / "out")


def test_what_has_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(EnvironmentProblem, match="no text: all documents are empty"):
        run([tmp_path / "a.jsonl"], tmp_path / "out")
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(EnvironmentProblem, match=r"a\.bin is binary data, not text, JSON Lines"):
        run([tmp_path / "a.bin"], tmp_path / "out")
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(RecipeError, match="has no column 'text'"):
        run([tmp_path / "a.parquet"], tmp_path / "out")


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_truncated_compressed_file_is_an_error(tmp_path: Path, suffix: str) -> None:
    forms = write_forms(tmp_path / "forms")
    path = forms[f"a.jsonl.{suffix}"]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EnvironmentProblem, match=rf"a\.jsonl\.{suffix}"):
        run([path], tmp_path / "out")


def damage(out: Path, kind: str) -> str:
    """Damage shards; return what is said of it."""
    data = out / "00001.bin"
    if kind == "truncated":
        data.write_bytes(data.read_bytes()[:-3])
        return rf"00001\.bin is truncated at byte {data.stat().st_size}: "
    if kind == "longer":
        (out / "00001.idx").write_bytes((out / "00001.idx").read_bytes() + b"12345678")
        return r"00001\.idx has \d+ bytes, but index\.json says"
    if kind == "changed":
        content = bytearray(data.read_bytes())
        content[300] ^= 1
        data.write_bytes(content)
        return r"00001\.bin: the data differ from index\.json from byte 256 on"
    if kind == "gone":
        data.unlink()
        return r"00001\.bin cannot be read: No such file"
    if kind == "dtype":
        (out / INDEX).write_text((out / INDEX).read_text().replace("uint16", "uint32"))
        return r"index\.json cannot be read: the checksums of 00000\.bin do not match \d"
    (out / "00001.idx").write_bytes((out / "00000.idx").read_bytes()[: (out / "00001.idx").stat().st_size])
    return r"00001\.idx(: the data differ from index\.json from byte 0| is truncated)"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["truncated", "longer", "changed", "gone", "dtype", "other"])
def test_damage_is_named_with_file_and_byte(
    lines: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("titancli.data.shards.CHUNK_BYTES", 128)
    run([lines], tmp_path / "out")
    require_sound(read_index(tmp_path / "out"))
    said = damage(tmp_path / "out", kind)
    with pytest.raises(EnvironmentProblem, match=said):
        require_sound(read_index(tmp_path / "out"))
    if kind != "dtype":
        assert list(faults(read_index(tmp_path / "out"), whole=True))


def test_ends_that_are_none_are_named_where_they_are_read(lines: Path, tmp_path: Path) -> None:
    index = run([lines], tmp_path / "out")
    ends, kept = index.files(index.shards[0])[1][0], index.shards[0].modified[1]
    whole = np.fromfile(ends, "<i8")
    for wrong in (-1, 10**12):  # damage that no time of change tells
        damaged = whole.copy()
        damaged[2] = wrong
        damaged.tofile(ends)
        os.utime(ends, ns=(kept, kept))
        for read in (lambda: document_of(index, 2), lambda: document_of(index, 3), lambda: lengths(index)):
            with pytest.raises(EnvironmentProblem, match=r"00000\.idx is damaged at byte (16|24)"):
                read()
    whole.tofile(ends)
    assert document_of(index, 3)[0] == stream(TEXTS[3:4])


def test_copied_shards_are_compared_once(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    index = run([lines], tmp_path / "out")
    for file in index.folder.glob("0*"):
        os.utime(file)
    require_sound(index)
    monkeypatch.setattr(fingerprint, "file_sums", lambda path: pytest.fail("read again"))
    require_sound(index)


def test_a_worker_process_that_dies_is_told_with_its_documents(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "GROUP_PIECES", 3)
    (tmp_path / "flag").touch()
    config = Deadly(flag=tmp_path / "flag")
    with pytest.raises(
        EnvironmentProblem, match=r"a worker process died .* from jsonl: corpus\.jsonl, \{.file"
    ):
        run([lines], tmp_path / "out", tokenizer=config, workers=2)
    run([lines], tmp_path / "out", tokenizer=config, workers=2)
    run([lines], tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.e2e
def test_a_command_that_is_killed_goes_on_when_it_is_given_again(lines: Path, tmp_path: Path) -> None:
    plugin = Path(__file__).with_name("deadly_plugin.py")
    (tmp_path / "r.toml").write_text(
        'extends = "titan:llama3_debug"\n[tokenizer]\ntype = "deadly"\nflag = "flag"\n'
    )
    (tmp_path / "flag").touch()
    titan = str(Path(sys.executable).with_name("titan"))
    command = [titan, "-p", str(plugin), "data", "tokenize", "corpus.jsonl", "out", "--recipe", "r.toml"]
    command += ["--shard-tokens", "300", "--workers", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "out" / PROGRESS).exists() and not (tmp_path / "out" / INDEX).exists()
    done = subprocess.run([*command[:-1], "2"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run([lines], tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_worker_process_needs_no_torch() -> None:
    code = (
        "import sys\nfrom titancli.data import ByteTokenizer\n"
        "from titancli.data.shards import workers\n"
        "workers._start_worker(((), ()))\n"
        "assert workers._encode_in_worker(ByteTokenizer(), 'uint16', ['ab', 'c'])[1] == [2, 1]\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_commands_show_and_verify_what_was_written(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from titancli.cli import main

    def titan(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == code
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    main(["data", "tokenize", str(lines), "a 'ü' b", "--workers", "1", "--tokenizer", "byte"])
    _, said = capsys.readouterr().err.split("to train on them: ")
    named = tomllib.loads(said.splitlines()[0].replace(", ", "\n"))["dataset"]
    assert named == {"type": "token_shards", "paths": ["a 'ü' b"]} and "paths" in TokenShards.__annotations__
    write = ("data", "tokenize", str(lines), "out", "--workers", "1")
    titan(*write, code=2)
    titan("data", "tokenize", str(tmp_path), "out", "--tokenizer", "byte", code=2)
    titan(*write, "--tokenizer", "byte", "--revision", "v1", code=2)
    assert not (tmp_path / "out").exists()
    assert titan(*write, "--tokenizer", "byte") == (
        f"{len(stream(TEXTS)):,} tokens of 40 documents in 1 shard, 2 bad rows skipped\n"
    )
    found = json.loads(titan(*write, "--recipe", "llama3_debug", "--json"))
    assert (found["schema"], found["documents"], found["skipped"]) == ("titan.tokenization", 40, 2)
    shown = titan("data", "show", "out")
    assert "40, " in shown and "16-31" in shown and "byte, 257 ids, end marker 256" in shown
    assert titan("data", "show", "out", "--document", "7", "--tokenizer", "byte") == TEXTS[7] + "\n"
    assert titan("data", "show", "out", "--document", "7") == " ".join(map(str, stream(TEXTS[7:8]))) + "\n"
    titan("data", "show", "out", "--document", "40", code=2)
    titan("data", "show", "out", "--tokenizer", "byte", code=2)
    assert titan("data", "verify", "out").endswith(" tokens in 1 shard)\n")
    (tmp_path / "out" / "00000.bin").write_bytes(b"\0" * (tmp_path / "out" / "00000.bin").stat().st_size)
    assert "00000.bin: the data differ from index.json from byte 0" in titan("data", "verify", "out", code=5)
    assert not json.loads(titan("data", "verify", "out", "--json", code=5))["ok"]


def test_errors_speak_of_sources_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from titancli.cli import main

    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    write = ["--workers", "1", "--tokenizer", "byte"]
    for source, options in (("gone", []), ("a.jsonl", ["--strict"])):
        assert (
            main(["data", "tokenize", str(tmp_path / source), str(tmp_path / "out"), *write, *options]) == 5
        )
        said = capsys.readouterr().err
        assert "dataset" not in said and ("--strict" in said or "SOURCE" in said), said
    assert main(["data", "tokenize", str(tmp_path / "dataset.text"), str(tmp_path / "out"), *write]) == 5
    assert "/dataset.text does not exist" in capsys.readouterr().err
