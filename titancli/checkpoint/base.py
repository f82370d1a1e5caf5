"""Checkpoints of adapters: finding their base, and reading the merged weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from titancli.checkpoint.adapters import recorded_base
from titancli.checkpoint.exclude import Exclusion
from titancli.checkpoint.format.manifest import LOCK, Verify, adapter_record, is_checkpoint, read_manifest
from titancli.checkpoint.format.tensors import Tensors
from titancli.checkpoint.hf.config_match import left_out
from titancli.checkpoint.hf.detect_model import hf_form, parameter_shapes
from titancli.checkpoint.hf.folder import read_hf
from titancli.checkpoint.hf.grown import grown_form
from titancli.checkpoint.reader import CheckpointReader
from titancli.converters.lora import adapter_names, magnitude_name, merge, scale_of, weights_of
from titancli.errors import EnvironmentProblem, TitanError
from titancli.fingerprint import fingerprint
from titancli.layout.degrees import Degrees
from titancli.models.loss import of_loss
from titancli.recipe import load_recipe
from titancli.registry.component import build


def base_of(folder: Path) -> dict[str, str]:
    """Return the path and digest of a base, as checkpoints of its adapters record them.

    The digest is equal for equal files: of a checkpoint it covers the checksums in the manifest, of a Hugging
    Face folder the safetensors files (above 256 MiB in total only their names, sizes, first and last bytes).
    """
    if is_checkpoint(folder):
        sums = xxhash.xxh3_128()
        for name, file in sorted(read_manifest(folder).files.items()):
            if name.endswith(".safetensors"):
                sums.update(f"{name}\0{file.size}\0{file.xxh3_64}\0".encode())
        return {"path": str(folder), "digest": sums.hexdigest()}
    paths = sorted(folder.glob("*.safetensors"))
    try:
        digest = fingerprint([(str(path), path.name, path.stat().st_size) for path in paths])
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot read the weights {error.filename}: {error.strerror}", hint="make the file readable"
        ) from error
    return {"path": str(folder), "digest": digest}


def require_base(record: dict[str, Any], folder: Path, base: dict[str, str] | None = None) -> Path:
    """Return the folder of the base that a checkpoint of adapters was trained on.

    Args:
        record: what the manifest of `folder` records about its adapters.
        base: the base to use; None: the one at the recorded path.

    Raises:
        EnvironmentProblem: the base is missing, or is a different one.
    """
    path = Path(record["base"]["path"])
    if base is None:
        base = base_of(recorded_base(record, folder))
    if base["digest"] != record["base"]["digest"]:
        raise EnvironmentProblem(
            f"{folder} holds adapters of the base {path} (digest {record['base']['digest'][:12]}), but "
            f"{base['path']} is a different one (digest {base['digest'][:12]})",
            hint="use exactly the base that the adapters were trained on",
        )
    return path


class MergedReader:
    """The weights of a base with adapters merged in, and those of the loss beside them, one tensor at a time.

    Merged weights are computed and returned in fp32, whatever the base's dtype (`dtype`); whoever writes them
    rounds them once.
    """

    def __init__(self, adapters: CheckpointReader, base: Tensors, scale: float) -> None:
        self.folder, self.manifest = adapters.folder, adapters.manifest
        self.adapters, self.base, self.scale = adapters, base, scale
        self._own = set(adapters.names())
        if missing := set(weights_of(self._own)) - set(base.names()):
            raise TitanError(
                f"{self.folder} holds adapters of {min(missing)}, which their base does not have"
            )

    def names(self) -> list[str]:
        return [*self.base.names(), *filter(of_loss, self._own)]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._owner(name).shape(name))

    def dtype(self, name: str) -> torch.dtype:
        return self._owner(name).dtype(name)

    def _owner(self, name: str) -> Tensors:
        return self.adapters if of_loss(name) else self.base

    def read(self, name: str) -> Tensor:
        weight = self._owner(name).read(name)
        a, b = adapter_names(name)
        if a not in self._own:
            return weight
        norms = magnitude_name(name)
        magnitude = self.adapters.read(norms) if norms in self._own else None
        return merge(weight, self.adapters.read(a), self.adapters.read(b), self.scale, magnitude)


class HFTensors:
    """A Hugging Face folder whose tensors have our names."""

    def __init__(self, folder: Path, model: Any) -> None:
        form = grown_form(hf_form(model), model, folder)
        self._reader, self._shapes = read_hf(folder, form), parameter_shapes(model)
        self._reader.check(self._shapes)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(name)

    def read(self, name: str) -> Tensor:
        return self._reader.parameter(name)


def open_weights(
    folder: Path,
    model: Any,
    *,
    of_head: Collection[str] = (),
    verify: Verify = "full",
    reuse: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> CheckpointReader | MergedReader:
    """Open a checkpoint's weights as whole tensors; adapters are merged into their base.

    Args:
        of_head: the parameters of the loss that are not left out.
        reuse: see CheckpointReader.

    Raises:
        EnvironmentProblem: the checkpoint is damaged, or the base of its adapters is missing or a
            different one.
    """
    record = adapter_record(read_manifest(folder))
    reader = CheckpointReader(folder, verify=verify, prefix="model.", reuse=reuse and record is None)
    if left := reader.leave_out(lambda name: of_loss(name) and name not in of_head):
        say(f"left out, since they are the loss's alone: {', '.join(left)}")
    if record is None:
        return reader
    path = require_base(record, folder)
    say(f"merging the adapters into {path}")
    base = as_computed(folder, open_base(path, model, verify=verify, reuse=reuse))
    return MergedReader(reader, base, scale_of(record))


def as_computed(folder: Path, base: Tensors) -> Tensors:
    """Return a base as the converters of a checkpoint's recipe have its adapters compute with it."""
    if (folder / LOCK).is_file():
        recipe = load_recipe(folder / LOCK, runnable=False).recipe
        for config in recipe.converters:
            converter = build(config, mesh=Degrees(), compile=False)
            base = base if converter.base is None else converter.base(base, recipe)
    return base


def open_base(path: Path, model: Any, *, verify: Verify = "full", reuse: bool = False) -> Tensors:
    """Open the weights that a model starts from: those of a checkpoint, or of a Hugging Face folder under our
    names.

    Raises:
        EnvironmentProblem: it is damaged, or holds another model.
    """
    if is_checkpoint(path):
        exclude = Exclusion(left_out(model, path))
        reader = CheckpointReader(path, verify=verify, prefix="model.", reuse=reuse, exclude=exclude)
        reader.leave_out(of_loss)
        return reader
    return HFTensors(path, model)
