"""`titan launch …`: runs as jobs of a cluster."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titancli.commands import Common, RunName, clean, note, out, print_json, short_path
from titancli.commands.starting import Nodes, check_flags, environment_of, one_recipe, start_options
from titancli.errors import EXIT_INTERRUPTED, EXIT_OK, EnvironmentProblem, UsageError
from titancli.runs import RunFolder

if TYPE_CHECKING:
    from titan_slurm.jobs import JobState, SlurmFiles
    from titancli.commands.starting import Plan

RUN = RunName()
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
POLL_SECONDS = 0.5
ASK_SECONDS = 10.0
"""Interval at which Slurm is asked about a job while its logs are followed: its controller serves all
users."""


@click.group("launch", short_help="Train as a job of a cluster: submit, follow, cancel.")
def command() -> None:
    """Train as a job of a cluster: submit, follow, cancel.

    RUN is the run folder that `titan launch slurm` prints.
    """


@command.command("slurm", short_help="Submit a run as a Slurm job, and follow it.")
@start_options
@click.option(
    "--nodes",
    type=Nodes(),
    required=True,
    metavar="N|MIN:MAX",
    help="Number of nodes. MIN:MAX: as many as Slurm gives; the run continues while MIN are left.",
)
@click.option(
    "--sbatch",
    "options",
    multiple=True,
    metavar="OPTION[=VALUE]",
    help="Set any option of sbatch, without the dashes; may be repeated.",
)
@click.option("--detach", is_flag=True, help="Do not follow the job.")
@click.option("--dry-run", is_flag=True, help="Print the script of the job, then exit.")
@JSON
@click.pass_obj
def slurm(
    common: Common,
    arguments: tuple[str, ...],
    nodes: tuple[int | None, int],
    run_dir: Path | None,
    resume: bool,
    allow_drift: bool,
    from_scratch: bool,
    unset: tuple[str, ...],
    variables: tuple[str, ...],
    nproc: int | str | None,
    options: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Submit a run as a Slurm job: one `titan train --resume` on each node, requeued until the run ends.

    Partition, account, time limit and other options of sbatch are fields of the launcher `slurm`, in the
    recipe or as launcher.KEY=VALUE. Follows the job, whose exit code it returns; Ctrl-C leaves the job alone.
    """
    from titan_slurm import jobs
    from titancli.commands.starting import Request, make_plan

    recipe, overrides = one_recipe(arguments, "launch slurm")
    check_flags(run_dir, resume, None, allow_drift, from_scratch, nnodes=1)
    env = environment_of(variables)
    sbatch = _options_of(options)
    files = list(common.plugin_files)
    overrides = ["launcher=titan-slurm/slurm", *overrides]
    again = "titan launch slurm --nodes N"
    plan = make_plan(
        Request(
            *(recipe, overrides, unset, run_dir, resume, None, allow_drift, from_scratch, files, dry_run),
            *(note, again),
        )
    )
    found: dict[str, Any] = {
        "run_folder": str(plan.folder.path),
        "nodes": nodes[1],
        **dict.fromkeys(("script", "job", "state", "exit_code")),
    }
    code: int = EXIT_OK
    if plan.finished:
        note(f"{short_path(plan.folder.path)} is finished: step {plan.start_step}; nothing is submitted")
    else:
        config = _launcher(plan)
        found["script"] = jobs.script(
            config,
            jobs.SlurmFiles(plan.folder),
            name=plan.loaded.recipe.name,
            nodes=nodes,
            nproc=_ranks_per_node(plan, config, nproc, nodes),
            plugins=[*map(str, files), *(f"no:{name}" for name in common.blocked)],
            env=env,
            flags=[*(["--allow-drift"] * allow_drift), *(["--from-scratch"] * from_scratch)],
            sbatch=sbatch,
        )
        if dry_run:
            for line in plan.missing:
                note(f"missing: {line}")
        else:
            code = _submit(plan, found, detach=detach, as_json=as_json)
    if as_json:
        print_json("launch", found)
    elif dry_run and not plan.finished:
        print(found["script"], end="")
    return code


def _options_of(given: tuple[str, ...]) -> dict[str, str | bool]:
    """Parse `--sbatch OPTION[=VALUE]`.

    Raises:
        UsageError: titan sets the option itself, or sbatch has no such option.
    """
    from titan_slurm import wrong_option

    found: dict[str, str | bool] = {}
    for text in given:
        option, equals, value = text.partition("=")
        if wrong := wrong_option(option):
            raise UsageError(f"--sbatch {option}: {wrong}")
        if equals and (not value or not value.isprintable()):
            raise UsageError(f"--sbatch {option}: {value!r} is empty, or is more than one line")
        found[option] = value if equals else True
    return found


def _submit(plan: Plan, found: dict[str, Any], *, detach: bool, as_json: bool) -> int:
    """Submit the job, and follow it unless `detach`; return its exit code, and add the results to `found`."""
    from titan_slurm import jobs

    for line in [*plan.notes, *(f"changed: {change}" for change in plan.drift)]:
        note(line)
    files = jobs.SlurmFiles(plan.folder)
    job = jobs.submit(files, script=found["script"], recipe=plan.lock_text, nodes=found["nodes"])
    found["job"] = job
    note(f"run folder: {short_path(plan.folder.path)}")
    note(f"job {job} is submitted: {short_path(files.script)}")
    if detach:
        run = shlex.quote(short_path(plan.folder.path))
        note(f"follow:  titan launch logs {run} -f")
        note(f"cancel:  titan launch cancel {run}")
        return EXIT_OK
    state, code = _follow(files, job, to_stderr=as_json)
    found.update(state=state.name if state else None, exit_code=code)
    return code


def _launcher(plan: Plan) -> Any:
    from titan_slurm import Slurm

    if isinstance(plan.loaded.recipe.launcher, Slurm):
        return plan.loaded.recipe.launcher
    raise UsageError(
        "`titan launch slurm` needs the launcher slurm", hint="remove launcher=… or launcher.type=…"
    )


def _ranks_per_node(
    plan: Plan, config: Any, wanted: int | str | None, nodes: tuple[int | None, int]
) -> int | None:
    """Return the ranks per node, or None if only the nodes can determine them; a known layout is checked.

    Raises:
        RecipeError: the layout does not fit the nodes.
        UsageError: nodes may be lost but ranks may not be restarted; or a single node has spare nodes.
    """
    from titancli.commands.starting import check_worlds

    if nodes[0] is not None and config.max_restarts == 0:
        raise UsageError(
            "--nodes MIN:MAX needs launcher.max_restarts: how often the run may continue after a loss",
            hint="add launcher.max_restarts=10",
        )
    if config.spare_nodes and nodes[1] == 1:
        raise UsageError(
            "launcher.spare_nodes needs --nodes 2 or more: a single node cannot continue on others",
            hint="add launcher.spare_nodes=0: the job is requeued when its node fails",
        )
    wanted = wanted or config.nproc
    ranks = wanted if isinstance(wanted, int) else config.gpus_per_node
    if ranks is not None:
        check_worlds(plan.loaded, ranks, *nodes)
    return ranks


@command.command("status", short_help="Show the state of a run's job.")
@click.argument("run", type=RUN)
@JSON
def status(run: Path, as_json: bool) -> None:
    """Show the state of RUN's newest job, and that of the run."""
    from titan_slurm import jobs
    from titancli.observe.summary import state_line, summarize

    files = _files(run)
    job = files.newest()
    state = jobs.job_state(job)
    summary = summarize(files.run) if RunFolder.is_run(files.run) else None
    if as_json:
        names = ("name", "reason", "nodes", "restarts", "code")
        shown = {name: getattr(state, name) if state else None for name in names}
        shown |= {
            "state": shown.pop("name"),
            "exit_code": shown.pop("code") if state and state.ended else None,
        }
        about = {"run_folder": str(files.run), "job": job, **shown, "jobs": files.jobs()}
        found = {"state": summary.state, "step": summary.step, "steps": summary.steps} if summary else None
        print_json("job", {"job": about, "run": found})
        return
    out(_job_line(job, state))
    out(f"run {short_path(files.run)}: {state_line(summary) if summary else 'not started yet'}")


@command.command("logs", short_help="Print the logs of a run's job.")
@click.argument("run", type=RUN)
@click.option("-f", "--follow", is_flag=True, help="Print what is added, until the job ends.")
@click.option(
    "--node", type=click.IntRange(0), default=0, metavar="N", show_default=True, help="The node of the job."
)
@JSON
def logs(run: Path, follow: bool, node: int, as_json: bool) -> int:
    """Print what the newest job of RUN printed: Slurm's script, and titan on one of the nodes.

    The logs of the ranks: titan runs logs RUN. With -f the exit code is that of the job.
    """
    if follow and as_json:
        raise UsageError("-f and --json exclude each other")
    files = _files(run)
    job = files.newest()
    if follow:
        return _follow(files, job, node=node)[1]
    there = [path for path in files.outputs(job, node) if path.is_file()]
    if not there:
        raise EnvironmentProblem(f"job {job} has printed nothing yet", hint=f"titan launch status {run}")
    texts = {path: path.read_text(encoding="utf-8", errors="replace").splitlines() for path in there}
    if as_json:
        rows = [{"name": path.stem, "path": str(path), "lines": lines} for path, lines in texts.items()]
        print_json("logs", {"logs": rows})
        return EXIT_OK
    for lines in texts.values():
        for line in lines:
            out(line)
    return EXIT_OK


@command.command("cancel", short_help="Stop a run's job, with a checkpoint.")
@click.argument("run", type=RUN)
@click.option("--now", is_flag=True, help="Do not wait for a checkpoint: Slurm ends the job within seconds.")
@JSON
def cancel(run: Path, now: bool, as_json: bool) -> None:
    """Stop the newest job of RUN. The run finishes its step, saves and ends; it is not requeued."""
    from titan_slurm import jobs

    files = _files(run)
    job = files.newest()
    state = jobs.job_state(job)
    over = state is None or state.ended
    saves = False if over else jobs.cancel(job, now=now)
    what = "finishes its step, saves and stops" if saves else "is cancelled"
    note(_job_line(job, state) if over else f"job {job} {what}")
    if as_json:
        print_json("cancelled-job", {"job": job, "cancelled": not over, "saves": saves})


def _files(run: Path) -> SlurmFiles:
    from titan_slurm.jobs import SlurmFiles

    if not run.is_dir():
        raise EnvironmentProblem(
            f"{run} does not exist", hint="give the run folder that titan launch printed"
        )
    return SlurmFiles(RunFolder(run.absolute()))


def _job_line(job: str, state: JobState | None) -> str:
    if state is None:
        return f"job {job}: Slurm no longer knows it"
    more = [f"on {state.nodes}"] if state.nodes else []
    more += [f"reason {state.reason}"] if state.reason else []
    more += [f"requeued {state.restarts} time{'s' * (state.restarts > 1)}"] if state.restarts else []
    more += [f"exit code {state.code}"] if state.ended and state.code else []
    return ", ".join([f"job {job}: {state.name}", *more])


def _follow(
    files: SlurmFiles, job: str, *, node: int = 0, to_stderr: bool = False
) -> tuple[JobState | None, int]:
    """Print a job's logs until it ends; return its last state and the resulting exit code."""
    from titan_slurm.jobs import job_state
    from titancli.observe.logs import Lines

    readers = [Lines(path) for path in files.outputs(job, node)]
    stream = sys.stderr if to_stderr else sys.stdout
    said, asked, state, over = "", 0.0, None, False
    try:
        while True:
            if time.monotonic() - asked >= ASK_SECONDS or not asked:
                try:
                    state = job_state(job)
                    line, over = _job_line(job, state), state is None or state.ended
                except EnvironmentProblem as error:  # a restarting controller is no reason to stop
                    line = f"job {job}: {error.message}"
                asked = time.monotonic()
                if line != said:
                    note(line)
                    said = line
            for reader in readers:
                for text in reader.poll():
                    print(clean(text), file=stream, flush=True)
            if over:
                break
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        run = shlex.quote(short_path(files.run))
        note(f"\njob {job} continues; follow: titan launch logs {run} -f; stop: titan launch cancel {run}")
        return state, EXIT_INTERRUPTED
    for reader in readers:
        for text in reader.rest():
            print(clean(text), file=stream)
    code = EXIT_OK if state is None else state.exit_code
    if code:
        note(f"logs of all nodes: {short_path(files.logs)}/slurm-{job}-node-*.log")
    return state, code
