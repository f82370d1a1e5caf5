"""`[env]`: which environment variables a recipe may set for its workers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping

from titancli.recipe.scan import KeyPath

SECRET = ("*_TOKEN", "*_KEY", "*SECRET*", "*PASSWORD*")
LAUNCHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_*",
)
CODE = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "LD_PRELOAD", "LD_AUDIT", "TITAN_*")
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def check_env(env: Mapping[str, str]) -> Iterator[tuple[KeyPath, str, str]]:
    """What is wrong with each variable: its path, a message, and what to do."""
    for name, value in env.items():
        refused = _refused(name, value)
        if refused is not None:
            yield ("env", name), *refused


def _refused(name: str, value: str) -> tuple[str, str] | None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return f"{name!r} is no name of an environment variable", "write letters, digits and _"
    if "\0" in value:
        return f"the value of {name} has a NUL in it", "take it out"
    if _matches(name, SECRET):
        message = f"{name} looks like a secret, and a recipe and its lock file are shown around"
        return message, f"set it in the shell: export {name}=…"
    if _matches(name, LAUNCHERS):
        return f"{name} is set by the launcher", "take it out"
    if _matches(name, CODE):
        return f"{name} decides what code is run, which is not for a recipe to say", "set it in the shell"
    if _matches(name, DEVICES):
        return (
            f"{name} is for the machine to say, not for the recipe",
            f"set it in the shell: export {name}=…",
        )
    return None


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in patterns)
