"""The origin of a run: versions, host, git state, plugin files. Torch-free."""

from __future__ import annotations

import getpass
import hashlib
import importlib.util
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from titancli.errors import EnvironmentProblem
from titancli.files import regular

LARGEST_SOURCE = 16 << 20
"""Bytes of a patch or plugin file that a run folder keeps at most."""
PACKAGES = ("titancli", "torch", "transformers", "datasets", "safetensors", "numpy", "pydantic")


def provenance(plugin_files: list[Path]) -> dict[str, Any]:
    """Return the record of the command and the machine for `run.json`: plain JSON."""
    return {
        "argv": sys.argv,
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "user": _user(),
        "process": os.getpid(),
        "platform": platform.platform(),
        "versions": versions(),
        "code": code_hashes(),
        "git": git_state(Path.cwd()),
        "plugin_files": [{"path": str(file), "sha256": file_hash(file)} for file in plugin_files],
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, of packages that affect results, and of every distribution that brings a
    plugin."""
    return {"python": platform.python_version(), **package_versions(PACKAGES)}


def package_versions(names: tuple[str, ...] = ("titancli", "torch")) -> dict[str, str]:
    """Return the versions of these packages, and of every distribution that brings a plugin."""
    found = {}
    plugins = {point.dist.name for point in entry_points() if point.dist is not None}
    for name in (*names, *sorted(plugins - set(names))):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an optional package that is not there has no version
    return found


def entry_points() -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of the group `titancli`. With a hundred packages a search takes 10 ms, so that
    it is made again only where a folder of `sys.path` has changed."""
    return _entry_points(tuple((folder, _changed_at(folder)) for folder in sys.path))


@lru_cache(maxsize=1)
def _entry_points(folders: tuple[tuple[str, int | None], ...]) -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group="titancli"))


def _changed_at(folder: str) -> int | None:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return None


def code_hashes() -> dict[str, str]:
    """Return by plugin a hash of the Python files of its package, `titan` being titancli itself.

    Two installations of one version may have other code: editable ones. Nothing is imported.
    """
    found = {name: code_hash(name) for name in sorted(_packages())}
    return {name: digest for name, digest in found.items() if digest is not None}


def code_hash(plugin: str, file: Path | None = None) -> str | None:
    """Return the hash of one plugin's code: of its package, or of its single `file`; None if it has none."""
    try:
        if file is not None:
            return _code_hash([str(file)])
        spec = importlib.util.find_spec(_packages()[plugin]) if plugin in _packages() else None
        return None if spec is None else _code_hash(spec.submodule_search_locations or [spec.origin or ""])
    except (ImportError, OSError, ValueError):
        return None  # a broken plugin, which is reported where it is needed


def _packages() -> dict[str, str]:
    """The package of each plugin."""
    tops = {point.name: point.value.partition(":")[0].partition(".")[0] for point in entry_points()}
    return {**tops, "titan": "titancli"}


def _code_hash(places: Iterable[str]) -> str:
    """Return the hash of packages' folders, or of a module's file."""
    digest = xxhash.xxh3_128()
    for place in map(Path, places):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{os.path.relpath(file, place)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


_recorded: dict[str, bytes] = {}
"""The patch that `git_state` has recorded last, by its hash: `keep_sources` need not make it again."""


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch, whether there are changes, and the hash of these (`uncommitted_patch`); None outside a
    repository or without git."""
    try:
        dirty = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
        sha256 = None
        if dirty:
            patch = uncommitted_patch(folder)
            sha256 = hashlib.sha256(patch).hexdigest()
            _recorded.clear()  # the newest one, until it is kept
            _recorded[sha256] = patch
        return {
            "commit": _git(folder, "rev-parse", "HEAD").decode().strip(),
            "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD").decode().strip(),
            "dirty": dirty,
            "patch_sha256": sha256,
        }
    except (OSError, subprocess.SubprocessError):
        return None


def uncommitted_patch(folder: Path) -> bytes:
    """Return what `git apply` makes of the commit what lies in the repository around a folder, without files
    that git does not track.

    Raises:
        OSError, subprocess.SubprocessError: there is no git, or no repository.
    """
    return _git(folder, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff")


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, timeout=10, check=True).stdout


SOURCES = "sources"
"""The folder of a run folder that keeps them."""


def kept_source(sha256: str, name: str) -> str:
    """Return the name under which a run folder keeps a source: a plugin file, or the uncommitted patch."""
    return f"{SOURCES}/{sha256[:12]}-{name}"


PATCH_NAME = "uncommitted.patch"


def keep_sources(run: Path, attempt: Mapping[str, Any]) -> None:
    """Copy the plugin files and the uncommitted patch that an attempt records into its run folder.

    What has changed since it was recorded is left out: a copy under its hash is always what was recorded.

    Raises:
        EnvironmentProblem: the disk is full.
    """
    wanted: list[tuple[str, str, Callable[[], bytes]]] = [
        (entry["sha256"], Path(entry["path"]).name, Path(entry["path"]).read_bytes)
        for entry in attempt["plugin_files"]
    ]
    git = attempt["git"] or {}
    if git.get("patch_sha256"):
        sha256 = git["patch_sha256"]
        made = _recorded.pop(sha256, None)
        folder = Path(attempt["directory"])
        wanted.append((sha256, PATCH_NAME, lambda: uncommitted_patch(folder) if made is None else made))
    for sha256, name, read in wanted:
        path = run / kept_source(sha256, name)
        try:
            data = read()
        except (OSError, subprocess.SubprocessError):
            continue
        if path.exists() or len(data) > LARGEST_SOURCE or hashlib.sha256(data).hexdigest() != sha256:
            continue
        try:
            path.parent.mkdir(exist_ok=True)
            part = path.with_name(f".{path.name}.{os.getpid()}")
            with open(part, "wb", opener=regular) as file:
                file.write(data)
            os.replace(part, path)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot write {path}: {error.strerror}", hint="free some space"
            ) from error


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return None
