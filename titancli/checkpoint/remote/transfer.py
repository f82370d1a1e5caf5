"""The same folders under a URL: how a checkpoint gets into an object store, and back. Torch-free.

An object store renames nothing, but a checkpoint without a valid manifest is none. So the manifest goes up
last and is taken away first, and a checkpoint is whole or absent there, too.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from titancli.checkpoint.format.disk import need, refusal, size_text, sync_folder, write_file
from titancli.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    Verify,
    faults,
    hidden_prefix,
    manifest_bytes,
    newest_good,
    read_manifest,
    remove,
)
from titancli.checkpoint.remote.store import RemotePath, Unreachable, at
from titancli.errors import EnvironmentProblem, TitanError

if TYPE_CHECKING:
    from titancli.recipe.schema import Checkpoint

_MARK = re.compile(r"\.(step-\d{1,18})\.tmp-[0-9a-f]{8}-upload\Z")


def run_place(section: Checkpoint, run_folder: Path) -> Path:
    """Where a run's checkpoints lie under `checkpoint.remote`: by the name of its folder."""
    return at(f"{(section.remote or '').rstrip('/')}/{run_folder.name}", section.remote_timeout_seconds)


def probe(place: Path) -> None:
    """See to it that a store can be written and cleared, before anything takes time.

    Raises:
        EnvironmentProblem: it cannot.
    """
    remote = cast(RemotePath, place / f".probe-{secrets.token_hex(4)}")
    hint = "checkpoint.remote: set the credentials in the environment, or remove it with --unset"
    try:
        remote.write_bytes(b"titan was here")
        remote.unlink()
    except (Unreachable, OSError) as error:
        why = getattr(error, "message", None) or f"{place} cannot be written: {error}"
        raise EnvironmentProblem(f"no checkpoint can be uploaded: {why}", hint=hint) from error


# ------------------------------------------------------------------------------------------- both ways


def upload(folder: Path, place: Path) -> None:
    """Put a checkpoint where `place` is, its manifest last.

    A small object beside it says meanwhile whose it is, see `of_others`.

    Raises:
        TitanError: another run's checkpoint lies there, or is on its way; there is one to be replaced, but
            the folder is damaged; or what arrived is not what was sent.
        Unreachable: the store refuses, or does not answer.
        OSError: the local files cannot be read.
    """
    remote = cast(RemotePath, place)
    manifest = read_manifest(folder)
    with suppress(EnvironmentProblem):  # half of one is nobody's
        if (owner := read_manifest(place).run_id) != manifest.run_id:
            raise TitanError(f"{place} was written by another run ({owner}) and is not overwritten")
        if found := faults(folder, manifest):  # it may be the last good copy that would be deleted
            raise TitanError(f"{folder} is damaged ({found[0]}): {place} stays as it was")
    mark = remote.parent / mark_name(place.name, manifest.run_id)
    mark.write_bytes(manifest.run_id.encode())
    if place.name in of_others(remote.parent, manifest.run_id):
        mark.unlink()
        raise TitanError(
            f"{place} is being uploaded by another run",
            hint=f"give this run another name (--run-dir); if none does, delete .{place.name}.tmp-*-upload",
        )
    remote.delete()
    for name in manifest.files:
        (remote / name).put(folder / name)
    there = {path.name: path.stat().st_size for path in remote.iterdir()}
    if there != {name: digest.size for name, digest in manifest.files.items()}:
        raise TitanError(f"{place} does not contain what was uploaded: {there}")
    (remote / MANIFEST).write_bytes(manifest_bytes(manifest))
    mark.unlink()


def mark_name(name: str, run_id: str) -> str:
    return f"{hidden_prefix(name, run_id)}upload"


def of_others(place: RemotePath, run_id: str) -> set[str]:
    """Return the names of the checkpoints that other runs are uploading to a run's place."""
    marks = [match for path in place.iterdir() if (match := _MARK.match(path.name))]
    return {mark[1] for mark in marks if mark[0] != mark_name(mark[1], run_id)}


def fetch(place: Path, manifest: Manifest, parent: Path) -> list[str]:
    """Take a checkpoint into `parent`, under its own name; whole or absent there, as if it were saved.

    Every checksum is compared on the way. A folder of that name gives way; if it is not known to be the same
    checkpoint, or an older one of its run, it is kept as `NAME.unknown-...`.

    Returns:
        What is wrong with it, a phrase for each file; then nothing was taken.

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
        for name in manifest.files:
            try:
                cast(RemotePath, place / name).get(hidden / name)
            except FileNotFoundError:  # deleted since it was looked at
                return [f"{name} is missing"]
            _sync(hidden / name)
        write_file(hidden / MANIFEST, manifest_bytes(manifest))
        if found := faults(hidden, manifest):
            return found
        sync_folder(hidden)
        older = _is_older(final, manifest)
        form = ".{}.old-{}" if older else "{}.unknown-{}"  # which nothing removes
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


def _is_older(folder: Path, manifest: Manifest) -> bool:
    """Whether a folder is known to be the same checkpoint, or an older one of its run."""
    try:
        there = read_manifest(folder)
    except EnvironmentProblem:
        return False
    return there.run_id == manifest.run_id and there.serial <= manifest.serial


def take(place: Path, parent: Path, say: Callable[[str], None], *, look_only: bool = False) -> Path:
    """Take the one checkpoint that lies at `place` into `parent`; see `fetch`. `say` is told before.

    `look_only`: take nothing; the path is the one that it would have.

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
    """A run's newest good checkpoint, of those in `folder` and those in a store; the latter is taken first.

    Args:
        run_id: of the run in `folder`; None: there is none yet.
        rejected: is told of each one that is passed over, in a line.
        say: is told of a download before it begins.
        look_only: take nothing; the path is the one that it would have.
        newer_than, damaged: see `newest_good`; what is damaged in `folder` is replaced by the store's.

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
        with _alone(folder):
            if _lies_in(folder / remote.name, manifest):
                return []
            say(f"downloading {remote} ({_size(manifest)})")
            return fetch(remote, manifest, folder)

    def told(line: str) -> None:
        rejected(f"{line} ({place})")

    here = newest_good(folder, verify=verify, rejected=rejected, newer_than=newer_than, damaged=damaged)
    known = read_manifest(here).serial if here is not None else newer_than
    found = newest_good(place, rejected=told, newer_than=known, look=taken)
    return here if found is None else folder / found.name


def _lies_in(folder: Path, manifest: Manifest) -> bool:
    """Whether another machine's command has just put this very checkpoint there."""
    try:
        return read_manifest(folder) == manifest and not faults(folder, manifest)
    except EnvironmentProblem:
        return False


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Commands of several machines that share a disk take a checkpoint once: the others wait for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".taking", "a")  # noqa: SIM115
    except OSError as error:
        raise EnvironmentProblem(f"{folder} cannot be written: {error.strerror}") from error
    with file:
        with suppress(OSError):  # a disk that knows no locks: each takes its own, and the last rename wins
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def take_unless_there(url: str, here: Path, say: Callable[[str], None], *, timeout_seconds: float) -> None:
    """Take the checkpoint of a URL into the folder `here`, which has its name, unless it lies there; see
    `take`, and for the limit `at`."""
    place = at(url, timeout_seconds)
    with _alone(here.parent):
        if not _lies_in(here, read_manifest(place)):
            take(place, here.parent, say)
