"""Datasets of encoded samples, with noise added to each, dealt to data-parallel ranks.

Everything about a sample depends only on (training.seed, epoch, its index): its position in the order, its
noise, its time, and whether its text is dropped. Global micro-batch k consists of positions k·D·B to
(k+1)·D·B (D ranks, B rows each), and rank d takes the d-th B of them; so a position is a number of samples,
whatever D and B are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_flux import Latents, Noised, RandomLatents
from titan_flux.shards import Random, Samples, Shards, random_state
from titancli import Batch
from titancli.data.packing import STATE_VERSION, refuse_other_data
from titancli.data.source import document_order
from titancli.errors import RecipeError


class NoisedLatents:
    """Batches of noisy latents and the velocities that lead back: a `Dataset` of `titancli.protocols`.

    | key | shape, dtype | meaning |
    |---|---|---|
    | latents | [B, S, 4C] fp32 | noisy image tokens: (1 − t)·clean + t·noise |
    | places | [B, S, 3] int64 | 0, row and column of each |
    | text, pooled | [B, T, context_dim], [B, pooled_dim] fp32 | the text's encodings |
    | timesteps | [B] fp32 | t, from 0 (clean) to 1 (noise) |
    | guidance | [B] fp32, if the config has it | |
    | velocity | [B, S, 4C] fp32 | noise − clean |
    | weights | [B] fp32 | 0 for a row that pads the last batch |
    """

    def __init__(
        self,
        samples: Samples,
        config: Noised,
        *,
        seq_len: int,
        rows: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
    ) -> None:
        self._samples, self._config = samples, config
        self._rows, self._seed = rows, seed
        self._skip, self._step = dp_rank * rows, dp_size * rows
        self._place = 0
        """Position of the next sample of all ranks, over all epochs."""
        self._order: tuple[int, np.ndarray] | None = None
        self._empty = samples.empty() if config.text_dropout > 0 else None
        _, height, width = samples.shape.latents
        self._places = places_of(height // 2, width // 2).expand(rows, -1, -1)
        _refuse_other_length(seq_len, len(self._places[0]), samples)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the current position on.

        Raises:
            EnvironmentProblem: a shard is damaged; names it.
        """
        while self._config.repeat or self._place < self._samples.count:
            mine = range(self._place + self._skip, self._place + self._skip + self._rows)
            batch = self._batch([self._row(place) for place in mine])
            self._place += self._step
            yield batch

    def _batch(self, rows: list[dict[str, Any]]) -> Batch:
        tensors = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
        return Batch({**tensors, "places": self._places})

    def _row(self, place: int) -> dict[str, Any]:
        count, config = self._samples.count, self._config
        counts = config.repeat or place < count
        epoch, at = divmod(place if counts else count - 1, count)
        number = int(self._order_of(epoch)[at])
        clean, text, pooled = self._samples.read(number)
        draw = random_state(self._seed, epoch, number)
        # All are always drawn, in this order, so that no setting changes another one's draws.
        noise = torch.from_numpy(draw.standard_normal(clean.shape).astype(np.float32))
        normal, uniform, kept = draw.standard_normal(), draw.random_sample(), draw.random_sample()
        time = 1 / (1 + np.exp(-normal)) if config.timesteps == "logit_normal" else uniform
        time = float(config.shift * time / (1 + (config.shift - 1) * time))
        if self._empty is not None and kept < config.text_dropout:
            text, pooled = self._empty
        clean, noise = tokens_of(clean), tokens_of(noise)
        row = {
            "latents": (1 - time) * clean + time * noise,
            "text": text,
            "pooled": pooled,
            "timesteps": time,
            "velocity": noise - clean,
            "weights": float(counts),
        }
        return row if config.guidance is None else {**row, "guidance": config.guidance}

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            shuffle = self._config.shuffle
            self._order = epoch, document_order(self._seed, epoch, self._samples.count, shuffle=shuffle)
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch: the number of samples used by all ranks, over all
        epochs."""
        return {"version": STATE_VERSION, "samples": self._place, "data": self._samples.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, with any number of ranks and rows.

        Raises:
            EnvironmentProblem: the state was saved with other data, or does not belong to this dataset.
        """
        refuse_other_data(state, self._samples.identity, self._samples.label, "samples")
        self._place = state["samples"]


def tokens_of(latents: Tensor) -> Tensor:
    """Split [C, H, W] into image tokens [H/2 · W/2, 4C], row by row; the channels of a 2 x 2 patch come
    first."""
    channels, height, width = latents.shape
    pieces = latents.view(channels, height // 2, 2, width // 2, 2).permute(1, 3, 0, 2, 4)
    return pieces.reshape(height // 2 * (width // 2), channels * 4)


def places_of(rows: int, columns: int) -> Tensor:
    """Return the positions of image tokens, [rows · columns, 3] int64: 0, row and column."""
    grid = torch.zeros(rows, columns, 3, dtype=torch.int64)
    grid[..., 1] = torch.arange(rows)[:, None]
    grid[..., 2] = torch.arange(columns)
    return grid.flatten(0, 1)


def _refuse_other_length(seq_len: int, image: int, samples: Samples) -> None:
    """Check that training.seq_len matches the data.

    Raises:
        RecipeError: it differs from the number of tokens in a row.
    """
    text = samples.shape.text[0]
    if seq_len != text + image:
        raise RecipeError(
            f"training.seq_len is {seq_len}, but a row of {samples.label} has {text} text tokens and "
            f"{image} image tokens",
            hint=f"set training.seq_len = {text + image}",
        )


def build_latents(config: Latents, *, tokenizer: None, seed: int, **runtime: Any) -> NoisedLatents:
    """Build `[dataset] type = "latents"`."""
    samples = Shards(config.paths, config.empty, shuffle=config.shuffle, seed=seed)
    return NoisedLatents(samples, config, seed=seed, **runtime)


def build_random(config: RandomLatents, *, tokenizer: None, seed: int, **runtime: Any) -> NoisedLatents:
    """Build `[dataset] type = "random_latents"`."""
    return NoisedLatents(Random(config, seed=seed), config, seed=seed, **runtime)
