"""`titan convert-checkpoint` without its command line: a checkpoint to a Hugging Face folder, and back."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from titancli.checkpoint.base import open_weights
from titancli.checkpoint.format.disk import write_file
from titancli.checkpoint.format.hashed import BLOCK, PIECE, HashedReader
from titancli.checkpoint.format.layout import Chunk
from titancli.checkpoint.format.manifest import MANIFEST, Manifest, faults, manifest_bytes
from titancli.checkpoint.format.metadata import Cell, Group, part_bytes, part_name
from titancli.checkpoint.format.newfolder import new_folder, refuse_used
from titancli.checkpoint.format.stream import Job, Progress, no_progress, write_files
from titancli.checkpoint.format.tensorfile import ITEM_SIZE, Entry
from titancli.checkpoint.format.tensors import dtype_name
from titancli.checkpoint.hf.compare import refuse_incomparable, verdict
from titancli.checkpoint.hf.config_match import CONFIG
from titancli.checkpoint.hf.detect_model import (
    Say,
    check_parameters,
    find_checkpoint,
    hf_form,
    model_of,
    parameter_shapes,
    recipe_of,
)
from titancli.checkpoint.hf.folder import HFReader, cast_of, export_hf, read_hf
from titancli.checkpoint.hf.libraries import library_of
from titancli.checkpoint.hf.quantise import Method, quantisation
from titancli.checkpoint.hf.sidecar_files import kept_of, not_kept, of_another_tokenizer
from titancli.checkpoint.reader import CheckpointReader
from titancli.checkpoint.save import Draft
from titancli.errors import EnvironmentProblem, TitanError
from titancli.recipe.config_json import bind_model
from titancli.recipe.toml import inline
from titancli.registry.component import build


@dataclass(frozen=True)
class Result:
    """Lines for the user, and whether the comparison passed, if there was one."""

    lines: list[str]
    good: bool = True


def to_hf(
    src: Path,
    dst: Path,
    *,
    dtype: str | None = None,
    quantise: Method | None = None,
    max_shard: int | None = None,
    verify: bool = False,
    progress: Progress = no_progress,
    say: Say,
) -> Result:
    """Export a checkpoint, or a run's newest good one.

    `quantise`: see `titancli.checkpoint.hf.quantise`; unquantized weights become bfloat16, unless `dtype`
    says otherwise.

    The checkpoint's checksums are verified during the conversion, and the folder appears only if they match.

    Raises:
        TitanError: `src` is not a good checkpoint, its model has no Hugging Face form, or `dst` is not free.
    """
    refuse_used(dst)
    folder = find_checkpoint(src, say)
    model, tokenizer, loss = recipe_of(folder)
    form = hf_form(model)
    if loss is not None:
        form = loss.hf_form(form, parameter_shapes(model))
    how = None if quantise is None else quantisation(quantise, model, form)
    if verify:
        refuse_incomparable(form, how)
    cast = torch.bfloat16 if how is not None and dtype is None else dtype_of(dtype)
    reader = open_weights(folder, model, of_head=form.of_loss, verify="size", reuse=True, say=say)
    check_parameters(reader, model, folder, form.of_loss)
    say(f"exporting {folder}")
    built = build(tokenizer) if tokenizer is not None else None
    eos_id, files = (None, {}) if built is None else (built.eos_id, built.files)
    kept = kept_of(folder, tokenizer=built is None)
    if of_another_tokenizer(kept, eos_id):
        say("the ids of special tokens are those of the recipe's tokenizer, not of the original folder")
    # The search for the newest good one has read every file already.
    with Checksums(folder, reader.manifest, data=folder == src.absolute()) as checksums:

        def watch(name: str, done: int, total: int) -> None:
            checksums.check_so_far()
            progress(name, done, total)

        export_hf(
            reader,
            form,
            files,
            dst,
            dtype=cast,
            quantise=how,
            max_shard=max_shard,
            eos_id=eos_id,
            bos_id=None if built is None else built.bos_id,
            kept=kept,
            progress=watch,
            say=say,
            before_rename=checksums.check,
        )
    dst = dst.absolute()
    lines, good = verdict(model, reader, dst, cast, form) if verify else ([], True)
    lines += [
        f"Hugging Face folder: {dst}",
        f"load it with: {library_of(form).how_to_load(form, str(dst))}",
    ]
    return Result(lines, good)


def to_titan(
    src: Path,
    dst: Path,
    *,
    dtype: str | None = None,
    max_shard: int | None = None,
    verify: bool = False,
    component: str | None = None,
    progress: Progress = no_progress,
    say: Say,
) -> Result:
    """Convert a Hugging Face folder to a checkpoint of weights alone.

    Raises:
        TitanError: `src` holds no model that `component` reads, or `dst` is not free.
    """
    refuse_used(dst)
    src, dst = src.absolute(), dst.absolute()
    name, config, model = model_of(src, component)
    form = hf_form(model)
    if verify:
        refuse_incomparable(form)
    config, model, reader = _complete(src, config, model, say)
    shapes = parameter_shapes(model)
    say(f"reading {src} as {name}")
    if left := not_kept(src):
        say(f"not copied: {', '.join(left)}")
    state = {"model": {"type": name, **config}}
    draft = Draft(dst, state, "", f"weights of {src}", {}, kept=kept_of(src, tokenizer=True))
    jobs = [_job(reader, parameter, shape, dtype_of(dtype)) for parameter, shape in shapes.items()]
    _save(draft, jobs, max_shard, progress, say)
    lines: list[str] = []
    good = True
    if verify:
        made = CheckpointReader(dst, prefix="model.")
        lines, good = verdict(model, made, src, dtype_of(dtype), form, exported=False)
    return Result([*lines, f"checkpoint: {dst}", f"start a run from it with: weights={dst}"], good)


def _complete(
    src: Path, config: dict[str, Any], model: Any, say: Say
) -> tuple[dict[str, Any], Any, HFReader]:
    """Return the model's keys and config with everything that the folder has for it, and a reader that has
    checked the folder. Training takes what its recipe asks for; a conversion leaves out nothing that fits."""
    form = hf_form(model)
    reader = read_hf(src, form)
    if further := form.whole(reader.names()):
        fuller = bind_model(type(model), config | further, src / CONFIG)
        found = read_hf(src, hf_form(fuller))
        try:
            found.check(parameter_shapes(fuller))
        except EnvironmentProblem as error:
            say(f"not read with {inline(further)}: {error.message}")
        else:
            return config | further, fuller, found
    reader.check(parameter_shapes(model))
    return config, model, reader


def _job(reader: HFReader, parameter: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Job:
    key = f"model.{parameter}"
    entry = Entry(key, dtype_name(key, cast_of(reader.dtype(parameter), dtype)), shape)
    return Job(parameter, (entry,), lambda: [reader.parameter(parameter)])


def _save(draft: Draft, jobs: list[Job], max_shard: int | None, progress: Progress, say: Say) -> None:
    """Write a checkpoint as a single rank would have, reading one tensor at a time."""
    entries = [job.entries[0] for job in jobs]
    filled = [job for job in jobs if job.entries[0].nbytes]  # empty pieces are not stored
    filled.sort(key=lambda job: -ITEM_SIZE[job.entries[0].dtype])  # keeps every tensor aligned in its file
    needed = sum(job.entries[0].nbytes for job in filled)
    with new_folder(draft.folder, needed, say=say) as folder:
        written = write_files(folder, filled, _file_name, limit=max_shard, progress=progress)
        files = {file.name: file.digest for file in written}
        chunks = {
            entry.key: [Chunk(_zeros(entry), entry.shape, file.name, entry.key, sums, PIECE, entry.start)]
            for file in written
            for entry, sums in zip(file.entries, file.checksums, strict=True)
        }
        part = part_bytes(chunks, {file.name: file.header for file in written})
        files[part_name(0)] = write_file(folder / part_name(0), part)
        files |= {n: write_file(folder / n, data) for n, data in draft.description(_groups(entries)).items()}
        write_file(folder / MANIFEST, manifest_bytes(draft.manifest(files, serial=1)))


def _zeros(entry: Entry) -> tuple[int, ...]:
    return (0,) * len(entry.shape)


def _groups(entries: list[Entry]) -> list[Group]:
    """Return the index of tensors that one rank has written whole."""
    alike: dict[tuple[str, tuple[int, ...]], list[Entry]] = {}
    for entry in entries:
        alike.setdefault((entry.dtype, entry.shape), []).append(entry)
    return [
        Group.of(
            dtype, shape, [e.key for e in found], [Cell(0, _zeros(found[0]), shape)] * bool(found[0].nbytes)
        )
        for (dtype, shape), found in alike.items()
    ]


def _file_name(number: int, count: int) -> str:
    return f"rank-00000{f'-{number}' if number else ''}.safetensors"


class Checksums:
    """Verifies a checkpoint's files against their checksums: data files in a thread, while they are used.

    A context manager, which ends the thread.

    Raises:
        EnvironmentProblem: a file is damaged; names it.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, data: bool) -> None:
        """Start verifying.

        Args:
            data: whether to verify the data files; false if they are known to be good.
        """
        self._folder, self._files = folder, manifest.files
        self._found: list[str] = []
        self._leave = threading.Event()
        names = [name for name in manifest.files if name.endswith(".safetensors")]
        self._found += faults(folder, manifest, only=manifest.files.keys() - set(names))
        self.check_so_far()
        self._thread = threading.Thread(target=self._compare, args=(names if data else [],))

    def check(self) -> None:
        """Wait until all files are verified."""
        self._thread.join()
        self.check_so_far()

    def check_so_far(self) -> None:
        if self._found:
            raise EnvironmentProblem(
                f"checkpoint {self._folder} is damaged: {'; '.join(self._found)}",
                hint="use another checkpoint of the run",
            )

    def _compare(self, names: Iterable[str]) -> None:
        scratch = memoryview(bytearray(2 * BLOCK))
        for name in names:
            try:
                with HashedReader(self._folder / name) as file:
                    while file.position < file.size:
                        if self._leave.is_set():
                            return
                        file.skip(min(len(scratch), file.size - file.position), scratch)
                    if file.digest() != self._files[name]:
                        self._found.append(f"{name} is damaged: its checksum does not match")
            except TitanError as error:
                self._found.append(error.message)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave.set()
        self._thread.join()


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return torch's dtype of that name."""
    return getattr(torch, name) if name else None
