"""Virtual tensors: what a part of a transform's result needs is what is read, and the values are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoint.test_quantized import Same, folder
from titancli.checkpoint.format import files
from titancli.checkpoint.format.region import Region
from titancli.checkpoint.format.tensorfile import read_header
from titancli.checkpoint.hf import stored
from titancli.checkpoint.hf.folder import read_hf
from titancli.checkpoint.hf.lazy_tensor import Virtual, blocks, everything
from titancli.checkpoint.hf.stored import Stored


def of(tensor: Tensor) -> Virtual:
    return Virtual.of(
        tensor.shape,
        tensor.dtype,
        lambda region: tensor[tuple(slice(r.start, r.stop, r.step) for r in region)],
    )


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous(),
    "pairs": lambda x: x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2),
    "gates": lambda x: x.transpose(1, 2).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2),
    "heads": lambda x: torch.cat((x[:, :-2], x[:, -2:].flip(1)), 1),
    "flat": lambda x: x.reshape(-1),
    "grid": lambda x: x.reshape(8, 18),
    "stack": lambda x: torch.stack([x[0], x[2], x[1]], 1),
    "chunks": lambda x: torch.cat([part.t() for part in x[1].chunk(2)]),
    "unbind": lambda x: torch.stack(list(x.unbind(1))[::-1]),
    "every other": lambda x: x[:, 1::2].unsqueeze(1).squeeze(1),
    "permuted": lambda x: x.permute(2, 0, 1).reshape(12, -1),
    "with memory": lambda x: torch.cat((x, torch.ones(1, 6, 6, dtype=x.dtype))),
    "cast": lambda x: x.float().t_() if x.ndim < 3 else x.double(),
    "computed": lambda x: x * 2,
    "ones": lambda x: x[:, None, :, None].squeeze(3),
    "none": lambda x: x[:, 3:3],
}  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
@settings(max_examples=8)
@given(data=st.data())
def test_a_part_of_a_transform_is_that_part_of_its_result(move: str, data: st.DataObject):
    x = torch.arange(4 * 6 * 6).reshape(4, 6, 6)
    wanted, made = MOVES[move](x), MOVES[move](of(x))
    assert made.shape == wanted.shape
    assert made.dtype == wanted.dtype
    if not isinstance(made, Virtual):
        assert move == "computed"
        assert torch.equal(made, wanted)
        return
    region = []
    for size in wanted.shape:
        start = data.draw(st.integers(0, size))
        region.append(range(start, data.draw(st.integers(start, size)), data.draw(st.integers(1, 2))))
    region = [range(r.start, r[-1] + 1, r.step) if r else r for r in region]
    part = wanted[tuple(slice(r.start, r.stop, r.step) for r in region)]
    assert torch.equal(made.read(tuple(region)), part)
    assert torch.equal(made.whole(), wanted)


@pytest.mark.parametrize("write", [lambda x: x.mul_(2), lambda x: x.clone()[0].fill_(1), lambda x: x.t_()])
def test_what_is_written_to_is_refused_and_not_lost(write: Callable[[Tensor], Tensor]):
    with pytest.raises(RuntimeError, match="writes to a tensor that is not in memory"):
        write(of(torch.ones(4, 6)))


class Writing(Same):
    """A form as plugins may have it."""

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        if name == "numpy":
            return torch.from_numpy(tensors[0].numpy() * 2)
        made = tensors[0].clone()
        made[1] = 7.0
        return made


def test_a_form_that_writes_or_wants_memory_gets_whole_tensors(tmp_path: Path):
    x = torch.arange(6.0).reshape(3, 2)
    reader = read_hf(folder(tmp_path, {"written": x, "numpy": x.clone()}, None), Writing())  # type: ignore[arg-type]
    assert reader.virtual("written").tolist() == [[0, 1], [7, 7], [4, 5]]
    assert torch.equal(reader.virtual("numpy"), 2 * x)


def test_no_block_is_larger_than_the_limit_and_together_they_are_the_region():
    made = MOVES["gates"](of(torch.arange(144).reshape(4, 6, 6)))
    assert isinstance(made, Virtual)
    filled = torch.zeros(4, 6, 6, dtype=torch.int64)
    for block in blocks(made, everything(made.shape), limit=100):
        values = made.read(block)
        assert values.nbytes <= 100
        filled[tuple(slice(r.start, r.stop) for r in block)] += values
    assert torch.equal(filled, made.whole())


def test_a_stored_tensor_reads_what_is_wanted_and_little_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    x = torch.arange(40 * 4096, dtype=torch.int16).reshape(40, 4096)
    save_file({"x": x}, tmp_path / "a.safetensors")
    place = Stored(tmp_path / "a.safetensors", read_header(tmp_path / "a.safetensors")["x"])
    read: list[int] = []

    def counting(path: Path, runs: list[tuple[int, memoryview]]) -> None:
        read.append(sum(memory.nbytes for _, memory in runs))
        files.read_runs(path, runs)

    monkeypatch.setattr(stored, "read_runs", counting)
    regions: list[tuple[Region, int]] = [
        ((range(3, 9), range(4096)), 6 * 8192),
        ((range(0, 40, 2), range(4096)), 20 * 8192),
        ((range(40), range(1024, 2048)), 40 * 2048),
        ((range(5), range(0, 4096, 2)), 5 * 8190 + 10),  # every second value comes with its neighbour
        ((range(5), range(10, 4090)), 5 * 8192),
        ((range(7, 8), range(10, 20)), 20),
    ]
    for region, least in regions:
        assert torch.equal(place.read(region), x[tuple(slice(r.start, r.stop, r.step) for r in region)])
        assert read.pop() <= least
