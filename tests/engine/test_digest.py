"""What a step's digest is made of: hashes against sums of plain Python integers, and what they notice."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import torch

from tests.engine import cases
from tests.engine.cases import Layout
from tests.ranks import Ranks
from titan_proof.digests import StepDigest, differing_values, named, read_digests
from titancli.engine import Engine, digest
from titancli.engine.digest import Digests, row_hashes, sums
from titancli.observe.digests import DigestWriter
from titancli.protocols.batch import IGNORE, Batch

WORD = 2**64


def mixed(number: int) -> int:
    number = number * (WORD - 0x61C8864680B583EB) % WORD
    number ^= number >> 29 & 0x7FFFFFFFF
    number = number * (WORD - 0x3D4D51C2D82B14B1) % WORD
    return number ^ number >> 32


def test_hashes_are_the_sums_that_plain_integers_make() -> None:
    whole = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    tensors = [("a", whole), ("none", None), ("b", whole[:, 0].bfloat16()), ("c", whole.t())]
    bits = {
        1: struct.unpack("<15i", struct.pack("<15f", *whole.flatten().tolist())),
        3: tuple(whole[:, 0].bfloat16().view(torch.int16).tolist()),
        4: struct.unpack("<15i", struct.pack("<15f", *whole.t().flatten().tolist())),
    }
    hashes, place = {}, {4: 15}  # of one dtype, 1 and 4 are hashed as one row of values
    for number, values in bits.items():
        first = place.get(number, 0) + 1
        total = sum((bit + 1) * (mixed(i) | 1) for i, bit in enumerate(values, first))
        hashes[number] = mixed(total % WORD) % 2**32
    found = [int(number) % 2**32 for number in sums(tensors, step=3)]
    assert found == [sum(hashes.values()) % 2**32, sum(n * h for n, h in hashes.items()) % 2**32]


def test_a_flipped_bit_anywhere_is_noticed_and_its_tensor_named() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(7, 9, generator=generator) for name in "abcdefgh"}
    before = pair(tensors)
    for trial in range(40):
        name = "abcdefgh"[trial % 8]
        changed = {**tensors, name: tensors[name].clone()}
        changed[name].view(torch.int32).view(-1)[trial % 63] ^= 1 << (trial % 31)
        assert named(list(tensors), before, pair(changed)) == name
    two = {**tensors, "a": tensors["b"], "b": tensors["a"]}
    assert pair(two) != before and named(list(tensors), before, pair(two)) is None


def pair(tensors: dict[str, torch.Tensor]) -> tuple[int, int]:
    first, second = (int(number) % 2**32 for number in sums(list(tensors.items()), 1))
    return first, second


def test_of_a_large_tensor_a_part_is_read_at_other_places_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "SAMPLES", 8)
    tensor = torch.zeros(30)
    noticed = set()
    for step in range(6):
        before = pair_at(tensor, step)
        for place in range(30):
            tensor[place] = 1.0
            noticed |= {(step, place)} if pair_at(tensor, step) != before else set()
            tensor[place] = 0.0
    assert [len({p for s, p in noticed if s == step}) for step in range(6)] == [7] * 6
    assert {place for _, place in noticed} == set(range(30))  # the last ones too, which no stride ends at


def pair_at(tensor: torch.Tensor, step: int) -> list[int]:
    return sums([("a", tensor)], step).tolist()


def test_rows_are_the_same_in_any_order_and_nothing_else_is() -> None:
    whole = cases.whole_batch()
    tensors = dict(whole)
    expected = int(row_hashes(whole).sum())
    order = torch.randperm(whole.rows, generator=torch.Generator().manual_seed(2))
    assert int(row_hashes(Batch({name: t[order] for name, t in tensors.items()})).sum()) == expected
    assert int(row_hashes(Batch({**tensors, "advantages": torch.ones(whole.rows)})).sum()) == expected
    swapped, masked = tensors["tokens"].clone(), tensors["targets"].clone()
    swapped[[0, 1], 3] = tensors["tokens"][[1, 0], 3]  # between rows, at the same place
    masked[2, 5] = IGNORE
    assert not torch.equal(swapped, tensors["tokens"])
    for name, changed in (("tokens", swapped), ("targets", masked)):
        assert int(row_hashes(Batch({**tensors, name: changed})).sum()) != expected
    images = Batch({"image": torch.ones(2, 3, 4, dtype=torch.bfloat16)})
    assert row_hashes(images).shape == (2,) and row_hashes(images).unique().numel() == 1


def stepped(layout: Layout, folder: Path, flip: int = -1) -> None:
    """Two steps with digests; `flip`: on that rank a bit of a gradient is flipped in the second."""
    engine = Engine.build(cases.recipe(layout))
    rank = torch.distributed.get_rank()
    named = engine.trained_parameters()
    header = {"attempt": 1, "restart": 0, "rank": rank, "world": torch.distributed.get_world_size()}
    header |= {"dp_rank": engine.mesh.dp_rank, "mesh": vars(engine.mesh.degrees)}
    writer = DigestWriter(folder, {**header, "names": [name for name, _ in named]})
    engine.hooks.add(digests := Digests(writer, named, engine.converters))
    dp, count = engine.mesh.degrees.dp, engine.settings.accumulation
    pieces = cases.whole_batch().split(cases.ROWS // dp // count)
    for step in range(2):
        engine.forward_backward([pieces[k * dp + engine.mesh.dp_rank] for k in range(count)])
        if step == 1 and rank == flip:
            gradient = named[3][1].grad
            assert gradient is not None
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.view(torch.int32).view(-1)[0] ^= 1
        engine.optim_step()
    digests.write(wait=True)
    writer.close()
    engine.close()


def of_two_steps(ranks: Ranks, count: int, folder: Path, *more: object) -> tuple[StepDigest, StepDigest]:
    ranks(count, stepped, *more[:1], folder, *more[1:])
    found = read_digests(folder)
    assert list(found) == [1, 2]
    return found[1], found[2]


LAYOUTS = {"TP2": {"tp": 2}, "PP2": {"pp": 2}, "CP2": {"cp": 2}, "DDP2": {"dp_replicate": 2}}


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[StepDigest, StepDigest]:
    return of_two_steps(ranks, 1, tmp_path_factory.mktemp("digests"), cases.small())


def check(found: tuple[StepDigest, StepDigest], one_rank: tuple[StepDigest, StepDigest]) -> None:
    """The same rows, losses and norms as one rank's."""
    for own, expected in zip(found, one_rank, strict=True):
        assert own.rows == expected.rows
        assert math.isclose(own.loss, expected.loss, rel_tol=1e-5)
        assert math.isclose(own.grad_norm, expected.grad_norm, rel_tol=1e-5)
        differing = differing_values(own, expected)
        assert set(differing) <= {"loss", "gradient norm"}  # hashes are another layout's


@pytest.mark.slow  # test_replay.py of titan-proof compares digests of two ranks
@pytest.mark.ranks
def test_ranks_make_the_same_digests_again_until_a_bit_flips(
    ranks: Ranks, tmp_path: Path, one_rank: tuple[StepDigest, StepDigest]
) -> None:
    layout = cases.small({"dp_shard": 2}, micro_batches=2)
    first = of_two_steps(ranks, 2, tmp_path / "first", layout)
    check(first, one_rank)
    assert one_rank[0].rows == one_rank[1].rows and first[0].ranks != first[1].ranks
    flipped = of_two_steps(ranks, 2, tmp_path / "flipped", layout, 1)
    assert differing_values(first[0], flipped[0]) == []
    assert f"gradients ({first[1].layout.names[1][3]} on rank 1)" in differing_values(first[1], flipped[1])


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_digests_on_other_layouts(
    ranks: Ranks, tmp_path: Path, one_rank: tuple[StepDigest, StepDigest], name: str
) -> None:
    layout = cases.small(LAYOUTS[name], micro_batches=2)
    check(of_two_steps(ranks, 2, tmp_path / "a", layout), one_rank)
    again = of_two_steps(ranks, 2, tmp_path / "b", layout)
    assert [differing_values(read_digests(tmp_path / "a")[d.step], d) for d in again] == [[], []]
