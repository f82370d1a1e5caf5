"""Uploading checkpoints to an object store, and downloading them. Torch-free.

Object stores cannot rename, but a folder without a valid manifest is not a checkpoint. So the manifest is
uploaded last and deleted first, and a checkpoint is complete or absent in a store, too.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from titancli.checkpoint.format.disk import need, refusal, size_text, sync_folder, write_file
from titancli.checkpoint.format.hashed import Digest, file_digest
from titancli.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    OtherFormat,
    Verify,
    faults,
    hidden_prefix,
    manifest_bytes,
    newest_good,
    read_manifest,
    remove,
)
from titancli.checkpoint.remote import Fsspec
from titancli.checkpoint.remote.leases import left_behind, marked
from titancli.checkpoint.remote.requests import ABSENT
from titancli.checkpoint.remote.store import ATTEMPTS, RemotePath, at
from titancli.errors import EnvironmentProblem, TitanError
from titancli.files import regular
from titancli.object_store import file_system
from titancli.process import refusal_below
from titancli.recipe.find import store_type
from titancli.registry import current

if TYPE_CHECKING:
    from titancli.recipe.schema import Checkpoint


def run_place(section: Checkpoint, run_folder: Path, *, patience: float | None = None) -> Path:
    """Return the folder of a run's checkpoints in `checkpoint.remote`, named like its run folder. `patience`:
    see `at`."""
    url = f"{(section.remote or '').rstrip('/')}/{run_folder.name}"
    return at(url, section.remote_timeout_seconds, patience, section.store)


def require_store(remote: str, store: Any) -> None:
    """Check without a request that fsspec knows the store of `checkpoint.remote`, and that one on this
    machine's disk can be written. A plugin's store is left alone: its code is imported by a run only.

    Raises:
        EnvironmentProblem: it does not, or it cannot.
    """
    url = remote.rstrip("/")
    kind = type(store) if store else current().find("store", store_type(url, current()))
    if not issubclass(kind, Fsspec):
        return
    _, path = file_system(url)
    if url.startswith(("file://", "local://")) and (refused := refusal_below(Path(path).absolute())):
        raise EnvironmentProblem(
            f"no checkpoint can be uploaded: {url} cannot be written: {refused[1].strerror} ({refused[0]})",
            hint="name another folder in checkpoint.remote, or remove it with --unset",
        ) from refused[1]


def probe(place: Path) -> None:
    """Check that a store can be written to and deleted from, before anything that takes time.

    Raises:
        EnvironmentProblem: it cannot.
    """
    remote = cast(RemotePath, place / f".probe-{secrets.token_hex(4)}")
    hint = "checkpoint.remote: set the credentials in the environment, or remove it with --unset"
    try:
        remote.write_bytes(b"titan was here")
        remote.unlink()
    except (TitanError, OSError) as error:
        why = getattr(error, "message", None) or f"{place} cannot be written: {error}"
        raise EnvironmentProblem(f"no checkpoint can be uploaded: {why}", hint=hint) from error


# ------------------------------------------------------------------------------------------- both ways


def upload(folder: Path, place: Path, *, read_back: bool = False) -> None:
    """Upload a checkpoint to `place`, its manifest last, unless it is there already.

    Meanwhile a mark lies beside it, see `titancli.checkpoint.remote.leases`. `read_back`: verify each object
    by reading it, also if the store has no checksum of it.

    Raises:
        TitanError: a checkpoint of another run or of another version of titan is there, or is being uploaded;
            the folder is damaged; or the store does not hold what was sent.
        Unreachable: the store refuses, or does not answer.
        OSError: the local files cannot be read.
    """
    remote = cast(RemotePath, place)
    manifest = read_manifest(folder)
    if (there := _lying_at(place)) is not None:
        if there.run_id != manifest.run_id:
            raise TitanError(f"{place} was written by another run ({there.run_id}) and is not overwritten")
        if there == manifest and not faults(place, manifest, verify="size"):
            return  # an outdated listing lacked it
    if found := faults(folder, manifest):  # it might replace the last good copy
        raise TitanError(f"{folder} is damaged ({found[0]}): {place} stays as it was")
    with marked(remote, manifest) as mark:
        _clear(remote)
        for name, digest in manifest.files.items():
            mark.check()
            (remote / name).put(folder / name, digest, read_back=read_back)
        mark.check()
        (remote / MANIFEST).write_bytes(manifest_bytes(manifest))


def _lying_at(place: Path) -> Manifest | None:
    """Return the manifest of the checkpoint at `place`; None: there is no complete one."""
    try:
        return read_manifest(place)
    except OtherFormat:
        raise
    except EnvironmentProblem:
        return None


def _clear(place: RemotePath) -> None:
    """Delete the files at `place`, the manifest first."""
    (place / MANIFEST).unlink()
    try:
        there = [path for path in place.iterdir() if path.is_file()]
    except ABSENT:
        return
    for path in there:
        path.unlink()


def discard(place: Path, manifest: Manifest) -> None:
    """Delete a run's own checkpoint from a store: the files that its manifest names, and first the manifest.

    Raises:
        TitanError: another run is uploading it.
        Unreachable: the store refuses, or does not answer; the next `sweep` continues.
    """
    with marked(cast(RemotePath, place), manifest):
        _delete(cast(RemotePath, place), manifest)


def _delete(place: RemotePath, manifest: Manifest) -> None:
    for name in (MANIFEST, *manifest.files):
        (place / name).unlink()
    place.rmdir()


def sweep(parent: Path, run_id: str) -> None:
    """Delete the leftovers of this run's interrupted uploads and deletions, as listed in their marks. Other
    incomplete folders are left alone.

    Raises:
        Unreachable: the store refuses, or does not answer.
    """
    for mark, manifest in left_behind(cast(RemotePath, parent), run_id):
        if manifest is not None:
            place = cast(RemotePath, parent) / f"step-{manifest.step}"
            if not (place / MANIFEST).is_file():
                _delete(place, manifest)
        mark.unlink()


def fetch(place: Path, manifest: Manifest, parent: Path) -> list[str]:
    """Download a checkpoint into `parent`, under its own name; like a saved one it is complete or absent.

    Every checksum is verified. A folder of that name is replaced; unless it is the same checkpoint or an
    older one of its run, it is kept as `NAME.unknown-...`.

    Returns:
        A phrase for each faulty file; if there are any, nothing was downloaded.

    Raises:
        EnvironmentProblem: the disk is full, or cannot be written.
        Unreachable: the store refuses, or does not answer.
    """
    final = parent / place.name
    needed = sum(digest.size for digest in manifest.files.values())
    hidden = parent / f"{hidden_prefix(place.name, manifest.run_id)}{secrets.token_hex(4)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        need(parent, needed)
        hidden.mkdir()
        for name, digest in manifest.files.items():
            try:
                if not _get(cast(RemotePath, place / name), hidden / name, digest):
                    return [f"{name} is damaged: its checksum does not match"]
            except FileNotFoundError:  # deleted in the meantime
                return [f"{name} is missing"]
            _sync(hidden / name)
        write_file(hidden / MANIFEST, manifest_bytes(manifest))
        if found := faults(hidden, manifest, verify="size"):
            return found
        sync_folder(hidden)
        older = _is_older(final, manifest)
        form = ".{}.old-{}" if older else "{}.unknown-{}"  # .unknown is never removed
        old = parent / form.format(place.name, secrets.token_hex(4))
        if final.exists():
            final.rename(old)
        hidden.rename(final)
        sync_folder(parent)
        if older:
            remove(old, manifest.run_id)
    except OSError as error:
        kept, remedy = f"It is still in {place}.", "free some space, or use another --run-dir"
        raise refusal(error, final, needed, kept=kept, remedy=remedy) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return []


def _get(remote: RemotePath, target: Path, digest: Digest) -> bool:
    """Download an object to a file, and return whether its checksum matches, after `ATTEMPTS` attempts."""
    for _ in range(ATTEMPTS):
        remote.get(target)
        if file_digest(target) == digest:
            return True
    return False


def _is_older(folder: Path, manifest: Manifest) -> bool:
    """Return whether a folder is the same checkpoint, or an older one of its run."""
    try:
        there = read_manifest(folder)
    except EnvironmentProblem:
        return False
    return there.run_id == manifest.run_id and there.serial <= manifest.serial


def take(place: Path, parent: Path, say: Callable[[str], None], *, look_only: bool = False) -> Path:
    """Download the checkpoint at `place` into `parent`, see `fetch`, and return its path.

    Args:
        say: called with a line before the download.
        look_only: only check the store, and return the path that the checkpoint would have.

    Raises:
        EnvironmentProblem: there is none, it is damaged, or the disk is full.
        Unreachable: the store refuses, or does not answer.
    """
    manifest = read_manifest(place)
    if not look_only:
        say(f"downloading {place} ({_size(manifest)}) to {parent / place.name}")
    found = faults(place, manifest, verify="size")
    if found := found or ([] if look_only else fetch(place, manifest, parent)):
        raise EnvironmentProblem(
            f"checkpoint {place} is damaged: {'; '.join(found)}", hint="use another checkpoint"
        )
    return parent / place.name


def _size(manifest: Manifest) -> str:
    return size_text(sum(digest.size for digest in manifest.files.values()))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def newest_of_both(
    place: Path,
    folder: Path,
    *,
    verify: Verify = "full",
    run_id: str | None = None,
    rejected: Callable[[str], None],
    say: Callable[[str], None],
    look_only: bool = False,
    newer_than: int = 0,
    damaged: Mapping[Path, str] = MappingProxyType({}),
) -> Path | None:
    """Return a run's newest good checkpoint in `folder` or in a store, from which it is downloaded.

    Args:
        run_id: the id of the run in `folder`; None: there is no run yet.
        rejected: called with a line for each checkpoint that is skipped.
        say: called with a line before a download.
        look_only: download nothing, and return the path that the checkpoint would have.
        newer_than, damaged: see `newest_good`; damaged checkpoints in `folder` are replaced by the store's.

    Raises:
        EnvironmentProblem: the disk is full, or cannot be written.
        Unreachable: the store refuses, or does not answer.
    """

    def taken(remote: Path, manifest: Manifest, *, verify: Verify) -> list[str]:
        if run_id is not None and manifest.run_id != run_id:
            return ["it was written by another run"]
        if found := faults(remote, manifest, verify="size"):
            return found
        if look_only:
            return []
        with alone(folder):
            if _lies_in(folder / remote.name, manifest):
                return []
            say(f"downloading {remote} ({_size(manifest)})")
            return fetch(remote, manifest, folder)

    def rejected_there(line: str) -> None:
        rejected(f"{line} ({place})")

    here = newest_good(folder, verify=verify, rejected=rejected, newer_than=newer_than, damaged=damaged)
    known = read_manifest(here).serial if here is not None else newer_than
    found = newest_good(place, rejected=rejected_there, newer_than=known, look=taken)
    return here if found is None else folder / found.name


def _lies_in(folder: Path, manifest: Manifest) -> bool:
    """Return whether a folder is this very checkpoint, which another machine may just have downloaded."""
    try:
        return read_manifest(folder) == manifest and not faults(folder, manifest)
    except EnvironmentProblem:
        return False


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock inside the block, so that commands on machines that share a disk run one after
    another, and find what an earlier one has transferred."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".taking", "a", opener=regular)  # noqa: SIM115
    except OSError as error:
        raise EnvironmentProblem(f"{folder} cannot be written: {error.strerror}") from error
    with file:
        with suppress(OSError):  # without locks each downloads its own, and the last rename wins
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def take_unless_there(
    url: str, here: Path, say: Callable[[str], None], *, timeout_seconds: float, store: Any
) -> None:
    """Download the checkpoint of a URL to the folder `here`, which has its name, unless it is there already;
    see `take`, and for the other arguments `at`."""
    place = at(url, timeout_seconds, store=store)
    with alone(here.parent):
        if not _lies_in(here, read_manifest(place)):
            take(place, here.parent, say)
