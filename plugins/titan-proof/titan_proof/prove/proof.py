"""`prove`: compute a recipe's small copy on every layout, and find which techniques make it wrong.
Torch-free."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan_proof.prove.cases import TITLES, Case, cases
from titan_proof.prove.pool import SECONDS, Pool
from titan_proof.prove.shrink import Small, largest_sizes, shrink
from titancli import Recipe
from titancli.errors import EnvironmentProblem, RecipeError, TitanError
from titancli.launchers.devices import visible_gpus
from titancli.recipe import Loaded, load_recipe

Progress = Callable[[int, int, str], None]
"""Called with the number of cases done, the number of all cases, and the name of the next one."""


@dataclass(frozen=True)
class Proof:
    """The results of a proof."""

    results: list[dict[str, Any]]
    """The result of each case: `name`, `ranks`, `techniques`, `status` (`right`, `wrong`, `failed`, `not
    supported`), and the keys that belong to the status."""
    small: Small
    parameters: int
    """The number of parameters of the small copy."""
    seconds: float

    @property
    def wrong(self) -> list[dict[str, Any]]:
        return [result for result in self.results if result["status"] in ("wrong", "failed")]

    @property
    def causes(self) -> list[dict[str, Any]]:
        """Return the wrong cases that no other wrong case with fewer techniques explains."""
        bad = self.wrong
        found = [
            one
            for one in bad
            if not any(set(other["techniques"]) < set(one["techniques"]) for other in bad if other is not one)
        ]
        first: dict[frozenset[str], dict[str, Any]] = {}
        for one in found:  # the same techniques with other degrees
            first.setdefault(frozenset(one["techniques"]), one)
        return list(first.values())


def prove(
    loaded: Loaded,
    *,
    ranks: int,
    device: str = "cpu",
    plugin_files: Sequence[Path] = (),
    blocked: Sequence[str] = (),
    progress: Progress = lambda done, of, name: None,
    seconds: float = SECONDS,
) -> Proof:
    """Compare a small copy of a recipe on every layout of at most `ranks` ranks with one process.

    Args:
        device: `cpu`, or `cuda`: a GPU for each rank.
        plugin_files: plugins in single files, which the ranks load too.
        blocked: plugins that are disabled.
        seconds: time limit of the ranks for one case.

    Raises:
        RecipeError: the recipe cannot be made small, or does not run on one process; the message says which
            value prevents it.
        EnvironmentProblem: there are fewer GPUs than ranks.
    """
    if device == "cuda" and (gpus := visible_gpus()) < ranks:
        raise EnvironmentProblem(
            f"--device cuda: layouts of {ranks} ranks need {ranks} GPUs, but {gpus} are visible",
            hint=f"use {f'--ranks {gpus}' if gpus else '--device cpu'}",
        )
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="titan-prove-") as name,
        Pool(Path(name), plugin_files, blocked, seconds, device=device) as pool,
    ):
        small = shrink(loaded, Path(name), device)
        run = _Run(small, pool)
        plain = run.reference(Case())
        results = []
        wanted = cases(_with_compile(small, loaded), ranks, by_rows=run.by_rows)
        for number, case in enumerate(wanted):
            progress(number, len(wanted), case.name)
            result = run.case(case, random=plain["random"])
            results.append(
                {"name": case.name, "ranks": case.ranks, "techniques": sorted(case.techniques), **result}
            )
        progress(len(wanted), len(wanted), "")
    return Proof(results, small, plain["parameters"], time.perf_counter() - began)


def _with_compile(small: Small, loaded: Loaded) -> Recipe:
    """Return the small recipe with the compile settings of the original, which choose the backend."""
    return replace(small.recipe, compile=loaded.recipe.compile)


def _in_the_way(small: Small, answer: dict[str, Any]) -> RecipeError:
    """Return the error for a copy that is too large; it says which value makes it so."""
    import tomli

    data = tomli.loads(small.file.read_text(encoding="utf-8"))
    sizes = ", ".join(f"{key} = {value}" for value, key in largest_sizes(data["model"])[:3])
    return RecipeError(
        f"the model cannot be made small: {answer['largest']} alone has {answer['numbers']:,} of "
        f"{answer['parameters']:,} parameters; its largest sizes: {sizes or 'none in [model]'}",
        hint="override it (titan prove RECIPE model.KEY=64), or declare `small` in the model's config",
    )


class _Run:
    """The ranks, and the references that they hold."""

    def __init__(self, small: Small, pool: Pool) -> None:
        self.small, self.pool = small, pool
        self._known: dict[str, dict[str, Any]] = {}
        self.by_rows = False
        """Whether values of converters depend on the rows of a call; measured with the first reference."""

    def reference(self, case: Case) -> dict[str, Any]:
        """Return the answer about the one process that a case is compared with.

        Raises:
            RecipeError: the recipe's own process does not run.
        """
        job = self._plain(case)
        if job["key"] not in self._known:
            answer = self._known[job["key"]] = self.pool.ask(1, job)
            if answer["status"] == "large":
                raise _in_the_way(self.small, answer)
            if answer["status"] != "right" and not case.more and case.converters:
                raise RecipeError(
                    f"the small copy does not run on one process: {answer['reason']}",
                    hint="see `titan plan RECIPE --check`, or override the sizes: titan prove RECIPE "
                    "model.KEY=VALUE",
                )
            self.by_rows |= answer.get("by_rows", False)
        known = self._known[job["key"]]
        return known | {"job": {**job, "seed": known.get("seed")}}

    def _plain(self, case: Case) -> dict[str, Any]:
        # If rounding depends on the rows of a call (float8's scales), the micro-batches of the one process
        # are the groups of rows of the case.
        sizes = [case.rows]
        if case.converters and self.by_rows:
            sizes = [size for size in case.sizes for _ in range(case.dp)]
            if "pp" in case.degrees:
                each = self.small.recipe.pipeline.microbatch_size
                sizes = [each] * (case.rows // each)
        overrides = [
            *case.of_model,
            *(f"training.{name}_batch_size={case.rows}" for name in ("local", "global")),
        ]
        key = f"rows {sizes} {' '.join(case.of_model)} {' '.join(case.replayed)}"
        return self._job("reference", overrides, case, sizes) | {"key": key, "how": case.replayed}

    def _job(self, do: str, overrides: list[str], case: Case, sizes: list[int]) -> dict[str, Any]:
        base = None
        if self.small.base is not None:  # with the same number of layers
            base = str(self.small.base.parent.with_name(f"base-{case.layers}") / "step-0")
            overrides = [*overrides, f"weights={base}"]
        return {
            "do": do,
            "file": str(self.small.file),
            "base": base,
            "overrides": overrides,
            "sizes": sizes,
        }

    def case(self, case: Case, *, random: bool) -> dict[str, Any]:
        """Return the result of one case."""
        try:
            load_recipe(self.small.file, case.overrides)
        except RecipeError as error:
            problem = error.problems[0]
            return {"status": "not supported", "reason": problem.message}
        except TitanError as error:
            return {"status": "failed", "reason": error.message}
        if random and (case.ranks > 1 or len(case.sizes) > 1 or case.in_other_rows):
            why = "the model draws random numbers in forward (dropout), which differ between layouts"
            return {"status": "not supported", "reason": why}
        answer = reference = self.reference(case)
        if reference["status"] == "right":
            job = self._job("case", case.overrides, case, case.sizes) | {
                "seed": reference["seed"],
                "more": list(case.more),
                "how": case.how,
                "reference": reference["job"],
                "by_rows": case.converters and self.by_rows,
            }
            answer = self.pool.ask(case.ranks, job)
        if answer["status"] == "refused":
            answer["status"] = "not supported"
        return {key: value for key, value in answer.items() if key not in ("rank", "echo", "job")}


# -------------------------------------------------------------------------------------------------- in words


def title(techniques: Sequence[str]) -> str:
    """Return techniques in words."""
    named = [TITLES[name] for name in TITLES if name in techniques]
    return " with ".join(named) or "one process"


def sentence(result: dict[str, Any]) -> str:
    """Return the error of a case, in words."""
    if result["status"] == "failed":
        return f"it fails: {result['reason']}"
    if result["status"] == "not supported":
        return f"not supported: {result['reason']}"
    fault = result["fault"]
    if fault is None:
        return ""
    if fault["kind"] in ("sampled", "generation", "ragged"):
        return _of_generation(fault)
    what = {
        "initial": "its value before the step is wrong",
        "forward": "forward is wrong",
        "loss": "the loss is wrong",
        "gradient": "its gradient is wrong",
        "norm": "the gradient norm is wrong",
        "applied": "its gradient is wrong after division and clipping",
        "weight": "it is wrong after the optimizer step",
    }[fault["kind"]]
    step = f"step {fault['step']}"
    words = []
    if fault["kind"] in ("loss", "forward"):
        words.append(f"{step}: {what}")
        if fault["output"]:
            words.append(f"the output of {fault['output']} is the first that differs")
        elif not any("compile" in name for name in result["techniques"]):
            words.append("the output of every block is right, so it is the loss, its weight or their sum")
        if fault["parameter"]:
            words.append(f"first wrong parameter {fault['parameter']}")
    elif fault["parameter"]:
        words.append(f"{fault['parameter']}: {what} ({step})")
        if fault["enters"] != fault["parameter"]:
            words.append(f"backward goes wrong at {fault['enters']}")
    else:
        words.append(f"{step}: {what}")
    if fault["scale"] is not None and abs(fault["scale"] - 1) > 1e-2:
        words.append(f"{fault['scale']:.4g} times what it should be")
    elif fault["difference"] is not None:
        words.append(f"off by {fault['difference']:.1e}")
    if fault["routes"]:
        words.append(f"tokens go to other experts in {fault['routes'][0]}")
    if fault["wrong"] > 1:
        words.append(f"{fault['wrong']} of {fault['of']} parameters")
    return "; ".join(words)


def _of_generation(fault: dict[str, Any]) -> str:
    rows = "in rows of unequal length, " if fault["kind"] == "ragged" else ""
    words = [f"{rows}the logits of token {fault['token']} differ from those of the whole row"]
    if fault["kind"] == "sampled":
        words = [f"the logits of token {fault['token']} for sampling differ from those of training"]
    if fault["output"]:
        words.append(f"the output of {fault['output']} is the first that differs")
        words.append(f"first wrong parameter {fault['parameter']}")
    return "; ".join([*words, f"off by {fault['difference']:.1e}" if fault["difference"] else "not a number"])
