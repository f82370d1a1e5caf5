"""Sources of training data: the configs of datasets and tokenizers.

Torch-free. A text dataset is built from three parts, each in its own file: a source of documents (`files.py`,
`jsonl.py`, `parquet.py`, `hf_datasets.py`), the stream of their tokens (`stream.py`), and rows that are cut
from the stream (`packing.py`) or filled with whole documents (`text.py`). The tokenizers are
`byte_tokenizer.py` and `hf_tokenizer.py`; `loader.py` prefetches batches to the device. A new dataset of text
documents needs only a source, see `source.py`.

Conversations are not a stream: their rows (`chat_source.py`) become examples (`chat.py`), and whole examples
become the rows of batches (`rows.py`, `fitting.py`).

Files of tokens are read by `shards/`, which also writes them (`titan data tokenize`). `mix.py` mixes the rows
of several datasets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MinLen

from titancli.data.paths import absolute, absolute_lines, hub_keys
from titancli.registry.component import component, section
from titancli.registry.fields import Component, LocalPath, Slot

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@section
class FillInTheMiddle:
    """Moves the middle of documents to the end, so that a model learns to fill it in."""

    rate: Annotated[float, Ge(0), Le(1)] = 0.5
    """Fraction of the documents; documents that do not fit a row with three more tokens stay unchanged."""
    spm_rate: Annotated[float, Ge(0), Le(1)] = 0.5
    """Fraction of these in the order suffix, prefix, middle; the others are prefix, suffix, middle."""
    prefix: str
    """Token before a prefix, e.g. `"<|fim_prefix|>"`."""
    middle: str
    """Token before a middle."""
    suffix: str
    """Token before a suffix."""


@section
class Packed:
    """Fields of all datasets whose rows consist of documents' tokens."""

    repeat: bool = True
    """Start over at the end of the data, as often as needed; false: end the run there."""
    document_mask: bool = False
    """Keep attention and positions within a document; false: treat a row as one document."""
    packing: Literal["stream", "best_fit"] = "stream"
    """`"stream"`: cut rows from the documents one after another. `"best_fit"`: put whole documents into
    the rows where they fit best, cut only documents longer than a row, and pad the rest. Needs
    document_mask."""
    max_document_length: Annotated[int, Gt(0)] | None = None
    """With best_fit, cut documents into pieces of at most this many tokens; None: training.seq_len."""
    fim: FillInTheMiddle | None = None
    """With best_fit, fill in the middle of some documents, chosen by (training.seed, epoch, document)."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.packing == "best_fit" and not self.document_mask:
            yield "packing", "best_fit puts documents beside each other: set document_mask = true"
        if self.packing == "stream" and self.max_document_length is not None:
            yield "max_document_length", 'documents are cut with packing = "best_fit" only: remove it'
        if self.packing == "stream" and self.fim is not None:
            yield "fim", 'middles are filled in with packing = "best_fit" only: remove it'


@section
class Text(Packed):
    """Fields of all text datasets."""

    shuffle: bool = True
    """Shuffle documents by (training.seed, epoch); false: keep their order."""
    cache_tokens: bool = False
    """Tokenize all documents once, before the first step, into token shards in titan's cache, so that each
    rank and each worker process reads only its own rows. Shuffled documents are in the order of
    `token_shards`."""
    add_bos: bool | None = None
    """Begin each document with BOS; None: if the tokenizer itself does that to a text, by the post-processor
    of its tokenizer.json."""
    add_eos: bool = True
    """End each document with the end marker."""
    fim: FillInTheMiddle | None = None
    """With best_fit and cache_tokens, fill in the middle of some documents, chosen by (training.seed, epoch,
    document)."""

    @property
    def skips_rows(self) -> bool:
        return self.cache_tokens

    @property
    def shuffles_source(self) -> bool:
        """Return whether the source shuffles its documents; token shards are shuffled when they are read."""
        return self.shuffle and not self.cache_tokens

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if self.fim is not None and not self.cache_tokens:
            yield "fim", "middles are filled in where lengths are known: set cache_tokens = true"
        if self.cache_tokens and not self.add_eos:
            yield (
                "add_eos",
                "token shards have the end marker after each document: remove it, or cache_tokens",
            )


@component("dataset", "text_files", target="titancli.data.files:build_text_files")
class TextFiles(Text):
    """Text files on disk, in UTF-8, also compressed by gzip or zstd; each file is one document."""

    paths: Annotated[list[Path], MinLen(1)]
    """Files, folders (all non-hidden files in them) and globs (`"corpus/**/*.md"`)."""
    format: Literal["auto", "text"] = "auto"
    """`"auto"`: reject files whose content is not text (JSON Lines, a JSON list, CSV, Parquet or binary
    data), unless their suffix is one of text (`.txt`, `.md`). `"text"`: read all files as text."""
    skip_damaged: bool = False
    """Skip and count files that are not UTF-8 or that cannot be decompressed, after reading all files once at
    the start; false: reject them."""


@component("dataset", "python_stdlib", target="titancli.data.files:build_python_stdlib")
class PythonStdlib(Text):
    """Source code of the Python standard library: real text, available on every machine."""


@component("dataset", "hf", target="titancli.data.hf_datasets:build")
class HFDataset(Text):
    """A Hugging Face dataset: a local folder or file, or a name on the Hub."""

    path: Annotated[str, MinLen(1), LocalPath()]
    """`"./folder"` or `"./file.jsonl"` (local: begins with `/`, `./`, `../` or `~`), or a Hub name."""
    name: str | None = None
    """Configuration of a dataset on the Hub, e.g. `"en"`."""
    revision: str | None = None
    """Commit, tag or branch of a dataset on the Hub; a commit makes a run reproducible."""
    split: str = "train"
    """Split to use, e.g. `"train"` or `"train[:10%]"`."""
    text: str = "text"
    """Column with the text of a document."""
    streaming: bool = False
    """Stream the data while training instead of downloading it first."""
    shuffle: bool = False
    """Shuffle documents by (training.seed, epoch); not with streaming."""

    @property
    def uncountable(self) -> str | None:
        return "a stream has no known length (dataset.streaming = true)" if self.streaming else None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute(self.path))

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        yield from hub_keys(self)
        if self.streaming and self.shuffle:
            yield "shuffle", "a shuffled stream cannot be resumed exactly: remove shuffle or streaming"
        if self.streaming and "[" in self.split:
            yield "split", f"a slice of a split ({self.split!r}) needs streaming = false"
        if self.streaming and self.cache_tokens:
            yield "cache_tokens", "a stream may differ each time that it is read: remove it, or streaming"


@component("dataset", "jsonl", target="titancli.data.jsonl:build")
class JsonLines(Text):
    """Files of rows on disk (JSON Lines, lists in JSON, CSV, Parquet); each row is one document.

    Bad rows are skipped and counted. All but Parquet may be compressed by gzip or zstd.
    """

    paths: Annotated[list[Path], MinLen(1)]
    """Files, folders (all non-hidden files in them) and globs (`"corpus/**/*.jsonl"`)."""
    text: str = "text"
    """Key of a row's text."""
    strict: bool = False
    """End the run at a bad row (not UTF-8, not JSON, empty, without the key, too long), reporting file and
    line."""
    max_bytes: Annotated[int, Gt(0)] = 8_388_608
    """Maximum length of a row; longer ones are bad rows."""
    skip_damaged: bool = False
    """Skip and count files that cannot be decompressed or decoded; false: reject them."""


@component("dataset", "parquet", target="titancli.data.parquet:build")
class Parquet(Text):
    """Parquet files on disk; each row is one document."""

    paths: Annotated[list[Path], MinLen(1)]
    """Files, folders (all non-hidden files in them) and globs (`"corpus/**/*.parquet"`)."""
    text: str = "text"
    """Column with the text of a document."""
    shuffle: bool = True
    """Shuffle the row groups and the rows within each by (training.seed, epoch), or, with cache_tokens,
    all rows; false: keep their order."""


@component("dataset", "token_shards", target="titancli.data.shards.dataset:build")
class TokenShards(Packed):
    """Files of tokens: shards of `titan data tokenize`, or files of other tools as they are."""

    paths: Annotated[list[Path], MinLen(1)]
    """Folders written by `titan data tokenize`, or URLs of such folders (`"s3://…"`, `"hf://datasets/…"`),
    which are cached as they are read; for other formats: files, folders and globs (`"data/*.bin"`)."""
    format: Literal["titan", "megatron", "llm.c", "raw"] = "titan"
    """`"megatron"`: `.bin` files with their `.idx` files. `"llm.c"`: `.bin` files with a header of 1 KiB.
    `"raw"`: bare little-endian integers, as in nanoGPT and OLMo-core."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Type of the tokens in raw files."""
    shuffle: Literal["rows", "documents", "off"] = "rows"
    """Shuffle by (training.seed, epoch): rows of training.seq_len tokens (not with best_fit), whole
    documents, or nothing."""
    document_mask: bool = False
    """Keep attention and positions within a document, if documents end with the end marker; false: treat a
    row as one document."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if self.packing == "best_fit" and self.shuffle == "rows":
            yield "shuffle", 'best_fit needs whole documents: set it to "documents" or "off"'
        if (self.format == "raw") != (self.dtype is not None):
            raw = self.format == "raw"
            yield (
                "dtype",
                "raw files need a dtype" if raw else f"files of format {self.format!r} define it: remove it",
            )


@section
class MixStage:
    """Weights of `mix` from a given step on."""

    from_step: Annotated[int, Gt(0)]
    """First optimizer step with these weights, counted from 0."""
    weights: dict[str, Annotated[float, Ge(0)]]
    """Weights by dataset name; datasets that are not listed contribute no rows."""


@section
class SeveralDatasets:
    """Fields of datasets that are made of others."""

    datasets: Annotated[dict[str, Annotated[Component, Slot("dataset")]], MinLen(1)]
    """Datasets by name, as in `[dataset.datasets.web]`."""

    @property
    def needs_tokenizer(self) -> bool:
        return any(one.needs_tokenizer for one in self.datasets.values())

    @property
    def of_conversations(self) -> bool:
        return any(one.of_conversations for one in self.datasets.values())

    @property
    def add_bos(self) -> bool | None:
        """Return whether texts begin with BOS; None if the datasets do not agree on it."""
        found = {one.add_bos for one in self.datasets.values()}
        return found.pop() if len(found) == 1 else None

    @property
    def document_mask(self) -> bool:
        """Return whether batches have `document_ids`: if any dataset's batches do."""
        parts = self.datasets.values()
        masks = any(one.document_mask for one in parts)
        return masks or any(getattr(one, "pack", False) for one in parts)

    @property
    def skips_rows(self) -> bool:
        return all(one.skips_rows for one in self.datasets.values())

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        for name, one in self.datasets.items():
            if one.joins_rows:
                yield f"datasets.{name}.padding", 'rows of several datasets have one length: use "seq_len"'
            if one.gives_pairs:
                yield f"datasets.{name}", "preference pairs cannot be mixed: each takes two rows of a batch"
            if isinstance(one, SeveralDatasets):
                yield f"datasets.{name}", "it is made of datasets itself: name those here instead"


@component("dataset", "concat", target="titancli.data.mix:build_concat")
class Concat(SeveralDatasets):
    """All rows of several datasets, each exactly once in an epoch, mixed evenly."""

    repeat: bool = True
    """Begin again after all rows; false: end the run."""

    @property
    def uncountable(self) -> str | None:
        return next((one.uncountable for one in self.datasets.values() if one.uncountable), None)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if self.uncountable is not None:
            yield "datasets", self.uncountable
        for name, one in self.datasets.items():
            if not one.repeat:
                yield f"datasets.{name}.repeat", "the datasets end together: set dataset.repeat instead"


@component("dataset", "mix", target="titancli.data.mix:build")
class Mix(SeveralDatasets):
    """Rows of several datasets, by weight."""

    weights: dict[str, Annotated[float, Ge(0)]]
    """Shares of the rows by dataset name; they need not add up to 1."""
    stages: list[MixStage] = field(default_factory=list)
    """Changes of the weights, in the order of their steps."""
    exhausted: Literal["end", "continue"] = "end"
    """When a dataset with `repeat = false` ends: end the run, or continue with the others."""

    uncountable: ClassVar = (
        "the datasets of a mix end at different times, by their weights (concat has epochs)"
    )

    @property
    def repeat(self) -> bool:
        """Return whether the mix never ends, judging by the datasets used at the start."""
        used = [one for name, one in self.datasets.items() if self.weights.get(name)]
        endless = [one.repeat for one in used]
        return all(endless) if self.exhausted == "end" else any(endless)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if self.stages and any(self is one for one in recipe.validation.datasets.values()):
            yield (
                "stages",
                "weights change at a step of training, and an evaluation has no steps: remove them",
            )
        steps = [stage.from_step for stage in self.stages]
        if steps != sorted(set(steps)):
            yield "stages", "the stages must be in the order of from_step, each at a step of its own"
        keys = ["weights", *(f"stages.{number}.weights" for number in range(len(steps)))]
        for key, weights in zip(keys, [self.weights, *(stage.weights for stage in self.stages)], strict=True):
            if unknown := sorted(set(weights) - set(self.datasets)):
                yield key, f"there is no dataset {unknown[0]!r}: they are {', '.join(self.datasets)}"
            elif not any(weights.values()):
                yield key, "at least one weight must be above 0"


@section
class RowsOfExamples:
    """Fields of datasets whose rows are conversations or preference pairs."""

    path: Annotated[str, MinLen(1), LocalPath()]
    """Files of rows (JSON Lines, a list in JSON, CSV, each also compressed by gzip or zstd, or Parquet): a
    file, a folder or a glob that begins with `/`, `./`, `../` or `~` or ends in `.jsonl`; a Hugging Face
    dataset: a folder of `save_to_disk`, or a Hub name; or titan's bundled data (chat: `"titan:sums"`,
    preference: `"titan:sums_pairs"`)."""
    name: str | None = None
    """Configuration of a dataset on the Hub."""
    revision: str | None = None
    """Commit, tag or branch of a dataset on the Hub."""
    split: str = "train"
    """Split of a Hugging Face dataset, e.g. `"train"` or `"train[:95%]"`."""
    strict: bool = False
    """End the run at a bad row: not JSON, without messages or pair, rejected by the chat template, without
    a target, or (pairs; conversations with `too_long = "skip"`) longer than training.seq_len + 1 tokens; and
    at its start if the check of the first 100 rows finds more than truncated rows."""
    max_bytes: Annotated[int, Gt(0)] = 8_388_608
    """Maximum length of a line of JSON; longer ones are bad rows."""
    skip_damaged: bool = False
    """Skip and count files that cannot be decompressed or decoded; false: reject them."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names of a row's fields where they differ from those of its format, e.g. `{ messages = "dialogue" }` or
    `{ instruction = "question", output = "answer" }`."""
    roles: dict[str, str] = field(default_factory=dict)
    """Roles of messages by other names, e.g. `{ bot = "assistant" }`; a name may stand for itself if the chat
    template knows it."""
    shuffle: bool = True
    """Shuffle rows by (training.seed, epoch); false: keep their order."""
    repeat: bool = True
    """Start over at the end of the data, as often as needed; false: end the run there."""
    trailing_newline: bool = False
    """Also train on the line break that a chat template puts after the assistant's end marker (ChatML:
    `<|im_end|>\\n`); false: the end marker is the last target of a turn."""
    padding: Literal["seq_len", "longest", "none"] = "seq_len"
    """Length of the rows of a batch: training.seq_len, or that of the longest of them, in multiples of 64;
    `"none"` (chat): one row of all conversations one after another, in multiples of 64, with separate
    attention."""
    length_index: bool = False
    """Measure all rows once, before the first step, and keep their lengths in titan's cache, so that each
    rank and each worker process prepares only its own rows. The metric `cut_rows` is omitted."""

    of_conversations: ClassVar[bool] = True
    joinable: ClassVar[bool] = False
    """Whether rows may be joined; the loss of a pair is one of two rows."""

    @property
    def skips_rows(self) -> bool:
        return self.length_index

    @property
    def joins_rows(self) -> bool:
        return self.padding == "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute_lines(self.path))

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from hub_keys(self)
        if self.padding != "seq_len" and (recipe.mesh.pp != 1 or recipe.mesh.ep != 1):
            yield "padding", 'pipelines and expert parallelism need rows of one length: use "seq_len"'
        if self.joins_rows and not self.joinable:
            yield "padding", 'the loss needs these rows one by one: use "longest"'


@component("dataset", "chat", target="titancli.data.chat:build")
class Chat(RowsOfExamples):
    """Conversations, with the tokenizer's chat template; bad rows are skipped and counted."""

    path: Annotated[str, MinLen(1), LocalPath()]
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"] = "auto"
    """Fields of a row. `"messages"`: `messages`, each with `role` and `content`. `"sharegpt"`:
    `conversations`, each with `from` and `value`. `"alpaca"`: `instruction`, `output`, and where present
    `input`, `system` and `history`. `"prompt_completion"`: `prompt` and `completion`, text or messages, of
    which only the completion is trained on. `"text"`: `text`, all of it trained on. `"auto"`: as the first
    rows are."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Train on the assistant's messages, including their end markers, or on every token."""
    markers: Literal["auto", "read", "turns", "plain"] = "auto"
    """Special tokens that are written in the text of rows (`<|im_start|>`, in text that was rendered with a
    chat template). `"read"`: encode them as these tokens. `"turns"`: do so, and train on turns of the
    assistant only. `"plain"`: encode them as characters. `"auto"`: as `"read"`, with a warning."""
    pack: bool = True
    """Pack several whole conversations into a row, with separate attention; false: one conversation per
    row."""
    joinable: ClassVar[bool] = True
    too_long: Literal["cut", "skip"] = "cut"
    """Conversations longer than training.seq_len + 1 tokens: truncate (and count) them, or treat them as
    bad rows."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if self.markers == "turns" and self.train_on == "all":
            yield "markers", 'every token is a target with train_on = "all": use "read"'
        if self.trailing_newline and self.train_on == "all":
            yield "trailing_newline", 'every token is a target with train_on = "all": remove it'
        if self.pack and self.padding != "seq_len":
            yield "padding", "packed rows are filled up to training.seq_len: remove it, or set pack = false"
        ring = recipe.parallelize.context_parallel == "ring"
        if (self.pack or self.joins_rows) and ring and recipe.mesh.cp != 1:
            message = 'parallelize.context_parallel = "ring" cannot separate the conversations of a row: use '
            yield (
                ("pack", message + 'false, or "allgather"')
                if self.pack
                else (
                    "padding",
                    message + '"longest", or "allgather"',
                )
            )


@component("tokenizer", "byte", target="titancli.data.byte_tokenizer:build")
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and an end marker 256. Needs no files.

    Its chat template renders each message as its role, a newline, its content, and 256.
    """


@component("tokenizer", "hf", target="titancli.data.hf_tokenizer:build")
class HFTokenizer:
    """A Hugging Face tokenizer: a folder with tokenizer.json."""

    path: Path
    """Folder with tokenizer.json; tokenizer_config.json in it defines the end marker and the chat
    template. `"hf://OWNER/NAME"` is a repository of the Hugging Face Hub."""
    eos: str | None = None
    """Token that ends a document; None: as defined by the folder's files."""


COMPONENTS: list[type] = [
    *(TextFiles, PythonStdlib, JsonLines, Parquet, TokenShards, Mix, Concat, HFDataset, Chat),
    *(ByteTokenizer, HFTokenizer),
]
