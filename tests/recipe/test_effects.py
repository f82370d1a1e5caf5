"""What another value of a section, a field or a component changes is declared there, once."""

from __future__ import annotations

from typing import Annotated, ClassVar

import pytest

from titancli import component, section
from titancli.recipe.schema import Recipe, effect_of, recipe_slots, sections_with
from titancli.registry.fields import Effect, fields_of
from titancli.registry.kinds import KINDS

EFFECTS = {"numbers", "speed", "running", "watching"}


@section
class Cache:
    effect: ClassVar = "running"
    folder: str = "cache"
    size: Annotated[int, Effect("speed")] = 1


def test_every_section_and_every_kind_declares_one() -> None:
    slots = recipe_slots().keys()
    undeclared = [
        name for name, known in fields_of(Recipe).items() if not known.type.effect and name not in slots
    ]
    assert undeclared == []
    assert {kind.effect for kind in KINDS.values()} <= EFFECTS
    assert {effect_of(name) for name in fields_of(Recipe)} == EFFECTS


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        ("model.dim", "numbers"),
        ("mesh.tp", "speed"),
        ("parallelize.reshard_after_forward", "speed"),
        ("loggers.0.type", "watching"),
        ("launcher.type", "running"),
        ("training.steps", "numbers"),
        ("training.gc_freq", "running"),
        ("training.local_batch_size", "speed"),
        ("training.dataloader.num_workers", "running"),
        ("checkpoint.interval", "running"),
        ("checkpoint.exclude_from_loading", "numbers"),
        ("debug.digests", "watching"),
        ("debug.deterministic", "numbers"),
        ("validation.datasets.books.paths", "watching"),
        ("env.NCCL_DEBUG", "numbers"),
        ("name", "watching"),
        ("of_another_version.key", "numbers"),
    ],
)
def test_the_nearest_declaration_counts(key: str, effect: str) -> None:
    assert effect_of(key) == effect


def test_a_plugins_fields_and_sections_may_declare_one() -> None:
    @component("loss", "of_tests", target="a:b")
    class Own:
        scale: float = 1.0
        report: Annotated[bool, Effect("watching")] = False
        cache: Cache | None = None

    @component("loss", "quiet", target="a:b")
    class Quiet:
        effect: ClassVar = "watching"
        every: int = 1

    keys = ("loss.scale", "loss.report", "loss.cache.folder", "loss.cache.size")
    assert [effect_of(key, {"loss": Own}) for key in keys] == ["numbers", "watching", "running", "speed"]
    assert {effect_of(key) for key in keys} == {"numbers"}
    assert effect_of("loss.every", {"loss": Quiet}) == "watching"


def test_sections_are_found_by_their_effect() -> None:
    assert {"loggers", "validation", "profiling", "metrics", "name"} <= set(sections_with("watching"))
    assert set(sections_with("speed")) == {
        "mesh",
        "pipeline",
        "parallelize",
        "activation_checkpoint",
        "compile",
    }
    assert sorted(sections_with(*EFFECTS)) == sorted(fields_of(Recipe))
