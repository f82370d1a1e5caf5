"""`titan recipe extend`: how to continue a run beyond its end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titancli.cli.output import out, print_json, short_path
from titancli.runs import RunFolder
from titancli.terminal import pasteable

if TYPE_CHECKING:
    from titancli.run.extend import Extension, Way


@click.command("extend", short_help="Show ways to continue a run beyond its end.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps in all.")
@click.option("--epochs", type=click.FloatRange(0, min_open=True), metavar="E", help="Epochs in all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, steps: int | None, epochs: float | None, as_json: bool) -> None:
    """Show ways to continue a run beyond its end: the learning rate so far, the learning rate of each way,
    and the command that continues the run in this way. Changes nothing.

    \b
    stretch   the same schedule, over all steps: at the next step the rate may jump
    hold      constant at the last rate
    warm_up   the same schedule once more, over the new steps
    decay     from the last rate down to the end of the schedule
    """
    from titancli.run.extend import extension

    folder = RunFolder.open(run)
    found = extension(folder, steps=steps, epochs=epochs)
    if as_json:
        print_json("extension", _facts(folder, found))
        return
    out(f"so far: {found.done:,} of {found.before:,} steps, learning rate {_at(found.rates)}")
    for way in found.ways:
        out(f"\n{way.name}: {way.about}")
        out(f"  learning rate {_at(way.rates)}")
        out(f"  {pasteable(_command(folder, way))}")


def _at(rates: dict[int, float]) -> str:
    from titancli.run.effects import rate_text

    return ", ".join(f"{rate_text(rate)} at step {step:,}" for step, rate in rates.items())


def _command(folder: RunFolder, way: Way) -> str:
    words = ["titan", "train", short_path(folder.path), "--resume", *way.overrides]
    for key in way.unset:
        words += ["--unset", key]
    for file in folder.last_loaded().get("plugin_files") or []:
        words += ["-p", file["path"]]
    return shlex.join(words)


def _facts(folder: RunFolder, found: Extension) -> dict[str, Any]:
    def by_step(rates: dict[int, float]) -> list[dict[str, float]]:
        return [{"step": step, "lr": rate} for step, rate in rates.items()]

    return {
        "run_folder": str(folder.path),
        "step": found.done,
        "steps_before": found.before,
        "steps_after": found.steps,
        "learning_rate": by_step(found.rates),
        "ways": [
            {
                "name": way.name,
                "about": way.about,
                "learning_rate": by_step(way.rates),
                "command": _command(folder, way),
            }
            for way in found.ways
        ],
    }
