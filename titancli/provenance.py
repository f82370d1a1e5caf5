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
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
    """Return the package of each plugin."""
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
    """Commit, branch, whether there are changes, and the hash of these (`uncommitted_patch`); None without
    git, outside a repository, and in one of another user."""
    try:
        with _repository(folder) as repository:
            status = repository.git("status", "--porcelain", "--untracked-files=no", *NO_SUBMODULES)
            dirty, sha256 = bool(status), None
            if dirty:
                patch = repository.git(*PATCH)
                sha256 = hashlib.sha256(patch).hexdigest()
                _recorded.clear()  # the newest one, until it is kept
                _recorded[sha256] = patch
            return {
                "commit": repository.commit,
                "branch": repository.branch,
                "dirty": dirty,
                "patch_sha256": sha256,
            }
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def uncommitted_patch(folder: Path) -> bytes:
    """Return what `git apply` makes of the commit what lies in the repository around a folder, without files
    that git does not track.

    Raises:
        OSError, subprocess.SubprocessError: there is no git, or no repository.
    """
    with _repository(folder) as repository:
        return repository.git(*PATCH)


NO_SUBMODULES = ("--ignore-submodules=dirty",)
"""Their work trees are not looked at: each is a repository with settings of its own."""
PATCH = ("diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", *NO_SUBMODULES)
HARMLESS = ("core.filemode", "core.symlinks", "core.ignorecase", "core.autocrlf", "core.eol")
"""Settings of a repository that say how its files lie on the disk."""


@dataclass(frozen=True)
class _Repository:
    commit: str
    branch: str
    environment: Mapping[str, str]
    top: Path

    def git(self, *arguments: str) -> bytes:
        return _git(self.top, self.environment, *arguments)


@contextmanager
def _repository(folder: Path) -> Iterator[_Repository]:
    """Yield the repository around a folder, seen through a git directory of our own, with its objects and its
    index.

    The files of a downloaded repository are a stranger's, and git would start the programs that they name:
    core.fsmonitor, filters and textconv (in `.git/config`, `.git/info/attributes` or what these include),
    hooks, and remotes of partial clones. In a directory of our own there are none of these. Variables GIT_*
    and the configs of the user and the machine are left out, too.

    Raises:
        OSError, subprocess.SubprocessError: there is no git, no repository with a commit, or it belongs to
            another user.
    """
    folder = folder.absolute()
    top = next((one for one in (folder, *folder.parents) if os.path.lexists(one / ".git")), None)
    if top is None:
        raise FileNotFoundError(f"no repository around {folder}")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    bare |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_OPTIONAL_LOCKS": "0"}
    asked = ["--show-toplevel", "--absolute-git-dir", "--show-object-format"]
    asked += ["--git-path", "objects", "--git-path", "index", "HEAD"]
    found = os.fsdecode(_git(top, bare, "rev-parse", *asked)).split("\n")
    shown, directory, form, objects, index, commit = found[:6]
    if not os.path.samefile(shown, top):  # core.worktree names another folder
        raise PermissionError(f"{top} is not the work tree of its repository")
    for path in (top, directory):
        if os.stat(path).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
    branch = _git(top, bare, "rev-parse", "--abbrev-ref", "HEAD").decode(errors="replace").strip()
    with tempfile.TemporaryDirectory(prefix="titan-git-") as own:
        (Path(own) / "refs").mkdir()
        (Path(own) / "HEAD").write_text(f"{commit}\n")
        core = f"[core]\nrepositoryformatversion = 1\n{_harmless(top, bare)}"
        (Path(own) / "config").write_text(f"{core}[extensions]\nobjectformat = {form}\n")
        places = {"GIT_DIR": own, "GIT_WORK_TREE": str(top)}
        places |= {"GIT_OBJECT_DIRECTORY": str(top / objects), "GIT_INDEX_FILE": str(top / index)}
        yield _Repository(commit, branch, bare | places, top)


def _harmless(top: Path, environment: Mapping[str, str]) -> str:
    """Return the lines of `HARMLESS` settings in a repository's config."""
    listed = _git(top, environment, "config", "--local", "--list", "--null", "--no-includes")
    pairs = [pair.partition(b"\n")[::2] for pair in listed.split(b"\0")]
    known = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
    return "".join(
        f"{name.removeprefix('core.')} = {known[name]}\n"
        for name in HARMLESS
        if known.get(name) in ("true", "false", "input", "lf", "crlf", "native")
    )


def _git(folder: Path, environment: Mapping[str, str], *arguments: str) -> bytes:
    off = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "--no-pager")
    command = ["git", *off, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, timeout=10, check=True, env=environment).stdout


SOURCES = "sources"
"""The folder of a run folder that keeps them."""


def kept_source(sha256: str, name: str) -> str:
    """Return the name under which a run folder keeps a source: a plugin file, or the uncommitted patch."""
    return f"{SOURCES}/{sha256[:12]}-{name}"


PATCH_NAME = "uncommitted.patch"


def keep_sources(run: Path, attempt: Mapping[str, Any], *, patch: bool = True) -> None:
    """Copy the plugin files that an attempt records, and with `patch` the uncommitted changes, into its run
    folder.

    What has changed since it was recorded is left out: a copy under its hash is always what was recorded.

    Raises:
        EnvironmentProblem: the disk is full.
    """
    wanted: list[tuple[str, str, Callable[[], bytes]]] = [
        (entry["sha256"], Path(entry["path"]).name, Path(entry["path"]).read_bytes)
        for entry in attempt["plugin_files"]
    ]
    git = attempt["git"] or {}
    if patch and git.get("patch_sha256"):
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
