"""Export and import of Hugging Face folders, one tensor at a time: memory grows only with the largest
tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from titancli.checkpoint.format.disk import sync_folder, write_file
from titancli.checkpoint.format.metadata import by_numbers
from titancli.checkpoint.format.newfolder import new_folder
from titancli.checkpoint.format.stream import Job, Progress, no_progress, write_files
from titancli.checkpoint.format.tensorfile import ITEM_SIZE, PACKED_BITS, Entry
from titancli.checkpoint.format.tensors import (
    TORCH_DTYPE,
    MemoryTensors,
    Tensors,
    dtype_name,
)
from titancli.checkpoint.hf.lazy_tensor import blocks, everything
from titancli.checkpoint.hf.libraries import Library, library_of
from titancli.checkpoint.hf.quantise import Quantise
from titancli.checkpoint.hf.sidecar_files import CONFIG, texts
from titancli.checkpoint.hf.stored import Place, Stored, as_bf16
from titancli.checkpoint.hf.stored_files import stored_tensors
from titancli.checkpoint.load import name_lists
from titancli.data.tokenizer_files import TEMPLATES, is_tokenizer_file
from titancli.errors import EnvironmentProblem, TitanError
from titancli.files import read_bytes, read_json
from titancli.models.quantization import DEQUANTISE, KEY, quantization_of
from titancli.protocols import HFForm

QUANTISED_DTYPES = {"I8", "U8", *PACKED_BITS, *(name for name in ITEM_SIZE if name.startswith("F8_"))}
QUANTISED_NAMES = re.compile(
    r"\.(qweight|qzeros|g_idx|weight_packed|weight_scale\w*|weight_zero_point|absmax|SCB|quant_\w+|\w+_blocks)$"
)
"""Tensors that GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8 and MXFP4 store beside or instead of weights,
for folders whose config.json does not mention quantization."""
HEAD = re.compile(r"(lm_head|embed_out|score|classifier|output)\.")
"""Tensors of a language model's or a classifier's output layer, which is outside of the base model."""


# ------------------------------------------------------------------------------------------------ export


def export_hf(
    tensors: Tensors | Mapping[str, Tensor],
    form: HFForm,
    tokenizer_files: Mapping[str, str | Path],
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    quantise: Quantise | None = None,
    max_shard: int | None = None,
    eos_id: int | None = None,
    bos_id: int | None = None,
    kept: Mapping[str, bytes] | None = None,
    progress: Progress = no_progress,
    say: Callable[[str], None] = lambda line: None,
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Write a folder that the form's library loads unchanged, such as `transformers.AutoModelForCausalLM`.

    Args:
        tensors: the model's parameters by their own names, whole: a `CheckpointReader`, or a mapping.
        form: the model's Hugging Face form.
        tokenizer_files: file names, and the files to copy.
        out: a folder that does not exist or is empty. It appears only when it is complete.
        dtype: the dtype that floating-point tensors are cast to; None: they keep theirs.
        quantise: which tensors are quantized and how, see `titancli.checkpoint.hf.quantise`.
        max_shard: maximum bytes of data per file, except that no tensor is split; None: 5 GB.
        eos_id, bos_id: the tokenizer's, for config.json and generation_config.json.
        kept: files of the folder the weights once came from (`titancli.checkpoint.hf.sidecar_files`); its
            tokenizer's files are copied too.
        say: called with one line for each leftover of a killed export to `out` that is removed.
        before_rename: called when everything is written; if it raises, nothing is left.

    Raises:
        EnvironmentProblem: `out` is not empty, or the disk refuses.
        TitanError: the form maps two tensors to one name or gives other shapes than it promised, or a
            value does not fit into `dtype`.
    """
    source = MemoryTensors(tensors) if isinstance(tensors, Mapping) else tensors
    jobs = _jobs(source, form, dtype, quantise)
    needed = sum(entry.nbytes for job in jobs for entry in job.entries)
    small = {
        name: (json.dumps(text, indent=2) + "\n").encode()
        for name, text in _texts(form, jobs, kept or {}, eos_id, bos_id, quantise).items()
    }
    small |= {name: data for name, data in (kept or {}).items() if is_tokenizer_file(name)}
    small |= {_in_folder(name): _bytes_of(Path(path)) for name, path in tokenizer_files.items()}
    with new_folder(out, needed + sum(map(len, small.values())), say=say) as folder:
        _write_weights(folder, library_of(form), jobs, max_shard, progress)
        for name, text in small.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_file(folder / name, text)
        if (folder / TEMPLATES).is_dir():
            sync_folder(folder / TEMPLATES)
        before_rename()


def _jobs(source: Tensors, form: HFForm, dtype: torch.dtype | None, quantise: Quantise | None) -> list[Job]:
    """Return what is read and what is written from it, by running the form on tensors without data."""
    jobs = []
    owners: dict[str, str] = {}
    for name in sorted(source.names(), key=by_numbers):
        empty = torch.empty(source.shape(name), dtype=cast_of(source.dtype(name), dtype), device="meta")
        entries = []
        for hf_name, tensor in _out(form, quantise, name, empty):
            if hf_name in owners:
                raise TitanError(f"the parameters {owners[hf_name]} and {name} would both become {hf_name}")
            owners[hf_name] = name
            entries.append(Entry(hf_name, dtype_name(hf_name, tensor.dtype), tuple(tensor.shape)))
        jobs.append(Job(name, tuple(entries), partial(_made, source, form, quantise, name)))
    return jobs


def _made(source: Tensors, form: HFForm, quantise: Quantise | None, name: str) -> list[Tensor]:
    return [value for _, value in _out(form, quantise, name, source.read(name))]


def _out(form: HFForm, quantise: Quantise | None, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    found = form.to_hf(name, tensor)
    return found if quantise is None else quantise.out(found)


def cast_of(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor is cast to if floating-point tensors are to be `wanted`."""
    return wanted if wanted is not None and own.is_floating_point else own


def _write_weights(
    folder: Path, library: Library, jobs: Sequence[Job], max_shard: int | None, progress: Progress
) -> None:
    files = write_files(folder, jobs, library.file, limit=max_shard, progress=progress)
    if len(files) > 1:
        total = sum(entry.nbytes for file in files for entry in file.entries)
        weight_map = {entry.key: file.name for file in files for entry in file.entries}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(folder / library.index, (json.dumps(index, indent=2) + "\n").encode())


def _texts(
    form: HFForm,
    jobs: Iterable[Job],
    kept: Mapping[str, bytes],
    eos_id: int | None,
    bos_id: int | None,
    quantise: Quantise | None,
) -> dict[str, dict[str, Any]]:
    """Return the JSON files. transformers' config.json names the dtype in which most numbers are stored."""
    if not library_of(form).text:
        return {"config.json": form.config_json()}
    sizes: dict[str, int] = {}
    for entry in (entry for job in jobs for entry in job.entries):
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    made = texts(form.config_json(), kept, eos_id, bos_id)
    if quantise is not None:
        made[CONFIG] |= {"dtype": "bfloat16", KEY: dict(quantise.table)}
    elif sizes:
        most = TORCH_DTYPE[max(sizes, key=lambda name: sizes[name])]
        made[CONFIG]["dtype"] = str(most).removeprefix("torch.")
    return made


def _in_folder(name: str) -> str:
    """Return the name that a tokenizer's file gets: of a plugin's own path the last part."""
    return name if is_tokenizer_file(name) else Path(name).name


def _bytes_of(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise EnvironmentProblem(f"the tokenizer's {path} cannot be read: {error.strerror}") from error


# ------------------------------------------------------------------------------------------------ import


class HFReader:
    """A Hugging Face folder's tensors by our parameters' names, read one at a time.

    Raises:
        EnvironmentProblem: the folder holds no safetensors, or its files are damaged.
    """

    def __init__(self, folder: Path, form: HFForm) -> None:
        self.folder, self.form = folder, form
        self._places = self._find()

    def parameter(self, name: str) -> Tensor:
        """Return our parameter, whole, on the CPU.

        Raises:
            EnvironmentProblem: the folder lacks a tensor that it is made of.
        """
        return self.form.from_hf(name, [place.whole() for place in self.sources(name)])

    def virtual(self, name: str) -> Tensor:
        """Return our parameter, unread: a `virtual.Virtual`, or a tensor if the form computes it from values.

        Raises:
            EnvironmentProblem: the folder lacks a tensor that it is made of.
        """
        try:
            return self.form.from_hf(name, [place.virtual() for place in self.sources(name)])
        except RuntimeError:  # the form writes to tensors, or needs their memory: it gets whole ones
            return self.parameter(name)

    def sources(self, name: str) -> list[Place]:
        """Return the stored tensors that our parameter is made of.

        Raises:
            EnvironmentProblem: the folder lacks one of them.
        """
        for hf_name in self.form.sources(name):
            if hf_name not in self._places:
                raise EnvironmentProblem(
                    f"{self.folder} has no tensor {hf_name!r}, which {name} is built from"
                )
        return [self._places[hf_name] for hf_name in self.form.sources(name)]

    def dtype(self, name: str) -> torch.dtype:
        """Return our parameter's dtype in the folder; bfloat16 if it is quantised."""
        sources = self.form.sources(name)
        if not sources:  # the form makes it from no stored tensor
            return self.form.from_hf(name, []).dtype
        return TORCH_DTYPE[self._places[sources[0]].dtype]

    def names(self) -> Collection[str]:
        """Return the names of all tensors in the folder, as the form knows them."""
        return self._places.keys()

    @property
    def identity(self) -> str:
        """Return a value that is equal if the names, dtypes, shapes and positions of all tensors are."""
        rows = [(name, place.dtype, place.shape, place.where) for name, place in sorted(self._places.items())]
        return xxhash.xxh3_128(repr(rows).encode()).hexdigest()

    def check(self, shapes: Mapping[str, tuple[int, ...]], share: tuple[int, int] = (0, 1)) -> None:
        """Check that the folder holds a model with these parameters: by its headers, and copies by value.

        Args:
            share: (number, count): the part of each copy that is compared; others compare the other parts.

        Raises:
            EnvironmentProblem: names are missing or unexpected, or shapes differ; names them all.
        """
        sources = {name: self.form.sources(name) for name in shapes}
        wanted = {hf_name for hf_names in sources.values() for hf_name in hf_names}
        self._refuse_quantised(wanted)
        unread = [n for n in sorted(self._places.keys() - wanted, key=by_numbers) if not self.form.ignored(n)]
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
        missing = sorted(wanted - self._places.keys(), key=by_numbers)
        found = name_lists({"it lacks": missing, "the model lacks": unread, "shapes differ": wrong})
        if found:
            why = self.form.why_missing
            raise EnvironmentProblem(
                f"the weights in {self.folder} do not fit this model: {found}",
                hint=why(missing) or "compare its config.json with the recipe's [model]",
            )
        self._refuse_untied(*share)

    def _refuse_quantised(self, wanted: Collection[str]) -> None:
        found = [
            f"{name} is {place.dtype}"
            for name, place in self._places.items()
            if (name in wanted and place.dtype in QUANTISED_DTYPES)
            or (name not in wanted and QUANTISED_NAMES.search(name))
        ]
        if found:
            listed = name_lists({"its weights are quantized": sorted(found)}, limit=3)
            raise EnvironmentProblem(f"{self.folder} cannot be used: {listed}", hint=DEQUANTISE)

    def _refuse_untied(self, number: int, count: int) -> None:
        """Check that tensors left unread as copies equal their originals: transformers would use them if
        not."""
        copy_of = self.form.copy_of
        for name in self._places:
            if (original := copy_of(name)) in self._places:
                one, other = (self._places[key].virtual() for key in (name, original))
                rows = len(one)
                mine = (range(rows * number // count, rows * (number + 1) // count),)
                region = (*mine, *everything(one.shape[1:]))
                if (one.dtype, one.shape) != (other.dtype, other.shape) or any(
                    not torch.equal(one.read(block), other.read(block)) for block in blocks(one, region)
                ):
                    raise EnvironmentProblem(
                        f"{self.folder}: {name} differs from {original}, but the model has one tensor for "
                        f"both",
                        hint="if both are wanted, set tie_word_embeddings to false in config.json or, for "
                        "layers that predict further tokens, model.n_mtp_layers = 0",
                    )

    def _empty(self, hf_name: str) -> Tensor:
        place = self._places[hf_name]
        return torch.empty(place.shape, dtype=TORCH_DTYPE[place.dtype], device="meta")

    def _find(self) -> dict[str, Place]:
        """Return where every tensor is stored, by the name that the form knows it by."""
        tensors = stored_tensors(self.folder, library_of(self.form))
        found = {key: Stored(path, entry) for key, (path, entry) in tensors.items()}
        how = quantization_of(self._config())
        places: dict[str, Place] = {**found} if how is None else as_bf16(found, how)
        known_as = self.form.known_as
        return self._prefixed({known_as(key): place for key, place in places.items()})

    def _prefixed(self, places: dict[str, Place]) -> dict[str, Place]:
        """Return tensors of a folder of the base model alone by the names of the whole model."""
        prefix = self.form.prefix
        if not prefix or any(key.startswith(prefix) for key in places):
            return places
        return {key if HEAD.match(key) else prefix + key: place for key, place in places.items()}

    def _config(self) -> Mapping[str, Any]:
        """Return the contents of config.json; empty if there is none."""
        path = self.folder / CONFIG
        try:
            found = read_json(path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise EnvironmentProblem(f"{path} cannot be read: {error}") from error
        return found if isinstance(found, dict) else {}


def read_hf(folder: Path, form: HFForm) -> HFReader:
    """Open a Hugging Face folder; see `HFReader`."""
    return HFReader(Path(folder), form)
