"""The generator `local`: samples from the very module that is trained, so that there is nothing to sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from titancli.protocols.samples import Completion
from titancli.rl.decode import Row, decode
from titancli.rl.sampling import Sampling
from titancli.rl.writer import Writer

if TYPE_CHECKING:
    from titancli import rl
    from titancli.protocols import Tokenizer


class LocalGenerator:
    """A `titancli.protocols.Generator`.

    Parameters are gathered once for all that is sampled; then each rank goes on by itself, at its own pace.
    """

    def __init__(self, config: rl.Local, engine: Any, tokenizer: Tokenizer) -> None:
        self._config, self._engine, self._tokenizer = config, engine, tokenizer
        self._eos_ids = frozenset({tokenizer.eos_id})

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
        """See `titancli.protocols.Generator`.

        Raises:
            TitanError: the model gives numbers that are not finite.
        """
        wanted = [(prompt, seed) for prompt, own in enumerate(seeds) for seed in own]
        made: list[list[Completion]] = [[] for _ in prompts]
        with self._engine.sampling() as model:
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
        )
        return [
            Completion(writer.text(), writer.tokens, own, writer.finish or "length")
            for writer, own in zip(writers, log_probs, strict=True)
        ]


def build(config: rl.Local, *, engine: Any, tokenizer: Tokenizer) -> LocalGenerator:
    """
    Raises:
        TitanError: the engine cannot be sampled from: it is cut otherwise than over data, or its model cannot
            generate.
    """
    with engine.sampling():  # says so before the first step
        return LocalGenerator(config, engine, tokenizer)
