"""The generator `local`, which samples from the module under training, so no weights are transferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titancli.protocols.samples import Completion, SamplingParams

if TYPE_CHECKING:
    from titancli import rl
    from titancli.protocols import Tokenizer


class LocalGenerator:
    """A `titancli.protocols.Generator` by `Engine.sample`."""

    def __init__(self, config: rl.Local, engine: Any, tokenizer: Tokenizer) -> None:
        self._engine, self._tokenizer, self._batch_size = engine, tokenizer, config.batch_size
        self.temperature = config.temperature
        self._params = SamplingParams(
            max_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            stop=config.stop,
        )

    def update(self, version: int) -> None:
        """Do nothing: its weights are the engine's."""

    def record_routes(self) -> None:
        """Have completions carry the experts that their tokens visit."""
        self._params = replace(self._params, routes=True)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        greedy: bool = False,
    ) -> list[list[Completion]]:
        """Continue prompts; see `titancli.protocols.Generator`.

        Raises:
            TitanError: the model returns numbers that are not finite.
        """
        found: list[list[Completion]] = self._engine.sample(
            prompts,
            params=replace(self._params, temperature=0.0, routes=False) if greedy else self._params,
            seeds=seeds,
            limits=limits,
            tokenizer=self._tokenizer,
            batch_size=self._batch_size,
        )
        return found


def build(config: rl.Local, *, engine: Any, tokenizer: Tokenizer) -> LocalGenerator:
    """Build the generator.

    Raises:
        TitanError: the engine cannot be sampled from: it has pipeline stages, or its model cannot generate.
    """
    with engine.sampling():  # raises before the first step
        return LocalGenerator(config, engine, tokenizer)
