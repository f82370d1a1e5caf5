"""`compile.cuda_graphs` around the graphs: what is replayed, what is computed as usual, what is refused.

On a GPU the numbers are compared by tests/gpu/test_graphs.py, and launches by tests/null_gpu/test_graphs.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.reruns import Reruns, reruns
from titancli.cli import main
from titancli.engine import Engine
from titancli.errors import RecipeError
from titancli.observe.metrics import collector
from titancli.protocols.batch import Batch
from titancli.protocols.result import LossResult
from titancli.recipe import load_recipe

SMALL = ["model.n_layers=1", "training.seq_len=16", "training.local_batch_size=2"]
GRAPHS = "compile.cuda_graphs=step"


@pytest.fixture
def rerun(monkeypatch: pytest.MonkeyPatch) -> type[Reruns]:
    return reruns(monkeypatch)


def built(*changed: str, graphs: str = GRAPHS) -> Engine:
    return Engine.build(load_recipe("llama3_debug", [*SMALL, graphs, *changed]).recipe, device="cpu")


def batch(number: int, rows: int = 2, **more: Tensor) -> Batch:
    tokens = torch.randint(0, 2048, (rows, 17), generator=torch.Generator().manual_seed(number))
    return Batch({"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous(), **more})


def trained(engine: Engine, batches: Iterator[Any] | Any) -> dict[str, Tensor]:
    """Train on each, and return losses and weights."""
    found = {}
    with engine:
        for number, one in enumerate(batches):
            found[f"loss {number}"] = engine.forward_backward(one)["loss"]
            engine.optim_step()
        return found | {name: p.detach().clone() for name, p in engine.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


# ------------------------------------------------------------------------------- replayed, or as usual


def test_a_shape_is_captured_once_and_another_computed_as_usual(rerun: type[Reruns], caplog: Any) -> None:
    """Alone, and among micro-batches, before and after those that are replayed."""
    one, odd = batch(1), batch(2, rows=1)
    steps: list[Any] = [one, one, batch(3), [one, batch(4)], odd, [one, odd, one], [odd, one, one], batch(5)]
    found = trained(built(), steps)
    assert rerun.captures == 2  # for a step without gradients, and for one with some
    assert caplog.text.count("another shape") == 1
    assert_same(found, trained(built(graphs="compile.cuda_graphs=none"), steps))


def test_another_loss_is_computed_as_usual(rerun: type[Reruns]) -> None:
    def half(out: Tensor, of: Batch) -> LossResult:
        return LossResult(-0.5 * out.sum(), torch.tensor(float(out.numel())))

    with built() as engine, built(graphs="compile.cuda_graphs=none") as usual:
        for number in range(6):
            for each in (engine, usual):
                each.forward_backward(batch(number), half if number in (1, 4) else None)
                each.optim_step()
        assert rerun.captures == 1
        pairs = zip(engine.named_parameters(), usual.named_parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def test_hooks_of_modules_are_called(rerun: type[Reruns]) -> None:
    with built() as engine:
        called = 0
        for number in range(4):
            engine.forward_backward(batch(number))
            engine.optim_step()
        assert rerun.captures == 1

        def count(*given: Any) -> None:
            nonlocal called
            called += 1

        handle = engine.model.norm.register_forward_hook(count)
        engine.forward_backward(batch(5))
        handle.remove()
        engine.forward_backward(batch(6))
        engine.optim_step()
        assert called == 1


@pytest.mark.parametrize(
    "what", ["a parameter moves", "a parameter is frozen", "a module computes something else"]
)
def test_what_changes_is_captured_anew(rerun: type[Reruns], what: str) -> None:
    def change(engine: Engine) -> None:
        first = engine.model.layers["0"].attention.wq.weight
        if what == "a parameter moves":
            first.data = first.data.clone()
        elif what == "a parameter is frozen":
            first.requires_grad_(False)
        else:
            engine.model.output.scale = 0.5

    found = []
    for graphs in (GRAPHS, "compile.cuda_graphs=none"):
        with built(graphs=graphs) as engine:
            for number in range(8):
                if number == 4:
                    change(engine)
                loss = engine.forward_backward(batch(number))["loss"]
                engine.optim_step()
            found.append({name: p.detach().clone() for name, p in engine.named_parameters()} | {"loss": loss})
    assert rerun.captures == 2
    assert_same(*found)


def test_metrics_that_the_model_reports_are_those_of_each_step(rerun: type[Reruns]) -> None:
    found = []
    marks = {"mix/code": torch.tensor([1.0, 0.0]), "mix/text": torch.tensor([0.0, 1.0])}
    for graphs in (GRAPHS, "compile.cuda_graphs=none"):
        with built(graphs=graphs) as engine:
            collector.drain()
            for number in range(5):
                engine.forward_backward(batch(number, **marks))
                engine.optim_step()
                found.append({name: float(r.value) / float(r.count) for name, r in collector.drain().items()})
    assert found[:5] == found[5:] and "mix/code/loss" in found[4] and found[3] != found[4]


def test_two_engines_take_turns(rerun: type[Reruns]) -> None:
    with built() as one, built("training.seed=1") as other, built(graphs="compile.cuda_graphs=none") as usual:
        for number in range(5):
            for each in (one, usual):
                each.forward_backward(batch(number))
                other.forward_backward(batch(number + 7))
                each.optim_step()
            other.optim_step()
        pairs = zip(one.named_parameters(), usual.named_parameters(), strict=True)
        assert rerun.captures > 2 and all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def test_an_evaluation_between_steps_changes_nothing(rerun: type[Reruns]) -> None:
    with built() as engine, built(graphs="compile.cuda_graphs=none") as usual:
        for number in range(5):
            for each in (engine, usual):
                each.forward_backward([batch(number), batch(-number)])
                if number > 2:
                    each.evaluate(batch(number, rows=1))
                each.optim_step()
        pairs = zip(engine.named_parameters(), usual.named_parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def test_a_capture_that_fails_leaves_the_engine_as_it_was(rerun: type[Reruns], monkeypatch: Any) -> None:
    with built() as engine:
        for number in range(2):
            engine.forward_backward(batch(number))
            engine.optim_step()

        def fails(*given: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

        with monkeypatch.context() as patch:
            patch.setattr(Reruns, "capture", fails)
            with pytest.raises(RuntimeError, match="capturing"):
                engine.forward_backward(batch(2))
        assert engine.status["accumulated"] == 0
        assert all(p.grad is None for _, p in engine.named_parameters())
        engine.forward_backward(batch(2))
        engine.optim_step()


def test_recomputation_that_would_draw_other_numbers_is_refused(rerun: type[Reruns]) -> None:
    def drops(module: Any, given: Any, out: Tensor) -> Tensor:
        return torch.nn.functional.dropout(out, 0.1)

    with built('activation_checkpoint.mode="full"') as engine:
        engine.model.layers["0"].feed_forward.register_forward_hook(drops)
        engine.runner._watch._built += 1  # type: ignore[attr-defined]  # as a converter's is
        with pytest.raises(RecipeError, match="draws random numbers"):
            engine.forward_backward(batch(1))


# ------------------------------------------------------------------------------------------------ refused


def test_a_cpu_is_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    run = ["train", "llama3_debug", *SMALL, GRAPHS, "--run-dir", str(tmp_path / "run")]
    assert main(run) != 0
    assert "compile.cuda_graphs: they need a GPU, but this is a cpu" in capsys.readouterr().err
    with Engine.frozen(load_recipe("llama3_debug", [*SMALL, GRAPHS]).recipe, device="cpu") as engine:
        engine.evaluate(batch(1))  # which replays nothing


@pytest.mark.parametrize(
    ("recipe", "changed", "message"),
    [
        ("llama3_debug", ["mesh.tp=2"], "graphs are for one GPU, and mesh.tp = 2"),
        ("llama3_debug", ["parallelize.cpu_offload=true"], "parallelize.cpu_offload moves them"),
        ("qwen3_moe_debug", ["training.mixed_precision_param=float32"], "the host waits for the tokens of"),
        ("grpo_digit", [], "has a shape of its own"),
        (
            "llama3_debug",
            ["compile.cuda_graphs=blocks", "dataset.document_mask=true"],
            "a mask of the documents",
        ),
        ("sft_debug", ["compile.cuda_graphs=blocks"], "or dataset.pack = false"),
        (
            "sft_debug",
            ["compile.cuda_graphs=blocks", "dataset.pack=false", "dataset.padding=none"],
            'or dataset.padding = "longest"',
        ),
    ],
)
def test_recipes_without_graphs_are_refused(recipe: str, changed: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(recipe, [GRAPHS, *changed])
    assert any(message in f"{one.message}; {one.hint}" for one in refused.value.problems)
