"""A plugin with one of everything. This file is its menu, and imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Lt

from titancli import component, hookimpl

if TYPE_CHECKING:
    import click

    from titancli import Recipe


@component("loss", "smoothed", target="titan_fixture.loss:Smoothed")
class Smoothed:
    """Cross-entropy against smoothed targets."""

    smoothing: Annotated[float, Ge(0), Lt(1)] = 0.1
    """The share of probability that is spread over the whole vocabulary."""


@component("converter", "scaled", target="titan_fixture.converter:Scaled")
class Scaled:
    """Remembers how often it was called, and what it saw."""

    note: str = "converted"
    """What it reports."""


@component("logger", "text_log", target="titan_fixture.logger:TextLog")
class TextLog:
    """One line of text for each step that is logged."""

    file: str = "text.log"
    """Its name in the run folder."""


@hookimpl
def titan_components() -> list[type]:
    return [Smoothed, Scaled, TextLog]


@hookimpl
def titan_recipes() -> Path:
    return Path(__file__).parent / "recipes"


@hookimpl
def titan_commands() -> list[click.Command]:
    import click

    @click.command("fixture-hello", help="Say hello from the plugin.")
    @click.argument("name", default="titan")
    def hello(name: str) -> None:
        click.echo(f"hello {name}")

    return [hello]


@hookimpl
def titan_checks(recipe: Recipe) -> list[tuple[str, str]]:
    if isinstance(recipe.loss, Smoothed) and recipe.training.seq_len < 8:
        return [("training.seq_len", "the smoothed loss wants rows of at least 8 tokens")]
    return []
