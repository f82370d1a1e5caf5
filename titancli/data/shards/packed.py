"""Whole documents of token files, packed into the rows where they fit best; with some rearranged to fill in
the middle.

Every rank looks up the lengths of all documents, and reads only the tokens of its own rows. Random draws for
a document depend only on the seed, the epoch and its index, so any position leads to the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from titancli.data import FillInTheMiddle
from titancli.data.fitting import PIECES, Conversation, PackedRows
from titancli.data.permutation import drawn, permuted
from titancli.data.rows import Examples, Group, RowDataset
from titancli.data.shards.reader import DocumentEnds, TokenFiles
from titancli.errors import RecipeError
from titancli.protocols import Tokenizer

BLOCK = 1024
"""Documents whose lengths are looked up at once."""
MARKERS = 3
"""Tokens added to a document whose middle is filled in."""


class Documents(NamedTuple):
    """Token files with known documents; they replace examples that are read one by one."""

    files: TokenFiles
    ends: DocumentEnds
    identity: dict[str, Any]
    label: str


class ShardPackedDataset(RowDataset):
    """Batches of rows of documents; those longer than a row, or than `max_document_length`, are cut."""

    def __init__(
        self,
        documents: Documents,
        config: Any,
        *,
        tokenizer: Tokenizer,
        seq_len: int,
        seed: int,
        **runtime: Any,
    ) -> None:
        """Create the dataset; `config` has the fields `shuffle`, `packing`, `max_document_length`,
        `repeat` and `fim`."""
        self._documents, self._config, self._seed = documents, config, seed
        self._bos = tokenizer.bos_id
        self._longest = min(seq_len, config.max_document_length or seq_len)
        self._fim_config: FillInTheMiddle | None = config.fim
        self._fim = None if self._fim_config is None else marker_ids(self._fim_config, tokenizer)
        settings: dict[str, Any] = {"packing": config.packing, "longest": self._longest}
        if (fim := self._fim_config) is not None:
            settings["fim"] = [fim.rate, fim.spm_rate, *(self._fim or ()), seed]
        super().__init__(
            cast(Examples, documents),  # never read one by one
            PackedRows(seq_len, tokenizer.eos_id, pack=True),
            tokenizer=tokenizer,
            seq_len=seq_len,
            repeat=config.repeat,
            settings=settings,
            group=PIECES,
            templated=False,
            length_index=True,
            **runtime,
        )

    def epoch_tokens(self) -> tuple[int, bool]:
        """Return the number of tokens in an epoch, and True: it is exact."""
        return self._documents.files.tokens, True

    def _indexed_groups(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[Group]:
        held = np.zeros((0, 6), np.int64)
        for pieces in self._pieces(epoch, *((mark["document"], mark["past"]) if mark else (0, 0))):
            held = np.concatenate((held, pieces))
            while len(held) >= self._group:
                yield self._group_of(epoch, held[: self._group])
                held = held[self._group :]
        if len(held):
            yield self._group_of(epoch, held)

    def _group_of(self, epoch: int, pieces: np.ndarray) -> Group:
        mark = {"document": int(pieces[0, 0]), "past": int(pieces[0, 1])}
        return Group(mark, pieces[:, 4].tolist(), partial(self._piece, epoch, pieces))

    def _numbers(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the documents at some positions of an epoch."""
        shuffled = self._config.shuffle == "documents"
        return permuted(places, self._documents.ends.documents, self._seed, epoch) if shuffled else places

    def _pieces(self, epoch: int, begin: int, before: int) -> Iterator[np.ndarray]:
        """Yield pieces from one on, int64 [n, 6]: the document's position in the order, its tokens before
        the piece, the document's index, the piece's first token in the files, its number of inputs, and
        whether its middle is filled in."""
        count, longest = self._documents.ends.documents, self._longest
        for first in range(begin, count, BLOCK):
            places = np.arange(first, min(count, first + BLOCK))
            numbers = self._numbers(epoch, places)
            bounds = self._documents.ends.bounds(numbers)
            inputs = np.maximum(0, bounds[:, 1] - bounds[:, 0] - 1)
            each = -(-inputs // longest)
            which = np.repeat(np.arange(len(places)), each)
            past = (np.arange(len(which)) - np.repeat(np.cumsum(each) - each, each)) * longest
            fills = self._fills(numbers, inputs, epoch)[which]
            sizes = np.minimum(longest, inputs[which] - past) + MARKERS * fills
            first_tokens = bounds[which, 0] + past
            found = np.stack((places[which], past, numbers[which], first_tokens, sizes, fills), 1)
            if first == begin:
                found = found[(which > 0) | (past >= before)]
            yield found

    def _fills(self, numbers: np.ndarray, inputs: np.ndarray, epoch: int) -> np.ndarray:
        """Return which documents have their middle filled in, bool: only those that stay one piece with
        the markers."""
        if self._fim_config is None:
            return np.zeros(len(numbers), bool)
        chosen = drawn(numbers, self._seed, epoch, 0) < self._fim_config.rate
        return chosen & (inputs > 0) & (inputs + MARKERS <= self._longest)

    def _piece(self, epoch: int, pieces: np.ndarray, index: int) -> Conversation:
        _, _, number, start, size, fills = pieces[index].tolist()
        data = np.empty(size + 1 - MARKERS * fills, self._documents.files.dtype)
        self._documents.files.read(start, data)
        tokens = data.astype(np.int64)
        if fills:
            tokens = self._rearranged(tokens, np.array([number]), epoch)
        return Conversation(tokens, np.ones(len(tokens), bool))

    def _rearranged(self, tokens: np.ndarray, document: np.ndarray, epoch: int) -> np.ndarray:
        """Return a document with its middle at the end: prefix, suffix, middle, or suffix, prefix, middle.

        Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022), on tokens.
        """
        config = cast(FillInTheMiddle, self._fim_config)
        begin = int(self._bos is not None and tokens[0] == self._bos)  # it stays the first
        first, tokens = tokens[:begin], tokens[begin:]
        prefix_id, middle_id, suffix_id = cast(tuple[int, int, int], self._fim)
        kind, *cuts = (float(drawn(document, self._seed, epoch, which)[0]) for which in (1, 2, 3))
        low, high = sorted(int(cut * len(tokens)) for cut in cuts)  # from 0 to just before the end marker
        prefix, middle, suffix = tokens[:low], tokens[low:high], tokens[high:-1]
        if kind < config.spm_rate:
            parts = [[prefix_id, suffix_id], suffix, [middle_id], prefix, middle]
        else:
            parts = [[prefix_id], prefix, [suffix_id], suffix, [middle_id], middle]
        return np.concatenate([first, *parts, tokens[-1:]]).astype(np.int64)


def marker_ids(config: FillInTheMiddle, tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return the ids of the three markers.

    Raises:
        RecipeError: the tokenizer lacks one.
    """
    found = []
    for name in ("prefix", "middle", "suffix"):
        token = getattr(config, name)
        if (number := tokenizer.token_id(token)) is None:
            raise RecipeError(
                f"dataset.fim.{name} = {token!r}: the tokenizer has no such token",
                hint="name the tokens that it was made with for filling in the middle",
            )
        found.append(number)
    return found[0], found[1], found[2]
