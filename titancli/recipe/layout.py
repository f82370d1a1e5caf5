"""Checks of a recipe's parallel degrees, shared by `validate`, `plan` and `train`. Torch-free.

A degree of -1 is unknown until the number of ranks is; checks that depend on it run once a recipe is `on`
some ranks. The sizes of a model are read from its config under their common names: `n_layers`, `n_heads`,
`n_kv_heads`, `hidden_dim`, `vocab_size`, `n_experts`, and `tied`. A size that a config does not have is not
checked. A model that is sharded in another way lists its possible degrees: `mesh_degrees`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from titancli.errors import RecipeError
from titancli.layout.degrees import Degrees, divisors, near
from titancli.layout.stages import AFTER, BEFORE, SCHEDULES, StageError, check_microbatches, cut
from titancli.recipe.schema import Mesh, Recipe
from titancli.recipe.toml import KeyPath
from titancli.registry.component import component_info
from titancli.torch_version import SPLIT_BACKWARD, lacks, torch_version

Finding = tuple[KeyPath, str, str | None]
"""Path, problem, and hint."""


def on(recipe: Recipe, degrees: Degrees) -> Recipe:
    """Return the recipe with every degree known."""
    return dataclasses.replace(recipe, mesh=Mesh(**dataclasses.asdict(degrees)))


def takes(recipe: Recipe, name: str, degree: int) -> bool:
    """Return whether the model allows this degree of the mesh, as far as its config tells."""
    other = dataclasses.replace(recipe, mesh=dataclasses.replace(recipe.mesh, **{name: degree}))
    return all(path != ("mesh", name) for path, _, _ in check_layout(other))


def check_layout(recipe: Recipe) -> Iterator[Finding]:
    """Yield all problems that the known degrees show."""
    refused = dict(_impossible(recipe))
    yield from refused.values()
    # Whether such degrees divide the model does not matter.
    yield from (found for found in _fitting(recipe) if found[0] not in refused)


def _impossible(recipe: Recipe) -> Iterator[tuple[KeyPath, Finding]]:
    """Yield degrees that the model does not support at all: those not in its config's `mesh_degrees`."""
    degrees = recipe.model.mesh_degrees
    if degrees is None:
        return
    name = component_info(recipe.model).name
    for field in dataclasses.fields(recipe.mesh):
        degree = getattr(recipe.mesh, field.name)
        if degree != 1 and field.name not in degrees:
            message = (
                f"mesh.{field.name} = {degree}: the model {name} can only be sharded by "
                f"{' and '.join(degrees)}"
            )
            path: KeyPath = ("mesh", field.name)
            yield path, (path, message, f"set mesh.{field.name} = 1")


def _fitting(recipe: Recipe) -> Iterator[Finding]:
    mesh = recipe.mesh
    free = [f.name for f in dataclasses.fields(mesh) if getattr(mesh, f.name) == -1]
    if len(free) > 1:
        message = f"only one degree may be -1, not {' and '.join(free)}"
        yield ("mesh", free[-1]), message, f"set mesh.{free[0]} = 1, for example"
    else:
        yield from _batch(recipe)
    yield from _tensor(recipe)
    yield from _context(recipe)
    yield from _experts(recipe)
    several = [name for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if getattr(mesh, name) > 1]
    if several and recipe.compile.cuda_graphs != "none":
        message = f"graphs are for one GPU, and mesh.{several[0]} = {getattr(mesh, several[0])}"
        yield ("compile", "cuda_graphs"), message, 'set it to "none"'
    if mesh.pp > 1:
        yield from _pipeline(recipe)
        yield from _beside_a_pipeline(recipe)


def _batch(recipe: Recipe) -> Iterator[Finding]:
    # A free degree may become any number; the batch must be divisible at least by the known ones.
    known = [degree for degree in (recipe.mesh.dp_replicate, recipe.mesh.dp_shard) if degree != -1]
    try:
        recipe.accumulation(Degrees(dp_shard=math.prod(known)))
    except RecipeError as error:
        yield ("training", "global_batch_size"), error.message, error.problems[0].hint


def _tensor(recipe: Recipe) -> Iterator[Finding]:
    model = recipe.model
    names = ("n_heads", "n_kv_heads", "hidden_dim")
    sizes = {name: size for name in names if isinstance(size := getattr(model, name), int)}
    cp, seq_len = recipe.mesh.cp, recipe.training.seq_len
    if cp != -1 and seq_len % cp == 0:  # sequence parallel: between the blocks a row is cut over the ranks
        sizes["training.seq_len" if cp == 1 else "training.seq_len / mesh.cp"] = seq_len // cp
    yield from _divides(recipe, "tp", sizes)


def _context(recipe: Recipe) -> Iterator[Finding]:
    how = recipe.parallelize.context_parallel
    tp = max(recipe.mesh.tp, 1)
    seq_len = recipe.training.seq_len
    if how != "ulysses":
        # Each rank has a piece from the front and one from the back of a row, so that causal work is even.
        if seq_len % 2:
            if recipe.mesh.cp > 1:
                yield ("training", "seq_len"), f"mesh.cp needs an even training.seq_len, not {seq_len}", None
            return
        yield from _divides(recipe, "cp", {"half of training.seq_len": seq_len // 2})
        return
    sizes = {"training.seq_len": seq_len}
    for name in ("n_heads", "n_kv_heads"):
        heads = getattr(recipe.model, name)
        if isinstance(heads, int) and heads % tp == 0:
            sizes[name if tp == 1 else f"{name} / mesh.tp"] = heads // tp
    yield from _divides(recipe, "cp", sizes)


def _divides(recipe: Recipe, name: str, sizes: dict[str, int]) -> Iterator[Finding]:
    degree = getattr(recipe.mesh, name)
    wrong = [f"{what} {size}" for what, size in sizes.items() if size % degree]
    if degree > 1 and wrong:
        several = " and ".join(filter(None, [", ".join(wrong[:-1]), wrong[-1]]))
        message = f"mesh.{name} = {degree} does not divide {several}"
        yield ("mesh", name), message, f"{near(degree, divisors(*sizes.values()))} can"


def _experts(recipe: Recipe) -> Iterator[Finding]:
    if recipe.debug.moe_force_load_balance and not recipe.model.n_experts:
        message = "moe_force_load_balance: the model has no experts"
        yield ("debug", "moe_force_load_balance"), message, "set it to false"
    mesh = recipe.mesh
    experts = recipe.model.n_experts
    if mesh.ep > 1 and experts is None:
        yield ("mesh", "ep"), f"mesh.ep = {mesh.ep}: the model has no experts", "set ep = 1"
        return
    sizes = {} if experts is None else {"n_experts": experts}
    among = {name: getattr(mesh, name) for name in ("dp_shard", "cp", "tp")}
    if -1 not in among.values():
        product = " x ".join(f"{name} {degree}" for name, degree in among.items())
        sizes[f"the number of ranks that experts are spread over, {product} ="] = math.prod(among.values())
    yield from _divides(recipe, "ep", sizes)


def _pipeline(recipe: Recipe) -> Iterator[Finding]:
    model = recipe.model
    n_layers, (before, after) = model.n_layers, model.stage_ends or (BEFORE, AFTER)
    section, pp = recipe.pipeline, recipe.mesh.pp
    stages = None
    try:
        if n_layers is not None:
            stages = len(cut(section, pp, n_layers, before=before, after=after))
    except StageError as error:
        yield _at(error)
    rows = _rows(recipe)
    if rows is None:
        return
    if rows % section.microbatch_size:
        fitting = near(section.microbatch_size, divisors(rows))
        message = f"pipeline.microbatch_size = {section.microbatch_size} does not divide a rank's {rows} rows"
        yield ("pipeline", "microbatch_size"), message, f"{fitting} can"
    elif stages is not None:
        try:
            check_microbatches(section.schedule, pp, stages, rows // section.microbatch_size)
        except StageError as error:
            sizes, hint = [n for n in divisors(rows) if rows // n >= stages], error.hint
            if SCHEDULES[section.schedule].at_least_stages:
                few = f"more rows: {stages} or more in a rank's step"
                hint = f"{near(section.microbatch_size, sizes)} can" if sizes else few
            # A micro-batch of one row cannot shrink, so the step needs more rows.
            rows_are_few = section.microbatch_size == 1 or not sizes
            where = ("training", "local_batch_size") if rows_are_few else ("pipeline", "microbatch_size")
            yield where, error.message, hint


def _rows(recipe: Recipe) -> int | None:
    """Return the rows per rank and step of the pipeline; None if not yet known, or not divisible."""
    mesh, training = recipe.mesh, recipe.training
    if training.global_batch_size is None:
        return training.local_batch_size
    if -1 in (mesh.dp_replicate, mesh.dp_shard):
        return None
    rows, rest = divmod(training.global_batch_size, mesh.dp_replicate * mesh.dp_shard)
    return None if rest or rows % training.local_batch_size else rows


def _beside_a_pipeline(recipe: Recipe) -> Iterator[Finding]:
    """Yield settings that exclude pipeline stages, or the schedule."""
    if recipe.model.tied:
        message = (
            "tied weights cannot be split into pipeline stages: the first and last stage would "
            "share a parameter"
        )
        yield ("mesh", "pp"), message, "set pp = 1, or model.tied = false"
    schedule = recipe.pipeline.schedule
    if not SCHEDULES[schedule].splits_backward:
        return
    if lacks(SPLIT_BACKWARD):
        # The remaining checks do not matter for an unavailable schedule.
        message = (
            f"torch {torch_version()} cannot split backward, as {schedule} requires: {SPLIT_BACKWARD.why}"
        )
        instead = "Interleaved1F1B or LoopedBFS, which also have two stages per rank"
        yield (
            ("pipeline", "schedule"),
            message,
            f"install torch {SPLIT_BACKWARD.since} or newer, or use {instead}",
        )
        return
    if recipe.parallelize.reshard_after_forward == "always":
        message = f"{schedule} would lose the gradients of parameters that are freed after forward"
        yield ("parallelize", "reshard_after_forward"), message, 'use "default" or "never"'
    others = ", ".join(name for name, kind in SCHEDULES.items() if not kind.splits_backward)
    if recipe.compile.enable:
        message = (
            f"{schedule} computes the gradients of inputs and of weights separately, which "
            f"compiled blocks cannot do"
        )
        yield ("compile", "enable"), message, f"set it to false, or use {others}"
    if recipe.activation_checkpoint.mode != "none":
        # By operations torch refuses to recompute twice; in full each block is computed ten times more.
        message = (
            f"{schedule} computes the gradients of weights separately, and blocks would be "
            f"recomputed for each of them"
        )
        yield ("activation_checkpoint", "mode"), message, f'use "none", or one of {others}'


def _at(error: StageError) -> Finding:
    section, _, key = error.key.partition(".")
    return (section, key), error.message, error.hint
