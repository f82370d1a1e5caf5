"""Saving: a hidden folder, every file flushed, one rename. A failure on any rank is raised on all."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import secrets
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from titancli.checkpoint.format.disk import need, refusal, sync_folder, write_file
from titancli.checkpoint.format.files import waiting_for_late_files
from titancli.checkpoint.format.hashed import Digest
from titancli.checkpoint.format.manifest import (
    LOCK,
    MANIFEST,
    REPLACED_NAME,
    STEP_NAME,
    Manifest,
    faults,
    hidden_prefix,
    last_serial,
    manifest_bytes,
    read_manifest,
    recover,
    remove,
    steps,
)
from titancli.checkpoint.format.metadata import METADATA, Group, index_bytes
from titancli.checkpoint.format.plan import SavePlan
from titancli.checkpoint.format.storage import Pieces, pieces_of, write_pieces
from titancli.checkpoint.hf.sidecar_files import PREFIX
from titancli.data.tokenizer_files import flat
from titancli.distributed import shared_folder
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem, TitanError
from titancli.runs import Claim
from titancli.version import __version__

ABANDONED = 3600.0
"""Seconds after which an unfinished save of an attempt on another host counts as left behind."""


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    lock_text: str,
    run_id: str,
    mesh: Mapping[str, int] | None = None,
    kept: Mapping[str, bytes] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save tensors and a JSON state as `folder`, which is then whole, or else unchanged.

    Collective over `group` (None: the default group; a single process needs none). Every rank passes the
    tensors that it has, under a pipeline those of its stages. A DTensor is written in the pieces that the
    ranks hold, each once; of a plain tensor one rank's copy is written. The state and texts are taken from
    rank 0, as are `mesh`, the degrees in the manifest (None: those of the largest mesh of a tensor), and
    `kept`, files for an export (`titancli.checkpoint.hf.sidecar_files`). An older `folder` of the same run is
    replaced, and deleted only after the new one has its name.

    Raises:
        EnvironmentProblem: the disk of any rank is full or cannot be written; raised on all ranks.
            Nothing half-written is left.
        TitanError: the state is not JSON, or an entry is not a tensor.
    """
    degrees = mesh_of(tensors) if mesh is None else dict(mesh)
    draft = Draft(folder, dict(state), lock_text, run_id, degrees, kept=kept or {})
    run_save(pieces_of(tensors), draft, group)


def mesh_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the degrees of the largest mesh that the tensors lie on, by name."""
    meshes = {tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)}
    if not meshes:
        return {}
    mesh = max(meshes, key=lambda mesh: mesh.ndim)
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return dict(zip(names, mesh.shape, strict=True))


@dataclass
class Draft:
    """A checkpoint being written. Its methods run on the coordinator."""

    folder: Path
    state: dict[str, Any]
    lock_text: str
    """Text of the lock file; empty: no lock file is kept (converted weights)."""
    run_id: str
    mesh: dict[str, int]
    ranks: int = 1
    kept: Mapping[str, bytes] = field(default_factory=dict)
    """Files beside the Hugging Face weights of the start; see `titancli.checkpoint.hf.sidecar_files`."""
    alongside: set[str] | None = None
    """Names of the only checkpoints of this run that may lie beside it, to which it is added; None: any."""
    claim: Claim | None = None
    """Checked before anything is deleted or gets its final name; None: no other process writes here."""
    spared: Collection[str] = ()
    """Tokens of earlier attempts that may still be at work: what they are writing is left alone."""
    hidden: Path | None = field(default=None, init=False)
    """The hidden folder, until it is complete."""
    old: Path | None = field(default=None, init=False)
    """Where the folder that it replaces was moved."""

    @property
    def step(self) -> int:
        match = STEP_NAME.match(self.folder.name)
        return int(match[1]) if match else int(self.state.get("engine", {}).get("step", 0))

    def open(self, needed: int) -> Path:
        """Create the hidden folder, with room for `needed` bytes."""
        manifest_bytes(self.manifest({}, 0))  # fail now if the state cannot be written
        if (owner := _run_of(self.folder)) not in (self.run_id, None):
            raise EnvironmentProblem(
                f"{self.folder} was written by another run ({owner}) and is not overwritten",
                hint="move it, or give this run its own folder (--run-dir)",
            )
        parent = self.folder.parent
        self._refuse_others(parent)
        self._check_claim()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            recover(parent)
            sweep(parent, self.run_id, self.spared)
            need(parent, needed)
            attempt = f"{self.claim.token[:8]}-" if self.claim and self.claim.token else ""
            prefix = hidden_prefix(self.folder.name, self.run_id)
            hidden = parent / f"{prefix}{attempt}{secrets.token_hex(4)}"
            hidden.mkdir()
        except OSError as error:
            raise self.explain(error, needed) from error
        self.hidden = hidden
        return hidden

    def _refuse_others(self, parent: Path) -> None:
        """Refuse checkpoints of the same run from before it started over: they must not be mixed with it,
        replaced or purged."""
        if self.alongside is None:
            return
        own = [path.name for path, manifest in steps(parent).items() if manifest.run_id == self.run_id]
        if others := sorted(set(own) - self.alongside):
            raise EnvironmentProblem(
                f"{parent} has checkpoints that were not there when the run started at step 0 "
                f"({', '.join(others)}): nothing is saved beside them",
                hint="stop the run and resume it: --resume takes the newest of them",
            )
        self.alongside.add(self.folder.name)  # now: a save that fails may leave it complete

    def complete(self, groups: Sequence[Group], files: dict[str, Digest]) -> None:
        """Write the files that describe the data, and rename the folder."""
        if self.hidden is None:
            raise TitanError(f"{self.folder} was not opened")
        try:
            for name, data in self.description(groups).items():
                files = {**files, name: write_file(self.hidden / name, data)}
            manifest = self.manifest(files, 1 + last_serial(self.folder.parent))
            write_file(self.hidden / MANIFEST, manifest_bytes(manifest))
            sync_folder(self.hidden)
            # On a shared disk another rank's file may come late, or not be what it wrote; and older ones are
            # deleted after this.
            with waiting_for_late_files(shared_folder.PATIENCE if self.ranks > 1 else 0.0):
                found = faults(self.hidden, manifest, verify="size")
            if found:
                raise EnvironmentProblem(f"{self.folder} differs from what was written: {'; '.join(found)}")
            self._check_claim()
            self._rename(self.hidden)
        except OSError as error:
            raise self.explain(error, sum(digest.size for digest in files.values())) from error

    def description(self, groups: Sequence[Group]) -> dict[str, bytes]:
        """Return the files that lie beside the data, except the manifest."""
        files = {f"{PREFIX}{flat(name)}": data for name, data in self.kept.items()}
        files[METADATA] = index_bytes(groups)
        return {**files, LOCK: self.lock_text.encode()} if self.lock_text else files

    def discard(self) -> None:
        """Remove what is half-written after a failure, and restore the older folder's name."""
        if self.hidden is not None:
            shutil.rmtree(self.hidden, ignore_errors=True)
        if self.old is not None and not self.folder.exists():
            with contextlib.suppress(OSError):  # the next save tries again
                self.old.rename(self.folder)

    def explain(self, error: OSError, needed: int) -> EnvironmentProblem:
        """Return the readable error for an error of the operating system. Runs on any rank."""
        kept = "Earlier checkpoints are not affected."
        remedy = "free some space, or lower checkpoint.keep_latest_k"
        return refusal(error, self.folder, needed, kept=kept, remedy=remedy)

    def _check_claim(self) -> None:
        if self.claim is not None:
            self.claim.check()

    def _rename(self, hidden: Path) -> None:
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # an empty folder is harmless
        if self.folder.exists():
            # What may not be ours is set aside under a name that nothing removes.
            form = ".{}.old-{}" if _run_of(self.folder) == self.run_id else "{}.unknown-{}"
            old = self.folder.with_name(form.format(self.folder.name, secrets.token_hex(4)))
            self.folder.rename(old)
            self.old = old
        hidden.rename(self.folder)
        sync_folder(self.folder.parent)
        if self.old is not None and _run_of(self.old) == self.run_id:
            remove(self.old, self.run_id)

    def manifest(self, files: dict[str, Digest], serial: int) -> Manifest:
        return Manifest(
            step=self.step,
            run_id=self.run_id,
            serial=serial,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions={
                "titancli": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            lock_xxh3_64=xxhash.xxh3_64(self.lock_text.encode()).hexdigest() if self.lock_text else None,
            layout={"ranks": self.ranks, "mesh": self.mesh},
            files=files,
            state=self.state,
        )


def run_save(
    pieces: Pieces, draft: Draft, group: dist.ProcessGroup | None, plan: SavePlan | None = None
) -> None:
    """Run the collective part of a save; see `save_checkpoint`. `plan` is the previous save's, if any."""
    ranks, doing = Ranks(group), f"saving {draft.folder}"
    draft.ranks, plan = ranks.size, plan or SavePlan()
    try:
        items = plan.agree(doing, pieces.items, ranks)
        folder, needed = ranks.broadcast_call(doing, lambda: (draft.open(plan.needed), plan.needed))

        def write() -> dict[str, Digest]:
            try:
                return write_pieces(folder, ranks.rank, items, pieces.resolve)
            except OSError as error:
                raise draft.explain(error, needed) from error

        def complete(written: list[dict[str, Digest]]) -> None:
            draft.complete(plan.groups, {name: digest for files in written for name, digest in files.items()})

        ranks.reduce(doing, write, complete)
    except BaseException:
        draft.discard()
        raise


def sweep(parent: Path, run_id: str, spared: Collection[str] = ()) -> None:
    """Remove replaced checkpoints, and what interrupted saves of a run left behind.

    Args:
        spared: see `Draft`.
    """
    for path in list(parent.glob(".*")):
        name = path.name[1:].partition(".")[0]
        prefix = hidden_prefix(name, run_id)
        mine = path.name.startswith(prefix)
        if mine and path.is_dir() and not path.is_symlink():
            attempt = path.name.removeprefix(prefix).partition("-")[0]
            if any(token.startswith(attempt) for token in spared) and not _abandoned(path):
                continue
            shutil.rmtree(path, ignore_errors=True)
        elif REPLACED_NAME.match(path.name) and _run_of(path) == run_id:
            remove(path, run_id)


def _abandoned(folder: Path) -> bool:
    """Return whether an unfinished folder has not changed for so long that no process can be writing it."""
    try:
        latest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # it is just being deleted or renamed
        return False
    return time.time() - latest > ABANDONED


def _run_of(folder: Path) -> str | None:
    try:
        return read_manifest(folder).run_id
    except EnvironmentProblem:
        return None


def refuse_link(folder: Path) -> None:
    """
    Raises:
        EnvironmentProblem: the folder to write to is a link: what it leads to is not the run's.
    """
    if folder.is_symlink():
        raise EnvironmentProblem(
            f"{folder} is a link, to {os.path.realpath(folder)}: nothing is written through it",
            hint="remove the link, or put the whole run folder there: --run-dir",
        )
