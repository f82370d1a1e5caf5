"""Where training data comes from: the configs of datasets and tokenizers.

Torch-free. A dataset is built in three parts, each in a file of its own: a source of documents (`files.py`,
`jsonl.py`, `hf_datasets.py`), the stream of their tokens (`stream.py`), and the rows cut from it
(`packing.py`). The tokenizers are `byte_tokenizer.py` and `hf_tokenizer.py`; `loader.py` brings batches to
the device ahead of their use. A new dataset that has documents of text needs only a source: see `source.py`.

Conversations and pairs are no stream: rows of them (`chat_source.py`) become examples (`chat.py`,
`chat_pairs.py`), and whole examples the rows of batches (`rows.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Gt, MinLen

from titancli.registry.component import component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@component("dataset", "text_files", target="titancli.data.files:build_text_files")
class TextFiles:
    """Text files on disk, UTF-8; one file is one document."""

    paths: Annotated[list[Path], MinLen(1)]
    """Files, folders (every file in them, hidden ones excepted) and globs (`"corpus/**/*.md"`)."""
    shuffle: bool = True
    """Documents come in an order that follows from (training.seed, epoch); false: in the order listed."""
    repeat: bool = True
    """Begin again at the end, as often as needed; false: the data's end ends the run."""
    document_mask: bool = False
    """Attention and positions stay inside a document; false: a row is treated as one document."""


@component("dataset", "python_stdlib", target="titancli.data.files:build_python_stdlib")
class PythonStdlib:
    """The Python standard library's own source: real text that lies on every machine."""

    shuffle: bool = True
    """Documents come in an order that follows from (training.seed, epoch); false: sorted by name."""
    repeat: bool = True
    """Begin again at the end, as often as needed; false: the data's end ends the run."""
    document_mask: bool = False
    """Attention and positions stay inside a document; false: a row is treated as one document."""


@component("dataset", "hf", target="titancli.data.hf_datasets:build")
class HFDataset:
    """A Hugging Face dataset: a local folder or file, or a name on the Hub."""

    path: Annotated[str, MinLen(1)]
    """`"./folder"` or `"./file.jsonl"` (local: begins with `/`, `./`, `../` or `~`), or a Hub name."""
    name: str | None = None
    """The configuration of a dataset on the Hub, e.g. `"en"`."""
    revision: str | None = None
    """The commit, tag or branch of a dataset on the Hub; a commit makes a run repeatable."""
    split: str = "train"
    """Which split, e.g. `"train"` or `"train[:10%]"`."""
    text: str = "text"
    """The column that holds a document's text."""
    streaming: bool = False
    """Read while training instead of downloading first."""
    shuffle: bool = False
    """Documents come in an order that follows from (training.seed, epoch); not with streaming."""
    repeat: bool = True
    """Begin again at the end, as often as needed; false: the data's end ends the run."""
    document_mask: bool = False
    """Attention and positions stay inside a document; false: a row is treated as one document."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _absolute(self.path))

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from hub_keys(self)
        if self.streaming and self.shuffle:
            yield "shuffle", "a stream cannot be shuffled and resumed exactly: drop shuffle or streaming"
        if self.streaming and "[" in self.split:
            yield "split", f"a slice of a split ({self.split!r}) needs streaming = false"


def _absolute(path: str) -> str:
    """A local path is stored absolute, so that a lock file means the same from every folder."""
    local = path == "~" or path in (".", "..") or path.startswith(("/", "./", "../", "~/"))
    return os.path.abspath(os.path.expanduser(path)) if local else path


def absolute_lines(path: str) -> str:
    """The same; what ends in `.jsonl` is always local."""
    return os.path.abspath(path) if path.endswith(".jsonl") and path[:1] not in "~" else _absolute(path)


def hub_keys(config: Any) -> Iterator[tuple[str, str]]:
    """Which keys of a config say something of the Hub while its `path` is on this machine, and why not."""
    if os.path.isabs(config.path) or config.path.startswith("titan:"):
        for key in ("name", "revision"):
            if getattr(config, key) is not None:
                yield key, f"a {key} is for datasets on the Hub, not for {config.path}: drop it"


@component("dataset", "jsonl", target="titancli.data.jsonl:build")
class JsonLines:
    """JSON Lines on disk; one row is one document. Bad rows are skipped and counted."""

    paths: Annotated[list[Path], MinLen(1)]
    """Files, folders (every file in them, hidden ones excepted) and globs (`"corpus/**/*.jsonl"`)."""
    text: str = "text"
    """The key of a row that holds its document's text."""
    strict: bool = False
    """A bad row (not UTF-8, not JSON, empty, without the key, too long) ends the run, with file and line."""
    max_bytes: Annotated[int, Gt(0)] = 8_388_608
    """A longer row is a bad one."""
    shuffle: bool = True
    """Documents come in an order that follows from (training.seed, epoch); false: in the order listed."""
    repeat: bool = True
    """Begin again at the end, as often as needed; false: the data's end ends the run."""
    document_mask: bool = False
    """Attention and positions stay inside a document; false: a row is treated as one document."""


@component("dataset", "chat", target="titancli.data.chat:build")
class Chat:
    """Conversations as `messages` under the tokenizer's chat template; bad rows are skipped and counted."""

    path: Annotated[str, MinLen(1)]
    """JSON Lines (a file or a glob that ends in `.jsonl`); a Hugging Face dataset: a local folder or file
    (begins with `/`, `./`, `../` or `~`), or a Hub name; or titan's own (`"titan:sums"`)."""
    name: str | None = None
    """The configuration of a dataset on the Hub."""
    revision: str | None = None
    """The commit, tag or branch of a dataset on the Hub."""
    split: str = "train"
    """Which split of a Hugging Face dataset, e.g. `"train"` or `"train[:95%]"`."""
    messages: str = "messages"
    """The key of a row that holds its messages, `{"role": …, "content": …}` each."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Whether targets are what the assistant says, up to its end marker, or every token."""
    trailing_newline: bool = False
    """The line break that a chat template puts behind the assistant's end marker (ChatML: `<|im_end|>\\n`) is
    a target too; false: the end marker is a turn's last one."""
    pack: bool = True
    """Several whole conversations share a row and do not see each other; false: one a row."""
    too_long: Literal["cut", "skip"] = "cut"
    """What is done with a conversation longer than training.seq_len + 1 tokens: it is cut (and counted), or
    it is a bad row."""
    strict: bool = False
    """A bad row (no JSON, no messages, refused by the chat template, without a target) ends the run."""
    max_bytes: Annotated[int, Gt(0)] = 8_388_608
    """A longer line of JSON is a bad one."""
    shuffle: bool = True
    """Rows come in an order that follows from (training.seed, epoch); false: in the order listed."""
    repeat: bool = True
    """Begin again at the end, as often as needed; false: the data's end ends the run."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute_lines(self.path))

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from hub_keys(self)
        if self.trailing_newline and self.train_on == "all":
            yield "trailing_newline", 'every token is a target under train_on = "all": leave it out'
        ring = getattr(recipe.parallelize, "context_parallel", None) == "ring"
        if self.pack and ring and recipe.mesh.cp != 1:
            message = 'parallelize.context_parallel = "ring" cannot keep conversations of a row apart: write '
            yield "pack", message + 'false, or "allgather"'


@component("dataset", "preference", target="titancli.data.chat_pairs:build")
class Preference:
    """Pairs of answers, one `chosen` and one `rejected`; bad rows are skipped and counted.

    Answers are messages or text; the prompt is `prompt` (messages, or what the user says), or both answers
    are whole conversations that begin alike. A pair is two rows, so training.local_batch_size is even.
    """

    path: Annotated[str, MinLen(1)]
    """As in dataset/chat; titan's own are `"titan:sums_pairs"`."""
    name: str | None = None
    """The configuration of a dataset on the Hub."""
    revision: str | None = None
    """The commit, tag or branch of a dataset on the Hub."""
    split: str = "train"
    """Which split of a Hugging Face dataset."""
    reference_logps: bool = False
    """Rows have `reference_chosen_logp` and `reference_rejected_logp`: the sums of the answers' tokens'
    log-probabilities under the reference, which then need not be in memory."""
    strict: bool = False
    """A bad row (no pair, refused by the chat template, longer than training.seq_len + 1 tokens) ends the
    run."""
    max_bytes: Annotated[int, Gt(0)] = 8_388_608
    """A longer line of JSON is a bad one."""
    shuffle: bool = True
    """Pairs come in an order that follows from (training.seed, epoch); false: in the order listed."""
    repeat: bool = True
    """Begin again at the end, as often as needed; false: the data's end ends the run."""
    gives_pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute_lines(self.path))

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from hub_keys(self)
        if recipe.training.local_batch_size % 2:
            yield "", "a pair is two rows: write an even training.local_batch_size"
        if recipe.mesh.pp != 1 and recipe.pipeline.microbatch_size % 2:
            yield "", "a pair is two rows: write an even pipeline.microbatch_size"


@component("tokenizer", "byte", target="titancli.data.byte_tokenizer:build")
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and an end marker 256; needs no files.

    Its chat template: each message is its role, an end of line, its content, and 256.
    """


@component("tokenizer", "hf", target="titancli.data.hf_tokenizer:build")
class HFTokenizer:
    """A Hugging Face tokenizer: a folder with tokenizer.json."""

    path: Path
    """The folder; tokenizer_config.json beside tokenizer.json names the end marker and the chat template."""
    eos: str | None = None
    """The token that ends a document; None: what the folder's files name."""


COMPONENTS: list[type] = [
    TextFiles,
    PythonStdlib,
    JsonLines,
    HFDataset,
    Chat,
    Preference,
    ByteTokenizer,
    HFTokenizer,
]
