"""Write badges: records of what was proven of a component, when, and with which code. `titan plugin` shows
them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from titan_proof.prove.component import computing, label_of
from titancli.registry.badges import badge_folder, code_of, versions_now
from titancli.runs import timestamp, write_atomically

if TYPE_CHECKING:
    from titan_proof.prove.proof import Proof
    from titancli.recipe import Loaded


def write_badges(
    proof: Proof, loaded: Loaded, ranks: int, component: type | None, device: str = "cpu"
) -> list[Path]:
    """Write the badges of a proof: for the requested component, whatever the result; for all components of a
    recipe, only if nothing is wrong, as it is not known which of them is at fault.

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
            "versions": versions_now(),
            "code": code_of(plugin),
        }
        path = badge_folder() / plugin / f"{kind}-{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(badge, indent=2) + "\n")
        written.append(path)
    return written
