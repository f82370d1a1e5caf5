"""Everything needed to reproduce a run and compare the result, and the file that holds it. Torch-free.

    {"xxh3_64": "…",          of all lines after this one
    "format": 1,
    "name": …, "recipe": …}   the fields of `Reproduction`

The file is only data: the text of plugins and of the uncommitted patch is for reading and comparing, and
nothing in it is run.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from titan_proof.digests import read_starts
from titancli.checkpoint import STEP_NAME, read_manifest
from titancli.commands.recorded import PATCH_NAME, file_hash, kept_source
from titancli.errors import EnvironmentProblem, TitanError
from titancli.observe.curves import curve
from titancli.observe.events import plain
from titancli.observe.summary import Summary, summarize
from titancli.recipe import find_recipe
from titancli.runs import LOCK_NAME, RunFolder, read_lock, write_atomically

FORMAT = 1
LIMIT = 1 << 28
"""Maximum bytes of a file: far more than a million logged steps take."""
COMPARED = ("loss", "grad_norm")
"""Metrics of a step that are compared."""
MADE_BY = ("versions", "code", "git", "machine", "data", "mesh", "world", "device", "env", "plugin_files")
"""The facts in an attempt of `run.json` that say how its steps were made."""

_FIRST_LINE = re.compile(rb'\{"xxh3_64": "([0-9a-f]{16})",\n')


@dataclass(frozen=True)
class Reproduction:
    """Everything that is recorded of a run, as plain JSON."""

    name: str
    run: dict[str, Any]
    """`path`, `run_id`, `host`, `state`, `step`, `steps`, `error`."""
    recipe: str
    """The contents of the lock file."""
    made_by: dict[str, Any]
    """The facts named in `MADE_BY`, of the newest attempt: None if not recorded. Plugin files and the git
    state have their texts, as `text` and `patch`: None if they are lost. Also `first_weights`."""
    launch: dict[str, Any]
    """`nproc`, `nnodes`."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """The earlier attempts whose steps count, as in `made_by` but without texts; each with `to_step`, its
    last step that counts, and `drift`, the changes to the recipe by the next attempt."""
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The metrics of `COMPARED` for each logged step."""
    weights: dict[str, dict[str, str]] = field(default_factory=dict)
    """The checksums of the tensor files of each checkpoint that exists, by step."""
    missing: list[str] = field(default_factory=list)
    """Things that could not be read, a phrase each."""

    @property
    def last_step(self) -> int:
        """Return the last step that was logged; 0 if there is none."""
        return max(map(int, self.steps), default=0)

    @property
    def data(self) -> dict[str, Any]:
        """Return the resolved recipe.

        Raises:
            EnvironmentProblem: it is not TOML.
        """
        import tomli

        try:
            return tomli.loads(self.recipe)
        except ValueError as error:
            raise EnvironmentProblem(f"the recipe of {self.name} is not TOML: {error}") from error


def find(reference: str) -> Reproduction:
    """Return the reproduction for a run, for a lock file or checkpoint in its folder, or from a file of
    `write`.

    Raises:
        EnvironmentProblem: there is none, it is damaged or of a newer format, or it is a lock file without a
            run.
    """
    path = Path(reference).absolute()
    for folder in (path, path.parent, path.parent.parent, path.parent.parent.parent):
        # A run, its lock file, its checkpoint, or the lock file of a checkpoint.
        if RunFolder.is_run(folder) and not STEP_NAME.match(folder.name):
            inside = path.relative_to(folder).parts
            if inside in ((), (LOCK_NAME,)) or (inside[0] == "checkpoints" and len(inside) > 1):
                return collect(folder)
    is_recipe = _names_a_recipe(reference) if not path.exists() else path.suffix == ".toml"
    if not path.is_file() and not is_recipe:
        RunFolder.open(path)  # raises, saying what is missing
    if is_recipe:
        raise EnvironmentProblem(
            f"{reference} is a recipe without a run: there is nothing to compare a reproduction with",
            hint=f"start a run with: titan train {reference}; or give a run folder, or a file written by "
            "`titan reproduce RUN --export FILE`",
        )
    return read(path)


def _names_a_recipe(reference: str) -> bool:
    try:
        find_recipe(reference)
    except TitanError:
        return False
    return True


# ------------------------------------------------------------------------------------------ a run folder


def collect(path: Path) -> Reproduction:
    """Return the reproduction of a run folder, whatever state the run is in.

    Raises:
        EnvironmentProblem: the folder is not a run folder, or its lock file cannot be read.
    """
    folder = RunFolder.open(path)
    run = summarize(folder.path)
    missing = list(run.problems)
    newest = run.attempts[-1] if run.attempts else {}
    steps = {
        str(int(point.step)): plain({name: point.metrics[name] for name in COMPARED if name in point.metrics})
        for point in curve(folder.events)
        if any(name in point.metrics for name in COMPARED)
    }
    if not steps:
        missing.append("no step is logged, so there is nothing to compare with")
    weights = _weights(folder, newest, missing)
    made_by = _made_by(newest) | {"first_weights": _first_weights(folder, missing)}
    if made_by["data"] is None:
        made_by["data"] = _data_of_checkpoint(folder)
    for entry in made_by["plugin_files"] or []:
        entry["text"] = _text(folder, entry["sha256"], Path(entry["path"]).name, Path(entry["path"]))
        if entry["text"] is None:
            missing.append(f"the plugin file {entry['path']} has changed since then, and its text is lost")
    if (git := made_by["git"]) and git.get("dirty"):
        git["patch"] = _text(folder, git.get("patch_sha256") or "", PATCH_NAME)
        if git["patch"] is None:
            missing.append("the uncommitted changes of the working folder are lost")
    return Reproduction(
        name=run.recipe or path.name,
        run=_about(run, folder),
        recipe=read_lock(folder.recipe_lock),
        made_by=made_by,
        launch={name: newest.get(name) for name in ("nproc", "nnodes")},
        earlier=_earlier(run.attempts, steps),
        steps=steps,
        weights=weights,
        missing=missing,
    )


def folder_of(run: Reproduction) -> Path | None:
    """Return the run's folder; None if it is not on this machine, or now belongs to another run."""
    path = Path(run.run["path"] or "")
    return path if RunFolder.is_run(path) and _run_id(RunFolder(path)) == run.run["run_id"] else None


def _run_id(folder: RunFolder) -> Any:
    try:
        return folder.record().get("run_id")
    except EnvironmentProblem:  # already among the problems of the summary
        return None


def _about(run: Summary, folder: RunFolder) -> dict[str, Any]:
    names = ("state", "step", "steps", "error", "host")
    return {
        "path": str(folder.path),
        "run_id": _run_id(folder),
        **{name: getattr(run, name) for name in names},
    }


def _made_by(attempt: dict[str, Any]) -> dict[str, Any]:
    found = {name: attempt.get(name) for name in MADE_BY}
    return json.loads(json.dumps(found))  # a copy, to which texts are added


def _earlier(attempts: list[dict[str, Any]], steps: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the attempts before the newest one, back to the last that began at step 0."""
    kept: list[dict[str, Any]] = []
    for before, after in zip(reversed(attempts[:-1]), reversed(attempts), strict=False):
        start = STEP_NAME.match(Path(after.get("checkpoint") or "").name)
        if start is None:
            break
        drift = after.get("drift") or []
        kept.insert(0, {**_made_by(before), "to_step": int(start[1]), "drift": drift})
    first = min(map(int, steps), default=0)
    return [one for one in kept if one["to_step"] >= first]


def _weights(folder: RunFolder, newest: dict[str, Any], missing: list[str]) -> dict[str, dict[str, str]]:
    found: dict[int, dict[str, str]] = {}
    try:
        entries = sorted(folder.checkpoints.iterdir())
    except OSError:
        entries = []
    for path in entries:
        if not (path.is_dir() and STEP_NAME.match(path.name)):
            continue
        try:
            manifest = read_manifest(path)
        except EnvironmentProblem as error:
            missing.append(error.message)
            continue
        tensors = {name: row.xxh3_64 for name, row in manifest.files.items() if name.endswith(".safetensors")}
        found[manifest.step] = tensors
    saved = (newest.get("outcome") or {}).get("checkpoint")
    last = STEP_NAME.match(Path(saved).name) if isinstance(saved, str) else None
    if last and int(last[1]) not in found:
        missing.append(f"the last checkpoint, {last[0]}, is gone, so its weights cannot be compared")
    return {str(step): found[step] for step in sorted(found)}


def _first_weights(folder: RunFolder, missing: list[str]) -> dict[str, str] | None:
    """Return hashes of the weights that step 1 began with, from the digests, and of their layout."""
    try:
        start = read_starts(folder.path).get(0)
    except EnvironmentProblem as error:
        missing.append(error.message)
        return None
    if start is None:
        return None
    texts = {"layout": repr(start.layout), "hash": repr(start.ranks)}
    return {name: xxhash.xxh3_128_hexdigest(text.encode()) for name, text in texts.items()}


def _data_of_checkpoint(folder: RunFolder) -> dict[str, Any] | None:
    """Return the identity of the data from a checkpoint, for runs that did not yet record it in run.json."""
    for path in folder.checkpoints.glob("step-*"):
        try:
            position = read_manifest(path).state.get("data")
        except EnvironmentProblem:  # already reported as missing
            continue
        if isinstance(position, dict) and isinstance(position.get("data"), dict):
            return dict(position["data"])
    return None


def _text(folder: RunFolder, sha256: str, name: str, original: Path | None = None) -> str | None:
    """Return the text of the source with this hash: from the run folder, or else from its original place."""
    for path in (folder.path / kept_source(sha256, name), original):
        try:
            if path is not None and file_hash(path) == sha256:
                return path.read_bytes().decode(errors="surrogateescape")
        except OSError:
            continue
    return None


# ---------------------------------------------------------------------------------------------- the file


def write(path: Path, reproduction: Reproduction) -> None:
    """Write the file atomically.

    Raises:
        EnvironmentProblem: it exists, or cannot be written.
    """
    if path.exists():
        raise EnvironmentProblem(f"{path} exists", hint="give another --export FILE, or remove it")
    rows = [
        f"{json.dumps(k)}: {json.dumps(v)}" for k, v in {"format": FORMAT, **asdict(reproduction)}.items()
    ]
    rest = ",\n".join(rows) + "}\n"
    if not path.parent.is_dir():
        raise EnvironmentProblem(f"cannot write {path}: there is no folder {path.parent}")
    write_atomically(path, f'{{"xxh3_64": "{xxhash.xxh3_64(rest.encode()).hexdigest()}",\n{rest}')


def read(path: Path) -> Reproduction:
    """Read a file of `write`.

    Raises:
        EnvironmentProblem: it is not such a file, is damaged, or has a newer format.
    """
    not_one = f"{path} is not a file of `titan reproduce --export`"
    try:
        with open(path, "rb") as file:
            text = file.read(LIMIT + 1)
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}") from error
    first = _FIRST_LINE.match(text)
    if not first:
        raise EnvironmentProblem(not_one, hint="give a run folder, or such a file")
    if xxhash.xxh3_64(text[first.end() :]).hexdigest().encode() != first[1]:
        raise EnvironmentProblem(
            f"{path} is damaged or was edited: its checksum does not match",
            hint="export it again from the run: titan reproduce RUN --export FILE",
        )
    try:
        data = json.loads(text)
        found = data.pop("format")
        del data["xxh3_64"]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise EnvironmentProblem(f"{not_one}: {error}") from error
    if found != FORMAT:
        versions = data.get("made_by", {}).get("versions") or {}
        raise EnvironmentProblem(
            f"{path} has format {found!r}, but this version of titan reads format {FORMAT}",
            hint=f"use the version that wrote it ({versions.get('titancli', 'a newer one')}); its recipe is "
            "plain text under the key 'recipe', which `titan train` can run",
        )
    types = {"name": str, "recipe": str, "earlier": list, "missing": list}
    wrong = [
        f.name for f in fields(Reproduction) if not isinstance(data.get(f.name), types.get(f.name, dict))
    ]
    if wrong or len(data) != len(fields(Reproduction)):
        raise EnvironmentProblem(f"{not_one}: {wrong[0] if wrong else 'a key'} is not valid")
    return Reproduction(**data)


def extract(reproduction: Reproduction, folder: Path) -> list[Path]:
    """Write the recipe, the plugin files and the uncommitted patch into a new folder, and return their paths.

    Raises:
        EnvironmentProblem: the folder exists, or cannot be written.
    """
    try:
        folder.mkdir(parents=True)
        texts = {LOCK_NAME: reproduction.recipe}
        for entry in reproduction.made_by.get("plugin_files") or []:
            if entry.get("text") is not None:
                name = Path(entry["path"]).name
                texts[f"{len(texts)}-{name}" if name in texts else name] = entry["text"]
        git = reproduction.made_by.get("git") or {}
        if git.get("patch"):
            texts[PATCH_NAME] = git["patch"]
        for name, text in texts.items():
            (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    except FileExistsError as error:
        raise EnvironmentProblem(f"{folder} exists", hint="give another folder") from error
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {folder}: {error.strerror}") from error
    return [folder / name for name in texts]
