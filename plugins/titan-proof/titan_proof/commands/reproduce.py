"""`titan reproduce`: run a recorded run again, and report whether its numbers are the same."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titancli.commands import (
    Common,
    NumberOrAuto,
    RecipeOrOverride,
    note,
    out,
    print_json,
    printable,
    short_path,
    split_overrides,
)
from titancli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, UsageError

if TYPE_CHECKING:
    from titan_proof.differences import Difference
    from titan_proof.reproduction import Reproduction
    from titan_proof.verdict import Verdict

EFFECTS = {"results": "changes results", "rounding": "changes rounding", "none": "no effect"}


@click.command("reproduce", short_help="Run a recorded run again and compare the numbers.")
@click.argument(
    "arguments", metavar="RUN|FILE [KEY=VALUE]...", nargs=-1, required=True, type=RecipeOrOverride()
)
@click.option("--check", "only_check", is_flag=True, help="Show what differs here, and start nothing.")
@click.option(
    "--export",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write everything that a reproduction needs to one file.",
)
@click.option(
    "--extract",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the recipe, the plugin files and the uncommitted patch to a new folder.",
)
@click.option(
    "--compare", "other", metavar="RUN|FILE", help="Compare with another run instead of starting one."
)
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Reproduce only the first N steps.")
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="The new run folder.")
@click.option("--nproc", type=NumberOrAuto(), help="Processes on this machine.  [default: those of the run]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(
    common: Common,
    arguments: tuple[str, ...],
    only_check: bool,
    file: Path | None,
    folder: Path | None,
    other: str | None,
    steps: int | None,
    run_dir: Path | None,
    nproc: int | str | None,
    as_json: bool,
) -> int:
    """Run RUN again in a new run folder, and compare losses, gradient norms and weights.

    \b
    titan reproduce RUN --export mine.repro   one file, to keep or send
    titan reproduce mine.repro --check        what differs from this machine
    titan reproduce mine.repro                run it here, and compare

    The answer is "bitwise equal", "within the envelope" (another layout or number of threads), or "diverges
    at step K", with the known difference that can explain it. Use overrides for paths that differ on this
    machine, such as dataset.paths. The exit code is 0 unless the runs diverge; with --check, it is 0 unless
    something relevant differs.
    """
    from titan_proof.reproduction import find

    references, overrides = split_overrides(arguments)
    actions = [only_check, file is not None, folder is not None, other is not None]
    if len(references) != 1:
        raise UsageError(
            f"reproduce takes one run or file, not {' and '.join(references) or 'none'}",
            hint="titan reproduce RUN|FILE [KEY=VALUE]...",
        )
    if sum(actions) > 1:
        raise UsageError("--check, --export, --extract and --compare exclude each other")
    if any(actions[1:]) and (overrides or steps or run_dir or nproc):
        raise UsageError("overrides, --steps, --run-dir and --nproc are for a reproduction that is started")
    if only_check and (steps or run_dir):
        raise UsageError("--check starts nothing: it takes no --steps and no --run-dir")
    run = find(references[0])
    for line in run.missing:
        note(f"note: {line}")
    if file is not None or folder is not None:
        return _write(run, file, folder, as_json=as_json)
    if other is not None:
        from titan_proof.verdict import compare

        again = find(other)
        return _report(run, again, compare(run, again), EXIT_OK, None, as_json=as_json)
    if only_check:
        return _check(run, overrides, nproc, common.plugin_files, as_json=as_json)
    return _again(run, references[0], overrides, steps, run_dir, nproc, common, as_json=as_json)


def _write(run: Reproduction, file: Path | None, folder: Path | None, *, as_json: bool) -> int:
    from titan_proof.reproduction import extract, write

    if file is not None:
        write(file.absolute(), run)
    files = [file] if file is not None else extract(run, folder) if folder is not None else []
    for path in files:
        note(f"wrote {short_path(path)}")
    if file is not None:
        note(f"reproduce: titan reproduce {shlex.quote(str(file))}")
    if as_json:
        print_json(
            "reproduction-files", {"files": [str(path.absolute()) for path in files], "missing": run.missing}
        )
    return EXIT_OK


def _check(
    run: Reproduction,
    overrides: Sequence[str],
    nproc: int | str | None,
    plugin_files: Sequence[Path],
    *,
    as_json: bool,
) -> int:
    from titan_proof import reproduce
    from titan_proof.differences import provenance_differences, unknown

    with quiet_stdout(as_json):
        now, problems = reproduce.here(run, overrides=overrides, nproc=nproc, plugin_files=plugin_files)
    found = provenance_differences(run, now)
    lacking = [line for line in unknown(run, now) if line.endswith("the run")]
    code = EXIT_FAILED if problems or any(one.effect != "none" for one in found) else EXIT_OK
    if as_json:
        print_json("reproduction", _document(run, None, None, found, lacking, problems))
        return code
    for problem in problems:
        out(f"cannot be reproduced here: {printable(problem)}")
    print_differences(found)
    for line in lacking:
        out(line)
    if code == EXIT_OK:
        print("nothing relevant differs")
    return code


def _again(
    run: Reproduction,
    reference: str,
    overrides: Sequence[str],
    steps: int | None,
    run_dir: Path | None,
    nproc: int | str | None,
    common: Common,
    *,
    as_json: bool,
) -> int:
    from titan_proof import reproduce
    from titan_proof.reproduction import collect
    from titan_proof.verdict import compare
    from titancli.runs import RunFolder

    last = reproduce.target(run, steps)
    plan = reproduce.plan(
        run,
        overrides=overrides,
        steps=last,
        run_dir=run_dir,
        nproc=nproc,
        plugin_files=common.plugin_files,
        say=note,
    )
    request = reproduce.request(run, plan, nproc, traceback=common.traceback)
    if run.run.get("state") == "running":
        note(f"note: the run is still running; it is reproduced up to step {run.last_step}")
    folders: list[RunFolder] = []

    def announce(folder: RunFolder) -> None:
        folders.append(folder)
        note(f"run folder: {short_path(folder.path)}")

    with quiet_stdout(as_json):
        code, error = reproduce.launch(plan, request, announce)
    if code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything is saved
    again = collect(folders[0].path)
    if error is not None and run.run.get("state") != "failed":
        note(f"the reproduction failed: {error}")
    verdict = compare(run, again)
    exit_code = _report(run, again, verdict, code, error, as_json=as_json)
    if code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        path = shlex.quote(short_path(folders[0].path))
        note(f"stopped at step {again.last_step}; to go on: titan train {path} --resume")
        note(f"then:    titan reproduce {shlex.quote(reference)} --compare {path}")
    return exit_code


def _report(
    run: Reproduction,
    again: Reproduction,
    verdict: Verdict,
    code: int,
    error: Exception | None,
    *,
    as_json: bool,
) -> int:
    """Print the verdict and return the exit code; `code` is that of the new run, and is returned if that
    run did not end as the recorded one did."""
    both_failed = run.run.get("state") == "failed" == again.run.get("state")
    if code == EXIT_OK or both_failed:
        code = EXIT_OK if verdict.result in ("bitwise_equal", "within_envelope") else EXIT_FAILED
    if as_json:
        print_json(
            "reproduction",
            _document(
                run, again, verdict, verdict.differences, verdict.unknown, [str(error)] if error else []
            ),
        )
        return code
    for line in _lines(run, again, verdict):
        out(line)
    print_differences([one for one in verdict.differences if one not in verdict.because])
    for line in verdict.unknown:
        out(line)
    return code


def _lines(run: Reproduction, again: Reproduction, verdict: Verdict) -> Iterator[str]:
    from titan_proof.reproduction import COMPARED

    steps = verdict.compared
    span = f"{len(steps)} logged step{'s' * (len(steps) > 1)}, {steps[0]} to {steps[-1]}" if steps else ""
    if verdict.result == "not_comparable":
        yield "not comparable: the runs have no logged step in common"
    elif verdict.result == "bitwise_equal":
        yield f"bitwise equal: losses and gradient norms of {span}"
    elif verdict.result == "within_envelope":
        yield f"within the layout's envelope: {span}"
    else:
        why = "; ".join(map(str, verdict.because))
        yield (
            f"diverges at step {verdict.step} because of {why}"
            if why
            else (f"diverges at step {verdict.step}, and no known difference explains it")
        )
    if verdict.result == "within_envelope":
        yield f"  because of {'; '.join(map(str, verdict.because))}"
    if verdict.result in ("parts", "within_envelope"):
        for one in verdict.largest:
            name, within = one.metric.replace("_", " "), verdict.envelope.get(one.metric)
            limit = "" if within is None else f" (envelope {within:.1e} at step {steps[-1]})"
            yield (
                f"  largest relative difference of {name}: {one.relative:.1e} at step {one.step}"
                f"{limit if verdict.result == 'within_envelope' else ''}"
            )
    if verdict.weights:
        equal = [step for step, same in verdict.weights.items() if same]
        unequal = [step for step, same in verdict.weights.items() if not same]
        if equal:
            yield f"  weights and optimizer state: equal at step {', '.join(equal)}"
        if unequal:
            yield f"  weights and optimizer state: not equal at step {', '.join(unequal)}"
    elif steps and not any(one.metric not in COMPARED for one in verdict.largest):
        yield "  weights: not compared, the runs have no checkpoint of the same step and layout"
    ends = [_end(run), _end(again)]
    if (
        "failed" in (run.run.get("state"), again.run.get("state"))
        or ends[0].split(":")[0] != ends[1].split(":")[0]
    ):
        yield f"  run: {ends[0]}; reproduction: {ends[1]}"


def _end(run: Reproduction) -> str:
    error = f": {printable(str(run.run['error']).splitlines()[0])}" if run.run.get("error") else ""
    return f"{str(run.run.get('state')).replace('_', ' ')} after step {run.run.get('step')}{error}"


def print_differences(found: Sequence[Difference]) -> None:
    for effect in ("results", "rounding", "none"):
        for one in found:
            if one.effect == effect:
                out(f"differs ({EFFECTS[effect]}): {printable(str(one))}")


def _document(
    run: Reproduction,
    again: Reproduction | None,
    verdict: Verdict | None,
    found: Sequence[Difference],
    lacking: Sequence[str],
    problems: Sequence[str],
) -> dict[str, Any]:
    from titancli.observe.events import plain

    answer = None
    if verdict is not None:
        answer = {
            "result": verdict.result,
            "step": verdict.step,
            "because": [asdict(one) for one in verdict.because],
            "compared_steps": verdict.compared,
            "weights": verdict.weights,
            "largest": [asdict(one) for one in verdict.largest],
            "envelope": verdict.envelope,
        }
    return plain(
        {
            "run": run.run,
            "reproduction": None if again is None else again.run,
            "verdict": answer,
            "differences": [asdict(one) for one in found],
            "unknown": list(lacking),
            "missing": run.missing,
            "problems": list(problems),
        }
    )


@contextmanager
def quiet_stdout(quiet: bool) -> Iterator[None]:
    """Send stdout to stderr, so that stdout contains only one document."""
    if not quiet:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
