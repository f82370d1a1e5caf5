"""The configs of what can watch a run, besides the event log and the console that every run has.

All loggers write the same table: a row for each logged step, a column for each metric, under the names of
events.jsonl. A resumed run continues it, and rows after the step that it resumes from are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from titancli.registry.component import component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@component("logger", "csv", target="titancli.loggers.csv:build")
class CSV:
    """A CSV file in the run folder: step, time (UTC), and a column for each metric."""

    file: str = "metrics.csv"
    """Name of the file."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if "/" in self.file or not self.file.removesuffix(".csv") or not self.file.endswith(".csv"):
            yield "file", f"{self.file!r} is not the name of a CSV file, e.g. 'metrics.csv'"
        if sum(isinstance(one, CSV) and one.file == self.file for one in recipe.loggers) > 1:
            yield "file", f"two csv loggers would write {self.file}: give them different names"


@component("logger", "tensorboard", target="titancli.loggers.tensorboard:build")
class TensorBoard:
    """TensorBoard event files in the run folder's `tb/`: scalars, the resolved recipe, the environment."""

    flush_secs: Annotated[int, Gt(0)] = 30
    """Seconds between two writes to disk."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if sum(isinstance(one, TensorBoard) for one in recipe.loggers) > 1:
            yield "type", "two tensorboard loggers would write every point twice: remove one"


COMPONENTS: list[type] = [CSV, TensorBoard]
