"""`titan prove`: compare what a model computes on every layout with what it computes on one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titancli.commands import Common, RecipeOrOverride, note, print_json, split_overrides, table
from titancli.errors import EXIT_FAILED, EnvironmentProblem, RecipeError, UsageError

if TYPE_CHECKING:
    from titan_proof.prove.proof import Progress, Proof
    from titancli.recipe import Loaded


@click.command("prove", short_help="Prove that every layout computes what one process does.")
@click.argument(
    "arguments",
    metavar="RECIPE|PLUGIN/COMPONENT [KEY=VALUE]...",
    nargs=-1,
    required=True,
    type=RecipeOrOverride(),
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 4),
    default=4,
    show_default=True,
    help="Layouts of at most this many ranks, all on this machine.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where to compute; cuda: one GPU of this machine for each rank.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(common: Common, arguments: tuple[str, ...], ranks: int, device: str, as_json: bool) -> int:
    """Compare a small copy of a recipe on every layout with one process.

    Two steps are computed on each legal layout of 2 to 4 ranks, and with accumulation, recomputation, compile
    and a resume in the middle: the loss, every gradient and every updated weight must equal those of one
    process. Export to Hugging Face and back, and generation with a cache, are compared too. For each error,
    the first wrong parameter and the technique that causes it are reported, and the exit code is 1.

    Instead of a recipe, name a model, converter, loss, optimizer or parallelize plan, as for `titan show`: it
    is proven in a recipe of its plugin, or in llama3_debug. `titan plugin show NAME` shows the results.

    Needs no data, and no GPU. docs/prove.md describes the method.
    """
    recipes, overrides = split_overrides(arguments)
    if len(recipes) != 1:
        raise UsageError(
            "prove needs one recipe or component"
            if not recipes
            else f"prove takes one recipe or component, not {len(recipes)}"
        )
    from titan_proof.prove import proof as proofs

    component, loaded = _named(recipes[0], overrides)
    try:
        with _progress() as progress:
            proof = proofs.prove(
                loaded,
                ranks=ranks,
                device=device,
                plugin_files=common.plugin_files,
                blocked=common.blocked,
                progress=progress,
            )
    except RecipeError as error:
        if component is None:
            raise
        from titan_proof.prove.component import cannot_alone

        raise cannot_alone(component, loaded, error) from error
    if as_json:
        print_json("proof", _document(loaded.data["name"], proof))
    else:
        _print(proof)
    _keep(proof, loaded, ranks, component, device)
    return EXIT_FAILED if proof.wrong else 0


def _named(name: str, overrides: list[str]) -> tuple[type | None, Loaded]:
    """Return the named component, if it is one, and the recipe to prove."""
    from titancli.commands import find_component, is_component
    from titancli.recipe import load_recipe

    if Path(name).exists() or not is_component(name):
        return None, load_recipe(name, overrides)
    from titan_proof.prove.component import label_of, recipe_around

    component = find_component(name)
    loaded = recipe_around(component, overrides)
    note(f"{label_of(component)} in the recipe {loaded.recipe.name}")
    return component, loaded


def _keep(proof: Proof, loaded: Loaded, ranks: int, component: type | None, device: str) -> None:
    """Write badges. A proof is valid without them."""
    from titan_proof.prove.badge import write_badges

    try:
        write_badges(proof, loaded, ranks, component, device)
    except (EnvironmentProblem, OSError) as error:
        note(f"`titan plugin list` will not show this proof: {error}")


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a progress bar at a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, of, name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("one process", total=None)
        yield lambda done, of, name: bar.update(task, completed=done, total=of, description=name)


def _document(name: str, proof: Proof) -> dict[str, Any]:
    from titan_proof.prove.proof import sentence, title

    return {
        "name": name,
        "ok": not proof.wrong,
        "parameters": proof.parameters,
        "seconds": proof.seconds,
        "changed": {key: {"from": old, "to": new} for key, (old, new) in proof.small.changed.items()},
        "left_out": proof.small.left_out,
        "cases": proof.results,
        "causes": [
            {
                "techniques": cause["techniques"],
                "case": cause["name"],
                "title": title(cause["techniques"]),
                "message": sentence(cause),
            }
            for cause in proof.causes
        ],
    }


def _print(proof: Proof) -> None:
    from titan_proof.prove.proof import sentence, title

    sizes = ", ".join(f"{key} {new}" for key, (_, new) in proof.small.changed.items())
    note(f"small copy: {proof.parameters:,} parameters ({sizes or 'as it is'})")
    for left_out in proof.small.left_out:
        note(f"not covered: {left_out}")
    rows = []
    for result in proof.results:
        figure = f"{result['worst']:.1e}" if result.get("worst") is not None else ""
        about = sentence(result).splitlines()[0] if result["status"] != "right" else ""
        about = about.removeprefix("not supported: ")
        rows.append([result["name"], str(result["ranks"]), result["status"], figure, about])
    styles = {"right": "green", "wrong": "bold red", "failed": "bold red", "not supported": "dim"}
    table(["layout", "ranks", "answer", "difference", ""], rows, styles=styles)
    counts = {
        status: sum(result["status"] == status for result in proof.results)
        for status in ("right", "wrong", "failed", "not supported")
    }
    print()
    for cause in proof.causes:
        print(f"wrong: {title(cause['techniques'])}")
        print(f"  {sentence(cause)}")
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    print(f"{len(proof.results)} layouts: {summary}; {proof.seconds:.0f} s")
