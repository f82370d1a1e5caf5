"""Text that is tokenized once, into token shards in titan's cache (`cache_tokens`)."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import xxhash

from titancli.data.packing import tokenizer_identity
from titancli.data.shards import INDEX, VERSION
from titancli.data.shards.inputs import Input
from titancli.data.shards.tokenize import Job, tokenize
from titancli.data.source import Source
from titancli.data.stream import Frame
from titancli.errors import EnvironmentProblem
from titancli.fingerprint import cache_folder, lock_if_possible
from titancli.observe.metrics import collector
from titancli.protocols import Tokenizer

logger = logging.getLogger(__name__)

SHARD_TOKENS = 1 << 29


def cached_shards(source: Source, tokenizer: Tokenizer, frame: Frame) -> Path:
    """Return the folder of a source's token shards, in its order; write them if there are none yet.

    Of all processes that request the same shards, one writes and the others wait. An interrupted write
    continues at the next call. Other contents, tokenizers or limits get a folder of their own.

    Raises:
        EnvironmentProblem: the cache cannot be written, or the source cannot be read or has no text.
    """
    limits = getattr(source, "limits", {})
    facts = [VERSION, source.label, source.identity, limits, tokenizer_identity(tokenizer)]
    facts += [frame.identity] if frame.identity else []
    name = xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
    folder = cache_folder() / "tokens" / name
    if (folder / INDEX).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_suffix(".lock"), "a")  # noqa: SIM115 - closed below
    except OSError as error:
        raise EnvironmentProblem(
            f"{source.label}: token shards cannot be written to {folder}: {error.strerror or error}",
            hint="set TITAN_CACHE to a folder that can be written, or dataset.cache_tokens = false",
        ) from error
    with lock:
        lock_if_possible(lock)
        if not (folder / INDEX).is_file():
            logger.info("tokenizing %s, once; the token shards are kept in %s", source.label, folder)
            inputs = [Input(source.label, source, 1.0, lambda mark: 0.0)]
            job = Job(inputs, None, folder, SHARD_TOKENS, 1, add_bos=frame.bos is not None)
            with collector.muted():  # other ranks and later runs do not count bad rows either
                index = tokenize(job, tokenizer=tokenizer)
            logger.info(
                "%d tokens of %d documents; %d bad rows", index.tokens, index.documents, index.skipped
            )
    return folder
