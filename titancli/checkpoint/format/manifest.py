"""`manifest.json`, and the folder of a run's checkpoints: which exist, which are good. Torch-free.

A folder `step-N` is whole or absent: it is written under a hidden name and renamed when everything in it, the
manifest last, is on the disk. The manifest lists every other file with its size and checksum; its first line
holds the checksum of the lines after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import xxhash

from titancli.checkpoint.format.files import file_size, look_again, patiently, read_file
from titancli.checkpoint.format.hashed import Digest, file_digest
from titancli.checksum import Checksum
from titancli.errors import EnvironmentProblem, TitanError
from titancli.runs import STEP_NAME

MANIFEST = "manifest.json"
LOCK = "recipe.lock.toml"
FORMAT = 1
COMPACT = (",", ":")
"""JSON separators without spaces, since thousands of ranks read these files."""
LIMIT = 1 << 28
"""Maximum size of a manifest in bytes, far above that of one with 10,000 files."""
SET_ASIDE = re.compile(r"step-\d{1,18}\.unknown-[0-9a-f]{8}\Z")
"""Names of folders of unknown origin that were in the way of a checkpoint; they are neither loaded nor
removed."""
REPLACED_NAME = re.compile(r"\.step-(\d{1,18})\.old-[0-9a-f]{8}\Z")

Verify = Literal["full", "size", "off"]
"""What is checked before a checkpoint is trusted: every byte, names and sizes, or only that its files are
regular."""


class DamagedCheckpoint(EnvironmentProblem):
    """A checkpoint's bytes are not those that were written, or cannot be read. Ranks that find it while
    loading all raise the same error; another checkpoint may then be loaded, see `newest_good`."""

    def __init__(self, folder: Path, why: str, file: str | None = None) -> None:
        """Create the error.

        Args:
            file: the file whose bytes are wrong, if there is only one.
        """
        super().__init__(f"checkpoint {folder} is damaged: {why}", hint="use another checkpoint (--step N)")
        self.folder, self.why, self.file = folder, why, file

    def __reduce__(self):
        return DamagedCheckpoint, (self.folder, self.why, self.file)


class OtherFormat(EnvironmentProblem):
    """A checkpoint in another version's format; as far as this version can tell, it is whole."""


CHECKSUM = Checksum('{"xxh3_64": "', '",\n')
"""The first line of a manifest."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint's manifest."""

    step: int
    run_id: str
    """The run that wrote it; no other may purge it."""
    serial: int
    """Number of the save within the folder of checkpoints; the newest has the highest."""
    created: str
    """Time of creation: UTC, ISO 8601."""
    versions: dict[str, str]
    """Versions of titancli, torch and python."""
    lock_xxh3_64: str | None
    """Checksum of `recipe.lock.toml`; None if there is none (converted weights)."""
    layout: dict[str, Any]
    """The number of `ranks` that wrote it, and the degrees of their mesh by name."""
    files: dict[str, Digest]
    state: dict[str, Any]
    """Counters, schedule, data position and random generators, as plain JSON."""


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the bytes of the manifest file.

    Raises:
        TitanError: `state` is not plain JSON.
    """
    try:
        rows = [
            f"{json.dumps(key)}: {json.dumps(value, allow_nan=False, separators=COMPACT)}"
            for key, value in {"format": FORMAT, **asdict(manifest)}.items()
        ]
    except (TypeError, ValueError) as error:
        raise TitanError(f"the state of step {manifest.step} is not plain JSON: {error}") from error
    rest = ",\n".join(rows) + "}\n"
    return CHECKSUM.put(rest).encode()


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder, or a path in an object store, is a checkpoint, damaged or not: whether it has
    a manifest, which `read_manifest` checks.

    Raises:
        EnvironmentProblem: the disk cannot be read.
    """
    try:
        return patiently((folder / MANIFEST).is_file)
    except OSError as error:
        raise EnvironmentProblem(f"{folder / MANIFEST} cannot be read: {error.strerror}") from error


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest.

    Raises:
        EnvironmentProblem: the folder is not a checkpoint, its manifest is damaged, or the manifest's
            step is not that of the folder's name.
    """
    path = folder / MANIFEST
    try:
        text = read_file(path, LIMIT)
        if not isinstance(path, os.PathLike) and not CHECKSUM.holds(text):
            text = read_file(path, LIMIT)  # for a store: the download may have corrupted it
    except (FileNotFoundError, NotADirectoryError) as error:
        raise EnvironmentProblem(
            f"{folder} is not a titan checkpoint: it has no {MANIFEST}",
            hint="a checkpoint is a folder such as RUN/checkpoints/step-100",
        ) from error
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from error
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Path) -> Manifest:
    """Parse and check the text of the manifest at `path`.

    Raises:
        EnvironmentProblem: as for `read_manifest`.
    """
    folder = path.parent
    if not CHECKSUM.holds(text):
        raise EnvironmentProblem(f"{path} is damaged: its checksum does not match")
    try:
        data = json.loads(text)
        del data["xxh3_64"]
        if (found := data.pop("format")) != FORMAT:
            raise OtherFormat(
                f"{path} has format {found!r}, but this version of titan reads format {FORMAT}",
                hint="use the version of titan that wrote it",
            )
        manifest = Manifest(**{**data, "files": {n: Digest(**row) for n, row in data["files"].items()}})
        _check(manifest)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise EnvironmentProblem(f"{path} is malformed: {error}") from error
    named = STEP_NAME.match(folder.name) or REPLACED_NAME.match(folder.name)
    if named and int(named[1]) != manifest.step:
        raise EnvironmentProblem(
            f"{folder} is named for step {int(named[1])}, but its {MANIFEST} says step {manifest.step}",
            hint=f"it was renamed or copied: name it step-{manifest.step}, or choose a name that is not "
            f"that of another step",
        )
    return manifest


def _check(manifest: Manifest) -> None:
    if not all(isinstance(n, int) and n >= 0 for n in (manifest.step, manifest.serial)):
        raise ValueError("step and serial must be non-negative integers")
    if not isinstance(manifest.run_id, str) or not isinstance(manifest.state, dict):
        raise ValueError("run_id must be a string and state an object")
    if bad := [name for name in manifest.files if not _PLAIN_NAME.match(name)]:
        raise ValueError(f"{bad[0]!r} is not a plain file name")
    if bad := [n for n, d in manifest.files.items() if type(d.size) is not int or type(d.xxh3_64) is not str]:
        raise ValueError(f"the row of {bad[0]!r}")


def adapter_record(manifest: Manifest) -> dict[str, Any] | None:
    """Return what a checkpoint of adapters records of them and their base; None for any other checkpoint."""
    engine = manifest.state.get("engine")
    found = engine.get("adapters") if isinstance(engine, dict) else None
    return found if isinstance(found, dict) else None


def faults(
    folder: Path, manifest: Manifest, *, verify: Verify = "full", only: Iterable[str] | None = None
) -> list[str]:
    """Return what is wrong with a checkpoint's files, one phrase per file, each naming it; empty if it is
    good.

    `only` limits the checksums to these files, so that ranks can share the reading.
    """
    try:
        present = _sizes(folder)
        while any((present.get(n, 0) or 0) < d.size for n, d in manifest.files.items()) and look_again():
            present = _sizes(folder)
    except OSError as error:
        return [f"{folder} cannot be read: {error.strerror}"]
    found = [f"{name} is not a regular file" for name in manifest.files if present.get(name, 0) is None]
    if verify == "off":
        return found
    found += [f"{name} is missing" for name in manifest.files if name not in present]
    extra = present.keys() - manifest.files.keys() - {MANIFEST}
    # A network file system renames an open file to this when it is deleted.
    found += [
        f"{name} is not listed in the manifest" for name in sorted(extra) if not name.startswith(".nfs")
    ]
    chosen = manifest.files.keys() if only is None else only
    for name, digest in manifest.files.items():
        if present.get(name) is None:
            continue
        if present[name] != digest.size:
            found.append(f"{name} has {present[name]} bytes instead of {digest.size}")
        elif verify == "full" and name in chosen and (wrong := _damage(folder / name, digest)):
            found.append(wrong)
    return found


def _sizes(folder: Path) -> dict[str, int | None]:
    return patiently(lambda: {path.name: file_size(path) for path in folder.iterdir()})


def _damage(path: Path, digest: Digest) -> str | None:
    """Return how a file differs from the one that was written; None: it does not.

    A path in an object store reads itself, see `titancli.checkpoint.remote.transfer`; a store that does not
    answer says nothing about the file, so that is not an `EnvironmentProblem`.
    """
    try:
        found = path.digest() if hasattr(path, "digest") else file_digest(path)
    except EnvironmentProblem as error:
        return error.message
    return None if found == digest else f"{path.name} is damaged: its checksum does not match"


def names_and_sizes(verify: Verify) -> Verify:
    """Return the level of verification when the bytes are left to the ranks, which hash what they read."""
    return "size" if verify == "full" else verify


def steps(folder: Path) -> dict[Path, Manifest]:
    """Return the checkpoints `step-N` of a folder that have a readable manifest, newest first."""
    return _manifests(folder)[0]


def last_serial(folder: Path) -> int:
    """Return the highest serial in a folder of checkpoints; an unreadable one counts as one more, so that it
    is not taken for the newest once it is readable."""
    good, bad = _manifests(folder)
    return max((manifest.serial for manifest in good.values()), default=0) + len(bad)


def none_newer(folder: Path, checkpoint: Path, newer_than: int = 0) -> bool:
    """Return whether no checkpoint in the folder may be newer than the given one, among those with a serial
    above `newer_than`. One with an unreadable manifest is dated by its step."""
    good, bad = _manifests(folder)
    known = [path for path, manifest in good.items() if manifest.serial > newer_than]
    return known[:1] in ([], [checkpoint]) and all(_step_in(path) < _step_in(checkpoint) for path in bad)


def _step_in(path: Path) -> int:
    """Return the step in the name of one of `_step_folders`."""
    match = STEP_NAME.match(path.name) or REPLACED_NAME.match(path.name)
    return int(match[1]) if match else -1


def _manifests(folder: Path) -> tuple[dict[Path, Manifest], dict[Path, EnvironmentProblem]]:
    """Return the manifests of a folder's checkpoints, newest first, and why the others cannot be read."""
    good, bad = {}, {}
    for path in _step_folders(folder):
        try:
            good[path] = read_manifest(path)
        except EnvironmentProblem as error:
            bad[path] = error
    newest_first = sorted(good.items(), key=lambda item: (item[1].serial, item[1].step), reverse=True)
    return dict(newest_first), bad


def _step_folders(folder: Path) -> list[Path]:
    """Return the folders that are checkpoints by name, highest step first.

    If the replacement of `step-N` was interrupted between its two renames, the old one is listed under its
    hidden name (see `recover`). Nothing is renamed here: a run may be saving at the same time.
    """
    try:
        names = patiently(lambda: {path.name: path for path in folder.iterdir() if path.is_dir()})
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise EnvironmentProblem(f"{folder} cannot be read: {error.strerror}") from error
    found = {int(match[1]): path for name, path in names.items() if (match := REPLACED_NAME.match(name))}
    found |= {int(match[1]): path for name, path in names.items() if (match := STEP_NAME.match(name))}
    return [found[step] for step in sorted(found, reverse=True)]


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of `RUN/checkpoints`, judged by names and manifests only, or
    None."""
    return next(iter(steps(folder)), None)


def newest_good(
    folder: Path,
    *,
    verify: Verify = "full",
    rejected: Callable[[str], None] | None = None,
    newer_than: int = 0,
    damaged: Mapping[Path, str] = MappingProxyType({}),
    look: Callable[..., list[str]] | None = None,
) -> Path | None:
    """Return the newest checkpoint whose files are all present and undamaged.

    Every file of it was read, unless `verify` says less, so this takes as long as reading a checkpoint.

    Args:
        rejected: called with one line for each checkpoint that was skipped, newest first.
        newer_than: only checkpoints with a serial above this are considered.
        look: finds what is wrong with a checkpoint; the default is `faults`.
        damaged: what is already known to be wrong with some of them.
    """

    def reject(path: Path, why: str) -> None:
        if rejected is not None:
            rejected(f"checkpoint {path.name} is skipped: {why}")

    good, bad = _manifests(folder)
    for path, error in bad.items():
        reject(path, error.message)
    for path, manifest in good.items():
        if manifest.serial <= newer_than:
            continue
        known = [damaged[path]] if path in damaged else []
        if not (found := known or (look or faults)(path, manifest, verify=verify)):
            return path
        reject(path, "; ".join(found))
    return None


def none_usable(run: Path, skipped: Iterable[str], *, hint: str | None = None) -> EnvironmentProblem:
    """Return the error for a run that has checkpoints but none that is usable, and must not start over."""
    listed = "".join(f"\n  {line}" for line in skipped)
    return EnvironmentProblem(f"{run} has checkpoints, and none of them can be used:{listed}", hint=hint)


def hidden_prefix(name: str, run_id: str) -> str:
    """Return the prefix of a run's unfinished folders; it names the run, so that no other is swept away."""
    return f".{name}.tmp-{xxhash.xxh3_64(run_id.encode()).hexdigest()[:8]}-"


def remove(path: Path, run_id: str) -> None:
    """Delete one of a run's own checkpoints, renamed as unfinished first, so that a partial one never counts.

    What cannot be deleted stays: a superfluous checkpoint is no reason to stop a run.
    """
    hidden = path.with_name(f"{hidden_prefix('step', run_id)}{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.rename(hidden)
        shutil.rmtree(hidden)


def recover(folder: Path) -> None:
    """Restore a checkpoint whose replacement was interrupted between two renames; only for the process that
    writes.

    `.step-N.old-…` is the previous `step-N`; it is complete, and is deleted only once the new one has the
    name.
    """
    for old in folder.glob(".step-*.old-*"):
        if match := REPLACED_NAME.match(old.name):
            final = folder / f"step-{match[1]}"
            if not final.exists():
                old.rename(final)
