"""Hugging Face folders, out and in, one tensor at a time: memory grows with the largest tensor only."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from titancli.checkpoint.disk import need, refusal, sync_folder, write_file
from titancli.checkpoint.load import name_lists
from titancli.checkpoint.tensorfile import Entry, TensorFileWriter, split
from titancli.checkpoint.tensors import (
    TORCH_DTYPE,
    MemoryTensors,
    TensorFiles,
    Tensors,
    dtype_name,
    read_tensor,
    tensor_bytes,
)
from titancli.errors import EnvironmentProblem, TitanError
from titancli.registry.kinds import HFForm

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

Progress = Callable[[str, int, int], None]
"""Called with a name, and how many of how many tensors are done."""


def no_progress(name: str, done: int, total: int) -> None:
    """Says nothing."""


# --------------------------------------------------------------------------------------------------- out


@dataclass(frozen=True)
class _Planned:
    """One of our tensors, and the Hugging Face tensors that come of it."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def export_hf(
    tensors: Tensors | Mapping[str, Tensor],
    form: HFForm,
    tokenizer_files: Mapping[str, str | Path],
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    eos_id: int | None = None,
    bos_id: int | None = None,
    progress: Progress = no_progress,
) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads as it is.

    Args:
        tensors: the model's parameters by their own names, whole: a `CheckpointReader`, or a mapping.
        form: the model's Hugging Face form.
        tokenizer_files: file name to the file that is copied.
        out: a folder that does not exist or is empty. It appears only when it is complete.
        dtype: what floating-point tensors are cast to; None keeps each one's own.
        eos_id, bos_id: the tokenizer's, for config.json and generation_config.json.

    Raises:
        EnvironmentProblem: `out` holds something, or the disk refuses.
        TitanError: the form maps two tensors to one name, or gives other shapes than it promised.
    """
    source = MemoryTensors(tensors) if isinstance(tensors, Mapping) else tensors
    plan = _plan(source, form, dtype)
    needed = sum(planned.nbytes for planned in plan)
    with _new_folder(out, needed) as folder:
        _write_weights(folder, source, form, plan, progress)
        for name, text in _texts(form, plan, eos_id, bos_id).items():
            write_file(folder / name, (json.dumps(text, indent=2) + "\n").encode())
        for name, path in tokenizer_files.items():
            write_file(folder / Path(name).name, _bytes_of(Path(path)))


def _plan(source: Tensors, form: HFForm, dtype: torch.dtype | None) -> list[_Planned]:
    """Shapes and names of everything that will be written: the form is run on tensors without data."""
    plan = []
    owners: dict[str, str] = {}
    for name in sorted(source.names(), key=_natural):
        empty = torch.empty(source.shape(name), dtype=_target(source.dtype(name), dtype), device="meta")
        entries = []
        for hf_name, tensor in form.to_hf(name, empty):
            if hf_name in owners:
                raise TitanError(f"the parameters {owners[hf_name]} and {name} would both become {hf_name}")
            owners[hf_name] = name
            entries.append(Entry(hf_name, dtype_name(hf_name, tensor.dtype), tuple(tensor.shape)))
        plan.append(_Planned(name, tuple(entries)))
    return plan


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which layer 10 follows layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _target(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _write_weights(
    folder: Path, source: Tensors, form: HFForm, plan: Sequence[_Planned], progress: Progress
) -> None:
    parts = split([planned.nbytes for planned in plan])
    weight_map: dict[str, str] = {}
    done = 0
    for number, part in enumerate(parts, start=1):
        name = WEIGHTS if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        chosen = [plan[i] for i in part]
        with TensorFileWriter(
            folder / name, [entry for planned in chosen for entry in planned.entries]
        ) as file:
            for planned in chosen:
                _write_tensor(file, source, form, planned)
                done += 1
                progress(planned.name, done, len(plan))
            file.close()
        weight_map |= {entry.key: name for planned in chosen for entry in planned.entries}
    if len(parts) > 1:
        total = sum(planned.nbytes for planned in plan)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _write_tensor(file: TensorFileWriter, source: Tensors, form: HFForm, planned: _Planned) -> None:
    tensor = source.read(planned.name)
    if planned.entries:
        tensor = tensor.to(_target(tensor.dtype, TORCH_DTYPE[planned.entries[0].dtype]))
    made = list(form.to_hf(planned.name, tensor))
    found = [Entry(name, dtype_name(name, value.dtype), tuple(value.shape)) for name, value in made]
    if tuple(found) != planned.entries:
        raise TitanError(
            f"the Hugging Face form of {planned.name} depends on its values, not on its shape alone"
        )
    for _, value in made:
        file.write(tensor_bytes(value))


def _texts(
    form: HFForm, plan: Sequence[_Planned], eos_id: int | None, bos_id: int | None
) -> dict[str, dict[str, Any]]:
    """The JSON files. config.json names the dtype that most numbers are stored in."""
    sizes: dict[str, int] = {}
    for entry in (entry for planned in plan for entry in planned.entries):
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    ids = {"bos_token_id": bos_id, "eos_token_id": eos_id}
    config = {**form.config_json(), **ids}
    if sizes:
        config["dtype"] = str(TORCH_DTYPE[max(sizes, key=lambda name: sizes[name])]).removeprefix("torch.")
    texts = {"config.json": config}
    if eos_id is not None:
        texts["generation_config.json"] = {"_from_model_config": True, **ids}
    return texts


@contextmanager
def _new_folder(out: Path, needed: int) -> Iterator[Path]:
    """A hidden folder beside `out` that becomes `out` when all is well, and is gone otherwise."""
    out = out.absolute()
    refuse_used(out)
    hidden = out.with_name(f".{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        need(out.parent, needed)
        hidden.mkdir()
        yield hidden
        sync_folder(hidden)
        hidden.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        remedy = "free some space, or take another disk"
        raise refusal(error, out, needed, kept="Nothing was left behind.", remedy=remedy) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def refuse_used(out: Path) -> None:
    """See to it that a folder may be written.

    Raises:
        EnvironmentProblem: it is a file, or holds something.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise EnvironmentProblem(
            f"{out} {what}, and nothing is overwritten", hint="name a folder that does not exist"
        )


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EnvironmentProblem(f"the tokenizer's {path} cannot be read: {error.strerror}") from error


# ---------------------------------------------------------------------------------------------------- in


class HFReader:
    """A Hugging Face folder's tensors by our parameters' names, read one at a time.

    Raises:
        EnvironmentProblem: the folder holds no safetensors, or its files are damaged.
    """

    def __init__(self, folder: Path, form: HFForm) -> None:
        self.folder, self.form = folder, form
        self._files = TensorFiles(folder)
        self._places = self._find()

    def parameter(self, name: str) -> Tensor:
        """Our parameter, whole, on the CPU.

        Raises:
            EnvironmentProblem: the folder lacks what it is made of.
        """
        parts = []
        for hf_name in self.form.sources(name):
            if hf_name not in self._places:
                raise EnvironmentProblem(f"{self.folder} has no tensor {hf_name!r}, which {name} is made of")
            file, entry = self._places[hf_name]
            parts.append(read_tensor(self.folder / file, entry))
        return self.form.from_hf(name, parts)

    def dtype(self, name: str) -> torch.dtype:
        """Our parameter's dtype in the folder."""
        sources = self.form.sources(name)
        if not sources:  # the form makes it of nothing
            return self.form.from_hf(name, []).dtype
        return TORCH_DTYPE[self._places[sources[0]][1].dtype]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See to it that the folder holds a model of these parameters, by its headers alone.

        Raises:
            EnvironmentProblem: names are missing or left over, or shapes differ; names them all.
        """
        sources = {name: self.form.sources(name) for name in shapes}
        wanted = {hf_name for hf_names in sources.values() for hf_name in hf_names}
        unread = [n for n in sorted(self._places.keys() - wanted, key=_natural) if not self.form.ignored(n)]
        wrong = []
        for name, hf_names in sources.items():
            if self._places.keys() >= set(hf_names):
                metas = [self._empty(hf_name) for hf_name in hf_names]
                try:
                    made: Any = list(self.form.from_hf(name, metas).shape)
                except (RuntimeError, TypeError, ValueError):
                    made = "not convertible"
                if made != list(shapes[name]):
                    there = " + ".join(str(list(meta.shape)) for meta in metas)
                    wrong.append(f"{' + '.join(hf_names)} is {there}, {name} is {list(shapes[name])}")
        missing = sorted(wanted - self._places.keys(), key=_natural)
        found = name_lists(
            {"it lacks": missing, "it has, and this model has not": unread, "shapes differ": wrong}
        )
        if found:
            raise EnvironmentProblem(
                f"the weights in {self.folder} do not fit this model: {found}",
                hint="compare its config.json with the recipe's [model]",
            )

    def _empty(self, hf_name: str) -> Tensor:
        entry = self._places[hf_name][1]
        return torch.empty(entry.shape, dtype=TORCH_DTYPE[entry.dtype], device="meta")

    def _find(self) -> dict[str, tuple[str, Entry]]:
        """Every tensor's file and entry."""
        if (self.folder / INDEX).is_file():
            names = self._indexed()
        elif (self.folder / WEIGHTS).is_file():
            names = [WEIGHTS]
        else:
            raise self._no_weights()
        return {key: (name, entry) for name in names for key, entry in self._files.header(name).items()}

    def _indexed(self) -> list[str]:
        path = self.folder / INDEX
        try:
            weight_map = json.loads(path.read_bytes())["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise EnvironmentProblem(f"{path} is damaged: it has no weight_map") from error
        for name in files:
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*\.safetensors", name):
                raise EnvironmentProblem(
                    f"{path} names {name!r}, which is no safetensors file in that folder"
                )
        for key, name in weight_map.items():
            if key not in self._files.header(name):
                raise EnvironmentProblem(f"{path} says that {key!r} is in {name}, and it is not")
        return files

    def _no_weights(self) -> EnvironmentProblem:
        if not self.folder.is_dir():
            return EnvironmentProblem(f"there is no folder {self.folder}")
        if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pth")):
            return EnvironmentProblem(
                f"{self.folder} holds pickled weights (.bin), which can run code and are not read",
                hint="if you trust it, save it as safetensors: load it with transformers and call "
                "save_pretrained(NEW_FOLDER)",
            )
        return EnvironmentProblem(
            f"{self.folder} holds no weights: neither {WEIGHTS} nor {INDEX}",
            hint="name a Hugging Face model folder with its *.safetensors",
        )


def read_hf(folder: Path, form: HFForm) -> HFReader:
    """Open a Hugging Face folder; see `HFReader`."""
    return HFReader(Path(folder), form)


@torch.no_grad()
def load_hf_weights(
    folder: Path,
    form: HFForm,
    parameters: Mapping[str, Tensor],
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    progress: Progress = no_progress,
) -> None:
    """Fill parameters in place, one tensor at a time; each rank cuts its own part out of it.

    Values are cast to the parameters' dtypes. No rank talks to another. `shapes` are those of the whole
    model, where `parameters` are only some of it.

    Raises:
        EnvironmentProblem: the folder does not hold this model; names everything that is wrong.
    """
    reader = read_hf(folder, form)
    own = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    reader.check(own if shapes is None else shapes)
    for done, (name, parameter) in enumerate(parameters.items(), start=1):
        put(parameter, reader.parameter(name))
        progress(name, done, len(parameters))


@torch.no_grad()
def put(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter, or this rank's part of it into a sharded one."""
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        whole = whole.to(device=local.device, dtype=local.dtype)
        # Without a source rank every rank cuts its own copy: nothing is sent.
        cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        local.copy_(cut.to_local())
    else:
        parameter.copy_(whole)
