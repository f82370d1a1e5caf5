"""`titan rollouts RUN`: the samples of a run, with their rewards."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click

from titancli.commands import colored, note, print_json, printable
from titancli.errors import UsageError

GREEN, RED, DIM, BOLD = 32, 31, 2, 1


@click.command("rollouts", short_help="Show the rollouts of a run, with rewards and advantages.")
@click.argument("run", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--step", type=int, help="Step to show.  [default: the latest]")
@click.option(
    "-n", "--prompts", type=click.IntRange(min=1), help="Number of prompts.  [default: 4; all with --json]"
)
@click.option(
    "--samples", type=click.IntRange(min=1), help="Samples per prompt.  [default: 8; all with --json]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, step: int | None, prompts: int | None, samples: int | None, as_json: bool) -> None:
    """Show the rollouts of RUN: prompts, samples, rewards, advantages and failed rewards.

    The best and worst samples come first. Samples with a positive advantage become more probable (green),
    those with a negative one less probable (red).
    """
    from titan_rl.recorded import read, recorded
    from titancli.runs import RunFolder

    found = recorded(RunFolder.open(run).path)
    wanted = step if step is not None else max(found, default=None)
    if not found:
        note(f"{run} has no rollouts: its loop is not grpo, or loop.save_rollouts is 0")
    elif wanted is not None and wanted not in found:
        near = min(found, key=lambda other: abs(other - wanted))
        raise UsageError(
            f"{run} has no rollouts of step {wanted}",
            hint=f"{len(found)} steps have rollouts, from step {min(found)} to {max(found)}; the "
            f"nearest is {near}",
        )
    rows = read(found[wanted]) if wanted in found else []
    if as_json:
        document = [{**row, "samples": row["samples"][:samples]} for row in rows[:prompts]]
        print_json("rollouts", {"step": wanted if found else None, "steps": list(found), "prompts": document})
        return
    shown = rows[: prompts or 4]
    for row in shown:
        _show(row, samples or 8)
    if rows:
        steps = f"of {len(found)} steps, {min(found)} to {max(found)}"
        note(f"step {wanted}: {len(shown)} of {len(rows)} prompts; {steps}")


def _show(row: dict[str, Any], count: int) -> None:
    answer = "" if row["answer"] is None else printable(f"  (answer: {row['answer']})")
    print(_in(BOLD, f"{_line(row['prompt'])}{answer}"))
    samples = sorted(row["samples"], key=lambda sample: -sample["advantage"])
    kept = (
        samples
        if len(samples) <= count
        else [*samples[: (count + 1) // 2], *samples[len(samples) - count // 2 :]]
    )
    for sample in kept:
        advantage = sample["advantage"]
        numbers = f"{sample['reward']:7.3f}  {advantage:+7.3f}"
        color = GREEN if advantage > 0 else RED if advantage < 0 else DIM
        parts = " ".join(f"{name} {value:g}" for name, value in sample["rewards"].items())
        tail = [parts] if len(sample["rewards"]) > 1 else []
        tail += [f"{name}: {why}" for name, why in sample["failed"].items()]
        tail += [] if sample["counted"] else ["not counted"]
        suffix = f"  [{'; '.join(tail)}]" if tail else ""
        finish, text = printable(sample["finish"]), _line(sample["text"])
        print(f"  {_in(color, numbers)}  {finish:<6}  {text}{printable(suffix)}")
    if left := len(samples) - len(kept):
        print(_in(DIM, f"  … {left} more in between"))
    print()


def _line(text: str) -> str:
    """Return a text as one line, cut to the terminal's width, without control characters."""
    width = max(40, shutil.get_terminal_size((120, 24)).columns - 40)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= width else f"{shown[: width - 1]}…"


def _in(code: int, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colored(sys.stdout) else text
