"""List the cases that are compared with one process: layouts of two to four ranks, and more. Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from titan_proof.prove.shrink import ROWS
from titancli import Recipe
from titancli.layout.stages import SCHEDULES
from titancli.parallel.programs import missing_programs

TITLES = {
    "dp_shard": "FSDP2 (mesh.dp_shard)",
    "dp_replicate": "replication (mesh.dp_replicate)",
    "tp": "tensor parallel (mesh.tp)",
    "cp": "context parallel (mesh.cp)",
    "pp": "pipeline parallel (mesh.pp)",
    "ep": "expert parallel (mesh.ep)",
    "accumulation": "gradient accumulation (training.global_batch_size)",
    "recompute full": 'recomputation (activation_checkpoint.mode = "full")',
    "recompute op": 'recomputation (activation_checkpoint.mode = "selective")',
    "compile": "compile (compile.enable)",
    "bf16": "bfloat16 (training.mixed_precision_param)",
    "samples": "lists of samples (Engine.forward_backward)",
    "routes": "replayed routes",
    "epoch": "the last step of an epoch (training.epochs)",
    "resume": "resume from a checkpoint",
    "export": "export to Hugging Face and back",
    "generation": "generation",
}
"""User-facing names of techniques."""
MICRO_BATCHES = 3
"""Number of micro-batches for accumulation: one is neither the first nor the last, and the last has fewer
rows."""


GIVEN = ("samples", "routes", "epoch")
"""Ways in which a step's rows are given, other than as batches; see `titan_proof.prove.given`."""


@dataclass(frozen=True)
class Case:
    """One way to compute the same two steps."""

    mesh: tuple[tuple[str, int], ...] = ()
    more: tuple[str, ...] = ()
    """Techniques that are not degrees of the mesh."""
    rows: int = ROWS
    backend: str = "aot_eager"
    """The backend of compile."""
    layers: int | None = None
    """The number of layers that the layout needs; None: that of the small recipe."""
    converters: bool = True
    """Whether the recipe's converters are applied."""
    unit: int = 1
    """Rows that belong together, such as pairs."""
    experts: bool = False

    @property
    def degrees(self) -> dict[str, int]:
        return dict(self.mesh)

    @property
    def name(self) -> str:
        words = [f"{name} {degree}" for name, degree in self.mesh]
        more = [f"compile ({self.backend})" if name == "compile" else name for name in self.more]
        return ", ".join([*words, *more, *["without converters"] * (not self.converters)]) or "one process"

    @property
    def techniques(self) -> frozenset[str]:
        return frozenset([*(name for name, _ in self.mesh), *self.more])

    @property
    def ranks(self) -> int:
        count = 1
        for name, degree in self.mesh:
            count *= 1 if name == "ep" else degree
        return count

    @property
    def dp(self) -> int:
        """Return the number of ranks with different rows."""
        return self.degrees.get("dp_shard", 1) * self.degrees.get("dp_replicate", 1)

    @property
    def sizes(self) -> list[int]:
        """Return the rows of each micro-batch on a data-parallel rank."""
        units, left = self.rows // self.dp // self.unit, MICRO_BATCHES if "accumulation" in self.more else 1
        found = []
        while units:
            found.append(-(-units // left))
            units, left = units - found[-1], left - 1
        return [size * self.unit for size in found]

    @property
    def how(self) -> list[str]:
        """Return how the rows are given, if not as batches."""
        return [name for name in self.more if name in GIVEN]

    @property
    def in_other_rows(self) -> bool:
        """Return whether the rows lie beside others than in the one process."""
        return any(name != "routes" for name in self.how)

    @property
    def replayed(self) -> list[str]:
        """Return how the rows are also given to the one process that this case is compared with: routes are a
        part of the rows."""
        return [name for name in self.how if name == "routes"]

    @property
    def of_model(self) -> list[str]:
        """Return the overrides that also apply to the one process that this case is compared with."""
        found = [] if self.layers is None else [f"model.n_layers={self.layers}"]
        if not self.converters:
            found.append("converters=[]")
        if "bf16" in self.more:
            found.append("training.mixed_precision_param=bfloat16")
            if self.experts:  # rounding to bfloat16 would choose others
                found.append("debug.moe_force_load_balance=true")
        return found

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of the small recipe for this case."""
        found = self.of_model + [f"mesh.{name}={degree}" for name, degree in self.mesh]
        found.append(f"training.local_batch_size={self.rows // self.dp}")
        found.append(f"training.global_batch_size={self.rows}")
        if "recompute full" in self.more:
            found.append("activation_checkpoint.mode=full")
        if "recompute op" in self.more:
            found.append("activation_checkpoint.mode=selective")
        if "compile" in self.more:
            found += ["compile.enable=true", f"compile.backend={self.backend}"]
        return found


def cases(recipe: Recipe, ranks: int, *, by_rows: bool = False) -> list[Case]:
    """Return all cases of a recipe on at most `ranks` ranks, those with few techniques first.

    Args:
        by_rows: the recipe's converters compute values that depend on the rows of a call. Accumulation is
            then also compared without them, to test it by itself; context parallel, samples and the end of
            an epoch only without them.
    """
    # inductor compiles C++, which takes minutes: only if the recipe requests it and its programs are here.
    wanted = recipe.compile.enable and recipe.compile.backend == "inductor"
    backend = "inductor" if wanted and not missing_programs() else "aot_eager"
    experts = bool(recipe.model.n_experts)
    pairs = recipe.loss.learns_from_pairs

    def case(*more: str, rows: int = ROWS, **mesh: int) -> Case:
        unit = 2 if pairs else 1
        return Case(tuple(mesh.items()), more, rows, backend, unit=unit, experts=experts)

    found = [
        case("accumulation"),
        case("recompute full"),
        case("recompute op"),
        case("compile"),
        case("resume"),
        case("export"),
        case("generation"),
        case("bf16", "resume"),  # the casts of a new engine are those of its weights
        # Not on layouts whose ranks add terms of a sum that are rounded to bfloat16: no nudge shows that
        # rounding.
        *(case("bf16", **{name: 2}) for name in ("dp_shard", "pp")),
        *(case(**{name: 2}) for name in ("dp_shard", "dp_replicate", "tp", "cp", "pp")),
        case("accumulation", dp_shard=2),
        case("recompute full", dp_shard=2),
        case("compile", dp_shard=2),
        case("resume", dp_shard=2),
        case("generation", dp_shard=2),
        case("accumulation", tp=2),
        case("recompute op", tp=2),
        case("compile", tp=2),
        case("resume", tp=2),
        case("export", tp=2),
    ]
    if not pairs:
        found.append(case(dp_shard=3, rows=12))  # three do not divide rows evenly
    if recipe.model.vocab_size is not None:  # rows are of tokens
        found += _given_otherwise(case, pairs=pairs, experts=experts)
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    found += [case(dp_shard=4), case(tp=4), case(cp=4), replace(case(pp=4), layers=_layers(recipe, 4))]
    if recipe.converters:
        found.append(replace(case("generation"), converters=False))  # as `titan generate` does
    if by_rows:
        found += [
            replace(one, converters=False)
            for one in found
            if one.techniques <= {"accumulation", "dp_shard"} and len(one.sizes) > 1
        ]
    found += [case(**{one: 2, other: 2}) for one, other in itertools.combinations(names, 2)]
    found.append(case("recompute full", "compile", dp_shard=2, tp=2))
    if experts:
        found += [
            *(case(**{name: 2}, ep=2) for name in ("dp_shard", "cp", "tp")),
            case("recompute op", dp_shard=2, ep=2),
            case("accumulation", dp_shard=2, ep=2),
            case("resume", dp_shard=2, ep=2),
            case("export", dp_shard=2, ep=2),
            case(dp_shard=4, ep=2),
            case(dp_shard=4, ep=4),
            *(
                case(**{one: 2, other: 2}, ep=2)
                for one, other in itertools.combinations(names, 2)
                if (one, other) != ("dp_replicate", "pp")
            ),
        ]
    legal = [each for each in found if each.ranks <= ranks]
    if by_rows:  # no single process sees the part of a row that a rank has
        legal = [
            replace(each, converters=each.converters and "cp" not in each.degrees and not each.in_other_rows)
            for each in legal
        ]
    return sorted(legal, key=lambda each: (each.ranks, len(each.techniques)))


def _given_otherwise(case: Callable[..., Case], *, pairs: bool, experts: bool) -> list[Case]:
    """Return the cases whose rows are not given as batches."""
    degrees: list[dict[str, int]] = [{}, *({name: 2} for name in ("dp_shard", "tp", "cp", "pp"))]
    if experts:
        degrees.append({"dp_shard": 2, "ep": 2})
    found = [case("epoch", **mesh) for mesh in degrees]
    if not pairs:
        found += [case("samples", **mesh) for mesh in degrees]
    if experts:
        found += [case("routes", **mesh) for mesh in degrees[1:]]
        found += [] if pairs else [case("samples", "routes", **mesh) for mesh in ({}, degrees[-1])]
    return found


def _layers(recipe: Recipe, stages: int) -> int | None:
    """Return how many layers a pipeline over this many ranks needs: a multiple of the small recipe's
    layers, which include every kind; None: they are enough, or not known."""
    there = recipe.model.n_layers
    needed = stages * SCHEDULES[recipe.pipeline.schedule].usual_stages
    return None if not there or there >= needed else there * math.ceil(needed / there)
