"""The same samples with the same noise on any layout and after any stop; and shards that are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from titan_flux import FlowMatching, Latents, RandomLatents
from titan_flux.data import NoisedLatents, places_of, tokens_of
from titan_flux.loss import FlowMatching as Loss
from titan_flux.shards import write_shard
from titancli import Batch, TitanError
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.registry.component import build

COUNT, SEQ_LEN = 10, 5 + 2 * 3


def sample(number: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(number)
    shapes = {"latents": (2, 4, 6), "text": (5, 7), "pooled": (3,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards of 4, 1 and 5 samples, and the empty text beside them."""
    (tmp_path / "shards").mkdir()
    for name, numbers in {"a": range(4), "b": range(4, 5), "c": range(5, COUNT)}.items():
        write_shard(tmp_path / "shards" / f"{name}.safetensors", [sample(i) for i in numbers])
    write_shard(tmp_path / "empty.safetensors", [sample(99)])
    return tmp_path


@pytest.fixture
def made(folder: Path) -> Callable[..., NoisedLatents]:
    def dataset(rows: int = 4, dp_rank: int = 0, dp_size: int = 1, seed: int = 0, **fields: Any) -> Any:
        config = Latents(paths=[folder / "shards"], **fields)
        runtime = dict(seq_len=SEQ_LEN, rows=rows, dp_rank=dp_rank, dp_size=dp_size, seed=seed)
        return build(config, tokenizer=None, **runtime)

    return dataset


def taken(dataset: NoisedLatents, batches: int) -> dict[str, Tensor]:
    found = list(islice(dataset, batches))
    return {name: torch.cat([batch[name] for batch in found]) for name in found[0]}


def numbers(rows: dict[str, Tensor]) -> list[int]:
    """Return the indices of samples, found by their clean latents."""
    clean = rows["latents"] - rows["timesteps"][:, None, None] * rows["velocity"]
    every = torch.stack([tokens_of(sample(i)["latents"]) for i in range(COUNT)])
    distances = (clean[:, None] - every).abs().amax((2, 3))
    assert distances.amin(1).max() < 1e-5
    return distances.argmin(1).tolist()


def test_a_batch_is_what_the_shards_hold_and_noise(made: Callable[..., NoisedLatents]) -> None:
    rows = taken(made(shuffle=False, guidance=3.5), 2)
    assert numbers(rows) == list(range(8))
    for name in ("text", "pooled"):
        assert torch.equal(rows[name], torch.stack([sample(i)[name] for i in range(8)]))
    assert (
        rows["places"].shape == (8, 6, 3) and rows["guidance"].eq(3.5).all() and rows["weights"].eq(1).all()
    )
    assert 0 < rows["timesteps"].min() < rows["timesteps"].max() < 1
    noise = rows["latents"] + (1 - rows["timesteps"])[:, None, None] * rows["velocity"]
    assert noise.mean().abs() < 0.1 and noise.std() == pytest.approx(1, abs=0.1)


def test_tokens_are_pieces_of_two_by_two_with_their_place() -> None:
    latents = torch.arange(2 * 4 * 6.0).view(2, 4, 6)
    tokens, places = tokens_of(latents), places_of(2, 3)
    assert places.tolist() == [[0, row, column] for row in range(2) for column in range(3)]
    for token, (_, row, column) in zip(tokens, places.tolist(), strict=True):
        piece = latents[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        assert torch.equal(token, piece.flatten())


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_sees_the_same_rows(made: Callable[..., NoisedLatents], ranks: int) -> None:
    whole = taken(made(rows=4), 6)
    parts = [taken(made(rows=4 // ranks, dp_rank=rank, dp_size=ranks), 6) for rank in range(ranks)]
    for name, expected in whole.items():
        dealt = torch.stack([part[name].unflatten(0, (6, -1)) for part in parts], dim=1)
        assert torch.equal(dealt.flatten(0, 2), expected), name


def test_every_epoch_has_all_samples_in_an_order_and_with_noise_of_its_own(
    made: Callable[..., NoisedLatents],
) -> None:
    rows = taken(made(rows=COUNT), 2)
    first, second = numbers(rows)[:COUNT], numbers(rows)[COUNT:]
    assert sorted(first) == sorted(second) == list(range(COUNT)) and first != second
    times = rows["timesteps"].tolist()
    assert len(set(times)) == 2 * COUNT
    assert taken(made(rows=COUNT, seed=1), 1)["timesteps"].tolist() != times[:COUNT]
    # The noise of a sample is its own, wherever it comes.
    listed = taken(made(rows=COUNT, shuffle=False), 1)["timesteps"].tolist()
    assert listed == [times[first.index(number)] for number in range(COUNT)]


def test_it_goes_on_where_it_was_on_any_ranks(made: Callable[..., NoisedLatents]) -> None:
    dataset = made(rows=2)
    taken(dataset, 4)
    state = dataset.state_dict()
    expected = taken(dataset, 4)
    assert state["samples"] == 8
    for rank in range(2):
        again = made(rows=1, dp_rank=rank, dp_size=2)
        again.load_state_dict(state)
        found = taken(again, 4)
        assert all(torch.equal(found[name], expected[name][rank::2]) for name in expected)
        assert again.state_dict()["samples"] == 16
    other = made(seed=1)
    with pytest.raises(
        EnvironmentProblem, match="not the data that the checkpoint was trained on: order was"
    ):
        other.load_state_dict(state)
    with pytest.raises(EnvironmentProblem, match="does not belong to dataset latents"):
        other.load_state_dict({"version": 1, "tokens": 8})


def test_the_end_of_the_data_fills_up_with_rows_that_do_not_count(made: Callable[..., NoisedLatents]) -> None:
    found = [list(made(rows=2, dp_rank=rank, dp_size=2, repeat=False)) for rank in range(2)]
    weights = [[batch["weights"].tolist() for batch in batches] for batches in found]
    assert weights == [[[1, 1]] * 3, [[1, 1], [1, 1], [0, 0]]]


def test_dropout_replaces_texts_and_changes_nothing_else(
    made: Callable[..., NoisedLatents], folder: Path
) -> None:
    plain = taken(made(rows=COUNT), 20)
    dropped = taken(made(rows=COUNT, text_dropout=0.3, empty=folder / "empty.safetensors"), 20)
    empty = sample(99)
    gone = (dropped["text"] == empty["text"]).all((1, 2))
    assert 0.2 < gone.float().mean() < 0.4
    assert torch.equal(gone, (dropped["pooled"] == empty["pooled"]).all(1))
    assert torch.equal(dropped["text"][~gone], plain["text"][~gone])
    for name in plain.keys() - {"text", "pooled"}:
        assert torch.equal(plain[name], dropped[name])


def test_times_are_drawn_and_shifted_as_asked(made: Callable[..., NoisedLatents]) -> None:
    def times(**fields: Any) -> Tensor:
        return taken(made(rows=COUNT, **fields), 100)["timesteps"]

    normal, uniform = times(), times(timesteps="uniform")
    logits = torch.logit(normal.double())
    assert logits.mean().abs() < 0.1 and logits.std() == pytest.approx(1, abs=0.09)
    assert uniform.quantile(torch.tensor([0.25, 0.75])).tolist() == pytest.approx([0.25, 0.75], abs=0.05)
    torch.testing.assert_close(times(timesteps="uniform", shift=3.0), 3 * uniform / (1 + 2 * uniform))


# ----------------------------------------------------------------------------------------------- faults


def whole() -> dict[str, Tensor]:
    return {name: torch.stack([sample(i)[name] for i in range(3)]) for name in sample(0)}


def changed(**tensors: Tensor) -> Callable[[Path], None]:
    return lambda path: save_file({**whole(), **tensors}, path)


def truncated(path: Path) -> None:
    save_file(whole(), path)
    path.write_bytes(path.read_bytes()[:-100])


def without_pooled(path: Path) -> None:
    save_file({name: tensor for name, tensor in whole().items() if name != "pooled"}, path)


BAD = {
    "no safetensors": (lambda path: path.write_text("hello"), "is not a valid shard of latents"),
    "cut off": (truncated, "is not a valid shard of latents"),
    "a tensor missing": (without_pooled, "it has no tensor pooled"),
    "a dimension missing": (
        changed(text=torch.zeros(3, 7)),
        r"text is \[3, 7\], not \[N, T,",
    ),
    "counts differ": (changed(pooled=torch.zeros(2, 3)), "latents 3, text 3, pooled 2"),
    "empty": (changed(pooled=torch.zeros(0, 3)), r"pooled is \[0, 3\]"),
    "odd sizes": (
        changed(latents=torch.zeros(3, 2, 5, 6)),
        r"\[5, 6\] cannot be split into patches of "
        r"2 x 2",
    ),
    "integers": (changed(text=torch.zeros(3, 5, 7, dtype=torch.int32)), "text is I32, not one of"),
    "other shapes": (changed(latents=torch.zeros(3, 2, 2, 6)), r"has samples of latents \[2, 2, 6\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_shard_is_named_before_the_first_step(
    made: Callable[..., NoisedLatents], folder: Path, name: str
) -> None:
    spoil, message = BAD[name]
    spoil(folder / "shards" / "b2.safetensors")
    with pytest.raises(EnvironmentProblem, match=f"(?s)b2.safetensors.*{message}"):
        made()


def test_numbers_that_are_none_are_named_when_they_are_read(
    made: Callable[..., NoisedLatents], folder: Path
) -> None:
    latents = whole()["latents"]
    latents[1, 0, 0, 0] = torch.nan
    changed(latents=latents)(folder / "shards" / "c.safetensors")
    with pytest.raises(EnvironmentProblem, match=r"c.safetensors .*: latents of sample 1 \(from 0\) has"):
        taken(made(), 4)


def test_a_row_of_another_length_says_which(folder: Path) -> None:
    config = Latents(paths=[folder / "shards"])
    with pytest.raises(RecipeError, match="seq_len is 16, but a row of dataset latents has 5") as caught:
        build(config, tokenizer=None, seq_len=16, rows=1, dp_rank=0, dp_size=1, seed=0)
    assert caught.value.problems[0].hint == "set training.seq_len = 11"


def test_an_empty_text_of_another_shape_is_refused(made: Callable[..., NoisedLatents], folder: Path) -> None:
    write_shard(folder / "long.safetensors", [{**sample(0), "text": torch.zeros(6, 7)}])
    with pytest.raises(EnvironmentProblem, match=r"long.safetensors has the shapes .* text \[6, 7\]"):
        made(text_dropout=0.1, empty=folder / "long.safetensors")


def test_made_up_latents_follow_from_seed_and_number() -> None:
    config = RandomLatents(
        count=3, channels=2, height=4, width=6, text_length=5, context_dim=7, pooled_dim=3, shuffle=False
    )

    def rows(seed: int, config: RandomLatents = config) -> dict[str, Tensor]:
        runtime = dict(seq_len=SEQ_LEN, rows=3, dp_rank=0, dp_size=1, seed=seed)
        return taken(build(config, tokenizer=None, **runtime), 1)

    assert all(torch.equal(rows(0)[name], value) for name, value in rows(0).items())
    assert not torch.equal(rows(0)["text"], rows(1)["text"])
    dropped = rows(0, replace(config, text_dropout=1.0))
    assert dropped["text"].eq(0).all() and torch.equal(dropped["velocity"], rows(0)["velocity"])


# ------------------------------------------------------------------------------------------------- loss


def test_the_loss_is_the_mean_squared_error_of_the_rows_that_count() -> None:
    draw = torch.Generator().manual_seed(0)
    out = torch.randn(3, 6, 8, generator=draw).requires_grad_()
    velocity = torch.randn(3, 6, 8, generator=draw)
    batch = Batch({"velocity": velocity, "weights": torch.tensor([1.0, 0.0, 1.0])})
    result = build(FlowMatching())(out, batch)
    expected = torch.nn.functional.mse_loss(out[::2], velocity[::2])
    torch.testing.assert_close(result.sum / result.weight, expected)
    (gradient,) = torch.autograd.grad(result.sum, out)
    assert gradient[1].eq(0).all() and torch.equal(gradient[0], 2 * (out - velocity)[0])
    assert result.weight == 2 * 6 * 8 and result.sum.dtype == torch.float32
    assert build(FlowMatching())(out.bfloat16(), batch).sum.dtype == torch.float32


def test_a_batch_without_velocities_is_refused_in_words() -> None:
    with pytest.raises(TitanError, match="needs velocities, but the batch has tokens, targets"):
        Loss()(torch.zeros(1, 2, 3), Batch({"tokens": torch.zeros(1, 2), "targets": torch.zeros(1, 2)}))
