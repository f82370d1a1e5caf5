"""Slurm jobs: their script, submission and state. Torch-free.

The script starts `titan train RECIPE --run-dir RUN --resume` on each node. Everything submitted is kept in
the run folder, since none of it may change while the job is queued:

    slurm/job.sh       the script
    slurm/recipe.toml  the resolved recipe
    slurm/jobs.json    the jobs of the run, the newest last
    slurm/lock         held while a job is submitted
    slurm/exit-JOB-N   the exit code of titan on each node
    logs/slurm-JOB.log and slurm-JOB-node-N.log: output of the script, and of titan on each node
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_slurm import FIELDS, Slurm
from titancli.errors import EXIT_FAILED, EXIT_OK, EnvironmentProblem
from titancli.files import read_json
from titancli.locks import hold_file
from titancli.runs import RunFolder, timestamp, write_atomically

ENDED = ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"]
ENDED += ["PREEMPTED", "REVOKED", "TIMEOUT"]
"""Final states of a job; all others precede one of them."""
TIMEOUT_SECONDS = 60.0
"""Maximum time that a command of Slurm may take."""
FORMAT = 1

SCRIPT = """\
#!/bin/bash
# Written by `titan launch slurm`: one `titan train` on each node, which start the run or resume it.
{directives}

# After `scancel` or `titan launch cancel` the job is not started again.
cancelled=
trap 'cancelled=1' TERM

# `python -m` would look for modules in the working directory first.
export PYTHONSAFEPATH=1

# Each node leaves the exit code of its titan here.
export CODES={codes}-$SLURM_JOB_ID
rm -f "$CODES"-*

srun {options} --output={output} \\
  bash -c 'trap : TERM USR1; "$@"; code=$?; echo $code > "$CODES-$SLURM_NODEID"; exit $code' node \\
  {command}
code=$?
lost=

# The greatest code, which srun returns, may be that of a node which was lost, or whose titan was killed.
if [ "$code" -ne 0 ]; then
  if grep -qsx 0 "$CODES"-*; then code=0
  elif grep -qsx {stopped} "$CODES"-*; then code={stopped}
  else
    left=$(cat "$CODES"-* 2> /dev/null | wc -l)
    if [ "$left" -gt 0 ] && [ "$left" -lt "$SLURM_JOB_NUM_NODES" ]; then lost=1; fi
  fi
fi

# Stopped by a signal, with all saved, or too few nodes are left: the same job once more, which resumes.
if [ "$code" -eq {stopped} ] || [ -n "$lost" ]; then
  [ -n "$cancelled" ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


class SlurmFiles:
    """The submitted files in a run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.run = folder.path
        self.logs = folder.logs
        self.path = folder.path / "slurm"
        self.script = self.path / "job.sh"
        self.recipe = self.path / "recipe.toml"
        self.jobs_file = self.path / "jobs.json"
        self.lock = self.path / "lock"

    def jobs(self) -> list[dict[str, Any]]:
        """Return the jobs submitted for the run, the newest last: `id`, `submitted`, `nodes`.

        Raises:
            EnvironmentProblem: the file is damaged, or of another version.
        """
        try:
            found = read_json(self.jobs_file)
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']} is that of another version of titan")
            return [{name: job[name] for name in ("id", "submitted", "nodes")} for job in found["jobs"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentProblem(f"cannot read {self.jobs_file}: {error}") from error

    def newest(self) -> str:
        """Return the id of the newest job.

        Raises:
            EnvironmentProblem: no job was submitted.
        """
        jobs = self.jobs()
        if not jobs:
            raise EnvironmentProblem(
                f"no Slurm job was submitted for {self.run}",
                hint=f"titan launch slurm {self.run} --resume --nodes N",
            )
        return str(jobs[-1]["id"])

    def outputs(self, job: str, node: int | None = None) -> list[Path]:
        """Return the log of a job's script, and that of titan on one node, or on every node."""
        of_nodes = (
            [self.logs / f"slurm-{job}-node-{node}.log"]
            if node is not None
            else sorted(self.logs.glob(f"slurm-{job}-node-*.log"), key=lambda path: (len(path.name), path))
        )
        return [self.logs / f"slurm-{job}.log", *of_nodes]


# ------------------------------------------------------------------------------------------------ the script


def script(
    config: Slurm,
    files: SlurmFiles,
    *,
    name: str,
    nodes: tuple[int | None, int],
    nproc: int | None,
    plugins: Sequence[str],
    env: Mapping[str, str],
    flags: Sequence[str] = (),
    sbatch: Mapping[str, str | bool] | None = None,
) -> str:
    """Return the text of a job's script.

    Args:
        name: the recipe's name.
        nodes: the minimum with which the run continues, None if the number is fixed; and the maximum.
        nproc: ranks per node; None: one per GPU that titan finds there.
        plugins: arguments of `-p`.
        env: variables for `titan train --env`.
        flags: further flags of `titan train`.
        sbatch: options of sbatch that override the recipe's.

    Raises:
        EnvironmentProblem: Slurm would misread the name of the run folder.
    """
    if bad := [char for char in "%\\" if char in str(files.run)] or not str(files.run).isprintable():
        shown = repr(bad[0]) if isinstance(bad, list) else "a character that cannot be printed"
        raise EnvironmentProblem(
            f"the path of the run folder contains {shown}, which Slurm would replace: {files.run}",
            hint="use another --run-dir",
        )
    least, most = nodes
    survives = least is not None or config.spare_nodes > 0
    flags = ["--resume", *flags, *(word for plugin in plugins for word in ("-p", plugin))]
    flags += [word for variable, value in env.items() for word in ("--env", f"{variable}={value}")]
    flags += ["--nproc", str(nproc)] if nproc is not None else []
    flags += ["--nnodes", str(most) if least is None else f"{least}:{most}"] if most > 1 else []
    train = [sys.executable, "-m", "titancli", "train", str(files.recipe), "--run-dir", str(files.run)]
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH {line}" for line in directives(config, files, name, nodes, sbatch)),
        codes=shlex.quote(str(files.path / "exit")),
        options=" ".join(["--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0", *["--no-kill"] * survives]),
        output=shlex.quote(str(files.logs / "slurm-%j-node-%n.log")),
        command=shlex.join([*train, *flags]),
        stopped=75,
    )


def directives(
    config: Slurm,
    files: SlurmFiles,
    name: str,
    nodes: tuple[int | None, int],
    sbatch: Mapping[str, str | bool] | None = None,
) -> list[str]:
    """Return the options of sbatch as written after `#SBATCH`."""
    least, most = nodes[0], nodes[1] + config.spare_nodes
    options: dict[str, str | int | bool] = {
        "job-name": job_name(files, name),
        "nodes": most if least is None else f"{least}-{most}",
        "ntasks-per-node": 1,
        "output": str(files.logs / "slurm-%j.log"),
        "open-mode": "append",
        "signal": f"USR1@{config.signal_seconds}",
        "requeue": True,
    }
    for option, field in FIELDS.items():
        if (value := getattr(config, field)) is not None:
            options[option] = value
    if least is not None or config.spare_nodes:
        options["no-kill"] = True  # otherwise Slurm ends the job as soon as one of its nodes fails
    given = {**config.sbatch, **(sbatch or {})}
    options |= given
    # A second job of a run waits for the first, however it was submitted.
    options["dependency"] = ",".join(["singleton", *filter(None, [str(given.get("dependency", ""))])])
    return [
        f"--{option}" if value is True else f"--{option}={_quoted(str(value))}"
        for option, value in options.items()
        if value is not False
    ]


def job_name(files: SlurmFiles, name: str) -> str:
    """Return the name of a run's jobs, which differs from that of all other runs."""
    own = hashlib.sha256(str(files.run).encode()).hexdigest()[:8]
    return f"titan-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{own}"


def _quoted(value: str) -> str:
    """Quote a value for a directive line of a script, which sbatch parses by other rules than a shell."""
    if re.fullmatch(r"[\w./:@,=+%~-]+", value):
        return value
    if not value.isprintable():  # a line break would end the directive, and bash run what follows
        raise EnvironmentProblem(f"{value!r} cannot be written as an option of sbatch: it has more than text")
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


# -------------------------------------------------------------------------------------------- the submission


def submit(files: SlurmFiles, *, script: str, recipe: str, nodes: int) -> str:
    """Submit a job and return its id. The files that it needs are kept in the run folder.

    Raises:
        EnvironmentProblem: sbatch is missing or rejects the job, a job of the run has not ended, or the
            folder cannot be written. A folder created for it is removed again.
    """
    require("sbatch")
    fresh = not files.run.exists()
    try:
        files.path.mkdir(parents=True, exist_ok=True)
        files.logs.mkdir(exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot create {files.path}: {error.strerror}") from error
    try:
        job = _submit(files, script, recipe, nodes)
    except EnvironmentProblem:
        if fresh and not files.jobs_file.exists():
            shutil.rmtree(files.run, ignore_errors=True)
        raise
    return job


def _submit(files: SlurmFiles, text: str, recipe: str, nodes: int) -> str:
    hold = hold_file(files.lock, f"the submission of {files.run}")
    try:
        before = files.jobs()
        if before and (state := job_state(before[-1]["id"])) is not None and not state.ended:
            raise EnvironmentProblem(
                f"job {before[-1]['id']} of {files.run} is {state.name}",
                hint=f"wait for it, or: titan launch cancel {shlex.quote(str(files.run))}",
            )
        write_atomically(files.recipe, recipe)
        write_atomically(files.script, text)
        done = run("sbatch", "--parsable", str(files.script))
        job = done.stdout.strip().partition(";")[0]
        if done.returncode or not job.isdecimal():
            words = (
                done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            ).splitlines()
            raise EnvironmentProblem(
                f"sbatch refused the job: {' '.join(words)}",
                hint="`titan launch slurm --dry-run` prints the script; partition, account, time and so on "
                "are fields of [launcher]: titan show launcher/slurm",
            )
        entry = {"id": job, "submitted": timestamp(), "nodes": nodes}
        try:
            write_atomically(
                files.jobs_file, json.dumps({"format": FORMAT, "jobs": [*before, entry]}, indent=2)
            )
        except EnvironmentProblem as error:
            raise EnvironmentProblem(
                f"job {job} is submitted, but {error.message}", hint=error.hint
            ) from error
        return job
    finally:
        hold.release()


# -------------------------------------------------------------------------------------------------- the job


@dataclass(frozen=True)
class JobState:
    """State of a job as reported by Slurm."""

    name: str
    """`PENDING`, `RUNNING`, `COMPLETED`, …"""
    reason: str | None = None
    """Reason why it waits, or why it ended."""
    nodes: str | None = None
    """Its nodes, in Slurm's list notation."""
    restarts: int | None = None
    """Number of times that it was requeued; None if Slurm does not report it."""
    code: int | None = None
    """Exit code of its script."""

    @property
    def ended(self) -> bool:
        return self.name in ENDED

    @property
    def exit_code(self) -> int:
        """Return the exit code of a command that waited for the job."""
        return EXIT_OK if self.name == "COMPLETED" else self.code or EXIT_FAILED


def job_state(job: str) -> JobState | None:
    """Ask Slurm about a job; return None if Slurm no longer knows it.

    Raises:
        EnvironmentProblem: Slurm's commands are missing, or its controller does not answer.
    """
    done = run("scontrol", "--oneliner", "show", "job", job)
    if done.returncode == 0:
        return _shown(done.stdout)
    if "Invalid job id" not in done.stderr:
        raise EnvironmentProblem(f"Slurm does not answer: {done.stderr.strip()}", hint="try again later")
    if shutil.which("sacct") is None:
        return None
    done = run("sacct", "-n", "-P", "-X", "-j", job, "-o", "State,ExitCode,NodeList")
    rows = done.stdout.strip().splitlines() if done.returncode == 0 else []  # accounting may be disabled
    if not rows:
        return None
    name, code, nodes = rows[-1].split("|")
    return JobState(name.partition(" ")[0], nodes=nodes, code=int(code.partition(":")[0]))


def _shown(line: str) -> JobState:
    def value(key: str) -> str | None:
        found = re.search(rf"(?:^|\s){key}=(\S*)", line)
        return found[1] if found and found[1] not in ("", "(null)", "None") else None

    code = (value("ExitCode") or "0").partition(":")[0]
    name, restarts = value("JobState") or "UNKNOWN", value("Restarts")
    return JobState(name, value("Reason"), value("NodeList"), int(restarts) if restarts else 0, int(code))


def cancel(job: str, *, now: bool = False) -> bool:
    """Stop a job. A running one saves first, unless `now`; return whether it does.

    Raises:
        EnvironmentProblem: Slurm refuses.
    """
    state = job_state(job)
    if now or state is None or state.name != "RUNNING":
        _must("scancel", job)
        return False
    _must("scancel", "--batch", "--signal=TERM", job)  # so that its script does not start it again
    _must("scancel", "--signal=USR1", job)
    return True


def _must(*command: str) -> None:
    done = run(*command)
    if done.returncode:
        raise EnvironmentProblem(f"{shlex.join(command)} failed: {done.stderr.strip()}")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm.

    Raises:
        EnvironmentProblem: the command is missing, or takes too long.
    """
    require(command[0])
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem(
            f"{command[0]} has not answered for {TIMEOUT_SECONDS:.0f} seconds", hint="try again later"
        ) from error


def require(command: str) -> None:
    """Check that a command of Slurm exists.

    Raises:
        EnvironmentProblem: it does not.
    """
    if shutil.which(command) is None:
        raise EnvironmentProblem(
            f"{command} is not on PATH",
            hint="run this on a login node of a Slurm cluster; `titan launch slurm --dry-run` prints the "
            "script anywhere",
        )
