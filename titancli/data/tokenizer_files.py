"""The files of a tokenizer in a Hugging Face folder. Torch-free."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""Tokenizer files; an export copies those that exist."""
TEMPLATES = "additional_chat_templates"
"""The folder with further chat templates, each a file NAME.jinja, as transformers writes it."""
MOST_TEMPLATES, MOST_BYTES = 64, 1 << 20
"""Limits for templates: their number, and the size of each."""
_TEMPLATE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.jinja", re.ASCII)
_APART = f"{TEMPLATES}--"

# Below titan's own logger, so that it reaches users and the run's events.
logger = logging.getLogger("titancli.tokenizer")


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the files of the tokenizer in a folder, by their names in it.

    A template with an odd name, one that is too large, and a link out of the folder are left out with a
    warning: their names are the folder's, and exports copy them.
    """
    found = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    for number, path in enumerate(sorted((folder / TEMPLATES).glob("*.jinja"))):
        why = _unfit(folder, path) if number < MOST_TEMPLATES else f"there are over {MOST_TEMPLATES} files"
        if why is None:
            found[f"{TEMPLATES}/{path.name}"] = path
        else:
            _warn(f"{path} is left out of checkpoints and exports: {why}")
    return found


def is_tokenizer_file(name: str) -> bool:
    """Return whether a name in a folder is that of a tokenizer's file."""
    folder, _, template = name.rpartition("/")
    return name in TOKENIZER_FILES or (folder == TEMPLATES and _TEMPLATE.fullmatch(template) is not None)


def flat(name: str) -> str:
    """Return the name under which a checkpoint, which has no folders, keeps a file."""
    return name.replace(f"{TEMPLATES}/", _APART, 1)


def flat_templates(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    """Yield the templates that a checkpoint keeps under names that begin with `prefix`."""
    for path in sorted(folder.glob(f"{prefix}{_APART}*.jinja")):
        name = f"{TEMPLATES}/{path.name.removeprefix(prefix + _APART)}"
        if is_tokenizer_file(name):
            yield name, path


def _unfit(folder: Path, path: Path) -> str | None:
    """Return why a template is not copied; None: it is."""
    if _TEMPLATE.fullmatch(path.name) is None:
        return "a name has letters, digits, '_', '-' and '.'"
    real, own = path.resolve(), folder.resolve()
    # The Hub's cache links the files of a snapshot to those of the repository.
    cached = own.parent.parent / "blobs" if own.parent.name == "snapshots" else own
    if not (real.is_relative_to(own) or real.is_relative_to(cached)):
        return "it is a link out of the folder"
    if not real.is_file():
        return "it is no file"
    if real.stat().st_size > MOST_BYTES:
        return f"it is larger than {MOST_BYTES:,} bytes"
    return None


@cache
def _warn(what: str) -> None:
    """Say it once in each process."""
    logger.warning(what)
