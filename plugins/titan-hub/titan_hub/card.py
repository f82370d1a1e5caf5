"""A model card: metadata, metrics, data and recipe, without anything of the machine that trained."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from titan_hub.source import REPOSITORY, Source
from titancli import __version__
from titancli.commands import printable

PRIVATE = ("env", "launcher", "loggers", "checkpoint")
"""Sections of a recipe that say where it ran and where its results went, beside those that only watch."""
SEAL = re.compile(r"<!-- written by titan-hub: ([0-9a-f]{64}) -->\n\Z")
_LOCAL = re.compile(r"(?<![\w:/.~-])(?:~|/)[^\s\"'`]*/([^\s/\"'`]+)")
_PASSWORD = re.compile(r"(\w://)[^\s/@\"'<>]+@")
_URL = re.compile(r"([a-z][a-z0-9+]*)://(.*)", re.ASCII | re.DOTALL)


def card_of(
    source: Source, license: str | None = None, base_model: str | None = None, *, name: str | None = None
) -> str:
    """Return the model card of a source, Markdown with YAML metadata, which ends with a seal.

    Args:
        license: the license's id on the Hub; None: the card names none.
        base_model: repository of the base model; None: as the recipe says.
        name: its title; None: the recipe's name.
    """
    from huggingface_hub import ModelCardData

    recipe = source.recipe or {}
    base, config = base_model or source.base_model, source.config()
    classes = config.get("architectures")
    causal = isinstance(classes, list) and any(str(one).endswith("ForCausalLM") for one in classes)
    lora = [str(one.get("type", "")).rpartition("/")[2] for one in _tables(recipe.get("converters"))]
    data = ModelCardData(
        library_name=source.library(),
        pipeline_tag="text-generation" if causal else None,
        base_model=base,
        datasets=sorted(set(_datasets(recipe))) or None,
        license=license,
        tags=["titan", *sorted({name for name in lora if name in ("lora", "qlora")})],
    )
    title = _line(name or str(recipe.get("name") or source.path.name))
    parts = [f"---\n{data.to_yaml()}\n---", f"# {title}", _origin(source, base)]
    parts += [*_metrics(source), *_data(source)]
    if (text := recipe_file(source)) is not None:
        parts += [
            "## Recipe",
            "The resolved recipe, without what concerns the machines. Local paths are shown as `./NAME`.",
            _fenced(text),
        ]
    body = "\n\n".join(parts) + "\n\n"
    return f"{body}<!-- written by titan-hub: {_hash(body)} -->\n"


def is_ours(card: str) -> bool:
    """Return whether titan-hub has written a card, and nobody has changed it since."""
    found = SEAL.search(card.replace("\r\n", "\n"))
    return found is not None and _hash(card.replace("\r\n", "\n")[: found.start()]) == found[1]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def recipe_file(source: Source) -> str | None:
    """Return the resolved recipe as TOML, without local paths and accounts; None if it is not known."""
    from titancli.recipe import LOCK_HEADER, toml_text
    from titancli.recipe.schema import sections_with

    if source.recipe is None:
        return None
    left_out = (*PRIVATE, *sections_with("watching"))
    kept = {key: value for key, value in source.recipe.items() if key not in left_out}
    versions = source.attempt.get("versions") or {}
    # With a lock file's header, missing values are None and not those of a flavor.
    header = f"{LOCK_HEADER} {_line(str(versions.get('titancli', __version__)))}"
    return f"{header}, without local paths\n{toml_text(without_paths(kept))}"


def without_paths(value: Any) -> Any:
    """Return plain data; a local path becomes its last part, and a URL loses user, bucket and query."""
    if isinstance(value, Mapping):
        return {str(key): without_paths(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [without_paths(one) for one in value]
    if isinstance(value, Path):
        value = str(value)
    return _without_path(value) if isinstance(value, str) else value


def _without_path(text: str) -> str:
    if found := _URL.fullmatch(text):
        scheme, rest = found.groups()
        if scheme == "hf":
            return text
        rest = re.split(r"[?#]", rest)[0]
        last = PurePosixPath(rest).name or "…"
        return (
            f"{scheme}://{rest.rpartition('@')[2]}" if scheme in ("http", "https") else f"{scheme}://…/{last}"
        )
    if text.startswith(("/", "~")):
        return f"./{PurePosixPath(text).name}"
    return _LOCAL.sub(r"./\1", _PASSWORD.sub(r"\1", text))


def _tables(value: Any) -> list[dict[str, Any]]:
    return [one for one in value or [] if isinstance(one, dict)]


def _datasets(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield the datasets on the Hub that a recipe trains on."""

    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            path = value.get("path")
            if str(value.get("type", "")).endswith("hf") and isinstance(path, str) and REPOSITORY.match(path):
                yield path
            for one in value.values():
                yield from walk(one)
        elif isinstance(value, list):
            for one in value:
                yield from walk(one)

    yield from walk(recipe.get("dataset"))


def _origin(source: Source, base: str | None) -> str:
    versions, git = source.attempt.get("versions") or {}, source.attempt.get("git") or {}
    began = f" from [{base}](https://huggingface.co/{base})" if base else ""
    if source.recipe is None:
        return f"Exported with titan{began}."
    lines = [f"Trained with titan {_line(str(versions.get('titancli', __version__)))}{began}"]
    if source.step is not None:
        lines.append(f"; this is step {source.step:,}")
    if commit := git.get("commit"):
        changed = ", with uncommitted changes" if git.get("dirty") else ""
        lines.append(f"; git commit `{_line(str(commit))}`{changed}")
    return "".join(lines) + "."


def _metrics(source: Source) -> Iterator[str]:
    rows = [("", name, value) for name, value in source.metrics.items()]
    rows += [(of, name, value) for of, found in source.evaluations.items() for name, value in found.items()]
    numbers = [
        f"| {_line(' '.join(filter(None, (of, name))))} | {value:.4f} |"
        for of, name, value in rows
        if isinstance(value, int | float)
    ]
    if numbers:
        yield "## Metrics"
        yield "\n".join(["| metric | value |", "|---|---|", *numbers])


def _data(source: Source) -> Iterator[str]:
    if isinstance(found := source.attempt.get("data"), dict):
        from titancli.files import utf8
        from titancli.recipe import toml_text

        yield "## Data"
        yield "The identity of the data, as titan recorded it:"
        yield _fenced(toml_text(utf8(without_paths(found))))


def _line(text: str) -> str:
    """Return a text, whatever it holds, as one line of Markdown that begins no markup."""
    return re.sub(r"[|<>`\[\]\\]", " ", printable(" ".join(text.split()))).strip()


def _fenced(text: str) -> str:
    """Return a TOML text as a block of Markdown that no line of it ends."""
    fence = "`" * (1 + max(2, *(len(run) for run in re.findall("`+", text) or [""])))
    return f"{fence}toml\n{text}{fence}"
