"""Tokenizes texts in several processes. Torch-free: workers import only what their tokenizer needs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from titancli import registry
from titancli.data.stream import encode
from titancli.errors import EnvironmentProblem
from titancli.protocols import Tokenizer
from titancli.registry.component import build

Plugins = tuple[Sequence[Path], Sequence[str]]
"""Plugin files, and blocked names."""
Encoded = tuple[np.ndarray, list[int]]
"""Ids of all texts, concatenated, and the number of ids per text."""

_tokenizer: Tokenizer | None = None
"""The tokenizer of a worker process."""


def _start_worker(plugins: Plugins) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process per core already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the command ends this one
    threading.Thread(target=end_with_parent, daemon=True).start()
    if plugins[0]:  # the config may come from one of these, which only the registry imports
        registry.configure(files=plugins[0], blocked=plugins[1])
        registry.current().names("tokenizer")


def end_with_parent() -> None:
    """End this process when the command that started it is gone, even if it was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(config: Any, dtype: str, texts: list[str]) -> Encoded:
    """Encode texts; the config comes with each batch because its class may not be imported when the
    process starts."""
    global _tokenizer
    if _tokenizer is None:
        _tokenizer = build(config)
    return _encoded(_tokenizer, dtype, texts)


def _encoded(tokenizer: Tokenizer, dtype: str, texts: list[str]) -> Encoded:
    """Encode texts.

    Raises:
        EnvironmentProblem: the tokenizer returned an id outside its vocabulary.
    """
    arrays = encode(tokenizer, texts)
    whole = np.concatenate(arrays)
    if len(whole) and not 0 <= int(whole.min()) <= int(whole.max()) < tokenizer.vocab_size:
        wrong = int(whole.max()) if whole.min() >= 0 else int(whole.min())
        raise EnvironmentProblem(
            f"the tokenizer returned the id {wrong}, but its vocabulary has {tokenizer.vocab_size:,}",
            hint="use another tokenizer",
        )
    return whole.astype(dtype), [len(ids) for ids in arrays]


@contextmanager
def encoder(
    config: Any, tokenizer: Tokenizer, dtype: str, *, workers: int, plugins: Plugins
) -> Iterator[Callable[[list[str]], Callable[[], Encoded]]]:
    """Yield a function that submits texts and returns a function that waits for their tokens.

    With one worker, this process encodes. Waiting raises BrokenProcessPool if a worker process died.
    """
    if workers == 1:

        def here(texts: list[str]) -> Callable[[], Encoded]:
            found = _encoded(tokenizer, dtype, texts)
            return lambda: found

        yield here
        return
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        _start_worker,
        (plugins,),
    )

    def submit(texts: list[str]) -> Callable[[], Encoded]:
        try:
            future: Future[Encoded] = pool.submit(_encode_in_worker, config, dtype, texts)
        except BrokenProcessPool as error:
            future = Future()
            future.set_exception(error)
        return future.result

    try:
        yield submit
    finally:
        pool.shutdown(cancel_futures=True)
