"""Downloads of the files that a run reads from a Hugging Face repository, by `huggingface_hub`. Torch-free.

Downloaded files are not downloaded again, and interrupted downloads continue; tokens and mirrors are
`huggingface_hub`'s own settings (`HF_TOKEN`, `hf auth login`, `HF_ENDPOINT`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titancli.data.tokenizer_files import TEMPLATES, TOKENIZER_FILES
from titancli.errors import EnvironmentProblem
from titancli.recipe.assets import REPOSITORY
from titancli.recipe.find import url_of

CONFIG = ("config.json", "generation_config.json")
WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
NOT_NEEDED = ("*/*.safetensors", "consolidated*")
"""Weights in folders (`original/`, `onnx/`) and in layouts other than the one transformers reads."""
SCHEME = "hf://"
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")


def download(repository: str, folder: Path, *, weights: bool, revision: str | None = None) -> list[Path]:
    """Download a repository's tokenizer and config, with `weights` also its weights; return the files.

    Raises:
        EnvironmentProblem: the repository cannot be reached or read, or lacks required files.
    """
    hint = "the same command continues the download; HF_ENDPOINT names a mirror"
    _snapshot(repository, weights, revision, hint, local_dir=folder)
    found = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    _require(repository, found, weights)
    return found


def _snapshot(repository: str, weights: bool, revision: str | None, hint: str, **where: Any) -> Path:
    """Download the files and return their folder, by default in the Hub's cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        found: str = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=[*TOKENIZER_FILES, f"{TEMPLATES}/*.jinja", *CONFIG, *(WEIGHTS if weights else ())],
            ignore_patterns=list(NOT_NEEDED),
            **where,
        )
    except GatedRepoError as error:
        raise EnvironmentProblem(
            f"{repository} is gated: its owner must grant you access",
            hint=f"ask for it at {constants.ENDPOINT}/{repository}, then log in: hf auth login",
        ) from error
    except RepositoryNotFoundError as error:
        raise EnvironmentProblem(
            f"there is no repository {repository}, or it is private",
            hint="check the name; for a private one, log in: hf auth login",
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise EnvironmentProblem(f"cannot download {repository}: {first}", hint=hint) from error
    return Path(found)


def _require(repository: str, found: list[Path], weights: bool) -> None:
    wanted = "safetensors" if weights else "json"
    if not any(path.suffix == f".{wanted}" for path in found):
        lacking = "weights in safetensors" if weights else "tokenizer"
        raise EnvironmentProblem(f"{repository} has no {lacking}")


# -------------------------------------------------------------------------------- in the place of a folder


@dataclass(frozen=True)
class Hosted:
    """A repository that a recipe names in place of a folder: `hf://OWNER/NAME`, or with `@REVISION`."""

    repository: str
    revision: str | None = None
    """A commit, branch or tag; None: the branch main."""

    @classmethod
    def of(cls, path: Path | None) -> Hosted | None:
        """Return the repository that a path names; None if the path is something else.

        Raises:
            EnvironmentProblem: the path has the scheme of a repository, but does not name one.
        """
        url = None if path is None else url_of(path)
        if url is None or not url.startswith(SCHEME):
            return None
        repository, at, revision = url.removeprefix(SCHEME).partition("@")
        if not REPOSITORY.match(repository) or bool(at) != bool(revision):
            raise EnvironmentProblem(
                f"{url} is not a repository of the Hugging Face Hub",
                hint=f"write {SCHEME}OWNER/NAME, or {SCHEME}OWNER/NAME@REVISION",
            )
        return cls(repository, revision or None)

    @property
    def url(self) -> str:
        return f"{SCHEME}{self.repository}{f'@{self.revision}' if self.revision else ''}"

    @property
    def is_pinned(self) -> bool:
        """Return whether the revision is a commit, so that the files never change."""
        return self.revision is not None and _COMMIT.match(self.revision) is not None

    @property
    def folder(self) -> Path:
        """Return its folder in the Hub's cache on this machine, without network access.

        Raises:
            EnvironmentProblem: it is not in the cache.
        """
        from huggingface_hub import constants

        root = Path(constants.HF_HUB_CACHE) / f"models--{self.repository.replace('/', '--')}"
        commit = self.revision
        if not self.is_pinned:
            ref = root / "refs" / (self.revision or "main")
            commit = ref.read_text().strip() if ref.is_file() else None
        folder = root / "snapshots" / (commit or "none")
        if commit is None or not folder.is_dir():
            raise EnvironmentProblem(
                f"{self.url} is not in the cache of this machine", hint=self._offline(weights=False)
            )
        return folder

    def fetch(self, *, weights: bool) -> Hosted:
        """Download files missing from the Hub's cache, and return the repository pinned to its current
        commit.

        Raises:
            EnvironmentProblem: as for `download`; without a network, the cache is used.
        """
        folder = _snapshot(self.repository, weights, self.revision, self._offline(weights=weights))
        _require(self.repository, list(folder.iterdir()), weights)
        return replace(self, revision=folder.name)

    def _offline(self, *, weights: bool) -> str:
        name = self.repository.partition("/")[2]
        flags = (" --weights" if weights else "") + (f" --revision {self.revision}" if self.revision else "")
        line = f"titan download {self.repository}{flags} --dir assets/{name}"
        return f"where there is a network: {line}; then give that folder instead of {self.url}"


def local_folder(path: Path) -> Path:
    """Return a folder unchanged, and for a repository that is named in its place, its folder in the cache.

    Raises:
        EnvironmentProblem: the repository is not in the cache.
    """
    hosted = Hosted.of(path)
    return path if hosted is None else hosted.folder
