"""A sweep: one recipe, every combination of some values, a folder of runs. Torch-free.

    DIR/sweep.json          the swept keys, and the name of the first run
    DIR/recipes/NAME.toml   the resolved recipe that each run is started from
    DIR/logs/NAME.log       output of its command
    DIR/NAME/               the run

Each run is an ordinary `titan train`, so every command for runs works with it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from titancli.commands.starting import Request, changes, check_world, count_processes, make_plan
from titancli.errors import EnvironmentProblem, RecipeError, UsageError
from titancli.files import read_json
from titancli.locks import Hold, hold_file
from titancli.observe.summary import summarize
from titancli.recipe import inline, load_recipe, lock_text
from titancli.runs import RunFolder, write_atomically

if TYPE_CHECKING:
    from titancli.recipe import Loaded

SWEEP_FORMAT = 1
SWEEP_NAME = "sweep.json"
OWN = ("sweep.lock", "recipes", "logs")
"""Files left by a sweep that failed at its start."""
LONGEST = 60
"""Maximum number of characters of a value in a run's name."""
DONE = ("finished", "data_ended")


@dataclass(frozen=True)
class Setting:
    """A key and one value for it."""

    key: str
    text: str
    """The value as on the command line."""

    @property
    def override(self) -> str:
        return f"{self.key}={self.text}"

    @property
    def value(self) -> Any:
        """Return the value parsed as TOML; invalid TOML is text, as in an override."""
        try:
            return tomli.loads(f"x = {self.text}")["x"]
        except tomli.TOMLDecodeError:
            return self.text


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str
    settings: tuple[Setting, ...]
    folder: RunFolder
    recipe: Path
    lock_text: str
    action: str
    """The action to take: `start`, `resume`, `retry` (it failed), or `skip` (it is finished)."""

    @property
    def log(self) -> Path:
        return self.folder.path.parent / "logs" / f"{self.name}.log"

    @property
    def tries(self) -> int:
        """Maximum number of starts: a failed run is retried once."""
        return {"skip": 0, "retry": 1}.get(self.action, 2)


def parse_set(argument: str) -> list[Setting]:
    """Return the settings of one `--set KEY=VALUE,VALUE`; commas in quotes and brackets do not separate.

    Raises:
        UsageError: the argument is not of this form.
    """
    key, equals, text = argument.partition("=")
    hint = "write --set KEY=VALUE,VALUE, for example --set optimizer.lr=1e-3,3e-3"
    if not equals or not key.strip():
        raise UsageError(f"--set {argument}: there is no KEY=", hint=hint)
    values = _split(text, argument)
    if values[-1] == "" and len(values) > 1:  # as at the end of an array
        values.pop()
    if "" in values:
        raise UsageError(f"--set {argument}: a value is missing", hint=hint)
    return [Setting(key.strip(), value) for value in values]


def _split(text: str, argument: str) -> list[str]:
    """Split a text at commas outside of quotes and brackets.

    Raises:
        UsageError: a quote or a bracket is not closed.
    """
    parts, begin, depth, at = [], 0, 0, 0
    while at < len(text):
        if text[at] in "\"'":
            quoted = re.compile(r'"(\\.|[^"\\])*"' if text[at] == '"' else "'[^']*'").match(text, at)
            if quoted is None:
                raise UsageError(
                    f"--set {argument}: a quote has no end", hint="put text in quotes: 'KEY=\"it's\"'"
                )
            at = quoted.end()
            continue
        depth += (text[at] in "[{") - (text[at] in "]}")
        if depth < 0:
            break
        if text[at] == "," and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
        at += 1
    if depth != 0:
        raise UsageError(f"--set {argument}: brackets do not match")
    return [*parts, text[begin:].strip()]


def combinations(arguments: Sequence[str], overrides: Sequence[str]) -> list[tuple[Setting, ...]]:
    """Return the product of the values, the last key changing fastest.

    Raises:
        UsageError: a key or a value is given twice, or a `--set` cannot be parsed.
    """
    axes = [parse_set(argument) for argument in arguments]
    fixed = {override.partition("=")[0].strip() for override in overrides}
    keys: set[str] = set()
    for axis in axes:
        key = axis[0].key
        if key in keys or key in fixed:
            raise UsageError(f"{key} is given twice", hint="give all its values in one --set")
        keys.add(key)
        shown = [inline(setting.value) for setting in axis]
        if twice := [value for n, value in enumerate(shown) if value in shown[:n]]:
            raise UsageError(f"--set {key}: the value {twice[0]} is given twice")
    return list(itertools.product(*axes))


def name_of(settings: Sequence[Setting]) -> str:
    """Return the name of a run: `lr=0.001,seed=1`; with whole keys if their last parts are not unique."""
    last = [setting.key.rpartition(".")[2] for setting in settings]
    short = len(set(last)) == len(last)
    keys = last if short else [setting.key for setting in settings]
    return ",".join(
        f"{_as_name(key)}={_as_name(s.value if isinstance(s.value, str) else inline(s.value))}"
        for key, s in zip(keys, settings, strict=True)
    )


def _as_name(text: str) -> str:
    """Return a text as part of a file name; changed texts get a hash, so that names stay unique."""
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", text)[:LONGEST]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


# ------------------------------------------------------------------------------------------------- plan


def make_jobs(
    reference: str,
    overrides: Sequence[str],
    settings: Sequence[tuple[Setting, ...]],
    folder: Path,
    nproc: int | str | None,
    plugin_files: Sequence[Path],
) -> list[Job]:
    """Check every combination and return a job for each; writes nothing.

    Raises:
        RecipeError: with every problem of every combination.
        EnvironmentProblem: the folder has other contents, or the runs of another recipe.
    """
    loaded, problems = [], []
    for combination in settings:
        try:
            loaded.append(load_recipe(reference, [*overrides, *(one.override for one in combination)]))
        except RecipeError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise RecipeError(problems)
    _refuse_another(folder, loaded[0], {one.key for one in settings[0]})
    jobs = []
    for combination, recipe in zip(settings, loaded, strict=True):
        job = _job(folder, combination, recipe)
        if job.action != "skip":
            try:
                _check(job, reference, overrides, nproc, plugin_files)
            except RecipeError as error:
                problems += [problem for problem in error.problems if problem not in problems]
        jobs.append(job)
    if problems:
        raise RecipeError(problems)
    texts = {job.lock_text: job.name for job in jobs}
    if same := [job.name for job in jobs if texts[job.lock_text] != job.name]:
        raise UsageError(f"{same[0]} and {texts[_named(jobs, same[0]).lock_text]} are the same recipe")
    return jobs


def _named(jobs: Sequence[Job], name: str) -> Job:
    return next(job for job in jobs if job.name == name)


def _job(folder: Path, settings: tuple[Setting, ...], loaded: Loaded) -> Job:
    """Return the job for a combination.

    Raises:
        EnvironmentProblem: a run of that name has another recipe, or is running.
    """
    name = name_of(settings)
    run, action = RunFolder(folder / name), "start"
    recipe = folder / "recipes" / f"{name}.toml"
    if RunFolder.is_run(run.path):
        # Its own lock file may contain more than the recipe: a repository's commit, a later end.
        drift = changes(load_recipe(recipe if recipe.is_file() else run.path).data, loaded.data)
        if drift:
            raise EnvironmentProblem(
                f"{run.path} is a run of another recipe:\n" + "\n".join(f"  {one}" for one in drift),
                hint="use another --dir",
            )
        state = summarize(run.path).state
        if state == "running":
            run.hold().release()  # raises an error that names the holder
        action = "skip" if state in DONE else "retry" if state == "failed" else "resume"
    return Job(name, settings, run, recipe, lock_text(loaded), action)


def _check(
    job: Job,
    reference: str,
    overrides: Sequence[str],
    nproc: int | str | None,
    plugin_files: Sequence[Path],
) -> None:
    """Check everything that `titan train` would reject."""
    every = [*overrides, *(one.override for one in job.settings)]
    plan = make_plan(
        Request(
            reference,
            every,
            run_dir=job.folder.path,
            resume=True,
            plugin_files=plugin_files,
            dry_run=True,
            nproc=nproc,
        )
    )
    if plan.missing:
        raise EnvironmentProblem("\n".join(plan.missing))
    check_world(plan.loaded, count_processes(plan))


def _refuse_another(folder: Path, loaded: Loaded, keys: set[str]) -> None:
    """Check that the folder is new, or has a sweep of this recipe.

    Raises:
        EnvironmentProblem: it has something else.
    """
    if RunFolder.is_run(folder) or (folder.exists() and not folder.is_dir()):
        raise EnvironmentProblem(f"{folder} is not a folder of a sweep", hint="use another --dir")
    if not (folder / SWEEP_NAME).exists():
        if folder.is_dir() and any(entry.name not in OWN for entry in folder.iterdir()):
            raise EnvironmentProblem(
                f"{folder} exists and has no {SWEEP_NAME}", hint="use a --dir that does not exist"
            )
        return
    record = _record(folder)
    first = load_recipe(folder / "recipes" / f"{record['first']}.toml")
    before, now = first.recipe.name, loaded.recipe.name
    if before != now:
        raise EnvironmentProblem(f"{folder} is a sweep of {before}, not of {now}", hint="use another --dir")
    # A swept type or flavor determines the rest of its table.
    swept = {key.removesuffix(".type").removesuffix(".flavor") for key in {*keys, *record["keys"]}}
    drift = [
        change
        for change in changes(first.data, loaded.data)
        if not any(change.key == key or change.key.startswith(f"{key}.") for key in swept)
    ]
    if drift:
        raise EnvironmentProblem(
            f"{folder} is a sweep of another recipe, also named {now}:\n"
            + "\n".join(f"  {one}" for one in drift),
            hint="use another --dir",
        )


def _record(folder: Path) -> dict[str, Any]:
    """Read the sweep's record.

    Raises:
        EnvironmentProblem: it cannot be read, or has another format.
    """
    path = folder / SWEEP_NAME
    try:
        record = read_json(path)
        if record["format"] != SWEEP_FORMAT:
            raise ValueError(f"format {record['format']!r}, this version of titan reads {SWEEP_FORMAT}")
        if not isinstance(record["first"], str) or not all(isinstance(key, str) for key in record["keys"]):
            raise ValueError("it names no keys")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentProblem(f"cannot read {path}: {error}", hint="use another --dir") from error
    return record


def hold(folder: Path) -> Hold:
    """Lock a sweep's folder, creating it if needed.

    Raises:
        EnvironmentProblem: it cannot be created, or another sweep is using it.
    """
    try:
        (folder / "recipes").mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot create {folder}: {error.strerror}", hint="use another --dir"
        ) from error
    return hold_file(folder / "sweep.lock", f"the sweep {folder}")


def write(folder: Path, jobs: Sequence[Job]) -> None:
    """Write the files that the runs are started from.

    Raises:
        EnvironmentProblem: a file cannot be written.
    """
    for job in jobs:
        if not job.recipe.exists() or job.recipe.read_text(encoding="utf-8") != job.lock_text:
            write_atomically(job.recipe, job.lock_text)
    record: dict[str, Any] = {"format": SWEEP_FORMAT, "first": jobs[0].name, "keys": []}
    if (folder / SWEEP_NAME).exists():
        record = _record(folder)
    keys = sorted({*record["keys"], *(one.key for one in jobs[0].settings)})
    write_atomically(folder / SWEEP_NAME, json.dumps({**record, "keys": keys}, indent=2) + "\n")
