"""The size to which a vocabulary grows: that of the tokenizer, read from its folder. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.files import read_json
from titancli.recipe.find import beside, url_of
from titancli.recipe.toml import Node

GROW = "grow"
FILE = "tokenizer.json"


def grown(table: dict[str, Any], root: Node) -> dict[str, Any]:
    """Return the `[model]` of a folder with a row for each id of the recipe's tokenizer, if `weights_vocab`
    is "grow" and the recipe itself gives no size.

    Raises:
        EnvironmentProblem: the tokenizer's folder is not on this machine, or is damaged.
    """
    how, model, rows = root.child("weights_vocab"), root.child("model"), table.get("vocab_size")
    given = model is not None and model.child("vocab_size") is not None
    if how is None or how.value != GROW or given or not isinstance(rows, int):
        return table
    return {**table, "vocab_size": max(rows, ids_in(_tokenizer_folder(root)))}


def _tokenizer_folder(root: Node) -> Path:
    tokenizer = root.child("tokenizer")
    path = tokenizer.child("path") if tokenizer is not None else None
    if path is None or not isinstance(path.value, str) or url_of(Path(path.value)):
        raise EnvironmentProblem(
            'weights_vocab = "grow" needs the number of ids, but [tokenizer] names no folder on this machine',
            hint="set model.vocab_size",
        )
    return Path(os.path.expanduser(beside(path)))


def ids_in(folder: Path) -> int:
    """Return the number of ids of the tokenizer in a folder: one more than the largest, which may be that of
    an added token.

    Raises:
        EnvironmentProblem: there is no tokenizer.json, or it is damaged.
    """
    path = folder / FILE
    try:
        found = read_json(path)
        vocabulary = found["model"]["vocab"]
        # Unigram has a list of pieces, the others a table of ids.
        ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
        return max([*ids, *(token["id"] for token in found.get("added_tokens") or ())]) + 1
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise EnvironmentProblem(
            f"{path} is damaged: {type(error).__name__}: {error}", hint="download it again"
        ) from error
