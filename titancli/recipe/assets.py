"""`assets`: the Hugging Face repository of a recipe's tokenizer and initial weights. Torch-free."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from titancli.recipe.find import beside
from titancli.recipe.toml import Node

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z", re.ASCII)
"""Matches `owner/name`."""


@dataclass(frozen=True)
class Assets:
    """A repository, and the local folder that a recipe reads it from."""

    repository: str
    folder: Path
    weights: bool
    """Whether the recipe starts from the weights in it."""

    @property
    def command(self) -> str:
        """Return the command that downloads it."""
        relative = os.path.relpath(self.folder)
        folder = str(self.folder) if relative.startswith("..") else relative
        flag = " --weights" if self.weights else ""
        return f"titan download {self.repository}{flag} --dir {shlex.quote(folder)}"


def hub_hint(given: Path) -> str | None:
    """Return a hint for `OWNER/NAME` where a Hugging Face folder is expected; None for any other name.

    If OWNER is an existing folder, the name is a mistyped path.
    """
    if not REPOSITORY.match(str(given)) or given.parent.is_dir():
        return None
    return (
        f"for a repository of the Hugging Face Hub: titan download {given} --weights, "
        f"then give assets/{given.name}"
    )


def assets_of(root: Node) -> Assets | None:
    """Return the assets that a recipe's tree names; None if it names no repository, or no folder for it."""
    repository, weights = _text(root.child("assets")), _text(root.child("weights"))
    tokenizer = root.child("tokenizer")
    folder = _text(tokenizer.child("path") if tokenizer else None) or weights
    if repository is None or not REPOSITORY.match(repository) or folder is None:
        return None
    path = Path(os.path.expanduser(folder)).absolute()
    starts = weights is not None and Path(os.path.expanduser(weights)).absolute() == path
    return Assets(repository, path, starts)


def _text(node: Node | None) -> str | None:
    return beside(node) if node is not None and isinstance(node.value, str) else None
