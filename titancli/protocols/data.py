"""Tokenizers and datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from titancli.protocols.batch import Batch


class TokenizerDefaults(Protocol):
    """Optional members of a tokenizer, with their defaults."""

    bos_id: int | None = None
    adds_bos: bool = False
    """True if a text to continue starts with BOS."""
    fingerprint: str | None = None
    """A text that changes when the ids change; None: derived from its class, vocabulary size, end marker
    and files."""
    chat_fingerprint: str | None = None
    """The same for the ids of `chat`."""
    turn_ends: Sequence[int] | None = None
    """The ids that end a turn of the assistant in `chat`, at which sampling stops in runs that train on
    conversations; empty: no single token does; None: not known, or it has no chat template."""
    chat_template: str | None = None
    """The text of the chat template; None: it is not known."""
    chat_text: Callable[..., str] | None = None
    """`chat_text(messages, *, add_generation_prompt=False, options=None) -> str`: a conversation as text,
    whose ids are those of `encode_special`. Evaluation harnesses need both for conversations."""
    encode_special: Callable[[str], list[int]] | None = None
    """`encode_special(text) -> ids`, where names of special tokens are these tokens."""
    chat_with_mask: Callable[..., tuple[list[int], list[bool]]] | None = None
    """Needed to train on assistant messages: `chat_with_mask(messages, *, first=0) -> (ids, mask)`, the
    ids of `chat`, and which of them belong to assistant turns among `messages[first:]`, including the end
    marker. With an additional argument `trailing_newline: bool = False` it can include the line break
    that the template adds after the marker; with `untrained: Collection[int] = ()` it can leave out messages
    by their numbers; with `options: Mapping[str, Any] | None = None`, as `chat` may have too, it is given
    other arguments of the template: `tools`, for example."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name, special ones included; None: there is none."""
        return None

    def decode_special(self, ids: list[int]) -> str | None:
        """Return the text with special tokens by their names; None: only `decode` is available."""
        return None

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray] | None:
        """Return the result of `encode_batch` as arrays; None: only `encode_batch` is available."""
        return None


class Tokenizer(TokenizerDefaults, Protocol):
    """Converts text to ids and back.

    Optional members are in `TokenizerDefaults`. A conversation that a chat template rejects raises
    `titancli.data.chat_template.ChatRefused`.
    """

    vocab_size: int
    """Ids are below this."""
    eos_id: int
    """The id that ends a document."""
    files: Mapping[str, str | Path]
    """Files to copy into an export: name to source path; may be empty."""

    def encode(self, text: str) -> list[int]:
        """Return ids, without added special tokens."""
        ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str: ...

    def chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
        """Return the ids of a conversation, using the tokenizer's own chat template; raises a TitanError
        if it has none.

        Args:
            add_generation_prompt: whether to append the prompt for an answer of the assistant.
        """
        ...


class TokenizerBuilder(Protocol):
    def __call__(self, config: Any) -> Tokenizer: ...


class DatasetDefaults(Protocol):
    """Optional members of a dataset, with their defaults."""

    def skip(self, rows: int) -> int | None:
        """Skip `rows` rows of all ranks without making them, and return how many there were; None if the
        dataset cannot, and the rows are read instead. It may be called between two batches of an
        iteration, which then continues behind them. Worker processes need it."""
        return None

    def rows_left(self, epochs: int) -> int | None:
        """Return how many rows of all ranks lie between the position and the end of the first `epochs`
        passes over the data, counted exactly; below 0 if the position is behind it; None if the dataset
        cannot know. `training.epochs` needs it."""
        return None

    def end_after(self, epochs: int) -> None:
        """End after this many passes over the data, counted from their start, with a last batch that is
        filled up with rows without targets. Called before the first batch."""
        return


class Dataset(DatasetDefaults, Protocol):
    """A finite or infinite stream of this rank's batches, on the CPU, all of the same shape.

    Where it has an attribute `rows_per_step`, that is set, before the first batch of a training run, to the
    rows of one optimizer step on all ranks.
    """

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned: plain JSON, independent of dp_rank
        and dp_size."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position, whatever the dp_size when it was saved.

        Raises:
            TitanError: the data is not the data that the state was saved on.
        """


class DatasetBuilder(Protocol):
    def __call__(
        self,
        config: Any,
        *,
        tokenizer: Tokenizer | None,
        seq_len: int,
        rows: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
    ) -> Dataset:
        """Build the dataset; `tokenizer` is None only for a config with `needs_tokenizer = False`, whose
        recipes have no [tokenizer]; see `titancli.registry.defaults`."""
        ...
