"""Greedy completions by vLLM, in a process of its own, for programs whose environment does not have it.

`Vllm(PYTHON, MODEL)` is the side of the program: a context in which `complete` may be called. This file is
also the other side, which imports nothing of titan: it runs in the environment that `vllm_environment.sh`
makes, reads a request from each line of stdin, and answers with a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in that process, whose CPU-seconds are then its own
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class Made(NamedTuple):
    """Completions, prompt by prompt."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cpu_seconds: float
    """Of the process that made them."""


class Vllm:
    """vLLM with the model of a folder that transformers has written."""

    def __init__(self, python: str, model: Path, *, together: int = 32) -> None:
        """Start it, and wait until the model is loaded.

        Args:
            python: of the environment that has vLLM.
            model: a folder with config.json and weights; it needs no tokenizer.
            together: the number of completions that are made at the same time.

        Raises:
            RuntimeError: it has ended; the message has what it said last.
        """
        # No pipe, which would fill, since nobody reads it.
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - __exit__ closes it
        self._process = subprocess.Popen(
            [python, __file__, str(model), str(together)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, **SETTINGS},
        )
        self.version: str = self._ask({})["vllm"]

    def complete(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], samples: int = 1) -> Made:
        """Return `samples` completions of each prompt (token ids), as long as its limit."""
        return Made(**self._ask({"prompts": prompts, "limits": limits, "samples": samples}))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it has ended: there is no answer, and what it said says why
            print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            code = self._process.wait()
            self._said.seek(0)
            raise RuntimeError(
                f"vLLM has ended with code {code}; benchmarks/vllm_environment.sh makes its environment. It "
                f"said:\n{self._said.read()[-3000:]}"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()


# ------------------------------------------------------------------------------------- in its environment


def answer(model: Any, request: dict[str, Any]) -> Made:
    """Complete the prompts of a request; nothing is kept of earlier ones."""
    from vllm import SamplingParams

    model.reset_prefix_cache()
    pairs = zip(request["prompts"], request["limits"], strict=True)
    rows = [pair for pair in pairs for _ in range(request["samples"])]
    start = time.process_time()
    found = model.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in rows],
        [
            SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, logprobs=0, detokenize=False)
            for _, limit in rows
        ],
        use_tqdm=False,
    )
    seconds = time.process_time() - start
    made = [one.outputs[0] for one in found]
    logprobs = [
        [by_token[token].logprob for token, by_token in zip(one.token_ids, one.logprobs, strict=True)]
        for one in made
    ]
    return Made([list(one.token_ids) for one in made], logprobs, seconds)


def main(folder: str, together: int) -> None:
    """Answer requests until stdin ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what else is said is no answer
    import torch
    import vllm

    torch.set_num_threads(1)
    model = vllm.LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=together,
        disable_log_stats=True,
    )
    for line in sys.stdin:
        request = json.loads(line)
        found = answer(model, request)._asdict() if request else {"vllm": vllm.__version__}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
