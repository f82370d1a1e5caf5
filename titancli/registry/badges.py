"""Badges: titan-proof's verdict on a component, with its date and the code it is about.

One file per component, in `proofs` of titan's cache (`TITAN_CACHE`, or `~/.cache/titan`) with titan's other
files of a user: an installed package stays unchanged, and two proofs at once do not collide.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titancli.files import read_json
from titancli.fingerprint import cache_folder
from titancli.provenance import code_hash, package_versions
from titancli.registry import current

VERSIONS = ("titancli", "torch")
SHOWN = ("component", "recipe", "ok", "cases", "ranks", "time")
"""The keys that a badge needs besides `versions` and `code`."""


def badge_folder() -> Path:
    """Return the folder of all badges."""
    return cache_folder() / "proofs"


def badges(plugin: str) -> list[dict[str, Any]]:
    """Return the badges of a plugin's components, each with `stale`: the changes since then, in words.

    An unreadable file is listed with `ok` null and the reason in `stale`.
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
    code, versions = code_of(plugin), versions_now()
    changed = [] if code == badge["code"] else [f"the code of {plugin} has changed"]
    return changed + [
        f"{name} {badge['versions'][name]} then, {versions.get(name)} now"
        for name in VERSIONS
        if badge["versions"][name] != versions.get(name)
    ]


def versions_now() -> dict[str, str | None]:
    found = package_versions(VERSIONS)
    return {name: found.get(name) for name in VERSIONS}


def code_of(plugin: str) -> str | None:
    file = next((p.file for p in current().plugins if p.name == plugin), None)
    return code_hash(plugin, file)
