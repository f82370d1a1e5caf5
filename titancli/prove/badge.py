"""Badges: what was proven of a component, when, and of which code. Torch-free.

A file a component, in `proofs` of titan's cache (`TITAN_CACHE`, or `~/.cache/titan`), beside what else titan
keeps for a user: an installed package stays as it is, and two proofs at once do not meet.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.files import read_json
from titancli.fingerprint import cache_folder
from titancli.prove.component import computing, label_of
from titancli.provenance import code_hash, package_versions
from titancli.registry import current
from titancli.runs import timestamp, write_atomically

if TYPE_CHECKING:
    from titancli.prove.proof import Proof
    from titancli.recipe import Loaded

VERSIONS = ("titancli", "torch")
SHOWN = ("component", "recipe", "ok", "cases", "ranks", "time")
"""What a badge must have beside `versions` and `code`."""


def badge_folder() -> Path:
    """Return the folder of all badges."""
    return cache_folder() / "proofs"


def write_badges(
    proof: Proof, loaded: Loaded, ranks: int, component: type | None, device: str = "cpu"
) -> list[Path]:
    """Write what a proof says: of the component that was asked for, whatever it says; of all those of
    a recipe, if nothing is wrong with it, for no single one of them is known to be at fault.

    Raises:
        EnvironmentProblem: a file cannot be written.
    """
    if component is None and proof.wrong:
        return []
    written = []
    for config in [component] if component is not None else computing(loaded):
        label = label_of(config)
        kind, plugin, name = label.split("/")
        badge = {
            "component": f"{kind}/{name}",
            "recipe": loaded.recipe.name,
            "ok": not proof.wrong,
            "cases": dict(Counter(result["status"] for result in proof.results)),
            "causes": [cause["name"] for cause in proof.causes],
            "ranks": ranks,
            "device": device,
            "time": timestamp(),
            "versions": _versions(),
            "code": _code(plugin),
        }
        path = badge_folder() / plugin / f"{kind}-{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(badge, indent=2) + "\n")
        written.append(path)
    return written


def badges(plugin: str) -> list[dict[str, Any]]:
    """Return the badges of a plugin's components, each with `stale`: what has changed since, in words.

    A file that cannot be read is there with `ok` null, and says so in `stale`.
    """
    found = []
    for path in sorted((badge_folder() / plugin).glob("*.json")):
        try:
            badge = read_json(path)
            stale = list(_changes(plugin, badge))
            if missing := [key for key in SHOWN if key not in badge]:
                raise KeyError(missing[0])  # another version of titan wrote it
            found.append({**badge, "stale": stale})
        except (OSError, ValueError, KeyError, TypeError) as error:
            name = path.stem.replace("-", "/", 1)
            found.append({"component": name, "ok": None, "stale": [f"{path} cannot be read: {error!r}"]})
    return found


def _changes(plugin: str, badge: dict[str, Any]) -> list[str]:
    code, versions = _code(plugin), _versions()
    changed = [] if code == badge["code"] else [f"the code of {plugin} has changed"]
    return changed + [
        f"{name} {badge['versions'][name]} then, {versions.get(name)} now"
        for name in VERSIONS
        if badge["versions"][name] != versions.get(name)
    ]


def _versions() -> dict[str, str | None]:
    found = package_versions(VERSIONS)
    return {name: found.get(name) for name in VERSIONS}


def _code(plugin: str) -> str | None:
    file = next((p.file for p in current().plugins if p.name == plugin), None)
    return code_hash(plugin, file)
