"""What is compared with one process: layouts of two to four ranks, and more. Torch-free."""

from __future__ import annotations

import itertools
import math
import shutil
from dataclasses import dataclass, replace

from titancli.layout.stages import SCHEDULES
from titancli.prove.shrink import ROWS
from titancli.recipe.schema import Recipe
from titancli.registry.defaults import LossConfigDefaults, ModelConfigDefaults, with_defaults

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
    "resume": "resume from a checkpoint",
    "export": "export to Hugging Face and back",
    "generation": "generation with a cache",
}
"""Techniques, as people are told."""
MOST = 4
"""Ranks."""


@dataclass(frozen=True)
class Case:
    """One way to compute the same two steps."""

    mesh: tuple[tuple[str, int], ...] = ()
    more: tuple[str, ...] = ()
    """Techniques that are no degree of the mesh."""
    rows: int = ROWS
    backend: str = "aot_eager"
    """Of compile."""
    layers: int | None = None
    """As many as the layout needs; None: as many as the small recipe has."""
    converters: bool = True
    """Whether the recipe's are in place."""

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
        """Ranks whose rows differ."""
        return self.degrees.get("dp_shard", 1) * self.degrees.get("dp_replicate", 1)

    @property
    def micro_batches(self) -> int:
        return 2 if "accumulation" in self.more else 1

    @property
    def of_model(self) -> list[str]:
        """What one process that this is compared with has as well."""
        layers = [] if self.layers is None else [f"model.n_layers={self.layers}"]
        return layers if self.converters else [*layers, "converters=[]"]

    @property
    def overrides(self) -> list[str]:
        """What makes this case of the small recipe."""
        found = self.of_model + [f"mesh.{name}={degree}" for name, degree in self.mesh]
        found.append(f"training.local_batch_size={self.rows // self.dp // self.micro_batches}")
        found.append(f"training.global_batch_size={self.rows}")
        if "recompute full" in self.more:
            found.append("activation_checkpoint.mode=full")
        if "recompute op" in self.more:
            found.append("activation_checkpoint.mode=selective")
        if "compile" in self.more:
            found += ["compile.enable=true", f"compile.backend={self.backend}"]
        return found


def cases(recipe: Recipe, ranks: int, *, by_rows: bool = False) -> list[Case]:
    """All cases of a recipe on at most so many ranks, those of few techniques first.

    Args:
        by_rows: what its converters compute depends on the rows at hand, so that accumulation with them says
            nothing of accumulation by itself, and context parallel is compared without them.
    """
    # inductor compiles C++, which takes minutes: where the recipe asks for it, and it can.
    wanted = recipe.compile.enable and recipe.compile.backend == "inductor"
    backend = "inductor" if wanted and shutil.which("g++") else "aot_eager"
    experts = bool(with_defaults(ModelConfigDefaults, recipe.model).n_experts)

    def case(*more: str, rows: int = ROWS, **mesh: int) -> Case:
        return Case(tuple(mesh.items()), more, rows, backend)

    found = [
        case("accumulation"),
        case("recompute full"),
        case("recompute op"),
        case("compile"),
        case("resume"),
        case("export"),
        case("generation"),
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
    if not with_defaults(LossConfigDefaults, recipe.loss).learns_from_pairs:
        found.append(case(dp_shard=3, rows=12))  # what three do not divide evenly
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    found += [case(dp_shard=4), case(tp=4), case(cp=4), replace(case(pp=4), layers=_layers(recipe, 4))]
    if by_rows:
        found += [
            replace(one, converters=False)
            for one in found
            if one.techniques <= {"accumulation", "dp_shard"} and one.micro_batches > 1
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
    if by_rows:  # no single process has at hand what a rank has of a row that is shared
        legal = [replace(each, converters="cp" not in each.degrees and each.converters) for each in legal]
    return sorted(legal, key=lambda each: (each.ranks, len(each.techniques)))


def _layers(recipe: Recipe, stages: int) -> int | None:
    """How many layers a pipeline over so many ranks needs: a multiple of those that the small recipe has,
    which are of every kind; None: they are enough, or not known."""
    there = with_defaults(ModelConfigDefaults, recipe.model).n_layers
    needed = stages * SCHEDULES[recipe.pipeline.schedule].usual_stages
    return None if not there or there >= needed else there * math.ceil(needed / there)
