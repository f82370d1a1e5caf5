"""Conversion as a stream: what is written is right in any layout, dtype and shard, or nothing is there."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict, namedtuple
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.tensors import RUN, bits
from tests.checkpoint.test_hf import FORM, TinyForm, equal, expected, hf_files, weights
from titancli.checkpoint import CheckpointReader, export_hf, load_hf_weights, save_checkpoint
from titancli.checkpoint.format import stream
from titancli.checkpoint.format.disk import write_file
from titancli.checkpoint.format.hashed import PIECE
from titancli.checkpoint.format.layout import Chunk
from titancli.checkpoint.format.manifest import MANIFEST, manifest_bytes
from titancli.checkpoint.format.metadata import METADATA, Cell, Group, index_bytes, part_bytes, part_name
from titancli.checkpoint.format.tensorfile import Entry, TensorFileWriter
from titancli.checkpoint.format.tensors import dtype_name, tensor_bytes
from titancli.checkpoint.hf.convert import to_hf, to_titan
from titancli.checkpoint.save import Draft
from titancli.errors import EnvironmentProblem, TitanError
from titancli.models import Llama3
from titancli.models.blocks.hf import DecoderHF
from titancli.registry.component import build

SMALL = dict(dim=16, n_layers=2, n_heads=2, hidden_dim=24, vocab_size=40, max_seq_len=64)
LARGE = 40 * 16 * 4
"""Bytes of the largest tensor of that model."""


def llama() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = build(Llama3(**SMALL), seq_len=4)
    return {
        f"model.{name}": torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }


def checkpoint(folder: Path) -> Path:
    """Weights alone, in one process."""
    save_checkpoint(folder, llama(), {"model": {"type": "titan/llama3", **SMALL}}, lock_text="", run_id=RUN)
    return folder


def cut(folder: Path, tensors: dict[str, Tensor], seed: int, state: dict[str, Any] | None = None) -> None:
    """Write a checkpoint as ranks might: boxes of any size, in any of four files, in any order."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    pieces: dict[int, list[tuple[str, tuple[int, ...], Entry, Tensor]]] = {}
    groups = []
    for name, tensor in tensors.items():
        boxes: list[tuple[slice, ...]] = [()]
        for size in tensor.shape:
            edges = sorted({0, size, *(1 + draw(size) for _ in range(draw(3)))})
            boxes = [(*box, slice(a, b)) for box in boxes for a, b in pairwise(edges)]
        cells = []
        for box in boxes:
            piece = tensor[box].contiguous()
            rank, offsets = draw(4), tuple(part.start for part in box)
            entry = Entry(f"{name}@{offsets}", dtype_name(name, tensor.dtype), tuple(piece.shape))
            pieces.setdefault(rank, []).insert(0, (name, offsets, entry, piece))
            cells.append(Cell(rank, offsets, entry.shape))
        groups.append(Group.of(dtype_name(name, tensor.dtype), tensor.shape, [name], cells))
    digests = {}
    for rank, rows in pieces.items():
        file = f"rank-{rank:05d}.safetensors"
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        with TensorFileWriter(folder / file, [entry for *_, entry, _ in rows]) as writer:
            for *_, piece in rows:
                writer.write(tensor_bytes(piece))
            digests[file] = writer.close()
        for (name, offsets, *_), entry, sums in zip(rows, writer.entries, writer.checksums(), strict=True):
            chunks[name].append(Chunk(offsets, entry.shape, file, entry.key, sums, PIECE, entry.start))
        part = part_bytes(chunks, {file: writer.header})
        digests[part_name(rank)] = write_file(folder / part_name(rank), part)
    digests[METADATA] = write_file(folder / METADATA, index_bytes(groups))
    draft = Draft(folder, state or {}, "", RUN, {}, ranks=4)
    write_file(folder / MANIFEST, manifest_bytes(draft.manifest(digests, serial=1)))


# ---------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "cast"])
@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_cut_in_any_way_gives_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, dtype: torch.dtype | None
):
    monkeypatch.setattr(stream, "BLOCK", 40)
    tensors = {f"model.{name}": tensor for name, tensor in weights().items()}
    cut(tmp_path / "step-1", tensors, seed)
    reader = CheckpointReader(tmp_path / "step-1", prefix="model.")
    export_hf(reader, FORM, {}, tmp_path / "out", dtype=dtype)
    wanted = {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in expected().items()}
    assert equal(hf_files(tmp_path / "out"), wanted)


def test_stacked_experts_are_cut_over_files_and_the_index_is_right(tmp_path: Path):
    """Four experts of 96 bytes are one tensor here; 200 bytes hold two of them."""

    class Experts(TinyForm):
        def to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
            return [(f"e.{i}", part) for i, part in enumerate(tensor.unbind())]

        def sources(self, name: str) -> list[str]:
            return [f"e.{i}" for i in range(4)]

        def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
            return torch.stack(tensors)

    stacked = {"experts": torch.randn(4, 6, 4)}
    export_hf(stacked, Experts(), {}, tmp_path / "out", max_shard=200)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 96}
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    assert index["weight_map"] == {"e.0": first, "e.1": first, "e.2": second, "e.3": second}
    loaded = {"experts": torch.zeros(4, 6, 4)}
    load_hf_weights(tmp_path / "out", Experts(), loaded)
    assert equal(loaded, stacked)


def test_shards_of_a_checkpoint_are_no_larger_than_asked(tmp_path: Path):
    to_hf(checkpoint(tmp_path / "step-1"), tmp_path / "hf", max_shard=LARGE, say=print)
    to_titan(tmp_path / "hf", tmp_path / "back", max_shard=LARGE, say=print)
    assert all((tmp_path / "back" / f"rank-00000{i}.safetensors").exists() for i in ("", "-1", "-2"))
    for folder in ("hf", "back"):
        sizes = [path.stat().st_size for path in (tmp_path / folder).glob("*.safetensors")]
        assert max(sizes) <= LARGE + 2048  # what is not data in a file
    back = CheckpointReader(tmp_path / "back")  # checks them
    assert equal({name: back.read(name) for name in back.names()}, llama())


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64])
def test_a_value_that_float16_cannot_hold_is_told_and_infinity_stays(tmp_path: Path, source: torch.dtype):
    tensors = {"a": torch.tensor([1.1, float("inf"), -65280.0, float("nan")], dtype=source)}
    export_hf(tensors, FORM, {}, tmp_path / "out", dtype=torch.float16)
    assert equal(hf_files(tmp_path / "out"), {"hf.a": tensors["a"].half()})
    tensors = {"b": torch.tensor([float("nan"), -65536.0], dtype=source)}
    with pytest.raises(TitanError, match=r"hf\.b has a value of -6\.55e\+04") as caught:
        export_hf(tensors, FORM, {}, tmp_path / "no", dtype=torch.float16)
    assert "bfloat16" in str(caught.value.hint)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cast_is_torchs_own(tmp_path: Path, source: torch.dtype, to: torch.dtype):
    tensors = {"a": torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(50).to(source)}
    export_hf(tensors, FORM, {}, tmp_path / "out", dtype=to)
    assert equal(hf_files(tmp_path / "out"), {"hf.a": tensors["a"].to(to)})


# -------------------------------------------------------------------------------------- or nothing is there


def hf_folder(folder: Path) -> Path:
    export_hf(
        {name.removeprefix("model."): tensor for name, tensor in llama().items()},
        DecoderHF(Llama3(**SMALL)),
        {},
        folder,
    )
    return folder


WAYS: dict[str, tuple[Callable[..., Any], Callable[[Path], Path]]] = {
    "to hf": (to_hf, checkpoint),
    "to titan": (to_titan, hf_folder),
}
both_ways = pytest.mark.parametrize("way", WAYS)


@both_ways
def test_killed_it_leaves_no_folder_and_the_next_one_clears_up(tmp_path: Path, way: str):
    convert, make = WAYS[way]
    source = make(tmp_path / "source")

    def die(name: str, done: int, total: int) -> None:
        if done == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    if not (child := os.fork()):
        try:
            convert(source, tmp_path / "out", progress=die, say=print)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = (path for path in tmp_path.iterdir() if path != source)
    assert left.name.startswith(".out.tmp-")
    assert list(left.glob("*.safetensors"))
    said: list[str] = []
    convert(source, tmp_path / "out", say=said.append)
    assert f"removed {left}, left by an interrupted conversion" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@both_ways
@pytest.mark.parametrize("error", [KeyboardInterrupt, TitanError("no")], ids=["Ctrl-C", "an error"])
def test_interrupted_it_leaves_nothing(tmp_path: Path, way: str, error: Any):
    convert, make = WAYS[way]
    source = make(tmp_path / "source")

    def interrupt(name: str, done: int, total: int) -> None:
        if done == 5:
            raise error

    with pytest.raises(type(error) if isinstance(error, TitanError) else error):
        convert(source, tmp_path / "out", progress=interrupt, say=print)
    assert list(tmp_path.iterdir()) == [source]


@both_ways
def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path, way: str):
    """The kernel's own refusal, in the middle of the file."""
    convert, make = WAYS[way]
    source = make(tmp_path / "source")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE, before[1]))
    try:
        with pytest.raises(EnvironmentProblem, match=r"File too large\. It needs .* file size limit"):
            convert(source, tmp_path / "out", say=print)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [source]


@both_ways
def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
):
    convert, make = WAYS[way]
    source = make(tmp_path / "source")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(1000))
    monkeypatch.setattr(TensorFileWriter, "__init__", None)  # nobody comes so far
    with pytest.raises(EnvironmentProblem, match=r"needs 2[23]\.\d kB, and 1\.0 kB is free"):
        convert(source, tmp_path / "out", say=print)
    assert list(tmp_path.iterdir()) == [source]


@both_ways
def test_what_somebody_else_makes_meanwhile_is_not_touched(tmp_path: Path, way: str):
    convert, make = WAYS[way]
    source = make(tmp_path / "source")

    def meanwhile(name: str, done: int, total: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "thesis.tex").write_text("mine")

    with pytest.raises(EnvironmentProblem, match="out cannot be written: Directory not empty"):
        convert(source, tmp_path / "out", progress=meanwhile, say=print)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"


def test_only_what_is_surely_left_over_is_removed(tmp_path: Path):
    for name in ("out.tmp-00000000", ".out.tmp-0000", ".other.tmp-00000000", ".out.tmp-0000000g"):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.tmp-11111111").symlink_to(tmp_path / ".out.tmp-0000")
    (tmp_path / ".out.tmp-22222222").write_text("a file")
    before = {path.name for path in tmp_path.iterdir()}
    export_hf(weights(), FORM, {}, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == before | {"out"}


def test_two_do_not_write_one_folder(tmp_path: Path):
    busy = tmp_path / ".out.tmp-00000000"
    busy.mkdir()
    handle = os.open(busy, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(EnvironmentProblem, match=r"another process, in \.out\.tmp-00000000"):
        export_hf(weights(), FORM, {}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [busy]
    os.close(handle)
    export_hf(weights(), FORM, {}, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_flipped_bit_in_a_checkpoint_is_found_and_nothing_is_left(tmp_path: Path):
    source = checkpoint(tmp_path / "source")
    path = source / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(EnvironmentProblem, match=r"rank-00000\.safetensors is damaged: its checksum"):
        to_hf(source, tmp_path / "out", say=print)
    assert list(tmp_path.iterdir()) == [source]


# ------------------------------------------------------------------------------------- what is not read


def test_quantised_weights_are_refused_by_name_with_the_way_out(tmp_path: Path):
    source = hf_folder(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "awq"}})
    )
    with pytest.raises(EnvironmentProblem, match="quantized with 'awq'") as caught:
        to_titan(source, tmp_path / "out", say=print)
    assert "dequantize" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hf.layers.0.weight": torch.ones(5, 4).to(torch.float8_e4m3fn)}, "hf.layers.0.weight is F8_E4M3"),
        ({"hf.layers.0.weight_scale_inv": torch.ones(1)}, "hf.layers.0.weight_scale_inv is F32"),
        ({"hf.layers.0.qweight": torch.ones(1, dtype=torch.int32)}, "hf.layers.0.qweight is I32"),
    ],
    ids=["float8", "scales", "packed"],
)
def test_quantised_tensors_are_refused_without_a_word_in_config_json(
    tmp_path: Path, change: dict[str, Tensor], told: str
):
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in (expected() | change).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentProblem, match=f"quantized: {told}") as caught:
        load_hf_weights(tmp_path, FORM, {name: torch.zeros_like(t) for name, t in weights().items()})
    assert "dequantize" in str(caught.value.hint)


@pytest.mark.parametrize("same", [True, False])
def test_an_output_that_config_json_calls_tied_must_be_the_embedding(tmp_path: Path, same: bool):
    """transformers uses both where they differ; without this we would drop one in silence."""
    from safetensors.torch import save_file

    source = hf_folder(tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    if same:
        tensors = hf_files(source)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, source / "model.safetensors")
        to_titan(source, tmp_path / "out", say=print)
        assert "model.output.weight" not in CheckpointReader(tmp_path / "out").names()
    else:
        with pytest.raises(EnvironmentProblem, match=r"lm_head\.weight differs") as caught:
            to_titan(source, tmp_path / "out", say=print)
        assert "tie_word_embeddings" in str(caught.value.hint)
        assert list(tmp_path.iterdir()) == [source]


def test_bits_are_kept_where_nothing_is_asked(tmp_path: Path):
    """NaN payloads, negative zeros, tensors without elements or dimensions, transposed ones."""
    tensors = {
        "nan": torch.tensor([0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32),
        "zero": torch.tensor(-0.0),
        "none": torch.empty(0, 3),
        "turned": torch.randn(3, 5).t(),
    }
    export_hf(tensors, FORM, {}, tmp_path / "out")
    assert {n: bits(t) for n, t in hf_files(tmp_path / "out").items()} == {
        f"hf.{n}": bits(t) for n, t in tensors.items()
    }


# ----------------------------------------------------------------------------------------------- memory

CONVERT = """
import sys, threading
from pathlib import Path
import titancli.models.blocks.decoder
from titancli.checkpoint.hf.convert import to_hf, to_titan

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024

def measure(convert, source, target, **options):
    def watch():
        while not done.wait(0.001):
            peaks.append(anonymous())

    done, peaks = threading.Event(), [anonymous()]
    thread = threading.Thread(target=watch)
    thread.start()
    convert(folder / source, folder / target, say=lambda line: None, **options)
    done.set()
    thread.join()
    print(max(peaks) - peaks[0])

folder = Path(sys.argv[1])
measure(to_hf, "source", "hf")
measure(to_hf, "source", "cast", dtype="bfloat16")
measure(to_titan, "hf", "back")
measure(to_titan, "cast", "wide", dtype="float32")
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells anonymous memory apart")
@pytest.mark.parametrize(
    ("dim", "layers"),
    [pytest.param(512, 12, id="0.2 GB"), pytest.param(1024, 29, id="2 GB", marks=pytest.mark.slow)],
)
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path, dim: int, layers: int):
    """Out of a checkpoint in pieces, which are put together; both ways, cast and as they are."""
    config = dict(dim=dim, n_layers=layers, n_heads=8, hidden_dim=4 * dim, vocab_size=4 * dim)
    with torch.device("meta"):
        parameters = dict(build(Llama3(**config), seq_len=4).named_parameters())
    tensors = {f"model.{name}": torch.full((), 0.5).expand(p.shape) for name, p in parameters.items()}
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:  # pytest would keep it
        cut(Path(name) / "source", tensors, 0, {"model": {"type": "titan/llama3", **config}})
        command = [sys.executable, "-c", CONVERT, name]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    largest = max(parameter.nbytes for parameter in parameters.values())
    assert sum(parameter.nbytes for parameter in parameters.values()) > 2 * largest + (128 << 20)
    peaks = [int(line) for line in out.splitlines()]
    assert len(peaks) == 4
    assert max(peaks) <= 2 * largest + (64 << 20), peaks
