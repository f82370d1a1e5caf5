"""`check_plugin`: check that a plugin follows the rules of docs/plugins.md."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from titancli.checkpoint import reader_of
from titancli.errors import PluginError, TitanError
from titancli.registry import current
from titancli.registry.component import component_info, load_target
from titancli.registry.fields import nested_fields, required_fields, summary
from titancli.registry.plugins import PluginStatus, own_traceback

HEAVY = ("torch", "transformers", "datasets", "numpy", "rich", "pydantic")
"""Packages that a plugin's module must not import."""
PROBE = """
import json, sys, time
from titancli.registry import configure, current
from pathlib import Path
time.perf_counter = time.process_time  # what the module computes, whatever else the machine does
configure(files=[Path(file) for file in sys.argv[3:]])
status = next((p for p in current().plugins if p.name == sys.argv[1]), None)
heavy = [name for name in sys.argv[2].split(",") if name in sys.modules]
found = status and {"state": status.state, "error": status.error, "seconds": status.seconds}
print(json.dumps({"status": found, "heavy": heavy}))
"""
"""Run in a process of its own: here torch may already be imported. TITAN_PLUGINS excludes other plugins."""


def check_plugin(
    name: str,
    *,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    examples: Mapping[str, Callable[[int], Any]] | None = None,
    skip: Mapping[str, Collection[str]] | None = None,
    seq_len: int = 16,
    file: str | Path | None = None,
    seconds: float = 1.0,
) -> None:
    """Check a plugin, and raise an error with all of its faults.

    Its module loads without torch and quickly. Components, and all of their fields, have docstrings; their
    types can be bound; their defaults survive a round trip through TOML. Targets can be imported and accept
    the arguments of their kind's Protocol; results have the Protocol's members, and behave as required of
    their kind: docs/plugins.md lists these checks by name. Its recipes are valid.

    Args:
        name: name of its entry point, or a file's stem.
        configs: values for the fields that a component needs to be built, `{"loss/lab": {"weight": 0.1}}`;
            for a slot, a table whose `type` is a full name. Components whose required values are missing here
            are not built. Models run on a CPU: give them small sizes.
        examples: input of a model or a loss that takes something other than tokens, as a function of the
            number of rows: `{"model/lab": lambda rows: Example(batch, loss=...)}`; for a reward, pairs of a
            Prompt and a Completion that it can rate.
        seq_len: length of the rows that datasets are built with.
        skip: names of checks to skip per component, `{"loss/lab": ["accumulation"]}`.
        file: a plugin in a single file.
        seconds: maximum CPU time for loading its module.

    Raises:
        PluginError: the faults, one per line.
    """
    from titancli import registry

    if file is not None:
        registry.configure(files=[Path(file)])
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(dict(configs or {}), dict(examples or {}), dict(skip or {}), seq_len, Path(folder))
        faults = list(_faults(name, trial, file, seconds))
    if faults:
        lines = "\n".join(f"- {fault}" for fault in faults)
        raise PluginError(f"plugin {name!r} has {len(faults)} fault{'s' * (len(faults) > 1)}:\n{lines}")


@dataclasses.dataclass(frozen=True)
class Trial:
    """Inputs of the checks, by `kind/name`."""

    configs: dict[str, Mapping[str, Any]]
    examples: dict[str, Callable[[int], Any]]
    skip: dict[str, Collection[str]]
    seq_len: int
    folder: Path
    """Parent of the folders that components write to."""


def _faults(name: str, trial: Trial, file: str | Path | None, seconds: float) -> Iterator[str]:
    yield from _module(name, file, seconds)
    status = next((plugin for plugin in current().plugins if plugin.name == name), None)
    if status is None or status.state != "ok":
        return
    for what in ("configs", "examples", "skip"):
        for key in getattr(trial, what).keys() - set(status.components):
            yield f"{what}: it does not provide {key}"
    for label, cls in _components(status):
        yield from (f"{label}: {fault}" for fault in _component(label, cls, trial))
    yield from _on_two_ranks(file)
    yield from _recipes(name)
    current().commands()
    current().check_targets()
    after = next(plugin for plugin in current().plugins if plugin.name == name)
    if after.error:
        yield after.error


def _components(status: PluginStatus) -> Iterator[tuple[str, type]]:
    for label in status.components:
        kind, _, bare = label.partition("/")
        yield label, current().find(kind, f"{status.name}/{bare}")


# ---------------------------------------------------------------------------------------------- the module


def _module(name: str, file: str | Path | None, seconds: float) -> Iterator[str]:
    environment = {**os.environ, "TITAN_PLUGINS": name}
    files = [str(Path(file).absolute())] if file is not None else []
    command = [sys.executable, "-c", PROBE, name, ",".join(HEAVY), *files]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        yield f"it cannot be inspected: {done.stderr.strip().splitlines()[-1:]}"
        return
    found = json.loads(done.stdout.splitlines()[-1])
    status = found["status"]
    if status is None or status["state"] == "missing":
        yield "it is not installed, or its entry point has a different name"
        return
    if status["state"] != "ok":
        yield f"it is {status['state']}: {status['error']}"
    if found["heavy"]:
        yield f"its module imports {', '.join(found['heavy'])}; import it only in the modules of targets"
    if status["seconds"] > seconds:
        yield f"its module takes {status['seconds']:.2f} s of CPU time to load, more than {seconds} s"


# ----------------------------------------------------------------------------------------- one component


def _component(label: str, cls: type, trial: Trial) -> Iterator[str]:
    from titan_testing.protocols import target_faults

    values = trial.configs.get(label)
    if not summary(cls):
        yield "it has no docstring, whose first line `titan list-components` shows"
    for field in nested_fields(cls):
        if not field.doc:
            yield f"the field {field.name} has no docstring below it, for `titan show`"
    try:
        config = _config(cls, values)
        if config is not None:
            yield from _round_trip(config)
    except (TitanError, ValueError) as error:
        yield f"its config cannot be created: {error}"
        return
    info = component_info(cls)
    try:
        target = load_target(info.target)
        form = load_target(info.hf) if info.hf else None
    except PluginError as error:
        yield own_traceback(error.__cause__ or error)
        return
    faults = list(target_faults(info.kind, target))
    yield from faults
    if form is not None and not (callable(form) and hasattr(reader_of(cls), "from_config_json")):
        yield f"{info.hf} has no from_config_json; see HFBuilder in titancli.protocols"
    if config is not None and not faults:
        yield from _built(label, config, target, trial)


def _built(label: str, config: Any, target: Callable[..., Any], trial: Trial) -> Iterator[str]:
    """Build a component, and if that succeeds, check its behaviour."""
    from titan_testing.behaviour import behaviour_faults, checks_of
    from titan_testing.behaviour.subject import Subject
    from titan_testing.protocols import built_faults

    kind = component_info(config).kind
    folder = trial.folder / label.replace("/", "-")
    for name in ("built", "tried"):
        (folder / name).mkdir(parents=True)
    faults = list(built_faults(kind, target, config, folder / "built", trial.seq_len))
    yield from faults
    skip = frozenset(trial.skip.get(label, ()))
    if unknown := skip - checks_of(kind).keys():
        known = ", ".join(checks_of(kind)) or "none"
        yield f"skip: unknown check {', '.join(unknown)} of a {kind}; the checks are {known}"
    if not faults:
        example = trial.examples.get(label)
        subject = Subject(label, kind, config, target, folder / "tried", example, trial.seq_len)
        yield from behaviour_faults(subject, skip)


def _on_two_ranks(file: str | Path | None) -> Iterator[str]:
    """Run the jobs that the checks queued for two ranks."""
    from titan_testing.behaviour.ranks import run_jobs, take_jobs

    yield from run_jobs(take_jobs(), [Path(file).absolute()] if file is not None else [])


def _config(cls: type, values: Mapping[str, Any] | None) -> Any:
    """Return the config with these values, bound as in a recipe; None if it requires others."""
    from titancli.registry.binding import adapter, bind

    adapter(cls)
    if values is None and required_fields(cls):
        return None
    return bind(cls, dict(values or {}), current())


def _round_trip(config: Any) -> Iterator[str]:
    """Check that its values survive a round trip through TOML, as in a lock file."""
    import tomli
    import tomli_w

    from titancli.recipe import DEFAULT, Node, resolved_data
    from titancli.registry.binding import bind

    data = resolved_data(config, Node({}, DEFAULT), current())
    read = tomli.loads(tomli_w.dumps({"table": data}))["table"]
    again = bind(type(config), {k: v for k, v in read.items() if k != "type"}, current())
    if again != config:
        yield f"{config} becomes {again} after a round trip through TOML"


# ---------------------------------------------------------------------------------------------- recipes


def _recipes(name: str) -> Iterator[str]:
    from titancli.errors import RecipeError
    from titancli.recipe import load_recipe, render_problems

    for plugin, folder in current().recipe_folders():
        for file in sorted(folder.rglob("*.toml")) if plugin == name else ():
            try:
                load_recipe(file)
            except RecipeError as error:
                yield f"its recipe {file.name} is not valid:\n{render_problems(error.problems).rstrip()}"
            except TitanError as error:
                yield f"its recipe {file.name} is not valid: {error}"
