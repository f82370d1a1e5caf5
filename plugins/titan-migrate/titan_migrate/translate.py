"""Translate a config of another tool to a recipe. Nothing is dropped silently."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_migrate import (
    axolotl,
    axolotl_keys,
    document,
    llamafactory,
    llamafactory_keys,
    torchtune,
    torchtune_keys,
)
from titan_migrate.account import Remark, Translation, as_text
from titan_migrate.config import Asked, Config
from titan_migrate.document import Leaf
from titan_migrate.keys import Key
from titancli.errors import RecipeError

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry


@dataclass(frozen=True)
class Tool:
    """A tool, and how its configs are read."""

    title: str
    command: str
    """The last word of `titan recipe from-…`."""
    keys: dict[str, Key]
    translate: Callable[[Config], None]
    refuse: Callable[[str, list[Leaf]], None]
    """Refuses configs of it that train nothing."""
    known_by: Callable[[set[str]], bool]
    """Whether names of keys are those of a config of this tool."""
    interpolates: bool = False
    """Whether it resolves `${key}`, by OmegaConf."""


TOOLS = {
    "axolotl": Tool(
        "axolotl",
        "axolotl",
        axolotl_keys.KEYS,
        axolotl.translate,
        axolotl.refuse,
        lambda names: "base_model" in names,
    ),
    "llamafactory": Tool(
        "LLaMA-Factory",
        "llamafactory",
        llamafactory_keys.KEYS,
        llamafactory.translate,
        llamafactory.refuse,
        lambda names: "model_name_or_path" in names,
        True,
    ),
    "torchtune": Tool(
        "torchtune",
        "torchtune",
        torchtune_keys.KEYS,
        torchtune.translate,
        torchtune.refuse,
        lambda names: any(name.endswith("_component_") for name in names),
        True,
    ),
}


def translate(
    tool: str,
    path: Path,
    name: str,
    registry: Registry,
    asked: Asked = Asked(),  # noqa: B008 - a constant
) -> Translation:
    """Return the recipe closest to a config.

    Raises:
        RecipeError: the file cannot be read, is not YAML, or is no training config of this tool.
    """
    this = TOOLS[tool]
    if path.suffix == ".toml":
        hint = f"titan recipe from-torchtitan {path} OUT.toml, if it is a job config of torchtitan"
        raise RecipeError(f"{path} is TOML; configs of {this.title} are YAML", hint=hint)
    leaves = document.read(path)
    _recognise(this, path, {leaf.name for leaf in leaves})
    this.refuse(str(path), leaves)
    lost: list[tuple[Leaf, str]] = []
    if this.interpolates:
        leaves, lost = torchtune.resolve(leaves)
    config = Config(leaves, this.keys, this.title, registry, asked, path)
    config.lost += [Remark(leaf.name, leaf.line, leaf.value, why) for leaf, why in lost]
    this.translate(config)
    config.finish()
    return _translation(config, this, path, name)


def _recognise(this: Tool, path: Path, names: set[str]) -> None:
    if this.known_by(names):
        return
    for other in TOOLS.values():
        if other.known_by(names):
            hint = f"titan recipe from-{other.command} {path} OUT.toml"
            raise RecipeError(f"{path} is a config of {other.title}, not of {this.title}", hint=hint)
    if {"model", "train_dataset"} <= names:
        raise RecipeError(
            f"{path} is a config of LLaMA-Factory's v1 engine, which titan does not read",
            hint="its keys of the other engine are read: model_name_or_path, dataset, stage",
        )
    if {"compute_environment", "distributed_type"} <= names:
        raise RecipeError(
            f"{path} is a config of accelerate: it says how ranks start",
            hint="set the layout in [mesh] and [parallelize], and start with `titan train`",
        )
    raise RecipeError(
        f"{path} is not a config of {this.title}", hint="give the YAML file that it trains from"
    )


def _translation(config: Config, this: Tool, path: Path, name: str) -> Translation:
    def placed(remarks: list[Remark]) -> list[Remark]:
        return sorted(remarks, key=lambda remark: (remark.line is None, remark.line or 0))

    found = Translation(
        "",
        sorted(config.moved),
        placed(config.lost),
        placed(config.changed),
        placed(config.idle),
        placed(config.unset),
    )
    from titancli import __version__

    recipe: dict[str, Any] = {"recipe": 1, "name": name, **config.recipe}
    head = f"Translated from the {this.title} config {path.name} by titan {__version__}."
    return dataclasses.replace(found, text=as_text(head, recipe, found, path.name))
