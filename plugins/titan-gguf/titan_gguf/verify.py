"""`--verify`: what a GGUF file holds, compared with the checkpoint that it was made of.

Every tensor is read back with the gguf package and compared with the checkpoint's values. Where llama.cpp is
there, the file is also run by it: its logits are compared with ours of the same stored values, and the
tokens of texts with our tokenizer's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from torch import Tensor

from titan_gguf.export import Item, Model
from titan_gguf.families import whole
from titan_gguf.mix import Type, limit_of, values_of
from titan_gguf.tokens import APPROXIMATE
from titancli.checkpoint.hf.compare import far, our_logits
from titancli.errors import EnvironmentProblem

PYTHON = "TITAN_LLAMACPP"
LENGTH = 64
"""Tokens whose logits are compared."""
LIMITS = {"f32": 1e-3, "f16": 1e-2, "bf16": 5e-2}
"""The largest difference of logits from llama.cpp's, of the largest logit, by the type of the file."""
QUANTIZED_LIMIT = 0.2
"""The same for quantized files, with which llama.cpp rounds activations to 8 bits too."""
TEXTS = (
    "Hello, world!",
    "  two  spaces,\ttabs\n\nand lines\r\n",
    "I'll say: it's 3.14159 or 1,234,567 — don't you think? WE'VE",
    "naïve café Ünïcode, Ελληνικά, русский, 你好世界, 🦙🙂",
    "def f(x_1):\n    return {'a': [x_1 ** 2]}  # done!!!\n",
    "हिन्दी में लिखा हुआ",
)
"""The last one has combining marks."""


def verdict(
    file: Path, model: Model, config: Any, tokenizer: Any, pre: str, python: str | None
) -> tuple[list[str], bool]:
    """Return lines for the user, and whether the file holds what it should.

    Args:
        config: the model's.
        tokenizer: the recipe's; None: its texts are not compared.
        pre: llama.cpp's name of what splits texts.
        python: what `python_with_llamacpp` returned.

    Raises:
        EnvironmentProblem: llama.cpp cannot be started.
    """
    found = Stored(file, model)
    lines, good = _compare(found)
    if python is None:
        lines.append("not run by llama.cpp, which is not installed (pip install llama-cpp-python)")
    else:
        more, same = _run(python, file, found, config, tokenizer, texts_for(pre))
        lines += more
        good = good and same
    return [*lines, f"verified: {'yes' if good else 'NO'}"], good


class Stored:
    """The tensors of a file: by their names in it, and as our parameters, like a reader of a checkpoint."""

    def __init__(self, file: Path, model: Model) -> None:
        self.model = model
        self._tensors = {str(one.name): one for one in GGUFReader(file).tensors}
        self._items = {item.name: item for item in model.items}

    def names(self) -> list[str]:
        return self.model.reader.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.model.reader.shape(name))

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str) -> Tensor:
        """Return our parameter, made of the stored values."""
        form, family, config = self.model.form, self.model.family, self.model.config

        def get(part: str) -> Tensor:
            place, expert = self.model.names.of(part)
            tensor = self.values(self._items[place])
            return tensor if expert is None else tensor[expert]

        return form.from_hf(name, [whole(family, config, one, get) for one in form.sources(name)])

    def values(self, item: Item) -> Tensor:
        """Return the values of a tensor.

        Raises:
            EnvironmentProblem: the file has another tensor of this name, or none.
        """
        stored = self._tensors.get(item.name)
        there = None if stored is None else (tuple(map(int, reversed(stored.shape))), stored.tensor_type)
        if stored is None or there != (item.shape, item.kind):
            raise EnvironmentProblem(f"the file has {there} for {item.name}, not {(item.shape, item.kind)}")
        return values_of(stored.data, item.kind, item.shape)


def _compare(stored: Stored) -> tuple[list[str], bool]:
    """Return the errors by type, and whether every value is within what its type can do."""
    worst: dict[Type, float] = {}
    squares: dict[Type, list[float]] = {}
    wrong = []
    for item in stored.model.items:
        meant = stored.model.read(item).float()
        meant = meant.reshape(-1, item.shape[-1])
        error = (stored.values(item).reshape(meant.shape) - meant).abs()
        if bool((error > limit_of(meant, item.kind)).any()) or not bool(error.isfinite().all()):
            wrong.append(item.name)
        worst[item.kind] = max(worst.get(item.kind, 0.0), float(error.max()))
        sums = squares.setdefault(item.kind, [0.0, 0.0])
        sums[0] += float(error.double().square().sum())
        sums[1] += float(meant.double().square().sum())
    lines = [
        f"{kind.name}: largest error {worst[kind]:.3g}, "
        f"{(sums[0] / max(sums[1], 1e-300)) ** 0.5:.3g} of the weights (root mean square)"
        for kind, sums in sorted(squares.items(), key=lambda one: one[0].name)
    ]
    if wrong:
        lines.append(f"not what the checkpoint has: {', '.join(wrong)}")
    return lines, not wrong


# -------------------------------------------------------------------------------------------------- llama.cpp


def python_with_llamacpp() -> str | None:
    """Return a Python that has the package llama_cpp; None: there is none.

    Raises:
        EnvironmentProblem: the one that `TITAN_LLAMACPP` names is not there.
    """
    if named := os.environ.get(PYTHON):
        if shutil.which(named) is None:
            raise EnvironmentProblem(f"{PYTHON} names {named}, which cannot be started")
        return named
    return sys.executable if importlib.util.find_spec("llama_cpp") else None


def run_llamacpp(python: str, file: Path, tokens: list[int], texts: list[str]) -> Mapping[str, Any]:
    """Return llama.cpp's logits of tokens (float32 [T, V]), their greedy continuation, and the ids of texts.

    Raises:
        EnvironmentProblem: it cannot be started, or cannot load the file.
    """
    with tempfile.TemporaryDirectory() as own:
        asked, told = Path(own) / "asked.json", Path(own) / "told.npz"
        asked.write_text(json.dumps({"model": str(file), "tokens": tokens, "texts": texts}))
        script = Path(__file__).with_name("llamacpp.py")
        try:
            done = subprocess.run(
                [python, "-I", str(script), str(asked), str(told)],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise EnvironmentProblem(f"{python} cannot be started: {error.strerror}") from error
        if done.returncode or not told.is_file():
            lines = done.stderr.strip().splitlines() or ["it says nothing"]
            why = [line for line in lines if "error" in line.lower()] or lines
            raise EnvironmentProblem(f"llama.cpp cannot run {file} (code {done.returncode}): {why[0]}")
        with np.load(told, allow_pickle=False) as found:
            return {**found, "texts": json.loads(str(found["texts"]))}


def texts_for(pre: str) -> tuple[str, ...]:
    """Return the texts that llama.cpp splits as the tokenizer does."""
    return TEXTS[:-1] if pre in APPROXIMATE else TEXTS


def _run(
    python: str, file: Path, stored: Stored, config: Any, tokenizer: Any, texts: tuple[str, ...]
) -> tuple[list[str], bool]:
    model = stored.model
    tokens = torch.randint(0, model.rows, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    texts = texts if tokenizer is not None else ()
    theirs = run_llamacpp(python, file, tokens[0].tolist(), list(texts))
    ours = our_logits(config, stored, tokens)[0].float()
    logits = torch.from_numpy(theirs["logits"])[:, : ours.shape[1]]
    apart = far(logits, ours)
    limit = LIMITS.get(model.file, QUANTIZED_LIMIT)
    same = int((logits.argmax(1) == ours.argmax(1)).sum())
    lines = [
        f"llama.cpp: largest difference between logits {apart:.3g} of the largest logit (at most {limit:g}), "
        f"{same} of {LENGTH} greedy tokens equal"
    ]
    wrong = [text for text, ids in zip(texts, theirs["texts"], strict=True) if ids != tokenizer.encode(text)]
    if texts:
        lines.append(
            f"llama.cpp: other tokens for {', '.join(map(repr, wrong))}"
            if wrong
            else f"llama.cpp: the same tokens for {len(texts)} texts"
        )
    return lines, apart <= limit and not wrong
