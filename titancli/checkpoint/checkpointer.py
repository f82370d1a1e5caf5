"""When a run saves, whether training waits for the disk, and which old checkpoints are deleted."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titancli.checkpoint.format.manifest import read_manifest, remove, steps
from titancli.checkpoint.format.plan import SavePlan
from titancli.checkpoint.format.storage import Pieces, pieces_of
from titancli.checkpoint.remote.uploads import Uploads
from titancli.checkpoint.save import Draft, mesh_of, refuse_link, run_save, sweep
from titancli.checkpoint.staging import Staging
from titancli.distributed.process_group import new_patient_group
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem, TitanError
from titancli.protocols import Copies
from titancli.recipe.schema import Checkpoint
from titancli.runs import Claim

logger = logging.getLogger(__name__)

AT_WORK = "at work"
EXPORTS = "exports"
REPLACES = "replaces"
"""Where the state of a named checkpoint says which one it replaces."""
SIGN_SECONDS = 600.0
"""Interval at which rank 0 signals to waiting ranks that it is still working."""


class Checkpointer:
    """Saves a run's state as `folder/step-N`, and keeps the latest k of them.

    All methods are collective: every rank creates one and makes the same calls. Asynchronous saves copy this
    rank's pieces to reusable buffers, which a thread writes while training continues; the thread plans with
    the other ranks over a separate gloo group, so its messages never mix with training's.
    """

    def __init__(
        self,
        folder: Path,
        section: Checkpoint,
        *,
        lock_text: str,
        run_id: str,
        mesh: Mapping[str, int] | None = None,
        kept: Mapping[str, bytes] | None = None,
        on_saved: Callable[[int, Path], None] = lambda step, path: None,
        uploads: Uploads | None = None,
        from_zero: bool = False,
        claim: Claim | None = None,
        spared: Collection[str] = (),
        copies: Copies | None = None,
    ) -> None:
        """Create the checkpointer.

        Args:
            mesh: the degrees that manifests record.
            kept: files for exports in each checkpoint, see `titancli.checkpoint.hf.sidecar_files`.
            on_saved: called with (step, path) on every rank, in the caller's thread, when a save is complete.
            uploads: rank 0's, woken after each save.
            from_zero: the run started at step 0; saving refuses checkpoints of this run that this object
                did not save.
            claim, spared: see `titancli.checkpoint.save.Draft`.
            copies: also keeps the state, every `copies.interval` steps.
        """
        self._folder, self._section = folder, section
        self._lock_text, self._run_id, self._on_saved = lock_text, run_id, on_saved
        self._mesh, self._kept, self._uploads = mesh, kept or {}, uploads
        self._claim, self._spared = claim, spared
        self._group: dist.ProcessGroup | None = None
        self._main = Ranks().rank == 0
        self._plan = SavePlan()
        self._staging = Staging(pinned=section.async_mode == "async_with_pinned_mem")
        self._writing: Writing | None = None
        self._copies = copies
        self._copied_alone: int | None = None
        """The step that is due to be copied but not saved."""
        self._saved: int | None = None
        self._names: set[str] | None = set() if from_zero else None
        """Names of the checkpoints saved by this object, if no others of this run may exist; None: others
        may."""

    @property
    def failed(self) -> bool:
        """Return whether the save in progress has failed, as far as this rank knows; `wait` raises the
        reason."""
        return self._writing is not None and self._writing.done and self._writing.error is not None

    def due(self, step: int) -> bool:
        """Return whether this step is due to be saved or copied, by the intervals or as the first step."""
        self._announce()
        if not self._section.enable:
            return False
        self._meet()
        first = step == 1 and self._section.enable_first_step_checkpoint
        saved = first or step % self._section.interval == 0
        alone = not saved and self._copy_due(step) and not self._busy_anywhere()
        self._copied_alone = step if alone else None
        return saved or alone

    def _copy_due(self, step: int) -> bool:
        return self._copies is not None and step % self._copies.interval == 0

    def _busy_anywhere(self) -> bool:
        """Return whether any rank is still writing an earlier save: training does not wait for it just to
        make a copy."""
        busy = self._writing is not None and not self._writing.done
        return any(Ranks().gather(busy)) if self._section.async_mode != "disabled" else False

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Reserve memory for copies of these tensors. The staging buffers of asynchronous saves are pinned in
        the background.

        Raises:
            EnvironmentProblem: there is not enough memory for them.
        """
        if self._section.async_mode == "async_with_pinned_mem":
            self._staging.reserve(pieces_of(tensors))
        if self._copies is not None:
            self._meet()
            self._copies.reserve(pieces_of(tensors), self._plan, self._group)

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Save a step, unless this process saved it last. If `due` asked for a copy only, the state is copied
        into memory but not saved.

        Raises:
            TitanError: this save failed or, in an asynchronous mode, the previous one. In the second case
                nothing of this step is saved yet: call again.
        """
        alone, self._copied_alone = step == self._copied_alone, None
        self.wait()
        if not self._section.enable or step == self._saved:
            return
        self._meet()
        path = self._folder / f"step-{step}"
        draft, pieces = self._draft(path, tensors, state), pieces_of(tensors)
        if not alone:
            draft.alongside = self._names
        if self._section.async_mode != "disabled":
            pieces = self._staging.copy(pieces)

        def work() -> None:
            if self._copy_due(step):
                self._copy(pieces, draft)
            if not alone:
                self._write(pieces, draft)

        if self._section.async_mode != "disabled":
            self._writing = Writing(step, None if alone else path, work)
            return
        work()
        if not alone:
            self._saved = step
            self._on_saved(step, path)

    def _copy(self, pieces: Pieces, draft: Draft) -> None:
        """Copy the state into memory. If that fails, the run continues: it still has its checkpoints on the
        disk."""
        try:
            if self._copies is not None:
                self._copies.make(pieces, draft, self._plan, self._group)
        except EnvironmentProblem as error:
            if self._main:
                logger.warning("step %d was not copied into memory: %s", draft.step, error.message)

    def save_apart(
        self, path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Save tensors and a state under a separate name, synchronously; nothing is purged.

        Raises:
            TitanError: this save failed, or the one before it.
        """
        self.wait()
        self.on_main(f"saving {path}", partial(refuse_link, path.parent))
        run_save(pieces_of(tensors), self._draft(path, tensors, state), self._group)

    def save_named(self, link: Path, path: Path, tensors: Mapping[str, Tensor], state: Any) -> None:
        """Save like `save_apart`, let a link point there, and delete what it pointed to before, if that
        is a checkpoint that this run has written under this name.

        Raises:
            EnvironmentProblem: the disk is full, or a name is taken by something else.
            TitanError: this save failed, or the one before it.
        """
        old = self._named(link)
        if old is not None and old.name != path.name:
            state = {**state, link.name: {**state[link.name], REPLACES: old.name}}
        self.save_apart(path, tensors, state)

        def name() -> None:
            new = link.with_name(f".{link.name}-{self._run_id}")
            try:
                new.unlink(missing_ok=True)
                new.symlink_to(os.path.relpath(path, link.parent))
                os.replace(new, link)
            except OSError as error:
                raise EnvironmentProblem(
                    f"{link} cannot be made a link to {path}: {error.strerror}",
                    hint="remove what has this name; the disk must take symbolic links",
                ) from error
            if old is not None and old.name != path.name:
                remove(old, self._run_id)

        self.on_main(f"naming {link}", name)

    def remove_replaced(self, link: Path) -> None:
        """Remove what a `save_named` of this run was to delete, if that was killed before; on rank 0."""
        if (named := self._named(link)) is None:
            return
        sweep(named.parent, self._run_id, self._spared)
        replaced = read_manifest(named).state[link.name].get(REPLACES)
        if isinstance(replaced, str) and replaced != named.name:
            old = named.parent / Path(replaced).name
            if old.exists() and self._has_named(old, link):
                remove(old, self._run_id)

    def _named(self, link: Path) -> Path | None:
        """Return the export that a link points to, if `save_named` of this run has made it."""
        target = link.resolve()
        is_export = link.is_symlink() and target.parent == link.parent.resolve() / EXPORTS
        return target if is_export and target.exists() and self._has_named(target, link) else None

    def _has_named(self, old: Path, link: Path) -> bool:
        """Return whether `save_named` of this run has made a checkpoint for a link."""
        try:
            manifest = read_manifest(old)
        except EnvironmentProblem as error:
            logger.warning("%s stays, since it may not be this run's: %s", old, error.message)
            return False
        own = manifest.run_id == self._run_id and isinstance(manifest.state.get(link.name), dict)
        return own and old.name == f"step-{manifest.step}-{link.name}"

    def on_main(self, doing: str, function: Callable[[], None]) -> None:
        """Run a function on rank 0, however long it takes, and raise its error on every rank."""
        self._meet()
        ranks = Ranks(self._group)
        if ranks.size == 1:
            function()
            return
        error: BaseException | None = None
        if self._main:
            with self._signs_of_life(ranks, doing):
                try:
                    function()
                except BaseException as raised:
                    error = raised
            _tell(ranks, doing, error)
        while not self._main and _tell(ranks, doing) == AT_WORK:
            pass

    @contextmanager
    def _signs_of_life(self, ranks: Ranks, doing: str) -> Iterator[None]:
        """Signal to the other ranks at intervals that rank 0 is still working, so that they keep waiting."""
        ended = threading.Event()

        def say() -> None:
            while not ended.wait(SIGN_SECONDS):
                _tell(ranks, doing, message=AT_WORK)

        # If this fails, a rank has ended: the work is still finished, and the final message fails too.
        with ThreadPoolExecutor(1, thread_name_prefix="titan-at-work") as thread:
            thread.submit(say)
            try:
                yield
            finally:
                ended.set()

    def finish_uploads(self) -> bool:
        """Wait until the newest checkpoints are in `checkpoint.remote`, and return True; on rank 0 return
        False if a signal has come and the store does not take them in time.

        Raises:
            TitanError: they cannot be uploaded.
        """
        there: list[bool] = []
        if self._section.remote is not None:
            self.on_main(
                "uploading checkpoints",
                lambda: there.append(self._uploads is None or self._uploads.finish()),
            )
        return all(there)

    def _meet(self) -> None:
        if self._group is None and Ranks().size > 1:
            # Early: making a group needs the rendezvous store; a run that has lost it must be able to save.
            self._group = new_patient_group()

    def _draft(self, path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Draft:
        degrees = mesh_of(tensors) if self._mesh is None else dict(self._mesh)
        return Draft(
            path,
            dict(state),
            self._lock_text,
            self._run_id,
            degrees,
            kept=self._kept,
            claim=self._claim,
            spared=self._spared,
        )

    def wait(self) -> None:
        """Wait for the save in progress, if any.

        Raises:
            TitanError: it failed.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.join()
        if writing.error is not None:
            raise writing.error
        self._tell(writing)

    def _announce(self) -> None:
        if self._writing is not None and self._writing.done and self._writing.error is None:
            self._tell(self._writing)

    def _tell(self, writing: Writing) -> None:
        """Call `on_saved` for a completed save, once."""
        if writing.path is not None and self._saved != writing.step:
            self._saved = writing.step
            self._on_saved(writing.step, writing.path)

    def _write(self, pieces: Pieces, draft: Draft) -> None:
        run_save(pieces, draft, self._group, self._plan)
        if self._copies is not None:
            self._copies.saved()
        if self._main:
            self._tidy()

    def _tidy(self) -> None:
        """Start uploads and purge old checkpoints on rank 0 after a save. Failures are only logged: the step
        is saved, and ranks must not diverge."""
        try:
            if self._uploads is not None:
                self._uploads.wake()
            busy = self._uploads.busy if self._uploads is not None else None
            purge(self._folder, self._run_id, self._section.keep_latest_k, busy)
        except Exception as error:
            logger.warning(
                "older checkpoints are not deleted, the next save tries again: %s",
                error.message if isinstance(error, TitanError) else f"{type(error).__name__}: {error}",
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )


def _tell(
    ranks: Ranks, doing: str, error: BaseException | None = None, message: str | None = None
) -> str | None:
    """Return `message` of rank 0 on every rank, or raise its error on all of them."""

    def word() -> str | None:
        if error is not None:
            raise error
        return message

    return ranks.broadcast_call(doing, word)


class Writing:
    """A save in progress in a thread; if `path` is None, only a copy into memory."""

    def __init__(self, step: int, path: Path | None, work: Callable[[], None]) -> None:
        self.step, self.path = step, path
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=f"titan-checkpoint-{step}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except TitanError as error:
            self.error = error
        except BaseException as error:  # announced in the caller's thread, at the next save or wait
            what = self.path or f"step {self.step}"
            self.error = TitanError(f"saving {what} failed: {type(error).__name__}: {error}")
            self.error.__cause__ = error


def purge(folder: Path, run_id: str, keep: int, busy: Path | None = None) -> None:
    """Delete all but the newest `keep` checkpoints of this run (0 keeps all). Other runs' folders, users'
    links and the checkpoint being uploaded (`busy`) stay."""
    own = [path for path, manifest in steps(folder).items() if manifest.run_id == run_id]
    mine = [path for path in own if not path.is_symlink()]
    for path in mine[keep:] if keep else ():
        if path != busy:
            remove(path, run_id)
