"""Token shards as training data: the rows of a live tokenizer; exact orders; each rank reads its own part."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.helpers import global_rows, make, same, stream
from titancli.data import ByteTokenizer, HFTokenizer, JsonLines, TokenShards
from titancli.data.permutation import permuted
from titancli.data.shards import Index, Shard, reader
from titancli.data.shards.sources import Options, open_inputs
from titancli.data.shards.tokenize import Job, tokenize
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols.batch import IGNORE
from titancli.registry.component import build

TEXTS = [f"{number}: " + "xyz" * (number * 5 % 11) for number in range(60)]
TOKENS = stream(TEXTS)
S = 16
ORDERS = ["rows", "documents", "off"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`corpus.jsonl`, and its shards in `out`."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    inputs = open_inputs([str(folder / "corpus.jsonl")], Options())
    tokenize(Job(inputs, ByteTokenizer(), folder / "out", 200, 1))
    return folder


def config(folder: Path, **fields: Any) -> TokenShards:
    return TokenShards(paths=[folder / "out"], **fields)


# ------------------------------------------------------------------------------------------------ orders


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17, 64, 65, 1000])
def test_each_number_has_one_place(count: int) -> None:
    orders = [permuted(np.arange(count), count, seed, epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    for order in orders:
        assert sorted(order.tolist()) == list(range(count))
    if count >= 64:
        assert len({tuple(order.tolist()) for order in orders}) == 3
        moved = np.abs(orders[0] - np.arange(count))
        assert count / 5 < moved.mean() < count / 2, "about a third, for a random order"
    some = np.array([count - 1, 0])
    assert permuted(some, count, 1, 0).tolist() == orders[0][some].tolist()


def test_the_order_stays_what_it_was() -> None:
    """A run that began with it is resumed with it."""
    assert permuted(np.arange(4), 10**13, 7, 3).tolist() == [
        4878733749806,
        7432885700204,
        5903420945241,
        5435601688294,
    ]


def test_rows_as_listed_are_those_of_the_live_tokenizer(folder: Path) -> None:
    for mask in (False, True):
        live = make(JsonLines(paths=[folder / "corpus.jsonl"], shuffle=False, document_mask=mask))
        shards = make(config(folder, shuffle="off", document_mask=mask))
        for _, one, other in zip(range(80), live, shards, strict=False):
            assert same(one, other)
        assert shards.state_dict()["epoch"] > 1
        assert shards.state_dict()["tokens"] == live.state_dict()["tokens"]


def test_without_repeat_they_end_where_the_live_tokenizer_does(folder: Path) -> None:
    live = JsonLines(paths=[folder / "corpus.jsonl"], shuffle=False, repeat=False)
    shards = config(folder, shuffle="off", repeat=False)
    for dp_size, rows in ((1, 1), (2, 2), (3, 4)):
        one, _ = global_rows(live, 1000, dp_size=dp_size, rows=rows)
        other, _ = global_rows(shards, 1000, dp_size=dp_size, rows=rows)
        assert one == other


@pytest.mark.parametrize("mask", [False, True])
def test_shuffled_rows_are_all_rows_once_an_epoch(folder: Path, mask: bool) -> None:
    count = -(-(len(TOKENS) - 1) // S)
    rows, _ = global_rows(config(folder, document_mask=mask), 2 * count, dp_size=1, rows=1)
    listed = []
    for start in range(0, len(TOKENS) - 1, S):
        inputs, targets = TOKENS[start : start + S], TOKENS[start + 1 : start + S + 1]
        inputs += [256] * (S - len(inputs))
        listed.append((inputs, targets + [IGNORE] * (S - len(targets))))
    assert sorted(rows[:count]) == sorted(rows[count:]) == sorted(listed)
    assert rows[:count] != rows[count:] and rows[:count] != listed
    once, state = global_rows(config(folder, repeat=False), 1000, dp_size=2, rows=3)
    assert once[:count] == rows[:count] and len(once) % 6 == 0
    assert all(targets == [IGNORE] * S for _, targets in once[count:])
    assert global_rows(config(folder, repeat=False), 1, dp_size=1, rows=1, state=state)[0] == []


def test_shuffled_documents_are_whole_and_come_once_an_epoch(folder: Path) -> None:
    found, _ = global_rows(config(folder, shuffle="documents"), 2 * len(TOKENS), dp_size=1, rows=1, seq_len=1)
    tokens = [token for row, _ in found for token in row]
    epochs = []
    for part in (tokens[: len(TOKENS)], tokens[len(TOKENS) :]):
        texts = bytes(token % 256 for token in part).decode().split("\0")
        assert texts.pop() == ""
        epochs.append(texts)
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(TEXTS)
    assert epochs[0] != epochs[1] != TEXTS
    assert [t for _, targets in found for t in targets][:-1] == tokens[1:]


@pytest.mark.parametrize("shuffle", ORDERS)
def test_document_masks_are_those_of_the_end_markers(folder: Path, shuffle: Any) -> None:
    batches = iter(make(config(folder, shuffle=shuffle, document_mask=True)))
    for _, batch in zip(range(30), batches, strict=False):
        for row, ids, positions in zip(
            *(batch[n].tolist() for n in ("tokens", "document_ids", "positions")), strict=True
        ):
            number = at = 0
            for token, identity, position in zip(row, ids, positions, strict=True):
                assert (identity, position) == (number, at)
                at += 1
                if token == 256:
                    number, at = number + 1, 0


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("shuffle", ORDERS)
def test_ranks_and_stops_change_nothing(folder: Path, shuffle: Any, repeat: bool) -> None:
    chosen = config(folder, shuffle=shuffle, repeat=repeat)
    whole, _ = global_rows(chosen, 150, dp_size=1, rows=1)
    got: list[Any] = []
    state = None
    for dp_size, rows, batches in [(1, 3, 2), (3, 1, 1), (2, 2, 5), (1, 1, 3), (4, 2, 1), (1, 7, 1)] * 2:
        part, state = global_rows(chosen, batches, dp_size=dp_size, rows=rows, state=state)
        state = json.loads(json.dumps(state))
        got += part
    size = min(len(whole), len(got))
    assert got[:size] == whole[:size] and (repeat or len(whole) < 150)
    assert all(targets == [IGNORE] * S for _, targets in got[size:])


@pytest.mark.parametrize("shuffle", ORDERS)
def test_a_rank_reads_its_own_tokens_only(
    folder: Path, shuffle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, preadv = 0, os.preadv

    def counted(descriptor: int, views: Any, offset: int) -> int:
        nonlocal read
        count = preadv(descriptor, views, offset)
        read += count * os.readlink(f"/proc/self/fd/{descriptor}").endswith(".bin")
        return count

    dataset = make(config(folder, shuffle=shuffle), dp_rank=5, dp_size=8)
    monkeypatch.setattr(os, "preadv", counted)
    for _, _batch in zip(range(6), dataset, strict=False):
        pass
    assert read <= 7 * 2 * (2 * S + 2), "6 batches of 2 rows of uint16, and one that is under way"


def test_the_state_tells_other_data(folder: Path, tmp_path: Path) -> None:
    state = make(config(folder)).state_dict()
    with pytest.raises(EnvironmentProblem, match="order was rows of 16 shuffled by seed 7"):
        make(config(folder), seq_len=8).load_state_dict(state)
    with pytest.raises(EnvironmentProblem, match="does not belong to dataset token_shards"):
        make(config(folder, shuffle="off")).load_state_dict(state)
    (tmp_path / "a.txt").write_text(TEXTS[0])
    tokenize(Job(open_inputs([str(tmp_path / "a.txt")], Options()), ByteTokenizer(), tmp_path / "out", 9, 1))
    with pytest.raises(EnvironmentProblem, match="contents was merkle:"):
        make(config(tmp_path)).load_state_dict(state)


# -------------------------------------------------------------------------------------------- what is wrong


def test_another_tokenizer_is_refused(folder: Path, bpe_folder: Path) -> None:
    with pytest.raises(
        EnvironmentProblem, match=r"were written with the tokenizer byte, but the recipe's is hf:"
    ):
        make(config(folder), tokenizer=build(HFTokenizer(path=bpe_folder)))


def copy(folder: Path, to: Path) -> Path:
    for file in (folder / "out").iterdir():
        (to / "out").mkdir(exist_ok=True)
        (to / "out" / file.name).write_bytes(file.read_bytes())
        os.utime(to / "out" / file.name, ns=(0, file.stat().st_mtime_ns))
    return to / "out"


@pytest.mark.parametrize("shuffle", ORDERS)
def test_truncated_shards_are_named_before_and_during_a_run(
    folder: Path, tmp_path: Path, shuffle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    out = copy(folder, tmp_path)
    dataset = make(config(tmp_path, shuffle=shuffle))
    size = (out / "00001.bin").stat().st_size
    os.truncate(out / "00001.bin", size // 2)
    with pytest.raises(EnvironmentProblem, match=rf"00001\.bin has changed since .* now {size // 2:,} bytes"):
        for _, _batch in zip(range(100), dataset, strict=False):
            pass
    with pytest.raises(EnvironmentProblem, match=rf"00001\.bin is truncated at byte {size // 2}: "):
        make(config(tmp_path, shuffle=shuffle))


def test_shards_of_another_index_are_found_before_the_first_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    out = copy(folder, tmp_path)
    data = bytearray((out / "00002.bin").read_bytes())
    data[7] ^= 1
    (out / "00002.bin").write_bytes(data)
    with pytest.raises(
        EnvironmentProblem, match=r"00002\.bin: the data differ from index.json from byte 0 on"
    ):
        make(config(tmp_path))


# --------------------------------------------------------------------------------------------- other tools


def write_megatron(
    path: Path,
    documents: list[list[int]],
    dtype: str = "<u2",
    code: int = 8,
    firsts: list[int] | None = None,
) -> None:
    """`firsts`: the first sequence of each document, and the end of all; None: each sequence is one."""
    path.with_suffix(".bin").write_bytes(b"".join(np.array(d, dtype).tobytes() for d in documents))
    lengths = np.array([len(d) for d in documents], "<i4")
    pointers = ((np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize).astype("<i8")
    index = np.array(range(len(documents) + 1) if firsts is None else firsts, "<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(documents), len(index))
    path.with_suffix(".idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + index.tobytes())


def write_llmc(path: Path, tokens: list[int]) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())


DOCUMENTS = [[*text.encode(), 256] for text in TEXTS]


@pytest.fixture
def foreign(tmp_path: Path) -> dict[str, TokenShards]:
    """The same tokens in the files of other tools, two of each."""
    write_megatron(tmp_path / "m0", DOCUMENTS[:25])
    write_megatron(tmp_path / "m1", DOCUMENTS[25:])
    write_llmc(tmp_path / "l0.bin", TOKENS[:333])
    write_llmc(tmp_path / "l1.bin", TOKENS[333:])
    np.array(TOKENS[:333], "<u4").tofile(tmp_path / "r0.bin")
    np.array(TOKENS[333:], "<u4").tofile(tmp_path / "r1.bin")
    return {
        "megatron": TokenShards(paths=[tmp_path / "m*.bin"], format="megatron"),
        "llm.c": TokenShards(paths=[tmp_path / "l*.bin"], format="llm.c"),
        "raw": TokenShards(paths=[tmp_path / "r*.bin"], format="raw", dtype="uint32"),
    }


def variant(found: TokenShards, **fields: Any) -> TokenShards:
    return TokenShards(**{**vars(found), **fields})


@pytest.mark.parametrize("name", ["megatron", "llm.c", "raw"])
def test_files_of_other_tools_give_the_same_rows(
    folder: Path, foreign: dict[str, TokenShards], name: str
) -> None:
    for fields in ({}, {"shuffle": "off", "document_mask": True}, {"shuffle": "documents"}):
        if fields.get("shuffle") == "documents" and name != "megatron":
            with pytest.raises(RecipeError, match="do not say where documents begin"):
                make(variant(foreign[name], **fields))
            continue
        own, other = make(config(folder, **fields)), make(variant(foreign[name], **fields))
        assert all(same(a, b) for _, a, b in zip(range(50), own, other, strict=False))


def test_what_is_not_of_the_format_is_named_with_its_byte(
    tmp_path: Path, foreign: dict[str, TokenShards]
) -> None:
    os.truncate(tmp_path / "l1.bin", 1024 + 101)
    with pytest.raises(
        EnvironmentProblem, match=r"l1\.bin is not .*'llm\.c': 101 bytes of uint16 are not .* \(byte 1,125\)"
    ):
        make(foreign["llm.c"])
    os.truncate(tmp_path / "r1.bin", 99)
    with pytest.raises(EnvironmentProblem, match=r"r1\.bin .* 99 bytes of uint32 are not whole tokens"):
        make(foreign["raw"])
    (tmp_path / "m1.bin").write_bytes((tmp_path / "m0.bin").read_bytes())
    with pytest.raises(
        EnvironmentProblem, match=r"m1\.bin is not .*'megatron': its index is of \d+ tokens of uint16"
    ):
        make(foreign["megatron"])
    (tmp_path / "m1.idx").unlink()
    with pytest.raises(EnvironmentProblem, match=r"m1\.bin has no index: cannot read .*m1\.idx"):
        make(foreign["megatron"])
    with pytest.raises(EnvironmentProblem, match=r"r0\.bin is not .*another magic number"):
        make(TokenShards(paths=[tmp_path / "r0.bin"], format="llm.c"))
    np.save(tmp_path / "n.npy", np.array(TOKENS))
    with pytest.raises(EnvironmentProblem, match=r"n\.npy .* it has a header of NumPy"):
        make(TokenShards(paths=[tmp_path / "n.npy"], format="raw", dtype="int64"))


@pytest.mark.parametrize("shuffle", ["rows", "off"])
def test_an_id_beyond_the_vocabulary_is_named_with_its_byte(
    tmp_path: Path, shuffle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "SAMPLED_TOKENS", 20)
    np.array([*TOKENS[:50], 300, *TOKENS[:60]], "<u2").tofile(tmp_path / "a.bin")
    dataset = make(TokenShards(paths=[tmp_path / "a.bin"], format="raw", dtype="uint16", shuffle=shuffle))
    with pytest.raises(
        EnvironmentProblem, match=r"a\.bin: the token at byte 100 is 300, but the vocabulary has 257"
    ):
        for _, _batch in zip(range(20), dataset, strict=False):
            pass
    monkeypatch.undo()
    with pytest.raises(EnvironmentProblem, match="the token at byte 100 is 300"):  # seen at once
        make(TokenShards(paths=[tmp_path / "a.bin"], format="raw", dtype="uint16", shuffle=shuffle))


def test_masks_need_end_markers(tmp_path: Path) -> None:
    write_megatron(tmp_path / "m", [document[:-1] for document in DOCUMENTS])
    found = TokenShards(paths=[tmp_path / "m.bin"], format="megatron")
    next(iter(make(found)))
    with pytest.raises(
        EnvironmentProblem, match=r"m\.bin: document 0 ends with the id 32, not with the end marker"
    ):
        make(variant(found, document_mask=True))


@pytest.mark.parametrize("shuffle", ORDERS)
def test_documents_and_files_that_are_empty_change_nothing(tmp_path: Path, shuffle: Any) -> None:
    for number, documents in enumerate(([], [[], *DOCUMENTS[:25], []], [], [*DOCUMENTS[25:], [], []])):
        write_megatron(tmp_path / f"m{number}", documents)
    found = TokenShards(
        paths=[tmp_path / "m*.bin"], format="megatron", shuffle=shuffle, document_mask=True, repeat=False
    )
    rows, _ = global_rows(found, 2 * len(TOKENS), dp_size=1, rows=1, seq_len=1)
    assert Counter(token for row, _ in rows for token in row) + Counter([256]) >= Counter(TOKENS)
    assert len(rows) == len(TOKENS) - 1
    for batches in range(0 if shuffle == "documents" else 40, 40):
        states = [
            global_rows(variant(found, repeat=True), batches, dp_size=d, rows=6 // d) for d in (1, 2, 3)
        ]
        assert states[0] == states[1] == states[2]
    whole, _ = global_rows(variant(found, repeat=True), 200, dp_size=1, rows=2)
    parts, state = global_rows(variant(found, repeat=True), 37, dp_size=2, rows=2)
    parts += global_rows(variant(found, repeat=True), 50, dp_size=1, rows=4, state=state)[0]
    assert parts == whole[: len(parts)]


def test_a_pointer_out_of_its_file_is_named(tmp_path: Path) -> None:
    for wrong in (-2, 1 << 40):
        write_megatron(tmp_path / "m", DOCUMENTS)
        index = bytearray((tmp_path / "m.idx").read_bytes())
        at = 34 + 4 * len(DOCUMENTS) + 8 * 3
        index[at : at + 8] = struct.pack("<q", wrong)
        (tmp_path / "m.idx").write_bytes(index)
        with pytest.raises(EnvironmentProblem, match=rf"m\.idx .* the one before it ends \(byte {at}\)"):
            make(TokenShards(paths=[tmp_path / "m.bin"], format="megatron", shuffle="documents"))


def sentences(folder: Path) -> dict[str, TokenShards]:
    """The same documents, whole, and as `preprocess_data.py --split-sentences --append-eod` writes them."""
    parts, firsts = [], [0]
    for document in DOCUMENTS:
        parts += [document[at : at + 5] for at in range(0, len(document), 5)]
        firsts.append(len(parts))
    cut = firsts[30]
    (folder / "whole").mkdir()
    (folder / "split").mkdir()
    write_megatron(folder / "whole/m0", DOCUMENTS[:30])
    write_megatron(folder / "whole/m1", DOCUMENTS[30:])
    write_megatron(folder / "split/m0", parts[:cut], firsts=firsts[:31])
    write_megatron(folder / "split/m1", parts[cut:], firsts=[first - cut for first in firsts[30:]])
    return {
        name: TokenShards(paths=[folder / name], format="megatron", document_mask=True)
        for name in ("whole", "split")
    }


@pytest.mark.parametrize(
    "fields", [{}, {"shuffle": "documents"}, {"shuffle": "documents", "packing": "best_fit"}]
)
def test_sentences_of_a_document_stay_together(tmp_path: Path, fields: dict[str, Any]) -> None:
    both = sentences(tmp_path)
    whole, split = (global_rows(variant(both[name], **fields), 60, dp_size=2, rows=2) for name in both)
    assert split[0] == whole[0]
    assert "documents" not in whole[1]["data"] and ("documents" in split[1]["data"]) is bool(fields)
    old = {**split[1], "data": {k: v for k, v in split[1]["data"].items() if k != "documents"}}
    if not fields:  # rows are cut from the tokens as they are listed, then as now
        make(both["split"]).load_state_dict(old)
        return
    with pytest.raises(EnvironmentProblem, match=f"documents was None and is {len(DOCUMENTS)}"):
        make(variant(both["split"], **fields)).load_state_dict(old)


@pytest.mark.parametrize(
    ("firsts", "said"),
    [
        ([], "its documents end with sequence|its table of documents|truncated"),
        ([0], "its documents end with sequence 0 of 60"),
        ([0, 30], "its documents end with sequence 30 of 60"),
        ([0, 30, 90], "its documents end with sequence 90 of 60"),
        ([10, 60], "its table of documents is not in order"),
        ([0, 40, 20, 60], "its table of documents is not in order"),
        ([0, -5, 60], "its table of documents is not in order"),
    ],
)
def test_a_table_of_documents_that_is_none_is_named(tmp_path: Path, firsts: list[int], said: str) -> None:
    write_megatron(tmp_path / "m", DOCUMENTS, firsts=firsts)
    with pytest.raises(EnvironmentProblem, match=rf"m\.idx is not a file of .*{said}"):
        make(TokenShards(paths=[tmp_path / "m.bin"], format="megatron"))


def test_a_folder_that_is_named_twice_is_read_once(folder: Path) -> None:
    twice = make(TokenShards(paths=[folder / "out", folder / "." / "out"]))
    assert twice.state_dict() == make(config(folder)).state_dict()


# ------------------------------------------------------------------------------------------------ very large


def test_10_terabytes_take_little_memory_and_any_place_is_near(tmp_path: Path) -> None:
    """Files of 10 TB that hold nothing: zeros take no disk."""
    count, tokens, documents = 320, 1 << 34, 1 << 24
    out, shards = tmp_path / "out", []
    out.mkdir()
    for number in range(count):
        name, modified = f"{number:05d}", []
        for suffix, size in ((".bin", 2 * tokens), (".idx", 8 * documents)):
            with open(out / f"{name}{suffix}", "wb") as file:
                file.truncate(size)
            modified.append((out / f"{name}{suffix}").stat().st_mtime_ns)
        shards.append(
            Shard(name, tokens, documents, 0, ("0" * 16 * 512, "0" * 16 * 2), (modified[0], modified[1]))
        )
    (out / "index.json").write_text(Index(out, "byte", 257, 256, "uint16", [], 0, shards).text())
    before = _resident()
    for shuffle in ("rows", "off"):
        dataset = make(config(tmp_path, shuffle=shuffle), seq_len=4096, rows=4, dp_rank=1000, dp_size=1024)
        state = dataset.state_dict()
        far = {"row": 10**9, "epoch": 0} if shuffle == "rows" else {"offset": 4 * 10**12}
        dataset.load_state_dict({**state, **far})
        for _, batch in zip(range(50), dataset, strict=False):
            assert not batch["tokens"].any()
    assert _resident() - before < 64 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
