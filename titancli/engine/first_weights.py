"""The first weights of a new engine: initial values, or those of a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titancli.checkpoint.exclude import Exclusion
from titancli.checkpoint.format.manifest import is_checkpoint
from titancli.checkpoint.hf.config_match import CONFIG, left_out, read_config, refuse_other_model
from titancli.checkpoint.hf.grown import Grown, grown_form
from titancli.checkpoint.hf.peft_in import PeftFolder, fill_adapters, merged_form
from titancli.checkpoint.hf.sidecar_files import kept_of
from titancli.checkpoint.start_from import StartFrom, start_from, still_needs_weights
from titancli.distributed.process_group import patient_group
from titancli.distributed.together import Ranks
from titancli.engine.rng import generator_for
from titancli.engine.weights import (
    TensorInfo,
    adapter_converter,
    adapter_facts,
    base_parameters,
    loss_parameters,
    plain_parameters,
    tensor_infos,
)
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.models.loss import OPTIONAL, of_loss, without_loss
from titancli.models.loss import initialise as initialise_loss
from titancli.parallel.unsharded import as_stored
from titancli.recipe.peft_folder import base_folder, is_peft
from titancli.recipe.schema import Recipe
from titancli.recipe.vocabulary import GROW

if TYPE_CHECKING:
    from titancli.checkpoint.format.stream import Progress
    from titancli.distributed.mesh import Mesh
    from titancli.parallel.pipeline import Placement
    from titancli.protocols import Converter, HFForm

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
"""Seconds between two progress lines of a long load."""


class FirstWeights(NamedTuple):
    """Facts about the weights that a model begins with: see the fields of `titancli.Engine`."""

    kept: Mapping[str, bytes] = MappingProxyType({})
    base: dict[str, str] | None = None
    begins_as_base: bool = False
    adapters_from: Path | None = None


def awaited_checkpoint(recipe: Recipe, checkpoint: Path | None) -> Path | None:
    """Return the run's own checkpoint if it makes the weights that the recipe names unnecessary.

    They would only be replaced by it.
    """
    if checkpoint is None or start_from(recipe).kind != "weights":
        return None
    return checkpoint if still_needs_weights(recipe, checkpoint) is None else None


def first_weights(
    recipe: Recipe,
    parts: list[Any],
    converters: Sequence[Converter],
    device: torch.device,
    mesh: Mesh,
    placement: Placement | None,
    form: HFForm | None,
    awaited: Path | None,
) -> FirstWeights:
    """Allocate the parts and set their first weights.

    Args:
        awaited: see `awaited_checkpoint`, which then fills in the values.
    """
    start = start_from(recipe)
    materialise(parts, converters, device, recipe.training.seed, start, initialised=awaited is None)
    if start.kind != "weights" or awaited is not None:
        return FirstWeights()
    tensors = base_parameters(parts, converters) | loss_parameters(parts)
    known = tensor_infos(tensors.items(), parts, mesh, placement)
    adapters = adapter_converter(converters)
    found = load_weights(recipe, start, form, tensors, known, adapters)
    if adapters is not None and adapters.base_loaded is not None:
        for part in parts:
            with as_stored(part):
                adapters.base_loaded(part)
    if adapters is not None and is_peft(start.folder):

        def fill() -> None:
            fill_adapters(PeftFolder(start.folder, recipe.model), dict(plain_parameters(parts, converters)))

        Ranks(patient_group()).allgather_call(f"loading {start.folder}", fill)
    return found


def materialise(
    parts: list[Any],
    converters: Sequence[Converter],
    device: torch.device,
    seed: int,
    start: StartFrom,
    *,
    initialised: bool = True,
) -> None:
    """Allocate the meta model, and set initial values unless it begins with weights alone.

    Weights in a complete checkpoint are read with its other state, see `titancli.worker.data`. With
    `initialised` false all weights come from a checkpoint of the run itself.
    """
    adapters = adapter_converter(converters)
    for part in parts:
        home = part.parameter_device or device
        allocate(part, home, device)
        with as_stored(part):
            if initialised and (start.kind != "weights" or start.exclude):
                with without_loss(part):
                    part.init_weights(generator_for(seed, home))
            if initialised:  # weights that are loaded next may have none of the loss
                initialise_loss(part, generator_for(seed, home))
            if adapters is not None:
                adapters.initialise(part, generator_for(seed, home))


def allocate(model: nn.Module, device: torch.device, buffers: torch.device | None = None) -> None:
    """Allocate the meta parameters, and the buffers on their own device, or on the same one by default.

    `to_empty` alone would split a tied weight in two.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, name), *others in places.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]
    for module in model.modules() if buffers is not None and buffers != device else ():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(buffers))  # the model may have set values


def load_weights(
    recipe: Recipe,
    start: StartFrom,
    form: HFForm | None,
    tensors: dict[str, Tensor],
    known: Sequence[TensorInfo],
    adapters: Any,
) -> FirstWeights:
    """Load the first weights from a titan checkpoint or a Hugging Face folder; for a checkpoint of adapters
    those of their base.

    Args:
        tensors: the plain model's parameters on this rank, and those of the loss.
        known: these of the whole model.

    Raises:
        EnvironmentProblem: the folder is missing, is neither of these, or contains weights of another model.
        RecipeError: the model has no Hugging Face form.
    """
    from titancli.checkpoint.base import base_of, require_base

    def look() -> tuple[Path, dict[str, Any] | None, Path]:
        if not start.is_here:  # the run resumed without it, but its reference model needs it
            start.fetch(logger.info)
        if is_peft(start.folder):
            if adapters is not None:
                PeftFolder(start.folder, recipe.model).require_same(adapters)
            return start.folder, None, base_folder(start.folder)
        record = adapter_facts(adapters, folder := start.folder)
        return folder, record, folder if record is None else require_base(record, folder)

    ranks = Ranks(patient_group())
    folder, record, base = ranks.call(f"reading {start.source}", look)
    if is_peft(folder):
        ranks.broadcast_call(f"reading {folder}", lambda: PeftFolder(folder, recipe.model).check_copies(base))
    source = replace(start, source=base)
    if adapters is None and folder != base:
        logger.info("merging the adapters in %s into their base %s", folder, base)
        kept = _load_base(recipe, source, form, tensors, known, adapters_in=folder)
    else:
        kept = _load_base(recipe, source, form, tensors, known)
    first = FirstWeights(kept=kept, adapters_from=None if record is None else folder)
    if adapters is None:
        return first
    own = ranks.call(f"reading {base}", lambda: base_of(base))
    return first._replace(base=own, begins_as_base=record is None and folder == base)


def _load_base(
    recipe: Recipe,
    start: StartFrom,
    form: HFForm | None,
    tensors: dict[str, Tensor],
    known: Sequence[TensorInfo],
    adapters_in: Path | None = None,
) -> dict[str, bytes]:
    """Load the plain model's parameters, and those of the loss that are there; return the other files of the
    folder. Collective: an error on one rank is raised on all.

    Args:
        adapters_in: a folder of peft's, whose adapters are merged into the parameters.
    """
    from titancli.checkpoint import load_checkpoint

    ranks, folder = Ranks(patient_group()), start.folder
    kinds = ranks.allgather_call(f"reading {folder}", lambda: is_checkpoint(folder))
    _same_on_all(folder, kinds)
    if kinds[0]:

        def look() -> tuple[Exclusion, tuple[str, ...], dict[str, bytes]]:
            refuse_other_model(recipe, folder)
            return start.exclusion, tuple(left_out(recipe.model, folder)), kept_of(folder)

        exclusion, further, beside = ranks.call(f"reading {folder}", look)
        filled = {f"model.{name}": tensor for name, tensor in tensors.items()}
        if further:
            logger.warning(f"{folder}: {', '.join(further)} left out: model.n_mtp_layers is 0")
        exclude = Exclusion((*exclusion.patterns, *further))
        load_checkpoint(folder, filled, verify=recipe.checkpoint.verify, exclude=exclude, optional=OPTIONAL)
        return beside
    # Separate from the load, at whose start ranks wait for each other.
    shapes = {one.name: one.shape for one in known}

    def read() -> HFForm:
        own = form
        if form is not None and adapters_in is not None:  # before the vocabulary grows
            own = merged_form(form, PeftFolder(adapters_in, recipe.model))
        return recipe.loss.hf_form(_readable(recipe, start, own), shapes, read_config(folder / CONFIG))

    readable = ranks.call(f"reading {folder}", read)
    kept: dict[str, bytes] = {}
    held = readable.of_loss
    shapes = {name: shape for name, shape in shapes.items() if not of_loss(name) or name in held}
    if len(shapes) < len(known) and dist.get_rank() == 0:
        logger.info("%s has no parameters of the loss, which keep their initial values", folder)
    tensors = {name: tensor for name, tensor in tensors.items() if name in shapes}

    def load() -> str:
        identity = _load_hf(folder, readable, tensors, shapes)
        kept.update(kept_of(folder))
        return identity

    _same_on_all(folder, ranks.allgather_call(f"loading {folder}", load))
    return kept


def _same_on_all(folder: Path, seen: Sequence[object]) -> None:
    for rank, there in enumerate(seen):
        if there != seen[0]:
            raise EnvironmentProblem(
                f"weights: the ranks read different folders: rank {rank} sees another {folder} than rank 0",
                hint="put the folder on storage that all nodes share, or copy the same files to each node",
            )


def _readable(recipe: Recipe, start: StartFrom, form: HFForm | None) -> HFForm:
    """Return the form in which a Hugging Face folder of this model is read.

    Raises:
        EnvironmentProblem: it is not such a folder, or it is of another model.
        RecipeError: the recipe requires state that such a folder does not have.
    """
    folder = start.folder
    if not (folder / "config.json").is_file():
        raise EnvironmentProblem(
            f"weights: {folder} is neither a Hugging Face folder (config.json and *.safetensors) "
            "nor a checkpoint (manifest.json)",
            hint="give a folder such as ./Llama-3.1-8B or RUN/checkpoints/step-N",
        )
    if start.exclude:
        raise RecipeError(
            f"checkpoint.exclude_from_loading: a Hugging Face folder such as {folder} is always loaded "
            f"as a whole",
            hint="convert it to a checkpoint first: titan convert-checkpoint FOLDER OUT --to titan",
        )
    if form is None:
        raise RecipeError(
            f"weights: the model cannot be read from a Hugging Face folder, such as {folder}",
            hint="give a checkpoint: RUN/checkpoints/step-N",
        )
    refuse_other_model(recipe, folder)
    return grown_form(form, recipe.model, folder) if recipe.weights_vocab == GROW else form


def _load_hf(
    folder: Path, form: HFForm, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]
) -> str:
    """Load tensors from a Hugging Face folder; return the result of `load_hf_weights`."""
    from titancli.checkpoint.hf.load import load_hf_weights

    ranks = Ranks()
    return load_hf_weights(
        folder,
        form,
        tensors,
        shapes=shapes,
        share=(ranks.rank, ranks.size),
        together=ranks.size > 1,
        progress=_seldom(),
    )


def report_growth(recipe: Recipe, form: HFForm | None, parts: Sequence[Any]) -> None:
    """Report that the vocabulary has grown, and warn of new rows that adapters leave as they are. Collective.

    Args:
        parts: this rank's part of the model, with the adapters.
    """
    start = start_from(recipe)
    if recipe.weights_vocab != GROW or form is None or start.kind != "weights" or not start.is_here:
        return

    def look() -> tuple[int, list[str]]:
        grown = grown_form(form, recipe.model, start.folder)
        if not isinstance(grown, Grown):
            return 0, []
        trained: dict[str, bool] = {}
        for name, parameter in (named for part in parts for named in part.named_parameters()):
            module = name.rpartition(".")[0]
            trained[module] = trained.get(module, False) or parameter.requires_grad
        return grown.before, [name for name in grown.names if trained.get(name.rpartition(".")[0]) is False]

    found = Ranks(patient_group()).allgather_call("reading the vocabulary", look)
    before = found[0][0]
    if not before or dist.get_rank() > 0:
        return
    logger.info(
        "the vocabulary grows from %s to %s ids: new rows begin as the mean of the others",
        f"{before:,}",
        f"{recipe.model.vocab_size:,}",
    )
    if untrained := sorted({name for _, names in found for name in names}):
        logger.warning(
            f"no adapter trains the {recipe.model.vocab_size - before:,} new rows of "
            f"{' and '.join(untrained)}, which stay the mean of the others: name the embedding and the "
            "output in the converter's targets or, if they share a weight, train all weights"
        )


def _seldom() -> Progress:
    """Return a progress callback that logs now and then; short loads log nothing."""
    said = time.monotonic()

    def tell(name: str, done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= PROGRESS_SECONDS and dist.get_rank() == 0:
            said = time.monotonic()
            logger.info("loading weights: %d of %d tensors", done, total)

    return tell
