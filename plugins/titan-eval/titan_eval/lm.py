"""`TitanLM`: an engine as a language model of lm-evaluation-harness.

Every rank runs the harness on the same requests. Requests of one kind are divided among the data-parallel
ranks, which exchange their answers at the end; so every rank returns all of them, on any layout.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from titancli.data.chat_template import ChatRefused
from titancli.data.packing import tokenizer_identity
from titancli.data.prompt import begun
from titancli.distributed.together import Ranks
from titancli.errors import TitanError
from titancli.registry.component import build
from titancli.rl import Local

if TYPE_CHECKING:
    from titancli.engine import Engine
    from titancli.protocols import Tokenizer

logger = logging.getLogger("titancli.plugins.titan_eval")

T = TypeVar("T")
Scored = tuple[Any, list[int], list[int]]
"""A request's texts, and the token ids of context and continuation."""
STRETCH = 64
"""Rows are padded to a multiple of this, to limit the number of shapes."""
MAX_NEW_TOKENS = 256
"""Maximum length of completions for tasks that do not define it, as in the harness."""


class TitanLM(TemplateLM):
    """Scores texts with `Engine.forward`, and samples with titan's own generator. Collective: every rank
    must make the same calls, in the same order."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, *, batch_size: int = 8, add_bos: bool | None = None
    ) -> None:
        """Create the model.

        Args:
            batch_size: rows per forward pass on each data-parallel rank.
            add_bos: begin each text with BOS; None: as defined by the tokenizer's files.

        Raises:
            TitanError: BOS is requested, but the tokenizer has none.
        """
        super().__init__()
        self._engine, self._tokenizer, self._rows = engine, tokenizer, batch_size
        self._bos = tokenizer.bos_id
        self._adds_bos = tokenizer.adds_bos if add_bos is None else add_bos
        if self._adds_bos and self._bos is None:
            raise TitanError("add_bos: the tokenizer has no BOS token", hint="remove it")
        self._device = engine.device
        self._said = self._without_system = False
        self._templated = False
        """Whether texts are conversations, in which names of special tokens are these tokens."""

    # ---------------------------------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token that an empty context becomes: BOS, or else the end marker, as in the harness's
        `hf`."""
        return self.eot_token_id if self._bos is None else self._bos

    @property
    def max_length(self) -> int:
        """Maximum length of a row: training.seq_len."""
        longest = self._engine.settings.limits.row_length
        if longest is None:
            raise TitanError("the engine does not say how long rows may be", hint="build it from a recipe")
        return longest

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's identity, which the harness's caches of requests depend on."""
        return f"{type(self._tokenizer).__name__} {tokenizer_identity(self._tokenizer)}".replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, which begins with BOS once if the tokenizer, or `add_bos`, says so."""
        special = self._tokenizer.encode_special if self._templated else None
        encode = special or self._tokenizer.encode
        bos = self._adds_bos if add_special_tokens is None else add_special_tokens and self._adds_bos
        return begun(self._tokenizer, encode(string), bos)

    # ----------------------------------------------------------------------------------- conversations

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the text of the tokenizer's chat template, for the harness's record.

        Raises:
            TitanError: another template than the tokenizer's own is asked for by name.
        """
        if isinstance(chat_template, str):
            raise TitanError(
                f"apply_chat_template = {chat_template!r}: only the tokenizer's own template is known",
                hint="use true",
            )
        return self._tokenizer.chat_template if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text. Its last message is continued unless a generation prompt follows it.
        As in the harness's `hf`, system messages are left out if the template takes none.

        Raises:
            TitanError: the tokenizer has no chat template, or the template rejects the conversation.
        """
        render = self._tokenizer.chat_text
        if render is None or self._tokenizer.encode_special is None:
            raise TitanError(
                f"the tokenizer {type(self._tokenizer).__name__} cannot write conversations as text",
                hint="evaluate without the chat template, or use a folder with tokenizer.json",
            )
        self._templated = True
        how: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if not add_generation_prompt:
            how["options"] = {"continue_final_message": True}
        try:
            return render(chat_history, **how)
        except ChatRefused:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            found = render(others, **how)
            if not self._without_system:
                self._without_system = True
                logger.warning("the chat template takes no system message: these are left out")
            return found

    # --------------------------------------------------------------------------------------- scoring

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the greedy one. The longest
        come first."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        mesh, mine = self._engine.mesh, dict[int, tuple[float, bool]]()
        at_once = self._rows * mesh.degrees.dp
        for start in range(0, len(order), at_once):
            chunk = order[start : start + at_once]
            texts = [self._cut(*requests[i][1:]) for i in chunk]
            first = mesh.dp_rank * self._rows
            own = slice(first, first + self._rows)
            scores = self._scores(texts[own], max(len(ids) - 1 for ids, _ in texts))
            mine |= dict(zip(chunk[own], scores, strict=True))
        return _everyones(mine, len(requests))

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """Return a text's ids, keeping the last ones if it is too long, and the number of ids that are
        scored."""
        if not continuation or not context:
            raise TitanError("a request of the task has no context or no continuation")
        if len(context) + len(continuation) > self.max_length + 1 and not self._said:
            self._said = True
            logger.warning(
                "texts longer than %d tokens lose their beginning (training.seq_len)", self.max_length
            )
        return (context + continuation)[-self.max_length - 1 :], min(len(continuation), self.max_length)

    def _scores(self, texts: Sequence[tuple[list[int], int]], longest: int) -> list[tuple[float, bool]]:
        """Score at most `batch_size` texts in rows of at least `longest` tokens. Collective."""
        multiple = self._engine.settings.limits.multiple
        stretch = STRETCH * multiple if STRETCH % multiple else STRETCH
        length = min(-(-longest // stretch) * stretch, self.max_length)
        tokens = torch.full((self._rows, length), self.eot_token_id, dtype=torch.int64)
        for row, (ids, _) in enumerate(texts):
            tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        logits = self._engine.forward({"tokens": tokens}, return_logits=True)
        found = []
        for row, (ids, count) in enumerate(texts):
            targets = torch.tensor(ids[-count:], device=logits.device)
            log_probs = logits[row, len(ids) - 1 - count : len(ids) - 1].float().log_softmax(-1)
            value = log_probs.gather(1, targets[:, None]).sum()
            found.append((float(value), bool((log_probs.argmax(-1) == targets).all())))
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        windows: list[Scored] = []
        counts = []
        for (text,) in (request.args for request in requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in found]
            windows += own
            counts.append(len(own))
        values = iter([value for value, _ in self._loglikelihood_tokens(windows)])
        return [sum(next(values) for _ in range(count)) for count in counts]

    # ------------------------------------------------------------------------------------ generating

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        """Return completions by titan's generator `local`.

        Raises:
            TitanError: the model is cut into pipeline stages, or cannot generate.
        """
        wanted = [request.args for request in requests]
        groups: dict[str, list[int]] = {}
        for i, (_, settings) in enumerate(wanted):
            groups.setdefault(repr(sorted(settings.items(), key=lambda item: item[0])), []).append(i)
        made: dict[int, str] = {}
        for members in groups.values():
            mesh = self._engine.mesh
            own = members[mesh.dp_rank :: mesh.degrees.dp]
            texts = self._completions([wanted[i][0] for i in own], wanted[members[0]][1])
            made |= dict(zip(own, texts, strict=True))
        return _everyones(made, len(wanted))

    def _completions(self, prompts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        settings = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
        until = handle_stop_sequences(settings.pop("until", None), eos=None)
        longest, sampled = settings.pop("max_gen_toks"), bool(settings.pop("do_sample", False))
        room = self.max_length - longest
        if room <= 0:
            raise TitanError(
                f"the task asks for {longest} new tokens, but rows have {self.max_length} (training.seq_len)",
                hint="use a larger training.seq_len",
            )
        temperature = settings.pop("temperature", None) or 1.0
        if unknown := [name for name, value in settings.items() if value not in (None, 1.0)]:
            raise TitanError(f"the task asks for {unknown[0]}, which titan's generator does not have")
        config = Local(max_new_tokens=longest, temperature=temperature, stop=until, batch_size=self._rows)
        generator = build(config, engine=self._engine, tokenizer=self._tokenizer)
        ids = [self.tok_encode(prompt)[-room:] or [self.prefix_token_id] for prompt in prompts]
        made = generator.sample(ids, [[0] for _ in ids], [longest for _ in ids], greedy=not sampled)
        return [completion.text for [completion] in made]


def _everyones(mine: dict[int, T], count: int) -> list[T]:
    """Return the answers of all ranks, in order."""
    found: dict[int, T] = {}
    for theirs in Ranks().gather(mine):
        found |= theirs
    return [found[i] for i in range(count)]
