"""The files themselves: safetensors streams, metadata.json, manifest.json, and hostile ones of each."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.checkpoint.tensors import bits, rewritten, save, some_tensors
from tests.yardstick import cpu_seconds
from titancli.checkpoint import CheckpointReader, newest_good, read_manifest
from titancli.checkpoint.format.hashed import Digest, file_digest
from titancli.checkpoint.format.layout import tile
from titancli.checkpoint.format.manifest import Manifest, Verify, faults, is_checkpoint, manifest_bytes
from titancli.checkpoint.format.metadata import Cell, Group, index_bytes, open_metadata
from titancli.checkpoint.format.tensorfile import Entry, TensorFileWriter, read_header, split
from titancli.checkpoint.format.tensors import dtype_name, read_tensor, tensor_bytes
from titancli.checkpoint.remote.store import at
from titancli.errors import EnvironmentProblem, TitanError


def test_the_format_itself_imports_no_torch():
    code = (
        "import sys, titancli.checkpoint.format.manifest, titancli.checkpoint.format.layout; "
        "print([m for m in ('torch', 'numpy', 'pydantic', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_safetensors_library_reads_what_we_stream(tmp_path: Path):
    tensors = some_tensors()
    entries = [Entry(n, dtype_name(n, t.dtype), tuple(t.shape)) for n, t in tensors.items()]
    with TensorFileWriter(tmp_path / "a.safetensors", entries) as file:
        for tensor in tensors.values():
            file.write(tensor_bytes(tensor))
        digest = file.close()
    assert digest.size == (tmp_path / "a.safetensors").stat().st_size
    theirs = load_file(tmp_path / "a.safetensors")
    assert all(bits(theirs[name]) == bits(tensor) for name, tensor in tensors.items())


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path):
    tensors = {name: tensor.contiguous() for name, tensor in some_tensors().items()}
    save_file(tensors, tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    assert header.keys() == tensors.keys()
    assert all(
        bits(read_tensor(tmp_path / "a.safetensors", header[n])) == bits(t) for n, t in tensors.items()
    )


def test_data_that_is_not_aligned_is_read(tmp_path: Path):
    value = torch.tensor([1.5, -2.0])
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 - len(header) % 2)  # the data begins at an odd byte
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bits(value))
    entry = read_header(path)["x"]
    assert entry.start % 2 == 1
    assert torch.equal(read_tensor(path, entry), value)


def test_a_writer_refuses_bytes_that_were_not_announced(tmp_path: Path):
    with (
        pytest.raises(TitanError, match="does not have the size"),
        TensorFileWriter(tmp_path / "a", [Entry("x", "F32", (2,))]) as file,
    ):
        file.write(memoryview(b"123"))
    with (
        pytest.raises(TitanError, match="fewer tensors"),
        TensorFileWriter(tmp_path / "b", [Entry("x", "F32", (2,))]) as file,
    ):
        file.close()
    with pytest.raises(TitanError, match="two tensors"):
        TensorFileWriter(tmp_path / "c", [Entry("x", "F32", (2,)), Entry("x", "F32", (2,))])


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_splitting_keeps_order_and_the_limit(sizes: list[int], limit: int):
    parts = split(sizes, limit)
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    assert all(len(part) == 1 or sum(sizes[i] for i in part) <= limit for part in parts)


HEADERS: dict[str, Any] = {
    "a hole": {"x": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}},
    "an overlap": {
        "x": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        "y": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
    },
    "a lying shape": {"x": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 8]}},
    "a negative offset": {"x": {"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}},
    "beyond the end": {"x": {"dtype": "U8", "shape": [80], "data_offsets": [0, 80]}},
    "an unknown dtype": {"x": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 8]}},
    "a float offset": {"x": {"dtype": "U8", "shape": [8], "data_offsets": [0.0, 8.0]}},
    "no offsets": {"x": {"dtype": "U8", "shape": [8]}},
    "a list": [1, 2],
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_hostile_header_is_refused(tmp_path: Path, header: Any):
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(EnvironmentProblem, match=r"a\.safetensors"):
        read_header(path)


@pytest.mark.parametrize(
    "data", [b"", b"abc", b"\xff" * 64, (2**40).to_bytes(8, "little"), b"\1" + b"\0" * 7 + b"["]
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, data: bytes):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(EnvironmentProblem):
        read_header(tmp_path / "a")


def _layout(**change: Any) -> dict[str, Any]:
    chunk = {"offsets": [0, 0], "shape": [2, 2], "file": "rank-00000.safetensors", "key": "a"}
    tensor = {"dtype": "F32", "shape": [2, 2], "chunks": [{**chunk, **change.pop("chunk", {})}]}
    return {"format": 1, "tensors": {"a": {**tensor, **change}}}


LAYOUTS: dict[str, Any] = {
    "a path out of the folder": _layout(chunk={"file": "../rank-00000.safetensors"}),
    "an absolute path": _layout(chunk={"file": "/etc/passwd"}),
    "a path in a folder": _layout(chunk={"file": "a/b.safetensors"}),
    "a hidden file": _layout(chunk={"file": ".metadata"}),
    "a newline after the name": _layout(chunk={"file": "rank-00000.safetensors\n"}),
    "a file that is a number": _layout(chunk={"file": 3}),
    "a negative offset": _layout(chunk={"offsets": [-1, 0]}),
    "a chunk outside": _layout(chunk={"offsets": [1, 0]}),
    "a hole": _layout(chunk={"shape": [1, 2]}),
    "other dimensions": _layout(chunk={"offsets": [0], "shape": [4]}),
    "a huge shape": _layout(shape=[2**62, 2**62]),
    "a shape of nothing that overflows": _layout(shape=[0, 2**62, 2**62], chunks=[]),
    "a thousand dimensions": _layout(shape=[1] * 1000, chunks=[]),
    "a true shape": _layout(shape=[True, 4]),
    "an overlap": _layout(
        shape=[3, 2],
        chunks=[
            {"offsets": [0, 0], "shape": [2, 2], "file": "a.safetensors", "key": "a"},
            {"offsets": [1, 0], "shape": [1, 2], "file": "a.safetensors", "key": "b"},
        ],
    ),
    "an unknown dtype": _layout(dtype="OBJECT"),
    "no tensors": {"format": 1},
    "tensors as a list": {"format": 1, "tensors": []},
    "another format": {"format": 3, "groups": []},
    "a number": 3,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_hostile_layout_is_refused(tmp_path: Path, layout: Any):
    (tmp_path / "metadata.json").write_text(json.dumps(layout))
    with pytest.raises(EnvironmentProblem, match=r"metadata\.json"):
        open_metadata(tmp_path).everything()


def _group(**change: Any) -> dict[str, Any]:
    row = {"dtype": "F32", "shape": [4], "tensors": ["a"], "ranks": [[0, 1]], "offsets": [[[0, 1]]]}
    return {"format": 2, "groups": [{**row, "sizes": [[[4, 1]]], **change}]}


GROUPS: dict[str, Any] = {
    "a hole": _group(sizes=[[[3, 1]]]),
    "an overlap": _group(ranks=[[0, 2]], offsets=[[[0, 1], [2, 1]]], sizes=[[[3, 1], [-1, 1]]]),
    "a box outside": _group(offsets=[[[1, 1]]]),
    "a negative rank": _group(ranks=[[-1, 1]]),
    "columns of two lengths": _group(ranks=[[0, 2]]),
    "other dimensions": _group(offsets=[]),
    "a run of nothing": _group(ranks=[[0, 0]]),
    "a run that goes back": _group(ranks=[[0, -1]]),
    "half a run": _group(ranks=[[0]]),
    "a run of text": _group(ranks=[["0", 1]]),
    "no runs": _group(ranks=3),
    "more boxes than fit into memory": _group(
        ranks=[[0, 10**12]], offsets=[[[0, 10**12]]], sizes=[[[4, 10**12]]]
    ),
    "names that are numbers": _group(tensors=[1]),
    "two shapes": {"format": 2, "groups": [*_group()["groups"], *_group(dtype="BF16")["groups"]]},
    "an unknown dtype": _group(dtype="OBJECT"),
    "no groups": {"format": 2},
}


@pytest.mark.parametrize("index", GROUPS.values(), ids=GROUPS.keys())
def test_a_hostile_index_is_refused(tmp_path: Path, index: Any):
    (tmp_path / "metadata.json").write_text(json.dumps(index))
    with pytest.raises(EnvironmentProblem, match=r"metadata\.json"):
        open_metadata(tmp_path).everything()


PARTS: dict[str, Any] = {
    "no such chunk": {"tensors": {"a": []}},
    "no such tensor": {"tensors": {}},
    "a chunk elsewhere": {"chunk": {"offsets": [1]}},
    "a path out of the folder": {"chunk": {"file": "../rank-00000.safetensors"}},
    "a negative start": {"chunk": {"start": -1}},
    "too few checksums": {"chunk": {"xxh3_64": ["0" * 16] * 2}},
    "pieces of nothing": {"piece": 0},
    "another format": {"format": 3},
    "a header of text": {"headers": {"rank-00000.safetensors": ["1", "0"]}},
    "a list": {"tensors": [1]},
}


@pytest.mark.parametrize("change", PARTS.values(), ids=PARTS.keys())
def test_a_hostile_part_is_refused(tmp_path: Path, change: dict[str, Any]):
    (tmp_path / "metadata.json").write_text(json.dumps(_group()))
    chunk = {"offsets": [0], "shape": [4], "file": "rank-00000.safetensors", "key": "a", "start": 8}
    rows = {"a": [{**chunk, "xxh3_64": ["0" * 16], **change.get("chunk", {})}]}
    part = {"format": 2, "piece": 1 << 20, "headers": {}, "tensors": rows, **change}
    (tmp_path / "metadata-00000.json.gz").write_bytes(gzip.compress(json.dumps(part).encode()))
    with pytest.raises(EnvironmentProblem, match=r"metadata-00000\.json\.gz"):
        open_metadata(tmp_path).everything()


def test_a_part_that_unpacks_to_more_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("titancli.checkpoint.format.metadata.PART_LIMIT", 1 << 16)
    (tmp_path / "metadata.json").write_text(json.dumps(_group()))
    (tmp_path / "metadata-00000.json.gz").write_bytes(gzip.compress(b" " * (1 << 20)))
    with pytest.raises(EnvironmentProblem, match=r"metadata-00000\.json\.gz is malformed"):
        open_metadata(tmp_path).everything()


def _files(folder: Path) -> dict[str, Digest]:
    return {path.name: file_digest(path) for path in folder.iterdir()}


def test_what_few_bytes_may_claim_is_proportional_to_them(tmp_path: Path):
    """Boxes have a row each in a part, and rows take bytes: 4 million of them would take 12 seconds."""
    many = _group(ranks=[[0, 1 << 21]], offsets=[[[0, 1 << 21]]], sizes=[[[4, 1 << 21]]])
    (tmp_path / "metadata.json").write_text(json.dumps(many))
    (tmp_path / "metadata-00000.json.gz").write_bytes(gzip.compress(b" " * (1 << 25)))
    with pytest.raises(EnvironmentProblem, match="more boxes than its parts have bytes"):
        open_metadata(tmp_path, _files(tmp_path))
    (tmp_path / "metadata.json").write_text(json.dumps(_group()))
    with pytest.raises(EnvironmentProblem, match=r"metadata-00000\.json\.gz is malformed"):
        open_metadata(tmp_path, _files(tmp_path)).everything()


def test_a_part_full_of_checksums_of_zeros_is_read(tmp_path: Path):
    """They compress to next to nothing."""
    pieces = 100_000
    (tmp_path / "metadata.json").write_text(
        json.dumps(_group(shape=[pieces << 18], sizes=[[[pieces << 18, 1]]]))
    )
    rows = [
        {"offsets": [0], "shape": [pieces << 18], "file": "rank-00000.safetensors", "key": "a", "start": 8}
    ]
    rows[0]["xxh3_64"] = ["0" * 16] * pieces
    part = {"format": 2, "piece": 1 << 20, "headers": {}, "tensors": {"a": rows}}
    (tmp_path / "metadata-00000.json.gz").write_bytes(gzip.compress(json.dumps(part).encode()))
    files = _files(tmp_path) | {"rank-00000.safetensors": Digest(pieces << 20, "")}
    assert len(open_metadata(tmp_path, files).everything()["a"].chunks[0].checksums) == pieces


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{", "\xff"])
def test_a_layout_that_is_no_json_is_refused(tmp_path: Path, text: str):
    (tmp_path / "metadata.json").write_text(text)
    with pytest.raises(EnvironmentProblem):
        open_metadata(tmp_path).everything()


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), max_size=6
    )
)
@example([(0, 0, 3, 1), (0, 1, 1, 2), (1, 1, 2, 2)])
@example([(0, 0, 3, 2), (0, 1, 3, 1)])
def test_boxes_tile_a_tensor_as_by_counting(boxes: list[tuple[int, int, int, int]]):
    chunks = [((a, b), (h, w)) for a, b, h, w in boxes]
    cells = [(x, y) for a, b, h, w in boxes for x in range(a, a + h) for y in range(b, b + w)]
    assert tile((3, 3), chunks) == (sorted(cells) == [(x, y) for x in range(3) for y in range(3)])


def test_a_layout_of_many_pieces_costs_no_more_than_it_has():
    """Columns beside rows: none can be told from another by its place along one dimension."""

    def cost(size: int) -> float:
        columns = [((0, i), (size, 1)) for i in range(size // 2)]
        rows = [((i, size // 2), (1, size // 2)) for i in range(size)]
        assert not tile((size, size), columns + rows[:-1])
        return cpu_seconds(lambda: tile((size, size), columns + rows) or 1 / 0, times=3)

    assert cost(6000) < 8 * cost(1500)  # four times as many; comparing all pairs would take 16 times as long


@pytest.mark.parametrize(
    "name", ["manifest.json", "metadata.json", "metadata-00000.json.gz", "rank-00000.safetensors"]
)
@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
@pytest.mark.parametrize("verify", ["full", "off"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(
    tmp_path: Path, name: str, kind: str, verify: Verify
):
    save(tmp_path / "step-1")
    path = tmp_path / "step-1" / name
    elsewhere = path.rename(tmp_path / name)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(elsewhere)
    else:
        path.mkdir()
    with pytest.raises(EnvironmentProblem, match=f"{name} is not a regular file"):
        CheckpointReader(tmp_path / "step-1", verify=verify)
    assert newest_good(tmp_path, verify=verify) is None


def test_a_manifest_of_any_size_is_not_read(tmp_path: Path):
    save(tmp_path / "step-1")
    os.truncate(tmp_path / "step-1" / "manifest.json", 1 << 40)
    with pytest.raises(EnvironmentProblem, match=r"manifest\.json has 1099511627776 bytes"):
        read_manifest(tmp_path / "step-1")


def test_a_lying_shape_costs_no_memory(tmp_path: Path):
    """The metadata may claim a huge tensor in one huge piece."""
    save(tmp_path / "step-1")
    _forge(tmp_path / "step-1", "rank-00000.safetensors", 2**40)
    with pytest.raises(EnvironmentProblem, match="does not hold"):
        CheckpointReader(tmp_path / "step-1").read("a")


def test_a_layout_that_names_a_file_beside_the_manifest_is_refused(tmp_path: Path):
    save(tmp_path / "step-1")
    _forge(tmp_path / "step-1", "other.safetensors", 2)
    with pytest.raises(EnvironmentProblem, match=r"other\.safetensors"):
        CheckpointReader(tmp_path / "step-1").read("a")


def _forge(folder: Path, file: str, size: int) -> None:
    """Replace the layout by a tensor `a` in one piece, and make the manifest agree, as an attacker would."""
    chunk = {"offsets": [0], "shape": [size], "file": file, "key": "model.layers.0.weight", "start": 200}
    table = {"format": 2, "piece": 2**50, "headers": {}, "tensors": {"a": [chunk | {"xxh3_64": ["0" * 16]}]}}
    rewritten(folder, "metadata-00000.json.gz", gzip.compress(json.dumps(table).encode()))
    group = Group.of("F32", [size], ["a"], [Cell(0, (0,), (size,))])
    rewritten(folder, "metadata.json", index_bytes([group]))


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_a_pickle_beside_it_is_named_and_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "step-1")
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(EnvironmentProblem, match=r"\.metadata is not listed in the manifest"):
        CheckpointReader(tmp_path / "step-1")
    assert not (tmp_path / "exploded").exists()


def test_nothing_of_a_checkpoint_is_a_pickle(tmp_path: Path):
    save(tmp_path / "step-1")
    names = sorted(path.name for path in (tmp_path / "step-1").iterdir())
    data = ["metadata-00000.json.gz", "metadata.json", "rank-00000.safetensors"]
    assert names == ["manifest.json", *data, "recipe.lock.toml"]


def test_the_manifest_says_what_is_there(tmp_path: Path):
    save(tmp_path / "step-12", state={"engine": {"step": 12}, "rng": [1, 2.5, None]})
    manifest = read_manifest(tmp_path / "step-12")
    assert (manifest.step, manifest.run_id, manifest.serial) == (12, "run-1", 1)
    assert manifest.state == {"engine": {"step": 12}, "rng": [1, 2.5, None]}
    assert manifest.layout == {"ranks": 1, "mesh": {}}
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.lock_xxh3_64 == manifest.files["recipe.lock.toml"].xxh3_64
    assert faults(tmp_path / "step-12", manifest) == []


def test_every_bit_of_the_manifest_is_guarded(tmp_path: Path):
    save(tmp_path / "step-1")
    path = tmp_path / "step-1" / "manifest.json"
    data = path.read_bytes()
    for position in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(EnvironmentProblem, match=r"manifest\.json"):
            read_manifest(tmp_path / "step-1")


def test_a_manifest_of_a_later_format_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path / "step-1")
    manifest: Manifest = read_manifest(tmp_path / "step-1")
    with monkeypatch.context() as patch:
        patch.setattr("titancli.checkpoint.format.manifest.FORMAT", 2)
        (tmp_path / "step-1" / "manifest.json").write_bytes(manifest_bytes(manifest))
    with pytest.raises(EnvironmentProblem, match="format 2"):
        read_manifest(tmp_path / "step-1")


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(EnvironmentProblem, match="not a titan checkpoint"):
        read_manifest(tmp_path)
    with pytest.raises(EnvironmentProblem, match="not a titan checkpoint"):
        read_manifest(tmp_path / "missing")
    (tmp_path / "manifest.json").mkdir()
    assert not is_checkpoint(tmp_path) and not is_checkpoint(tmp_path / "missing")


def test_a_damaged_checkpoint_is_a_checkpoint_wherever_it_lies(tmp_path: Path):
    save(tmp_path / "step-1")
    manifest = tmp_path / "step-1" / "manifest.json"
    assert is_checkpoint(tmp_path / "step-1") and is_checkpoint(at(f"file://{tmp_path}/step-1"))
    assert not is_checkpoint(at(f"file://{tmp_path}"))
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert is_checkpoint(tmp_path / "step-1")
    with pytest.raises(EnvironmentProblem, match="is damaged"):
        read_manifest(tmp_path / "step-1")
