"""`load_recipe`: read, extend, override, resolve, bind, check; and the lock file, which runs as it is."""

from __future__ import annotations

import dataclasses
import enum
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from titancli.checksum import LOCK_CHECKSUM
from titancli.errors import EnvironmentProblem, PluginError, RecipeError, TitanError
from titancli.recipe.assets import assets_of
from titancli.recipe.bind import bind_recipe
from titancli.recipe.check import check_recipe
from titancli.recipe.config_json import bind_model, config_json, fields_in
from titancli.recipe.find import LOCK_HEADER, beside, find_recipe, url_of
from titancli.recipe.foreign import refuse_foreign
from titancli.recipe.merge import merge, read_overrides, read_recipe, read_unset, without
from titancli.recipe.peft_folder import base_folder
from titancli.recipe.problems import Problems, nearest
from titancli.recipe.read import refuse_values
from titancli.recipe.resolve import resolve
from titancli.recipe.schema import Recipe
from titancli.recipe.toml import (
    DEFAULT,
    KeyPath,
    Node,
    Origin,
    Source,
    dotted,
    from_python,
    leaves,
    toml_text,
)
from titancli.recipe.vocabulary import grown
from titancli.registry.component import is_config
from titancli.registry.fields import fields_of
from titancli.registry.first_party import install_command
from titancli.registry.kinds import BUILTIN
from titancli.runs import LOCK_NAME, RECORD_NAME, RunFolder
from titancli.version import __version__

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A recipe that has passed every check."""

    recipe: Recipe
    """Typed, with its components bound."""
    data: dict[str, Any]
    """Plain TOML data: every default filled in, full component names, absolute paths, no None."""
    origins: dict[str, Origin]
    """Where each value of `data` comes from, by dotted key: `training.steps`, `converters.0.recipe`."""
    path: Path
    """The file."""


def load_recipe(
    reference: str | Path,
    overrides: Sequence[str] = (),
    *,
    unset: Sequence[str] = (),
    run: Path | None = None,
    registry: Registry | None = None,
    runnable: bool = True,
) -> Loaded:
    """Load a recipe, or a lock file, and check all of it. Imports no torch and fetches nothing.

    Args:
        reference: a path, a run folder, `name` or `plugin:name`; see `find_recipe`.
        overrides: `KEY=VALUE`, e.g. `training.steps=100`, `converters.0.recipe=tensorwise`, `optimizer=muon`.
        unset: keys to take away, e.g. `training.global_batch_size`.
        run: a run folder of this recipe: where `weights` gave the model and are gone, its lock file does.
        registry: the components that there are; the process's own if left out.
        runnable: False for an engine: what only a run needs, dataset, tokenizer and training.steps, may be
            missing.

    Raises:
        RecipeError: everything that is wrong, with places.
        PluginError: a plugin that the recipe needs is broken, or lacks the code that it names.
    """
    if registry is None:
        from titancli.registry import current

        registry = current()
    path = find_recipe(reference, registry=registry)
    try:
        return _load(path, overrides, unset, run, registry, runnable=runnable)
    except (RecipeError, PluginError) as error:
        if isinstance(error, RecipeError):
            refuse_foreign(path, registry)
        refuse_missing_files(path, run, error)
        raise


def refuse_missing_files(path: Path, run: Path | None, error: TitanError) -> None:
    """Refuse the recipe of a run that was started with plugin files (`-p`) which this process has not.

    Args:
        path: the recipe; a lock file lies in a run's folder, in a checkpoint or in an export.
        run: a run folder of the recipe, if it is known.
        error: what is wrong without them.

    Raises:
        PluginError: some are missing.
    """
    from titancli.registry import plugin_files

    lies_in = [path.parent, *path.parents[2:3]] if path.name == LOCK_NAME else []
    found = next((one for one in [*([run] if run else []), *lies_in] if (one / RECORD_NAME).is_file()), None)
    if found is None:
        return
    try:
        recorded = RunFolder(found).last_loaded().get("plugin_files") or []
    except EnvironmentProblem:  # where the run is resumed, that is an error
        return
    given = set(map(str, plugin_files()))
    if missing := [entry["path"] for entry in recorded if entry["path"] not in given]:
        flags = " ".join(f"-p {shlex.quote(file)}" for file in missing)
        raise PluginError(
            f"{found} was started with {flags}; without it: {error.message}", hint=f"add {flags}"
        ) from error


def _load(
    path: Path,
    overrides: Sequence[str],
    unset: Sequence[str],
    run: Path | None,
    registry: Registry,
    *,
    runnable: bool,
) -> Loaded:
    """Implement `load_recipe` for a file."""
    problems = Problems()
    root = read_recipe(path, registry, problems)
    root = merge(root, read_overrides(overrides, problems), problems)
    removed = read_unset(unset, problems)
    root, absent = _without_all(root, removed)

    root, model_known = model_of_weights(root, registry, problems, read_tree(run) if run else None)
    all_there = check_requires(root, problems)
    resolved = resolve(root, registry, problems, removed)
    if not all_there:
        problems.drop("unknown-component")  # the problem already says what to install
    resolved.holes |= refuse_values(resolved.root, problems)
    if not model_known:
        resolved.holes.add(("model",))  # already reported
    recipe, left_out = bind_recipe(resolved, registry, problems, runnable=runnable)
    _check_unset(recipe, absent, problems)
    check_recipe(recipe, resolved.root, registry, problems, left_out)
    problems.raise_any()
    registry.refuse_missing_code(recipe)

    data = resolved_data(recipe, resolved.root, registry)
    return Loaded(recipe, data, _origins(data, resolved.root), path)


def read_tree(reference: str | Path) -> Node:
    """Return the merged tree of a recipe and its bases, unchecked.

    Raises:
        RecipeError: there is no such recipe, or a file cannot be read or is not TOML.
    """
    from titancli.registry import current

    return read_recipe(find_recipe(reference, registry=current()), current(), Problems())


def _without_all(root: Node, keys: Mapping[KeyPath, Source]) -> tuple[Node, dict[KeyPath, Source]]:
    """Return the tree without some keys, and those of them that it did not have."""
    absent = {}
    for key, source in keys.items():
        root, found = without(root, key)
        if not found:
            absent[key] = source
    return root, absent


def _check_unset(recipe: Recipe, absent: Mapping[KeyPath, Source], problems: Problems) -> None:
    """Report an unset key that cannot exist; one that merely was not set is fine."""
    for path, source in absent.items():
        at: Any = recipe
        for i, key in enumerate(path):
            if isinstance(at, (list, tuple)):
                known: dict[str, Any] = {str(n): item for n, item in enumerate(at)}
            elif isinstance(at, dict):
                known = at
            elif dataclasses.is_dataclass(at):
                known = {f.name: getattr(at, f.name) for f in dataclasses.fields(at)}
                known |= dict.fromkeys(("type", "flavor") if is_config(at) else ())
            else:
                break
            location = source.location((0, len(source.text)))
            if isinstance(at, (list, tuple)) and i == len(path) - 1:
                message = f"cannot unset {dotted(path)}: it is an element of an array"
                problems.add("no-element", message, location, "override the whole array instead")
                break
            if str(key) not in known and not isinstance(at, dict):
                where = f" in {dotted(path[:i])}" if i else ""
                message = f"cannot unset {dotted(path)}: unknown key {key!r}{where}"
                problems.add("unknown-key", message, location, nearest(str(key), map(str, known)))
                break
            at = known.get(str(key))


def _origins(data: dict[str, Any], root: Node) -> dict[str, Origin]:
    origins = {}
    for path, _ in leaves(from_python(data, DEFAULT)):
        node, reached = root.follow(path)
        origins[dotted(path)] = node.origin if reached == path else DEFAULT
    return origins


# ---------------------------------------------------------------------------------------------- the lock file


def lock_text(recipe: Loaded | Recipe) -> str:
    """Return a recipe's resolved data as TOML 1.0, with a checksum. Loading it gives the same data.

    Raises:
        PluginError: a component of a Recipe is of no plugin, or holds a value that TOML cannot.
    """
    if isinstance(recipe, Recipe):
        from titancli.registry import current

        data = _table(recipe, None, current())
    else:
        data = recipe.data
    return f"{_header()}{LOCK_CHECKSUM.put(toml_text(data))}"


def resolved_text(loaded: Loaded) -> str:
    """Return the same text without the checksum, as a recipe to be edited."""
    return f"{_header()}\n{toml_text(loaded.data)}"


def _header() -> str:
    return f"{LOCK_HEADER} {__version__}. Run it again with: titan train THIS_FILE"


def resolved_data(recipe: Any, root: Node, registry: Registry) -> dict[str, Any]:
    """Return the plain TOML data of a bound recipe: defaults filled in, full component names, None left out.

    Raises:
        PluginError: a component holds a value that TOML cannot.
    """
    return _table(recipe, root, registry)


def _table(config: Any, node: Node | None, registry: Registry) -> dict[str, Any]:
    table: dict[str, Any] = {}
    if is_config(config):
        table["type"] = registry.full_name(type(config))
        flavor = node.child("flavor") if node else None
        if flavor is not None:
            table["flavor"] = flavor.value
    for field in fields_of(cast(type, type(config))).values():
        value, mark = getattr(config, field.name), field.type.marked_required
        replaced = mark is not None and mark.unless and getattr(config, mark.unless) is not None
        if value is not None and not replaced:
            table[field.name] = _plain(value, node.child(field.name) if node else None, registry)
    return table


def _plain(value: Any, node: Node | None, registry: Registry) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _table(value, node, registry)
    if isinstance(value, Path):
        return url_of(value) or str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, dict):
        below = {k: _plain(v, node.child(k) if node else None, registry) for k, v in value.items()}
        return {key: item for key, item in below.items() if item is not None}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item, None, registry) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, node.child(i) if node else None, registry) for i, item in enumerate(value)]
    raise PluginError(f"a config holds {value!r}, a {type(value).__name__}, which a recipe cannot hold")


# ------------------------------------------------------------------------------------------------- [requires]


def check_requires(root: Node, problems: Problems) -> bool:
    """Report requirements of a recipe that are not met; return whether all are."""
    requires = root.child("requires")
    titan = requires.child("titan") if requires else None
    plugins = requires.child("plugins") if requires else None
    found = True
    if titan is not None and isinstance(titan.value, str):
        found &= _check_titan(titan, problems)
    if plugins is not None and isinstance(plugins.value, list):
        for plugin in plugins.value:
            if isinstance(plugin.value, str):
                found &= _check_plugin(plugin, problems)
    return found


def _check_titan(node: Node, problems: Problems) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    location = node.origin.location()
    try:
        wanted = SpecifierSet(node.value)
    except InvalidSpecifier:
        hint = 'use a version specifier such as ">=0.1"'
        problems.add(
            "bad-value", f"requires.titan: {node.value!r} is not a version specifier", location, hint
        )
        return True
    if wanted.contains(__version__, prereleases=True):
        return True
    message = f"this recipe requires titan {node.value}; this is titan {__version__}"
    problems.add("requires", message, location, f"pip install 'titancli{node.value}'")
    return False


def _check_plugin(node: Node, problems: Problems) -> bool:
    from importlib import metadata

    from packaging.requirements import InvalidRequirement, Requirement

    location = node.origin.location()
    try:
        wanted = Requirement(node.value)
    except InvalidRequirement:
        hint = 'give a distribution and its version, such as "titan-float8>=0.1"'
        problems.add(
            "bad-value", f"requires.plugins: {node.value!r} is not a valid requirement", location, hint
        )
        return True
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        message = f"this recipe requires the plugin {node.value}, which is not installed"
        problems.add("requires", message, location, install_command(node.value))
        return False
    if wanted.specifier.contains(version, prereleases=True):
        return True
    message = f"this recipe requires the plugin {node.value}; version {version} is installed"
    problems.add("requires", message, location, install_command(node.value, "--upgrade"))
    return False


# ----------------------------------------------------------------------------------- the model of the weights


CONFIG = "config.json"
OWN = ("recipe.lock.toml", "manifest.json")
"""The files of a run folder, and of a checkpoint, that identify them; the first also holds the model."""


ABSENT_WEIGHTS = "absent-weights"
"""Code of the problem that a model's folder has not been downloaded yet."""


def model_of_weights(
    root: Node, registry: Registry, problems: Problems, lock: Node | None = None
) -> tuple[Node, bool]:
    """Return the tree with the `[model]` that the folder's config.json describes; keys set in `[model]` win.

    The tree is unchanged if `[model]` has a type, or there are no `weights`. The file is read with the
    recipe, so that a lock file, and each checkpoint, has the whole table; `lock` is one that may replace the
    file. If the weights give no model, the reason is reported here and the result is False and a tree without
    `[model]`.
    """
    weights, model = root.child("weights"), root.child("model")
    written = model is not None and (not isinstance(model.value, dict) or "type" in model.value)
    if written or weights is None or not isinstance(weights.value, str):
        return root, True
    folder, at = os.path.expanduser(beside(weights)), weights.origin
    try:
        table = _locked_model(lock, folder)
        if table is None:
            found = _model_table(folder, registry)
            if model is None:
                _bound(folder, found, registry)
            found = grown(found, root)
            origin = Origin("flavor", at.source, at.key, at.value, str(Path(folder) / CONFIG))
            table = from_python(found, origin)
    except TitanError as error:
        message = f"there is no [model], and it cannot be read from the weights: {error.message}"
        assets = assets_of(root)
        missing = assets is not None and assets.weights and not assets.folder.exists()
        hint = f"download it: {assets.command}" if assets and missing else error.hint
        code = ABSENT_WEIGHTS if missing else "check"
        problems.add(code, message, weights.origin.location(), hint)
        return Node({key: node for key, node in root.value.items() if key != "model"}, root.origin), False
    whole = table if model is None else merge(table, model, problems, ("model",))
    return Node({**root.value, "model": whole}, root.origin), True


def model_in(folder: Path) -> Any:
    """Return the config of the model whose weights are in a folder: that of a checkpoint's recipe, else the
    one that the folder's config.json describes.

    Raises:
        EnvironmentProblem: the folder describes no model, or one that no installed model reads.
        RecipeError: the checkpoint's recipe is damaged.
        PluginError: no installed plugin has the checkpoint's model.
    """
    from titancli.registry import current

    if not (folder / OWN[0]).is_file() or (lock := read_tree(folder / OWN[0]).child("model")) is None:
        return _bound(str(folder), _model_table(str(folder), current()), current())
    table = lock.plain()
    fields = {key: value for key, value in table.items() if key not in ("type", "flavor")}
    return bind_model(current().find("model", table["type"]), fields, folder / OWN[0])


def _bound(weights: str, table: dict[str, Any], registry: Registry) -> Any:
    """Return the config of the model that `_model_table` has read, so that an error names config.json."""
    path = base_folder(Path(weights)) / CONFIG
    fields = {key: value for key, value in table.items() if key != "type"}
    return bind_model(registry.find("model", table["type"]), fields, path, config_json(path), registry)


def _locked_model(lock: Node | None, weights: str) -> Node | None:
    """Return the model of a lock file with the same weights, if these are gone."""
    before = lock.child("weights") if lock is not None else None
    if lock is None or before is None or (Path(weights) / CONFIG).exists():
        return None
    return lock.child("model") if before.value == os.path.abspath(weights) else None


def readers_of(model_type: str, registry: Registry) -> dict[str, Any]:
    """Return the models, by full name, that read a config.json of this `model_type`: titan's own, else those
    of plugins.

    Raises:
        PluginError: a plugin of titan's reads it, which is not installed.
    """
    if (error := registry.lacks_reader(model_type)) is not None:
        raise error
    readers = {
        name: cls
        for name, cls in registry.components("model")
        if model_type in cls.model_types and cls.from_config_json is not None
    }
    own = {name: reader for name, reader in readers.items() if name.startswith(f"{BUILTIN}/")}
    return own or readers


def _model_table(weights: str, registry: Registry) -> dict[str, Any]:
    path = base_folder(Path(weights)) / CONFIG
    if any((path.parent / name).is_file() for name in OWN):
        raise EnvironmentProblem(
            f"{weights} is a titan run or checkpoint; only a Hugging Face folder can provide the model "
            f"of a recipe",
            hint=f"copy [model] from {path.parent / OWN[0]}",
        )
    if url_of(Path(weights)) or not path.is_file():
        far = f"{weights} is not a folder on this machine"
        raise EnvironmentProblem(
            far if url_of(Path(weights)) else f"{path} does not exist",
            hint="give a Hugging Face folder (relative paths start at the current folder), "
            "or add [model] with a type",
        )
    keys = config_json(path)
    model_type = keys["model_type"]
    readers = readers_of(model_type, registry)
    if len(readers) != 1:
        who = f"{' and '.join(readers)} read" if readers else "none of titan's own models reads"
        types = [*readers] or ["hf_causal_lm"]
        raise EnvironmentProblem(
            f"{who} model_type {model_type!r}",
            hint=f'add [model] with type = "{types[0]}"'
            + ("" if readers else f' and config = "{path.parent}", if transformers has that model'),
        )
    [(name, reader)] = readers.items()
    return {"type": name, **fields_in(path, reader, keys, name)}
