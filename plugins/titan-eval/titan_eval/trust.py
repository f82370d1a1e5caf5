"""Find code in the files of tasks: they are treated as data, unless the user who starts the run allows code.

A task's YAML can name Python functions (`!function`), metrics that the library `evaluate` downloads and
imports, and dataset readers. Files of the harness itself are installed code. Torch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titancli.files import read_bytes

LONGEST, DEEPEST, MOST = 1 << 20, 50, 200_000
"""Limits for a file: its bytes, its nesting, and its values."""
TRUST = "TITAN_EVAL_TRUST_CODE"
"""Environment variable with which a user allows code; `[env]` of a recipe cannot set it."""
_METRICS = (
    "acc acc_all acc_bytes acc_mutual_info acc_norm bits_per_byte bleu brier_score bypass byte_perplexity "
    "chrf chrf++ exact_match f1 likelihood mcc perplexity ter word_perplexity"
)
METRICS = _METRICS.split()
"""The harness's own metrics; any other name is a script that `evaluate` imports."""
READERS = ("json", "csv", "parquet", "text", "arrow")
"""Readers of the library `datasets` that run no code."""
_DATA = "null bool int float str binary timestamp seq map set omap pairs merge value"
DATA = frozenset(f"tag:yaml.org,2002:{name}" for name in _DATA.split())
"""YAML tags that are data."""


def trusted() -> bool:
    """Return whether the user who started the run allows the files of tasks to run code."""
    return os.environ.get(TRUST) == "1"


def code_of(tasks: list[str], folders: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield everything that would run code: the loop's key that names the file, and the location with the
    reason.

    Args:
        tasks: names, and YAML files.
        folders: folders whose files are tasks, too.
    """
    seen: set[Path] = set()
    for i, name in enumerate(tasks):
        if (file := Path(name).expanduser()).is_file():
            yield from ((f"tasks.{i}", found) for found in _in_file(file.resolve(), seen))
    for i, folder in enumerate(folders):
        for file in sorted(folder.glob("**/*.yaml")):
            yield from ((f"include_path.{i}", found) for found in _in_file(file.resolve(), seen))


def _in_file(file: Path, seen: set[Path]) -> Iterator[str]:
    """Yield everything in a file, and in files that it includes, that would run code."""
    import yaml

    if file in seen or file.is_relative_to(_harness()):
        return
    seen.add(file)
    # The harness's own parser: another one might interpret the same bytes differently.
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    try:
        data = read_bytes(file, LONGEST)
        _require_small(yaml.parse(data, Loader=loader))
        root = yaml.compose(data, Loader=loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        yield f"{file} cannot be read: {' '.join(str(error).split())}"
        return
    included: list[str] = []
    for line, why in _in_node(root, included, set()):
        yield f"{file}:{line}: {why}"
    for name in included:
        yield from _in_file((file.parent / name).resolve(), seen)


def _require_small(events: Iterator[Any]) -> None:
    """Check a document before it is composed: libyaml's composer calls itself for each level, until the
    process has no stack left, and the harness copies what is merged (`<<`).

    Raises:
        ValueError: it is nested more than `DEEPEST` deep, or has more than `MOST` values when each alias is
            replaced by what it names.
    """
    import yaml

    named: dict[str | None, int] = {}
    """Values by anchor."""
    open_: list[tuple[str | None, int]] = []
    """Of each collection that has not ended: its anchor, and the values before it."""
    values = 0
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            named[anchor] = values - before
        else:
            values += named.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_.append((event.anchor, values))
        if len(open_) > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        if values > MOST:
            raise ValueError(f"it has more than {MOST:,} values")


def _in_node(root: Any, included: list[str], seen: set[int]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a document that would run code, with reasons; included files are added to
    `included`."""
    waiting = [] if root is None else [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias, possibly of a node that contains it
            continue
        seen.add(id(node))
        line = node.start_mark.line + 1
        if node.tag not in DATA:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            yield line, f"{tag} {node.value if isinstance(node.value, str) else ''}".strip() + " is code"
        for key, value in _members(node):
            if key == "include":
                included += [each.value for each in [value, *_elements(value)] if isinstance(each.value, str)]
            elif (why := _refused(key, value)) is not None:
                yield value.start_mark.line + 1, why
            elif key == "metric_list":
                yield from _metrics(value, set())
            waiting.append(value)
        waiting += _elements(node)


def _refused(key: str, value: Any) -> str | None:
    """Return why a key's value would run code or read another file as a task; None if it would not."""
    text = value.value
    if not isinstance(text, str):
        return None
    if key == "dataset_path" and text not in READERS and _is_reader(text):
        return f"dataset_path: {text} is a reader of data that may load code; use {', '.join(READERS)}"
    if key == "use_prompt" and not text.startswith("qa-basic:"):
        return f"use_prompt: {text} is not a prompt of the harness"
    return None


def _metrics(node: Any, seen: set[int]) -> Iterator[tuple[int, str]]:
    """Yield the metrics of a list that are not the harness's own."""
    if id(node) in seen:
        return
    seen.add(id(node))
    for key, value in _members(node):
        line, text = value.start_mark.line + 1, value.value
        if key == "metric" and text not in METRICS:
            yield line, f"metric: {text} is a script that the library evaluate would fetch and import"
        elif key == "hf_evaluate" and str(text).lower() not in ("false", "no", "off"):
            yield line, "hf_evaluate: the library evaluate would fetch and import a script"
        yield from _metrics(value, seen)
    for element in _elements(node):
        yield from _metrics(element, seen)


def _members(node: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a mapping; none for anything else."""
    pairs = node.value if node.id == "mapping" else []
    return [(key.value, value) for key, value in pairs]


def _elements(node: Any) -> list[Any]:
    return list(node.value) if node.id == "sequence" else []


def _is_reader(name: str) -> bool:
    """Return whether `datasets` would take a name for one of its readers, without importing it."""
    spec = find_spec("datasets")
    folders = spec.submodule_search_locations if spec else None
    return bool(re.fullmatch(r"\w+", name)) and any(
        (Path(folder) / "packaged_modules" / name).is_dir() for folder in folders or ()
    )


def _harness() -> Path:
    """Return the folder of the harness."""
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("lm_eval is not installed: pip install lm_eval")
    return Path(spec.submodule_search_locations[0]).resolve()
