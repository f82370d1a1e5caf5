"""Arguments that name a folder on disk, or one in an object store by its URL."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from titancli.errors import EnvironmentProblem


class FolderOrURL(click.Path):
    """A folder; a URL becomes an object with the same methods, see `titancli.checkpoint.remote.store.at`."""

    def __init__(self, *, file_okay: bool = False) -> None:
        super().__init__(path_type=Path, file_okay=file_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from titancli.checkpoint.remote.store import at
        from titancli.recipe.find import url_of

        url = url_of(Path(value)) if isinstance(value, str) else None
        return at(url) if url else super().convert(value, param, ctx)


@contextmanager
def on_disk(src: Path, near: Path, *, say: Callable[[str], None]) -> Iterator[Path]:
    """Yield the folder of `src`; of a URL, a temporary copy in the folder `near`.

    Raises:
        EnvironmentProblem: there is no good checkpoint, or the copy cannot be written.
    """
    if isinstance(src, Path):
        yield src
        return
    from titancli.checkpoint.format.manifest import is_checkpoint
    from titancli.checkpoint.remote.transfer import newest_of_both, take

    with tempfile.TemporaryDirectory(dir=near, prefix=".titan-") as own:
        folder = Path(own)
        if not is_checkpoint(src):
            found = newest_of_both(src, folder, rejected=say, say=say)
            if found is None:
                raise EnvironmentProblem(f"{src} is neither a checkpoint nor a run with a good one")
            yield found
            return
        yield take(src, folder, say)
