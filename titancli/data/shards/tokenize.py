"""Documents to token shards: read here, tokenized by several processes, written in order.

The bytes depend only on the documents and the tokenizer, not on the number of processes or on interruptions.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from titancli.data.packing import tokenizer_identity
from titancli.data.shards import INDEX, LOCK, PROGRESS, Index, read_index
from titancli.data.shards.inputs import Input, pieces, share
from titancli.data.shards.workers import Encoded, Plugins, encoder
from titancli.data.shards.writer import ShardWriter
from titancli.data.stream import Frame
from titancli.errors import EnvironmentProblem
from titancli.locks import hold_file
from titancli.protocols import Tokenizer
from titancli.registry.component import build
from titancli.runs import write_atomically

GROUP_CHARACTERS = 1 << 20
GROUP_PIECES = 8192
"""Limits on the text that is tokenized at once."""
COMMIT_SECONDS = 20.0
"""Maximum time of work that is lost when the command is killed."""


class Job(NamedTuple):
    """The inputs, output and settings of a command."""

    inputs: Sequence[Input]
    tokenizer: Any
    """The tokenizer's config."""
    out: Path
    shard_tokens: int
    workers: int
    plugins: Plugins = ((), ())
    """Plugins for the worker processes."""
    add_bos: bool | None = None
    """Begin documents with BOS; None: if the tokenizer itself does that to a text."""


class Progress(NamedTuple):
    """Progress of a command."""

    tokens: int
    new_tokens: int
    """Tokens of this process, without those of an interrupted one."""
    documents: int
    share: float
    """Approximate fraction of the sources that is done, from 0 to 1."""
    new_share: float


class _Group(NamedTuple):
    """Pieces that are tokenized together, the first one's mark, and the number of bad rows before it."""

    texts: list[str]
    flags: list[tuple[bool, bool]]
    """For each piece, whether it begins and whether it ends its document."""
    mark: dict[str, Any]
    skipped: int


def tokenize(
    job: Job,
    report: Callable[[Progress], None] = lambda progress: None,
    *,
    tokenizer: Tokenizer | None = None,
) -> Index:
    """Write the token shards of all inputs, or continue where an interrupted command stopped.

    Args:
        tokenizer: the job's tokenizer, if it is already built and there is one worker.

    Raises:
        EnvironmentProblem: the folder is in use, has other contents, or cannot be written; or a worker
            process died.
        TitanError: an input cannot be read.
    """
    tokenizer = build(job.tokenizer) if tokenizer is None else tokenizer
    with _held(job.out):
        settings = _settings(job, tokenizer)
        if (job.out / INDEX).is_file():
            return _complete(job.out, settings)
        state = _state(job.out, settings)
        writer = ShardWriter(job.out, settings["dtype"], job.shard_tokens, state["writer"])
        try:
            skipped = _Run(job, tokenizer, settings, writer, state, report).write()
            return _finish(job, settings, writer, skipped)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot write {error.filename or job.out}: {error.strerror or error}",
                hint="free some space, then run the command again: it continues where it stopped",
            ) from error
        finally:
            writer.close()


class _Run:
    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        settings: dict[str, Any],
        writer: ShardWriter,
        state: dict[str, Any],
        report: Callable[[Progress], None],
    ) -> None:
        self._job, self._tokenizer, self._settings, self._writer = job, tokenizer, settings, writer
        self._report, self._state = report, state
        self._frame = Frame(settings["bos_id"], settings["eos_id"])
        self._first_tokens = writer.tokens
        self._first_share = share(job.inputs, state["mark"]) if state["mark"] else 0.0
        self._begun: bool = state.get("begun", False)  # whether the current document has tokens
        self._committed = time.monotonic()

    def write(self) -> int:
        """Write everything that is left; return the total number of bad rows."""
        job = self._job
        with encoder(
            job.tokenizer, self._tokenizer, self._settings["dtype"], workers=job.workers, plugins=job.plugins
        ) as submit:
            waiting: deque[tuple[_Group, Callable[[], Encoded]]] = deque()
            for group in self._groups():
                waiting.append((group, submit(group.texts)))
                if len(waiting) > 2 * self._job.workers:
                    self._take(*waiting.popleft(), waiting[0][0] if waiting else group)
            while waiting:
                taken = waiting.popleft()
                self._take(*taken, waiting[0][0] if waiting else None)
        return self._skipped()

    def _skipped(self) -> int:
        return self._state["skipped"] + sum(one.skipped for one in self._job.inputs)

    def _groups(self) -> Iterator[_Group]:
        group: _Group | None = None
        characters = 0
        for piece, mark in pieces(self._job.inputs, self._state["mark"]):
            if group is None:
                group, characters = _Group([], [], mark, self._skipped()), 0
            group.texts.append(piece.text)
            group.flags.append((piece.begins, piece.ends))
            characters += len(piece.text)
            if characters >= GROUP_CHARACTERS or len(group.texts) >= GROUP_PIECES:
                yield group
                group = None
        if group is not None:
            yield group

    def _take(self, group: _Group, result: Callable[[], Encoded], following: _Group | None) -> None:
        """Write a group and, periodically, commit the position after it."""
        try:
            tokens, lengths = result()
        except BrokenProcessPool as error:
            raise EnvironmentProblem(
                "a worker process died while it tokenized the documents from "
                f"{_place(self._job.inputs, group.mark)} on",
                hint="was it killed for its memory? Run it again with fewer --workers: it continues",
            ) from error
        at = 0
        for (begins, ends), length in zip(group.flags, lengths, strict=True):
            self._begun = self._begun and not begins
            ids, at = tokens[at : at + length], at + length
            ended = ends and (self._begun or length > 0)  # a document without tokens is skipped
            begun = not self._begun and length > 0
            ids = self._frame.around(ids, begins=begun, ends=ended).astype(self._settings["dtype"])
            if len(ids):
                self._writer.add(ids, ends=ended)
                self._begun = True
        done = 1.0 if following is None else share(self._job.inputs, following.mark)
        count = self._writer.tokens
        self._report(
            Progress(
                count, count - self._first_tokens, self._writer.documents, done, done - self._first_share
            )
        )
        if following is not None and time.monotonic() - self._committed >= COMMIT_SECONDS:
            state = {
                "writer": self._writer.commit(),
                "mark": following.mark,
                "skipped": following.skipped,
                "begun": self._begun,
            }
            write_atomically(self._job.out / PROGRESS, json.dumps({"settings": self._settings, **state}))
            self._committed = time.monotonic()


def _place(inputs: Sequence[Input], mark: dict[str, Any]) -> str:
    return f"{inputs[mark['source']].label}, {json.dumps(mark['mark'])}"


# ------------------------------------------------------------------------------------ the folder


@contextmanager
def _held(out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = set(os.listdir(out))
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the folder {out}: {error.strerror}") from error
    if names - {LOCK} and not names & {INDEX, PROGRESS}:
        raise EnvironmentProblem(
            f"the folder {out} holds other files, for example {min(names)}",
            hint="name a new or an empty folder for the token shards",
        )
    hold = hold_file(out / LOCK, f"the folder {out}")
    try:
        yield
    finally:
        hold.release()


def _settings(job: Job, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the settings that the bytes depend on."""
    if not 0 <= tokenizer.eos_id < tokenizer.vocab_size:
        raise EnvironmentProblem(
            f"the tokenizer's end marker is {tokenizer.eos_id}, but its vocabulary has "
            f"{tokenizer.vocab_size:,} ids",
            hint="use another tokenizer",
        )
    return {
        "tokenizer": tokenizer_identity(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "bos_id": Frame.of(tokenizer, job.add_bos).bos,
        "dtype": "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        "shard_tokens": job.shard_tokens,
        "sources": [{"label": one.label, **one.source.identity} for one in job.inputs],
    }


def _state(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the state to continue from; at the beginning, if nothing was committed."""
    path = out / PROGRESS
    if not path.is_file():
        state = {"writer": None, "mark": None, "skipped": 0}
        write_atomically(path, json.dumps({"settings": settings, **state}))
        return state
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        before = found.pop("settings")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentProblem(
            f"{path} cannot be read: {error}", hint="remove the folder and tokenize the data again"
        ) from error
    _require_same(out, before, settings)
    return found


def _require_same(out: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    now = json.loads(json.dumps(settings))
    names = [name for name in now if before.get(name) != now[name]]
    if names:
        said = "; ".join(f"{name} was {before.get(name)} and is {now[name]}" for name in names)
        raise EnvironmentProblem(
            f"{out} holds token shards of something else: {said}",
            hint="use the same sources, tokenizer and options, or another folder",
        )


def _complete(out: Path, settings: dict[str, Any]) -> Index:
    index = read_index(out)
    _require_same(out, {**vars(index), "shard_tokens": settings["shard_tokens"]}, settings)
    return index


def _finish(job: Job, settings: dict[str, Any], writer: ShardWriter, skipped: int) -> Index:
    writer.finish_shard()
    if not writer.shards:
        raise EnvironmentProblem(
            "the sources contain no text: all documents are empty", hint="name sources with text"
        )
    facts = {name: value for name, value in settings.items() if name != "shard_tokens"}
    index = Index(folder=job.out, skipped=skipped, shards=writer.shards, **facts)
    write_atomically(job.out / INDEX, index.text())
    (job.out / PROGRESS).unlink(missing_ok=True)
    return index
