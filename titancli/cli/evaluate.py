"""`titan eval`: loss and perplexity of a trained model on data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from titancli.cli.common import Common, split_overrides
from titancli.cli.output import note, out, print_json, short_path
from titancli.cli.train import NumberOrAuto
from titancli.errors import UsageError


@click.command("eval", short_help="Evaluate a trained model: loss, perplexity, bits per byte.")
@click.argument("arguments", metavar="SRC [KEY=VALUE]...", nargs=-1, required=True)
@click.option(
    "--data",
    "files",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    help="Text to evaluate: a file, folder or glob, JSON Lines with a key `text`; may be repeated.  "
    "[default: [validation] of the run]",
)
@click.option("--step", type=click.IntRange(0), metavar="N", help="Of a run: the checkpoint of step N.")
@click.option("--nproc", type=NumberOrAuto(), help="Processes on this machine.  [default: one for each GPU]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(
    common: Common,
    arguments: tuple[str, ...],
    files: tuple[Path, ...],
    step: int | None,
    nproc: int | str | None,
    as_json: bool,
) -> int:
    """Evaluate a trained model: loss, perplexity and bits per byte of each dataset.

    SRC is RUN (its newest good checkpoint), RUN/checkpoints/step-N, or a Hugging Face folder with
    config.json and *.safetensors. Results of a run are also written to RUN/evaluations/step-N/NAME.json.

    \b
    titan eval runs/mine                             the [validation] datasets of its recipe
    titan eval runs/mine --data book.txt --nproc 2 mesh.tp=2
    titan eval ./Qwen3-0.6B --data book.txt training.seq_len=4096
    """
    from titancli.run.evaluate import document, find_source, keep, load, run

    sources, overrides = split_overrides(arguments)
    if len(sources) != 1:
        raise UsageError(
            f"eval takes one run, checkpoint or folder, not {' and '.join(sources) or 'none'}",
            hint="titan eval SRC --data FILE [KEY=VALUE]...",
        )
    source = find_source(Path(sources[0]), step, note)
    loaded = load(source, files, overrides, note)
    note(f"evaluating {source.name}: {', '.join(loaded.recipe.validation.datasets)}")
    results = run(loaded, nproc, common.plugin_files, traceback=common.traceback)
    if results.code:
        return results.code
    rows = []
    for name, metrics in results.sets.items():
        row: dict[str, Any] = {
            "name": name,
            "data": loaded.data["validation"]["datasets"][name],
            "metrics": metrics,
        }
        kept = keep(source, name, row)
        rows.append({**row, "file": None if kept is None else str(kept)})
        if kept is not None:
            note(f"saved {short_path(kept)}")
    if as_json:
        print_json("evaluation", document(source, sources[0], rows))
        return 0
    for row in rows:
        figures = [f"{key.replace('_', ' ')} {_figure(key, value)}" for key, value in row["metrics"].items()]
        out(f"{row['name']}: {', '.join(figures)}")
    return 0


def _figure(name: str, value: float) -> str:
    return f"{value:,.0f}" if name in ("tokens", "bytes") else f"{value:.4f}"
