"""`titan replay`: repeat one step of a run and look at it in detail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from titancli.commands import (
    Common,
    NumberOrAuto,
    RecipeOrOverride,
    note,
    out,
    print_json,
    printable,
    split_overrides,
    table,
)
from titancli.errors import EXIT_FAILED, EXIT_OK, UsageError

SHOWN = 10
"""Number of rows and documents that are shown; --json has all."""
WIDTH = 60
"""Number of characters of a text that are shown."""


@click.command("replay", short_help="Repeat a step of a run and look at it in detail.")
@click.argument("arguments", metavar="RUN [KEY=VALUE]...", nargs=-1, required=True, type=RecipeOrOverride())
@click.option("--step", type=click.IntRange(1), metavar="K", required=True, help="The step.")
@click.option(
    "--layer",
    "layers",
    metavar="PATTERN",
    multiple=True,
    help="Also show the modules and parameters of these layers one by one: a number, or a name such as "
    "layers.3.attention or '*.wo.*'; may be repeated.",
)
@click.option(
    "--without",
    type=click.IntRange(1),
    metavar="ROW",
    multiple=True,
    help="Try the step without this row: its targets are masked; may be repeated.",
)
@click.option(
    "--with",
    "variations",
    metavar="KEY=VALUE",
    multiple=True,
    help="Try the step with another setting, such as optimizer.lr=1e-4; may be repeated.",
)
@click.option(
    "--gradients",
    type=click.IntRange(0),
    metavar="N",
    default=64,
    show_default=True,
    help="Compute the gradient of N rows one by one, those with the highest loss.",
)
@click.option("--from-scratch", is_flag=True, help="Repeat more than 1,000 steps if necessary.")
@click.option("--nproc", type=NumberOrAuto(), help="Processes on this machine.  [default: those of the step]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(
    common: Common,
    arguments: tuple[str, ...],
    step: int,
    layers: tuple[str, ...],
    without: tuple[int, ...],
    variations: tuple[str, ...],
    gradients: int,
    from_scratch: bool,
    nproc: int | str | None,
    as_json: bool,
) -> int:
    """Repeat step K of RUN, from the nearest checkpoint before it, and look at it in detail.

    \b
    titan replay RUN --step 812                           rows, losses, gradients, layers
    titan replay RUN --step 812 --layer 3                 each module and parameter of layer 3
    titan replay RUN --step 812 --without 13              what if row 13 had not been there
    titan replay RUN --step 812 --with optimizer.lr=1e-4  what if the learning rate had been lower

    On the layout of the run, the repeated steps must be bitwise equal to the recorded ones; otherwise the
    first step that differs, and what differs in it, are shown. The run's folder is not changed. Use overrides
    for paths that differ on this machine, such as dataset.paths. The exit code is 0 unless the steps diverge.
    """
    from titan_proof import Probe
    from titan_proof.replay import find_source, load, replay
    from titan_proof.variation import check_variation

    runs, overrides = split_overrides(arguments)
    if len(runs) != 1:
        raise UsageError(
            f"replay takes one run, not {' and '.join(runs) or 'none'}", hint="titan replay RUN --step K"
        )
    check_variation(variations)
    source = find_source(Path(runs[0]), step, from_scratch=from_scratch)
    probe = Probe(
        step=step,
        layers=list(layers),
        gradients=gradients,
        without=list(without),
        overrides=list(variations),
    )
    loaded = load(source, overrides, probe, common.plugin_files, note)
    for line in source.notes:
        note(line)
    code, found = replay(source, loaded, nproc, common.plugin_files, traceback=common.traceback)
    if found is None:
        return code
    if as_json:
        print_json("replay", {"run": str(source.folder.path), **found, "notes": source.notes})
    else:
        _show(found, layers)
    return EXIT_FAILED if found["verdict"]["result"] == "parts" else EXIT_OK


def _show(found: dict[str, Any], layers: Sequence[str]) -> None:
    for line in _summary(found):
        out(line)
    ordered = sorted(found["rows"], key=_weight, reverse=True)
    columns = ("row", "loss", "gradient norm", "targets", "rank", "position", "text")
    _table("rows, the highest first", columns, [_row(row) for row in ordered[:SHOWN]])
    if len(ordered) > SHOWN:
        print(f"… and {len(ordered) - SHOWN} more rows (--json has all)")
    documents = [(row, doc) for row in ordered[:3] for doc in row["documents"] if len(row["documents"]) > 1]
    if documents:
        documents.sort(key=lambda pair: _high(pair[1]["loss"]), reverse=True)
        shown = [_document(row, doc) for row, doc in documents[:SHOWN]]
        title = "documents of these rows, the highest loss first"
        _table(title, ("row", "tokens", "loss", "targets", "text"), shown)
    header = ("module", "activations rms", "largest", "gradient norm", "weight norm")
    _table("layers", header, [_layer(layer) for layer in found["layers"]])
    if layers:
        from titan_proof.watching import matches

        own = [(name, one) for name, one in found["parameters"].items() if matches(name, layers)]
        rows = [(name, _figure(one["gradient_norm"]), _figure(one["weight_norm"])) for name, one in own]
        _table("parameters", ("parameter", "gradient norm", "weight norm"), rows)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    out(f"\n{title}:")
    table(header, rows, explained=True)


def _summary(found: dict[str, Any]) -> Iterator[str]:
    verdict, step = found["verdict"], found["step"]
    words = {
        "bitwise": f"bitwise as recorded ({verdict['compared']} steps compared)",
        "within_envelope": "as recorded within the layout's envelope",
        "parts": f"diverges from the record at step {verdict['step']}: {', '.join(verdict['what'])}",
        "as_logged": "loss and gradient norm as logged",
        "unknown": "no record to compare with",
    }
    yield f"step {step}: {words[verdict['result']]}"
    done = {"replayed": found["replayed"], "recorded": found["recorded"], "tried": found["tried"]}
    for name, numbers in done.items():
        if numbers is not None and (name != "recorded" or verdict["result"] != "bitwise"):
            yield f"{name}: {_numbers(numbers)}"
    yield from _guard(found["guard"], found["replayed"])
    if (row := found["stands_out"]) is not None:
        norm, middle = row["gradient_norm"], row["median_gradient_norm"]
        gradient = "" if norm is None else f", gradient norm {_figure(norm)} (median {_figure(middle)})"
        loss = f"loss {_figure(row['loss'])} (median {_figure(row['median_loss'])})"
        yield f"row {row['row']} stands out: {loss}{gradient}"
    else:
        yield "no row stands out"


def _numbers(numbers: dict[str, Any]) -> str:
    names = {"loss": "loss", "grad_norm": "gradient norm", "lr": "lr", "loss_after": "loss after the step"}
    shown = [f"{word} {_figure(numbers[name])}" for name, word in names.items() if name in numbers]
    return "  ".join([*shown, *(["skipped"] if numbers["skipped"] else [])])


def _guard(guard: dict[str, Any] | None, numbers: dict[str, Any]) -> Iterator[str]:
    if guard is None:
        yield "guard: off"
    elif isinstance(guard["loss_limit"], str):  # Infinity
        seen = f"{guard['steps']} of {guard['window']} steps seen" if guard["steps"] < guard["window"] else ""
        yield f"guard: no limits yet{f' ({seen})' if seen else ''}; the step was " + _applied(numbers)
    else:
        yield (
            f"guard: loss below {_figure(guard['loss_limit'])} and gradient norm below "
            f"{_figure(guard['grad_norm_limit'])} expected; the step was {_applied(numbers)}"
        )


def _applied(numbers: dict[str, Any]) -> str:
    return "skipped" if numbers["skipped"] else "applied"


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    texts = sorted(row["documents"], key=lambda document: _high(document["loss"]), reverse=True)
    place = row.get("position") or {}
    return (
        str(row["row"]),
        _figure(row["loss"]),
        _figure(row["gradient_norm"]),
        str(row["targets"]),
        str(row["dp_rank"]),
        " ".join(_flat(place)),
        _shortened(texts[0]["text"]) if texts else "",
    )


def _flat(place: dict[str, Any]) -> Iterator[str]:
    """Yield a position in words: `epoch 0 document 12 offset 40`."""
    for name, value in place.items():
        if isinstance(value, dict):
            yield from _flat(value)
        elif isinstance(value, (int, str)) and name in (
            "epoch",
            "document",
            "file",
            "line",
            "offset",
            "used",
        ):
            yield f"{name} {value}"


def _document(row: dict[str, Any], document: dict[str, Any]) -> tuple[str, ...]:
    span = f"{document['begin']}-{document['end'] - 1}"
    loss = _figure(document["loss"])
    return str(row["row"]), span, loss, str(document["targets"]), _shortened(document["text"])


def _layer(layer: dict[str, Any]) -> tuple[str, ...]:
    names = ("rms", "max", "gradient_norm", "weight_norm")
    return layer["name"], *(_figure(layer[name]) for name in names)


def _weight(row: dict[str, Any]) -> tuple[float, float]:
    return _high(row["gradient_norm"]), _high(row["loss"])


def _high(value: Any) -> float:
    return -1.0 if value is None else value if isinstance(value, (int, float)) else float("inf")


def _shortened(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def _figure(value: Any) -> str:
    return "-" if value is None else str(value) if isinstance(value, str) else f"{value:.4g}"
