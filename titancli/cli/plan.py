"""`titan plan`: memory, traffic and speed of a recipe on N devices, and whether it fits."""

from __future__ import annotations

from typing import Any

import click

from titancli.cli.common import split_overrides
from titancli.cli.completion import RecipeOrOverride
from titancli.cli.output import print_json
from titancli.errors import UsageError
from titancli.observe.peaks import DEVICES
from titancli.process import torch_without_gpus
from titancli.recipe import Loaded, load_recipe
from titancli.run.fit import check_world

NODE = 8
"""Default number of ranks where neither the command nor the mesh sets one."""


@click.command("plan", short_help="Estimate memory, traffic and speed on N devices.")
@click.argument(
    "arguments", metavar="RECIPE [KEY=VALUE]...", nargs=-1, required=True, type=RecipeOrOverride()
)
@click.option("--unset", metavar="KEY", multiple=True, help="Reset KEY to its default; may be repeated.")
@click.option(
    "--world-size",
    metavar="N",
    type=click.IntRange(min=1),
    help="Total number of ranks.  [default: from the mesh, or one node of 8]",
)
@click.option(
    "--gpu",
    type=click.Choice(sorted(DEVICES), case_sensitive=False),
    metavar=f"[{'|'.join(sorted(DEVICES))}]",
    default="H100",
    show_default=True,
)
@click.option(
    "--check",
    is_flag=True,
    help="Also simulate a step on one rank of each pipeline stage, without allocating memory.",
)
@click.option(
    "--check-rank",
    metavar="R",
    type=click.IntRange(min=0),
    multiple=True,
    help="Rank to check; may be repeated.  [default: the first rank of each pipeline stage]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    arguments: tuple[str, ...],
    unset: tuple[str, ...],
    world_size: int | None,
    gpu: str,
    check: bool,
    check_rank: tuple[int, ...],
    as_json: bool,
) -> int:
    """Estimate memory, traffic and speed of a recipe on N devices, and whether it fits.

    Needs no GPU. docs/plan.md describes the method.
    """
    recipes, overrides = split_overrides(arguments)
    if len(recipes) != 1:
        raise UsageError(
            "plan needs one recipe" if not recipes else f"plan takes one recipe, not {len(recipes)}"
        )
    loaded = load_recipe(recipes[0], overrides, unset=unset)
    world = world_size or _ranks(loaded, gpu)
    document = _document(loaded, world, gpu)
    if check or check_rank:
        from titancli.run import check as dry_run

        document["check"] = dry_run.check(loaded.recipe, world, check_rank or None)
    if as_json:
        print_json("estimate", document)
    else:
        from titancli.planning.text import as_text

        if world_size is None and world != _ranks(loaded, "cpu"):
            print(f"ranks         {world}, a node of {NODE}: neither --world-size nor [mesh] says how many")
        print(as_text(document))
        if document["check"]:
            print(dry_run.as_text(document["check"]))
    return 0


def _document(loaded: Loaded, world: int, gpu: str) -> dict[str, Any]:
    """Return the document.

    Raises:
        RecipeError: everything about the recipe that does not fit this many ranks.
    """
    degrees, _ = check_world(loaded, world)
    # These bring torch, which an error in the layout does not wait for.
    torch_without_gpus()
    from titancli.planning.advice import as_data as verdict_data
    from titancli.planning.estimate import as_data, estimate

    recipe, device = loaded.recipe, DEVICES[gpu]
    found = estimate(recipe, degrees, device)
    return {
        **as_data(recipe, degrees, device, found),
        "verdict": verdict_data(recipe, found),
        "check": None,
    }


def _ranks(loaded: Loaded, gpu: str) -> int:
    """Return the ranks that the mesh needs; at least a full node if a degree takes the remaining ranks."""
    fixed, free = 1, False
    for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        degree = getattr(loaded.recipe.mesh, name)
        free = free or degree == -1
        fixed *= max(1, degree)
    if not free:
        return fixed
    node = 1 if gpu == "cpu" else NODE
    return fixed * max(1, node // fixed)
