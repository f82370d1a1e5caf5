"""The generator `local`: samples from the very module that is trained, so that there is nothing to sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titancli.errors import PluginError, RecipeError
from titancli.rl.decode import Row, decode
from titancli.rl.samples import Completion
from titancli.rl.sampling import Sampling
from titancli.rl.writer import Writer

if TYPE_CHECKING:
    from titancli import rl
    from titancli.registry.kinds import Tokenizer

REFUSED = ("tp", "cp", "pp", "ep")
"""Degrees under which a rank has no whole rows, or no whole model."""


class LocalGenerator:
    """A `titancli.registry.kinds.Generator`.

    Data-parallel ranks move in lock step: all make as many forwards, so that parameters that are gathered on
    the way are gathered on all of them.
    """

    def __init__(self, config: rl.Local, engine: Any, tokenizer: Tokenizer) -> None:
        self._config, self._engine, self._tokenizer = config, engine, tokenizer
        self._eos_ids = frozenset({tokenizer.eos_id})
        self._group = engine.mesh.dp_group if engine.mesh.degrees.dp > 1 else None

    def update(self, version: int) -> None:
        """Its weights are the engine's own."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        greedy: bool = False,
    ) -> list[list[Completion]]:
        """See `titancli.registry.kinds.Generator`; each rank has as many seeds in all.

        Raises:
            TitanError: the model gives numbers that are not finite.
        """
        wanted = [(prompt, seed) for prompt, own in enumerate(seeds) for seed in own]
        made: list[list[Completion]] = [[] for _ in prompts]
        model = self._engine.model
        with self._engine.sampling():
            for start in range(0, len(wanted), self._config.batch_size):
                batch = wanted[start : start + self._config.batch_size]
                first, last = batch[0][0], batch[-1][0]
                rows = [
                    Row(p - first, seed, min(self._config.max_new_tokens, limits[p])) for p, seed in batch
                ]
                found = self._batch(model, prompts[first : last + 1], rows, greedy)
                for (prompt, _), completion in zip(batch, found, strict=True):
                    made[prompt].append(completion)
        return made

    def _batch(
        self, model: Any, prompts: Sequence[Sequence[int]], rows: list[Row], greedy: bool
    ) -> list[Completion]:
        config, decode_text = self._config, self._tokenizer.decode
        writers = [Writer(decode_text, prompts[row.prompt], self._eos_ids, config.stop) for row in rows]
        log_probs: list[list[float]] = [[] for _ in rows]
        decode(
            model,
            prompts,
            rows,
            Sampling(0.0 if greedy else config.temperature, config.top_k, config.top_p),
            lambda row, token: writers[row].token(token),
            device=self._engine.device,
            vocab_size=self._tokenizer.vocab_size,
            log_probs=log_probs,
            anyone=self._anyone if self._group is not None else None,
        )
        return [
            Completion(writer.text(), writer.tokens, own, writer.finish or "length")
            for writer, own in zip(writers, log_probs, strict=True)
        ]

    def _anyone(self, goes_on: bool) -> bool:
        flag = torch.tensor([goes_on], dtype=torch.int32, device=self._engine.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())


def build(config: rl.Local, *, engine: Any, tokenizer: Tokenizer) -> LocalGenerator:
    """
    Raises:
        RecipeError: the engine is cut so that no rank has whole rows and a whole model.
        PluginError: the model cannot generate.
    """
    degrees = engine.mesh.degrees
    for name in REFUSED:
        if getattr(degrees, name) > 1:
            raise RecipeError(
                "the generator local samples from whole rows and a whole model, "
                f"and mesh.{name} = {getattr(degrees, name)} cuts them",
                hint=f"write mesh.{name} = 1",
            )
    if not hasattr(engine.model, "new_cache"):
        raise PluginError(
            f"the model {type(engine.model).__name__} cannot generate: it has no new_cache",
            hint="what a model needs for that is in titancli.registry.kinds.Model",
        )
    return LocalGenerator(config, engine, tokenizer)
