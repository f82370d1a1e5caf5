"""Components of two plugins, with every sort of field that a config can have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, MinLen

from titancli.optimizers import WarmupStableDecay
from titancli.recipe.schema import Recipe
from titancli.registry.component import component, section
from titancli.registry.fields import Component, Slot
from titancli.registry.lookup import Registry

TARGET = "tests.recipe.components:unused"


@section
class Rope:
    theta: float = 10_000.0
    factor: Annotated[float, Gt(0)] | None = None


@component("model", "tiny", target=TARGET)
class Tiny:
    """A model with flavors."""

    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {"dim": 64, "layers": 2},
        "large": {"dim": 512, "layers": 8, "rope": {"theta": 5e5, "factor": 8.0}},
    }
    dim: Annotated[int, Gt(0)] = 32
    layers: int = 1
    rope: Rope | None = None
    tied: bool = False

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if recipe.training.seq_len > 4096:
            yield "dim", "this model is too small for such rows"


@component("model", "plain", target=TARGET)
class PlainModel:
    """A model without flavors, that needs a size."""

    dim: int


@component("tokenizer", "chars", target=TARGET)
class Chars:
    path: Path | None = None


@component("dataset", "lines", target=TARGET)
class Lines:
    paths: list[Path] = field(default_factory=list)
    text_field: str = "text"
    columns: dict[str, int] = field(default_factory=dict)
    shape: tuple[int, int] = (1, 2)


@component("converter", "cast", target=TARGET)
class Cast:
    recipe: Literal["rowwise", "tensorwise"] = "rowwise"
    skip: list[str] = field(default_factory=list)


@component("parallelize", "decoder", target=TARGET)
class Decoder:
    reshard: Literal["default", "always"] = "default"


@component("loss", "cross_entropy", target=TARGET)
class CrossEntropy:
    pass


@component("optimizer", "adamw", target=TARGET)
class AdamW:
    lr: float = 1e-3
    betas: Annotated[list[float], MinLen(2)] = field(default_factory=lambda: [0.9, 0.95])


@component("optimizer", "muon", target=TARGET)
class Muon:
    lr: float = 0.02
    momentum: Annotated[float, Ge(0)] = 0.95
    fallback: Annotated[Component, Slot("optimizer")] | None = None
    groups: list[Annotated[Component, Slot("optimizer")]] = field(default_factory=list)


@component("optimizer", "adamw", target=TARGET)
class OtherAdamW:
    lr: float = 1.0


@component("logger", "book", target=TARGET)
class Book:
    folder: Path = Path("book")


@component("loop", "pretrain", target=TARGET)
class Pretrain:
    pass


@component("launcher", "local", target=TARGET)
class Local:
    nproc: Annotated[int, Gt(0)] | Literal["auto"] = "auto"


OURS = [
    Tiny,
    PlainModel,
    Chars,
    Lines,
    Cast,
    Decoder,
    CrossEntropy,
    AdamW,
    WarmupStableDecay,
    Book,
    Pretrain,
    Local,
]


def registry_of(*more: tuple[str, type]) -> Registry:
    """The plugin `titan` with everything but Muon, `titan-muon` with that, and what is asked for."""
    return Registry(components=[*(("titan", cls) for cls in OURS), ("titan-muon", Muon), *more])
