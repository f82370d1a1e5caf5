"""The decision what a run or an engine starts from, made in this one place. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from titancli.checkpoint.exclude import Exclusion
from titancli.checkpoint.format.manifest import adapter_record, read_manifest
from titancli.checkpoint.remote.store import TIMEOUT
from titancli.data.hub import Hosted
from titancli.errors import EnvironmentProblem
from titancli.fingerprint import cache_folder
from titancli.recipe.find import url_of

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@dataclass(frozen=True)
class StartFrom:
    """The source of the first weights, and what else is loaded from it."""

    kind: Literal["nothing", "weights", "state"]
    """nothing: initial values; weights: only the weights of a checkpoint or a Hugging Face folder; state:
    everything in a checkpoint."""
    source: Path | None = None
    """The folder or URL, as given."""
    exclude: tuple[str, ...] = ()
    """The tensors that are not loaded: `checkpoint.exclude_from_loading`."""

    timeout_seconds: float = field(default=TIMEOUT, compare=False)
    """For a URL: `checkpoint.remote_timeout_seconds`."""
    store: Any = field(default=None, compare=False)
    """The config of the URL's store; None: the one of its scheme."""

    @property
    def _url(self) -> str | None:
        return None if self.source is None else url_of(self.source)

    @property
    def is_remote(self) -> bool:
        """Return whether the source is a URL, which `fetch` downloads."""
        return self._url is not None

    @property
    def is_here(self) -> bool:
        """Return whether `folder` exists on this machine."""
        try:
            return self.folder.exists()
        except EnvironmentProblem:  # the Hub's cache does not have it
            return False

    @property
    def folder(self) -> Path:
        """Return the folder on this machine; for a URL, the one in the cache to which `fetch` downloads it.

        Raises:
            ValueError: the kind is "nothing".
        """
        if self.source is None:
            raise ValueError("what starts from nothing has no folder")
        if self._url is None:
            return self.source
        if (hosted := Hosted.of(self.source)) is not None:
            return hosted.folder
        return cache_folder() / "weights" / xxhash.xxh3_64(self._url.encode()).hexdigest() / self.source.name

    @property
    def exclusion(self) -> Exclusion:
        """Return what to leave out of the checkpoint in `folder`; see `Exclusion.once`."""
        return Exclusion.once(self.exclude, self.folder)

    def fetch(self, say: Callable[[str], None]) -> None:
        """Download a URL into this machine's cache, unless it is there already.

        Raises:
            EnvironmentProblem: it does not exist or is damaged, or the disk is full.
            Unreachable: the store refuses, or does not answer.
        """
        if (hosted := Hosted.of(self.source)) is not None:
            say(f"downloading {hosted.url} (what is in the cache is not downloaded again)")
            hosted.fetch(weights=True)
        elif self._url is not None:
            from titancli.checkpoint.remote.transfer import take_unless_there

            take_unless_there(
                self._url, self.folder, say, timeout_seconds=self.timeout_seconds, store=self.store
            )


NOTHING = StartFrom("nothing")


def start_from(recipe: Recipe, checkpoint: Path | None = None) -> StartFrom:
    """Decide what a recipe starts from.

    Args:
        checkpoint: the run's own, from which it continues; None: the run is new.
    """
    section = recipe.checkpoint
    exclude = tuple(section.exclude_from_loading)
    if checkpoint is not None:
        return StartFrom("state", checkpoint, exclude)
    if recipe.weights is None:
        return NOTHING
    kind: Literal["weights", "state"] = "weights" if section.initial_load_model_only else "state"
    url, remote = url_of(recipe.weights) or "", section.remote or ""
    store = section.store if url.partition("://")[0] == remote.partition("://")[0] else None
    return StartFrom(kind, recipe.weights, exclude, section.remote_timeout_seconds, store)


def still_needs_weights(recipe: Recipe, checkpoint: Path) -> str | None:
    """Return why a run that continues from its own checkpoint still reads the weights that it started from,
    as the end of a sentence; None: it does not.

    Raises:
        EnvironmentProblem: the folder is not a checkpoint, or is damaged.
    """
    start = start_from(recipe)
    if start.kind != "weights":  # tensors left out get initial values, as at the start of the run
        return None
    if adapter_record(read_manifest(checkpoint)) is not None:
        return f"{checkpoint.name} holds adapters, and these weights are their base"
    if start_from(recipe, checkpoint).exclusion.may_have_weights:
        return f"checkpoint.exclude_from_loading leaves out weights of {checkpoint.name}"
    return None
