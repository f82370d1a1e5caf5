"""[validation]: the loss of held-out data is that of one process on every layout; training never knows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.data.helpers import make
from tests.engine.cases import Layout, recipe, whole_batch
from tests.ranks import Ranks
from tests.run.conftest import Finished, here, losses, train, train_on  # noqa: F401 - fixtures
from titancli.cli import main
from titancli.data import JsonLines
from titancli.engine import Engine
from titancli.errors import TitanError
from titancli.loops.run import Run
from titancli.loops.validation import Evaluation, UnreadableData, Validation
from titancli.models import Qwen3
from titancli.models.sections import MoE
from titancli.observe.events import read_events
from titancli.observe.metrics import collector, report
from titancli.observe.observers import Observers
from titancli.protocols.batch import Batch
from titancli.recipe.schema import Validation as Section

# ------------------------------------------------------------------------------------------- layouts

MOE = Qwen3(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=258,
    moe=MoE(num_experts=4, top_k=2, hidden_dim=16),
)  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "FSDP2": (2, {"dp_shard": 2}),
    "TP": (2, {"tp": 2}),
    "CP": (2, {"cp": 2}),
    "PP": (2, {"pp": 2}),
    "EP": (2, {"dp_shard": 2, "ep": 2}),
}


def texts(folder: Path) -> Path:
    """Documents of uneven lengths: 7 rows and a piece."""
    path = folder / "held-out.jsonl"
    rows = [{"text": f"{n}: " + "abcdefghij" * (n % 4)} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loss_of(mesh: dict[str, int], moe: bool, path: Path, steps: int | None) -> dict[str, float]:
    """What an evaluation says, in batches of two rows on each rank."""
    layout = Layout(mesh=mesh, model={"vocab_size": 258, "n_layers": 2}, config=MOE if moe else None)
    engine = Engine.build(recipe(layout))
    dp = {"dp_rank": engine.mesh.dp_rank, "dp_size": engine.mesh.degrees.dp}
    config = JsonLines(paths=[path], document_mask=True, shuffle=False, repeat=False)
    evaluate = Evaluation("books", make(config, **dp), engine)
    first, second = evaluate(steps), evaluate(steps)
    assert first == second is not None
    return {**first.metrics, "weight": first.weight}


@pytest.mark.ranks
@pytest.mark.parametrize("moe", [False, True])
def test_every_layout_finds_the_loss_of_one_process_that_goes_row_by_row(
    ranks: Ranks, tmp_path: Path, moe: bool
) -> None:
    path = texts(tmp_path)
    [alone] = ranks(1, loss_of, {}, moe, path, None)
    tokens = sum(len(json.loads(line)["text"]) + 1 for line in path.read_text().splitlines())
    assert alone["weight"] == tokens - 1  # each but the first is predicted, once
    assert alone["perplexity"] == pytest.approx(math.exp(alone["loss"]), rel=1e-12)
    for name, (count, mesh) in LAYOUTS.items():
        if (name == "EP") == moe:
            for found in ranks(count, loss_of, mesh, moe, path, None):
                assert found == pytest.approx(alone, rel=1e-6), name
    if not moe:
        [some] = ranks(1, loss_of, {}, moe, path, 1)
        assert some["weight"] == 32 and some["loss"] != alone["loss"]


class Uneven:
    """Batches of which a rank has its own number; or which cannot be read on one of them."""

    def __init__(self, batches: list[Batch], broken: bool = False) -> None:
        self.batches, self.broken = batches, broken

    def __iter__(self) -> Iterator[Batch]:
        yield from self.batches
        if self.broken:
            raise ValueError("a row of 13 tokens")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def uneven() -> list[Any]:
    """Rank 0 has three batches of two rows, rank 1 none; then rank 1's data break; then all is well."""
    engine = Engine.build(recipe(Layout(mesh={"dp_shard": 2}, model={"n_layers": 2})))
    pieces = whole_batch().split(2)
    mine = pieces[:3] if engine.mesh.dp_rank == 0 else []
    found = [Evaluation("x", Uneven(mine), engine)(None)]
    try:
        Evaluation("x", Uneven(pieces[:1], broken=engine.mesh.dp_rank == 1), engine)(None)
    except UnreadableData as error:
        found.append(str(error))
    found.append(Evaluation("x", Uneven(mine), engine)(None, lambda: engine.mesh.dp_rank == 1))
    found.append(Evaluation("x", Uneven(mine), engine)(None))
    engine.forward_backward(pieces[engine.mesh.dp_rank])
    engine.optim_step()
    alone = Evaluation("x", Uneven(pieces[:3]), engine)
    return [*found, alone(1).weight]


@pytest.mark.ranks
def test_ranks_whose_data_end_earlier_wait_for_the_others_and_one_that_fails_stops_all(ranks: Ranks) -> None:
    [one] = ranks(1, of_three_batches)
    for first, told, cancelled, again, weight in ranks(2, uneven):
        assert first.weight == again.weight == one.weight
        assert first.metrics == again.metrics == pytest.approx(one.metrics, rel=1e-6)
        assert told == "validation.datasets.x: a row of 13 tokens"
        assert cancelled is None
        assert weight == 2 * 30  # rows 0 and 1, without the first two targets, on both ranks


def of_three_batches() -> Any:
    engine = Engine.build(recipe(Layout(model={"n_layers": 2})))
    return Evaluation("x", Uneven(whole_batch().split(2)[:3]), engine)(None)


# ------------------------------------------------------------------------------------- odd sizes, errors


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.build(recipe(Layout(model={"vocab_size": 258, "n_layers": 2}))) as built:
        yield built


def held_out(path: Path, text: str) -> Any:
    path.write_text(text)
    return make(JsonLines(paths=[path], shuffle=False, repeat=False))


def test_less_than_a_row_is_filled_up_and_no_text_is_an_error(engine: Engine, tmp_path: Path) -> None:
    few = Evaluation("few", held_out(tmp_path / "few.jsonl", '{"text": "abc"}\n'), engine)(None)
    assert few is not None and few.weight == 3
    tokens = torch.tensor([[97, 98, 99] + [256] * 13])
    log_p = engine.forward(Batch({"tokens": tokens, "targets": tokens.roll(-1, 1)}))[0, :3]
    assert few.metrics["loss"] == pytest.approx(-float(log_p.mean()), rel=1e-5)
    with pytest.raises(TitanError, match=r"validation.datasets.none: .* contains no text"):
        Evaluation("none", held_out(tmp_path / "none.jsonl", '{"text": ""}\n'), engine)(None)
    with pytest.raises(TitanError, match=r"validation.datasets.bare has nothing to predict"):
        Evaluation("bare", Uneven([]), engine)(None)


def test_a_dataset_may_fill_the_same_memory_and_the_same_state_again(engine: Engine) -> None:
    pieces = whole_batch().split(2)

    class Refilled(Uneven):
        state = {"at": 0}  # noqa: RUF012

        def __iter__(self) -> Iterator[Batch]:
            memory = {name: tensor.clone() for name, tensor in pieces[0].items()}
            for piece in pieces[self.state["at"] :]:
                self.state["at"] += 1
                for name, tensor in piece.items():
                    memory[name].copy_(tensor)
                yield Batch(memory)

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    expected = Evaluation("x", Uneven(pieces), engine)(None)
    again = Evaluation("x", Refilled([]), engine)
    assert again(None) == again(None) == expected


def test_what_is_reported_while_evaluating_is_not_taken_for_training(engine: Engine) -> None:
    class Reporting(Uneven):
        def __iter__(self) -> Iterator[Batch]:
            report("bad_rows", 1.0)
            yield from super().__iter__()

    collector.drain()
    Evaluation("x", Reporting(whole_batch().split(2)), engine)(None)
    assert collector.drain() == {}
    report("bad_rows", 1.0)
    assert collector.drain()["bad_rows"].count == 1


def test_an_engine_that_is_compiled_is_not_compiled_at_each_evaluation() -> None:
    from torch._dynamo.utils import counters

    with Engine.build(recipe(Layout(model={"n_layers": 2}, compile="aot_eager"))) as compiled:
        evaluate = Evaluation("x", Uneven(whole_batch().split(2)), compiled)
        seen = []
        for _ in range(3):
            compiled.forward_backward(whole_batch())
            compiled.optim_step()
            evaluate(None)
            seen.append(counters["stats"]["unique_graphs"])
    assert seen[0] == seen[1] == seen[2]


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[int, dict[str, float]]] = []

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        self.events.append((step, metrics))


def schedule(engine: Engine, data: Any, **section: Any) -> tuple[Validation, Told]:
    told = Told()
    observers = Observers([told], device=torch.device("cpu"), log_freq=10, total_steps=10)
    return Validation(Section(**section), {"x": data}, engine, observers), told


def steps_of(told: Told) -> list[int]:
    assert all(
        metrics.keys() == {"validation/x/loss", "validation/x/perplexity"} for _, metrics in told.events
    )
    return [step for step, _ in told.events]


def test_it_is_evaluated_at_the_start_every_so_often_and_at_the_end(engine: Engine) -> None:
    data = Uneven(whole_batch().split(8))
    validation, told = schedule(engine, data, freq=4)
    run = Run(steps=10, stop=SimpleNamespace(requested=None), validation=validation)  # type: ignore[arg-type]
    nowhere = SimpleNamespace(state={})
    for step in range(11):
        assert run.should_continue(step) == (step < 10)
        if step < 10:
            run.step_done(step + 1)
    engine.step = 10
    run.finish(engine, nowhere)
    assert steps_of(told) == [0, 4, 8, 10]
    # A loop that takes several steps at once passes none over, and a resumed run does not begin anew.
    validation, told = schedule(engine, data, freq=4)
    for step in (3, 6, 9, 12):
        validation.between(step, lambda: False)
    assert steps_of(told) == [6, 9, 12]
    validation, told = schedule(engine, data, freq=4, at_start=False)
    validation.between(0, lambda: False)
    assert steps_of(told) == []


def test_a_run_that_is_stopped_is_evaluated_if_there_is_time(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "titancli")
    data = Uneven(whole_batch().split(8))
    validation, told = schedule(engine, data)
    validation.at_end(3, lambda: True, stopped_at=time.monotonic())  # nobody knows how long it takes
    assert steps_of(told) == [] and "stopped: no evaluation of step 3" in caplog.text
    validation.between(0, lambda: False)
    validation.at_end(3, lambda: True, stopped_at=time.monotonic())
    assert steps_of(told) == [0, 3]
    validation.at_end(4, lambda: True, stopped_at=time.monotonic() - 20)
    assert steps_of(told) == [0, 3] and "no evaluation of step 4, which took 0 s before" in caplog.text
    # A signal in the middle of one ends it, and the run goes on to its save.
    validation, told = schedule(engine, data, freq=2)
    stop = SimpleNamespace(requested=None)
    run = Run(steps=10, stop=stop, validation=validation)  # type: ignore[arg-type]
    assert run.should_continue(1)
    data.__class__ = type("Stopping", (Uneven,), {"__iter__": lambda self: stopping(self, stop)})
    assert not run.should_continue(2) and run.why == "stopped"
    assert steps_of(told) == [] and "the evaluation of step 2 was abandoned" in caplog.text


def stopping(data: Uneven, stop: Any) -> Iterator[Batch]:
    stop.requested = "SIGTERM"
    yield from data.batches


def test_data_that_cannot_be_read_any_more_do_not_end_a_run(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    data = Uneven(whole_batch().split(8), broken=True)
    validation, told = schedule(engine, data, freq=1)
    with pytest.raises(TitanError, match="a row of 13 tokens"):
        validation.between(0, lambda: False)
    data.broken = False
    validation.between(1, lambda: False)
    data.broken = True
    validation.between(2, lambda: False)
    assert "step 2 was not evaluated, training continues: validation.datasets.x: a row of 13" in caplog.text
    data.broken = False
    validation.between(3, lambda: False)
    assert [step for step, metrics in told.events if metrics] == [1, 3]
    # A resumed run, or one without an evaluation at the start, has something to lose; `titan eval` has not.
    data.broken = True
    validation, told = schedule(engine, data, freq=4)
    validation.between(3, lambda: False)
    validation.between(4, lambda: False)
    assert "step 4 was not evaluated, training continues: validation.datasets.x: a row" in caplog.text
    with pytest.raises(TitanError, match="a row of 13 tokens"):
        validation.alone(4, lambda: False)


def test_no_rank_waits_for_another_to_measure_the_text(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titancli.distributed.together.Ranks.broadcast_call", None)
    data = held_out(tmp_path / "few.jsonl", '{"text": "äbc"}\n')
    validation, told = schedule(engine, data)
    assert validation.alone(0, lambda: False)
    [(_, metrics)] = told.events
    assert (metrics["validation/x/tokens"], metrics["validation/x/bytes"]) == (4, 4)


# ------------------------------------------------------------------------------------------ whole runs

HELD_OUT = (
    'validation.datasets.long={type="text_files", paths=["text.txt"], shuffle=false}',
    'validation.datasets.short={type="text_files", paths=["short.txt"], document_mask=true}',
    *("validation.freq=2", "validation.steps=3", "validation.local_batch_size=3"),
)


def weights(run: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(run.glob("checkpoints/step-6/*.safetensors")))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "count, layout",
    [
        (1, ()),
        pytest.param(2, ("mesh.pp=2", "pipeline.microbatch_size=1"), marks=pytest.mark.slow),
        pytest.param(2, ("mesh.tp=2",), marks=pytest.mark.slow),
        (2, ()),
    ],
)
def test_a_run_with_validation_is_bitwise_one_without_and_resumes_as_one(
    train_on: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
    count: int,
    layout: tuple[str, ...],
) -> None:
    (here / "short.txt").write_text("hello world")
    plain = train_on(count, "tiny.toml", "--run-dir", "plain", *layout)
    assert plain.code == 0, plain.err
    done = train_on(count, "tiny.toml", "--run-dir", "whole", *layout, *HELD_OUT)
    assert done.code == 0, done.err
    assert losses(here / "whole") == losses(here / "plain")
    assert weights(here / "whole") == weights(here / "plain")
    found = {
        e["step"]: e["metrics"]
        for e in read_events(here / "whole/events.jsonl")
        if e["event"] == "validation"
    }
    assert list(found) == [0, 2, 4, 6]
    for step, metrics in found.items():
        assert list(metrics) == [
            *("validation/long/loss", "validation/long/perplexity"),
            *("validation/short/loss", "validation/short/perplexity"),
        ]
        assert (
            f"validation at step {step}: long loss {metrics['validation/long/loss']:.4f}, perplexity"
            in done.err
        )
    assert found[6]["validation/long/loss"] < found[0]["validation/long/loss"]
    outcome = json.loads((here / "whole/run.json").read_text())["attempts"][-1]["outcome"]
    assert outcome["metrics"].items() >= found[6].items()
    assert (
        train_on(
            count,
            "tiny.toml",
            "--run-dir",
            "parts",
            *layout,
            *HELD_OUT,
            "training.steps=4",
            "lr_scheduler.total_steps=6",
        ).code
        == 0
    )
    done = train_on(count, "parts", "--resume", "training.steps=6")
    assert done.code == 0, done.err
    assert weights(here / "parts") == weights(here / "plain")
    again = [e for e in read_events(here / "parts/events.jsonl") if e["event"] == "validation"]
    assert [e["step"] for e in again] == [0, 2, 4, 6] and again[-1]["metrics"] == found[6]


def test_runs_show_and_compare_say_what_was_evaluated(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
) -> None:
    (here / "short.txt").write_text("hello world")
    for name in ("a", "b"):
        assert train("tiny.toml", "--run-dir", name, *HELD_OUT, "training.steps=2").code == 0
    assert main(["runs", "show", "a"]) == 0
    assert "  evaluated long loss " in capfd.readouterr().out
    assert main(["runs", "compare", "a", "b", "--json"]) == 0
    equal = json.loads(capfd.readouterr().out)["equal"]["step"]
    assert [place["at"] for place in equal] == [0, 1, 2]
    assert equal[0]["metrics"]["loss"] == [None, None]
    one, other = equal[2]["metrics"]["validation/short/loss"]
    assert one == other > 0


def test_what_is_wrong_with_validation_is_told_at_once(
    train: Callable[..., Finished],  # noqa: F811
) -> None:
    done = train(
        "tiny.toml",
        'validation.datasets.a={type="python_stdlib", repeat=true}',
        'validation.datasets."b c"="python_stdlib"',
    )
    assert done.code == 3
    assert "an evaluation would never end: set it to false, or set validation.steps" in done.err
    assert "'b c' cannot be the name of a metric and of a file" in done.err
    done = train("tiny.toml", 'validation.datasets.a={type="text_files", paths=["gone.txt"]}')
    assert done.code == 5 and "validation.datasets.a.paths: " in done.err


def test_validate_refuses_data_that_are_not_there(
    here: Path,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
) -> None:
    missing = 'validation.datasets.a={type="text_files", paths=["gone.txt"]}'
    assert main(["validate", "tiny.toml", missing]) == 5
    out, err = capfd.readouterr()
    assert out == "" and f"error: validation.datasets.a.paths: {here}/gone.txt does not exist" in err
    assert main(["validate", "tiny.toml", missing, "--recipe-only"]) == 0


# ---------------------------------------------------------------------------- recipes of before [validation]
