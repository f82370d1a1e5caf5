"""From prompts to completions: the code shared by `engine.sample`, the generator `local` and `titan
generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titancli.errors import TitanError
from titancli.protocols.samples import Completion, SamplingParams
from titancli.rl.decode import Row, check, decode
from titancli.rl.writer import OnText, Writer

if TYPE_CHECKING:
    from titancli.protocols import Tokenizer

OnDone = Callable[[list[Completion]], None]


class Completing:
    """Checked prompts to continue, each once per seed."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        end_ids: Set[int],
        limits: Sequence[int] | None = None,
        on_text: OnText | None = None,
    ) -> None:
        """
        Args:
            model: sharded or not; only its config is read.
            prompts: token ids.
            tokenizer: None: completions have no text.
            end_ids: tokens that end a completion, in addition to `params.stop_ids`.
            limits: maximum new tokens of each prompt; None: only `params.max_tokens`.
            on_text: called with each new piece of text of any completion.

        Raises:
            TitanError: a prompt is not a list of ids, is empty, has an id that the model does not have, or
                leaves no room in its context; there are stop texts but no tokenizer; or routes are asked for
                where there are none.
        """
        if params.stop and tokenizer is None:
            raise TitanError(
                "sampling: texts to stop at (stop) need a tokenizer, and there is none",
                hint="name one in the recipe, or give token ids (stop_ids)",
            )
        if params.routes and model.routing is None:
            raise TitanError(
                f"sampling: {type(model).__name__} has no routes to record: it has no layers of experts, of "
                "titan's own and alike",
                hint="leave `routes` of the SamplingParams false",
            )
        self.params, self._tokenizer, self._on_text = params, tokenizer, on_text
        self.prompts = [_ids(number, prompt) for number, prompt in enumerate(prompts)]
        self._end_ids = frozenset(end_ids) | frozenset(params.stop_ids)
        longest = model.config.max_seq_len
        self.rows: list[Row] = []
        self.counts = [len(own) for own in seeds]
        for number, (prompt, own) in enumerate(zip(self.prompts, seeds, strict=True)):
            room = params.max_tokens if limits is None else min(params.max_tokens, limits[number])
            if longest is not None:  # a prompt that leaves no room is refused below
                room = min(room, max(1, longest - len(prompt)))
            self.rows += [Row(number, seed, room) for seed in own]
        check(model, self.prompts, self.rows)

    def _writer(self, prompt: Sequence[int]) -> Writer:
        text = _no_text if self._tokenizer is None else self._tokenizer.decode
        return Writer(text, prompt, self._end_ids, self.params.stop, on_text=self._on_text)

    def run(
        self,
        model: Any,
        device: torch.device,
        *,
        batch_size: int,
        version: int | None = None,
        on_done: OnDone | None = None,
    ) -> list[list[Completion]]:
        """Return the completions of each prompt.

        Args:
            batch_size: maximum number of completions generated together.
            on_done: called with completions in order, as soon as all before them are complete.

        Raises:
            TitanError: the model returns numbers that are not finite.
        """
        tokenizer = self._tokenizer
        writers = [self._writer(self.prompts[row.prompt]) for row in self.rows]
        log_probs: list[list[float]] = [[] for _ in self.rows]
        routes: list[list[Tensor]] | None = [[] for _ in self.rows] if self.params.routes else None
        made: list[Completion | None] = [None] * len(self.rows)
        reported = 0

        def on_token(number: int, token: int) -> bool:
            nonlocal reported
            writer, limit = writers[number], self.rows[number].limit
            if writer.token(token) and len(writer.tokens) < limit:
                return True
            text, finish = writer.text(), writer.finish or "length"
            visited = None if routes is None else torch.cat(routes[number]).numpy()
            made[number] = Completion(text, writer.tokens, log_probs[number], finish, version, visited)
            if on_done is not None:
                ready = made[
                    reported : next((i for i in range(reported, len(made)) if made[i] is None), len(made))
                ]
                reported += len(ready)
                if ready:
                    on_done([one for one in ready if one is not None])
            return False

        decode(
            model,
            self.prompts,
            self.rows,
            self.params,
            on_token,
            device=device,
            vocab_size=None if tokenizer is None else tokenizer.vocab_size,
            log_probs=log_probs,
            routes=routes,
            batch_size=batch_size,
        )
        found = iter([one for one in made if one is not None])
        return [[next(found) for _ in range(count)] for count in self.counts]


def _no_text(ids: list[int]) -> str:
    return ""


def _ids(number: int, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        raise TitanError(
            f"prompt {number} is text: {prompt[:30]!r}", hint="pass token ids: tokenizer.encode(text)"
        )
    ids = prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
    if wrong := [one for one in ids if type(one) is not int]:
        raise TitanError(f"prompt {number} contains {wrong[0]!r}, which is no token id")
    return ids
