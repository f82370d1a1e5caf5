"""An engine in a script: built from what is at hand, in its own process group, and every mistake told."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.docs.markdown import ROOT, blocks
from titan_preference import DPO
from titan_rl import Grpo, Gspo
from titan_transformers import HFCausalLM
from titancli import Batch, Engine, LossResult, TitanError, load_recipe
from titancli.checkpoint.format import manifest
from titancli.checkpoint.format.hashed import file_digest
from titancli.checkpoint.format.tensorfile import read_header
from titancli.engine import inputs, recipes
from titancli.engine.inputs import RESERVED
from titancli.errors import EnvironmentProblem, RecipeError, UsageError
from titancli.losses import SFT, CrossEntropy, CrossEntropyFull
from titancli.models import Llama3
from titancli.optimizers import AdamW, WarmupStableDecay
from titancli.optimizers.schedule import schedule_of
from titancli.recipe import lock_text
from titancli.recipe.schema import Comm, Debug, Mesh, Training

TINY: dict[str, Any] = dict(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64, max_seq_len=64
)


def batch(rows: int = 4, seed: int = 0) -> Batch:
    tokens = torch.randint(0, 64, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return Batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()})


@pytest.fixture(autouse=True)
def no_group_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    hook = sys.excepthook
    yield
    assert not dist.is_initialized()
    assert sys.excepthook is hook


# ------------------------------------------------------------------------------------------------ building


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "tiny.toml"
    sizes = "\n".join(f"{key} = {value}" for key, value in TINY.items())
    path.write_text(
        f"""recipe = 1
[model]
type = "llama3"
{sizes}
[tokenizer]
type = "byte"
[dataset]
type = "text_files"
paths = ["*.txt"]
[training]
steps = 5
seq_len = 16
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 0
"""
    )
    return path


def test_a_run_stands_for_its_recipe_and_its_newest_weights(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_recipe(recipe_file, ["training.seed=3"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.lock.toml").write_text(lock_text(loaded))
    with pytest.raises(EnvironmentProblem, match="no good checkpoint") as caught:
        Engine.frozen(run)
    assert "recipe.lock.toml" in str(caught.value.hint)
    with Engine.build(recipe_file, ["training.seed=3"]) as engine:
        assert engine.config["model"]["dim"] == 32 and engine.config["degrees"]["dp_shard"] == 1
        for step in range(2):
            engine.forward_backward(batch(seed=step))
            engine.optim_step()
            folder = run / "checkpoints" / f"step-{step + 1}"
            engine.save(folder, lock_text=lock_text(loaded))
            if step == 0:
                first = engine.forward(batch())
        trained, wanted = engine.forward(batch()), engine.status
        with Engine.frozen(str(run)) as reference, Engine.frozen(folder.with_name("step-1")) as older:
            assert torch.equal(reference.forward(batch()), trained)
            assert torch.equal(older.forward(batch()), first)
            # Its own weights, where the caller names others.
            other = Engine.frozen(run, [f"weights={folder.with_name('step-1')}"])
            assert torch.equal(other.forward(batch()), first)
            other.close()
        engine.load(folder.with_name("step-1"))
        assert engine.status == {"step": 1, "version": 3, "accumulated": 0, "tokens_seen": 64}
    with Engine.build(run) as new:
        assert new.status == {"step": 0, "version": 0, "accumulated": 0, "tokens_seen": 0}
        assert torch.equal(new.forward(batch()), trained)
        state = new.load(run)
        assert new.status == wanted and state["engine"]["version"] == 2
        new.load(run, optimizer=False)
        assert new.status == wanted | {"version": 3}
        data = folder / "rank-00000.safetensors"  # the newest; damage is found on the way into the tensors
        whole, hashed = data.read_bytes(), []
        data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        monkeypatch.setattr(manifest, "file_digest", lambda p: hashed.append(p.name) or file_digest(p))
        new.load(run)
        assert new.status == {"step": 1, "version": 4, "accumulated": 0, "tokens_seen": 64}
        assert torch.equal(new.forward(batch()), first)
        assert hashed and data.name not in hashed  # by nobody but who reads them
        with Engine.build(run) as new:  # which needs the weights alone, and they are whole
            assert torch.equal(new.forward(batch()), trained)
        place = read_header(data)["model.output.weight"].start
        data.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with Engine.build(run) as new:
            assert torch.equal(new.forward(batch()), first)
        with pytest.raises(EnvironmentProblem, match="step-2 is damaged"):
            Engine.build(folder)
        assert data.name not in hashed
        data.write_bytes(whole)
    taken_over = ["checkpoint.initial_load_model_only=false", f"weights={folder}"]
    with Engine.build(recipe_file, taken_over) as continued:
        assert continued.status == wanted
    with Engine.frozen(recipe_file, taken_over) as scorer:
        assert torch.equal(scorer.forward(batch()), trained) and scorer.step == 0


@pytest.mark.parametrize("parts", [{}, {"training": Training(steps=9, seq_len=16)}])
def test_a_scripts_defaults_are_float32_on_a_cpu_no_recomputation_and_a_constant_rate(
    parts: dict[str, Any],
) -> None:
    recipe = recipes.recipe_of(Llama3(**TINY), parts, torch.device("cpu"))  # type: ignore[arg-type]
    assert recipe.training.mixed_precision_param == "float32"
    assert recipe.activation_checkpoint.mode == "none"
    schedule = schedule_of(recipe)
    assert [schedule(step) for step in range(9)] == [1.0] * 9
    on_gpu = recipes.recipe_of(Llama3(**TINY), parts, torch.device("cuda"))  # type: ignore[arg-type]
    assert on_gpu.training.mixed_precision_param == "bfloat16"
    written = Training(steps=1, mixed_precision_param="bfloat16")
    asked = recipes.recipe_of(Llama3(**TINY), {"training": written}, torch.device("cpu"))
    assert asked.training.mixed_precision_param == "bfloat16"


def test_rows_of_a_model_that_names_no_length_have_one() -> None:
    model = HFCausalLM(config={"model_type": "llama"})
    assert recipes.recipe_of(model, {}, torch.device("cpu")).training.seq_len == 2048


def test_a_script_hears_what_the_commands_say_of_a_recipe(caplog: pytest.LogCaptureFixture) -> None:
    parts: Any = {"training": Training(steps=9, seq_len=16), "lr_scheduler": WarmupStableDecay()}
    recipes.recipe_of(Llama3(**TINY), parts, torch.device("cpu"))
    recipes.recipe_from("llama3_debug", ["training.steps=3"])
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "the warm-up is shortened from 200 steps to 9",
        "the warm-up is shortened from 10 steps to 3",
    ]


def test_an_engine_of_parts_has_a_recipes_defaults() -> None:
    with Engine.of(Llama3(**TINY)) as engine:
        rates = [(engine.forward_backward(batch()), engine.optim_step())[1]["lr"] for _ in range(3)]
        assert rates == [AdamW().lr] * 3, "no schedule without a length"
        assert type(engine.loss).__name__ == "CrossEntropy"
        assert engine.config["compute_dtype"] == "float32" and engine.config["world"] == 1
        assert json.loads(json.dumps(engine.config)) == engine.config
    parts: dict[str, Any] = dict(
        optimizer=AdamW(lr=0.5),
        training=Training(steps=4, seq_len=16, mixed_precision_param="float32"),
        lr_scheduler=WarmupStableDecay(warmup_steps=2),
        mesh=Mesh(dp_replicate=1),
        debug=Debug(deterministic=True),
    )
    with Engine.of(Llama3(**TINY), **parts) as engine:
        assert torch.are_deterministic_algorithms_enabled()
        engine.forward_backward(batch())
        assert engine.optim_step()["lr"] == 0.25
        assert engine.forward(batch(), return_logits=True).dtype == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("build", "kind", "words"),
    [
        (lambda: Engine.of(Llama3(**TINY), optimiser=AdamW()), UsageError, "does not take optimiser"),
        (lambda: Engine.of(Llama3(**TINY), loss=AdamW()), UsageError, "loss: got a optimizer"),
        (lambda: Engine.of(Llama3), UsageError, "Llama3 is a class"),
        (lambda: Engine.of(Llama3(**TINY), training={"steps": 3}), UsageError, "training: got a dict"),
        (lambda: Engine.of(Llama3(**TINY), optimizer=AdamW(lr=math.nan)), RecipeError, "lr is nan"),
        (lambda: Engine.of(Llama3(**TINY), optimizer=AdamW(lr=math.inf)), RecipeError, "lr is inf"),
        (lambda: Engine.of("llama3"), UsageError, "model: got a str"),
        (lambda: Engine.of(Llama3(**TINY), lr_scheduler=WarmupStableDecay()), UsageError, "needs a length"),
        (lambda: Engine.of(Llama3(**TINY), mesh=Mesh(tp=2)), RecipeError, "tp=2 does not make 1 rank"),
        (lambda: Engine.of(Llama3(**TINY), weights="nowhere"), EnvironmentProblem, "neither a Hugging Face"),
        (lambda: Engine.of(Llama3(**TINY), converters=AdamW()), UsageError, "got a AdamW, expected a list"),
        (lambda: Engine.of(Llama3(**TINY), device="gpu"), UsageError, "cannot use the device 'gpu'"),
        (lambda: Engine.of(Llama3(**TINY), device="meta"), UsageError, "cannot use the device 'meta'"),
        (lambda: Engine.build("llama3_debug", "training.steps=1"), UsageError, "a list of strings"),
        (lambda: Engine.build("llama3_debgu"), RecipeError, "no recipe 'llama3_debgu'"),
        (lambda: Engine.build("llama3_debug", ["optimizer.lrr=1"]), RecipeError, "unknown key 'lrr'"),
        (lambda: Engine.build(7), UsageError, "not from a int"),  # type: ignore[arg-type]
        (lambda: Engine.build(load_recipe("llama3_debug").recipe, ["a=1"]), UsageError, "Recipe object"),
    ],
)
def test_what_cannot_be_built_is_told_and_leaves_no_group(
    build: Callable[[], Any], kind: type[TitanError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        build()
    assert not dist.is_initialized()


# ----------------------------------------------------------------------------------------- process group


def test_the_last_engine_ends_the_group_that_the_first_made() -> None:
    first, second = Engine.of(Llama3(**TINY)), Engine.of(Llama3(**TINY), frozen=True)
    first.close()
    first.close()
    assert dist.is_initialized()
    assert second.forward(batch()).shape == (4, 16)
    second.close()
    assert not dist.is_initialized()
    again = Engine.of(Llama3(**TINY))  # in the same process
    again.forward_backward(batch())
    again.close()


@contextmanager
def under_torchrun(port: int) -> Iterator[None]:
    """Where a script of several ranks begins; the pool's own group is in the way."""
    dist.barrier()  # or one would leave while the other still arrives
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    yield


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def joined(port: int) -> list[tuple[float, bool]]:
    """Three engines: one after the other, and two at once."""
    found = []
    with under_torchrun(port):
        for number in range(2):
            with Engine.of(Llama3(**TINY), mesh=Mesh(dp_shard=2)) as engine:
                assert engine.config["world"] == 2
                found.append(float(engine.forward_backward(batch(seed=dist.get_rank()))["loss"]))
                if number == 1:
                    with Engine.of(Llama3(**TINY), mesh=Mesh(dp_replicate=2), frozen=True) as other:
                        found.append(float(other.evaluate(batch(seed=dist.get_rank()))["loss"]))
                    found.append(float(engine.forward_backward(batch(seed=dist.get_rank()))["loss"]))
            assert not dist.is_initialized()
    return found


@pytest.mark.ranks
def test_ranks_that_torchrun_started_meet_as_often_as_they_build_an_engine(ranks: Any, port: int) -> None:
    found, other = ranks(2, joined, port)
    assert found == other and len(found) == 4
    assert found == pytest.approx([found[0]] * 4)


def limits(port: int, recipe_file: Path) -> list[float]:
    """The longest that a rank waits for the others in any group, as time goes by."""

    def longest() -> float:
        groups = list(dist.distributed_c10d._world.pg_map)
        waits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
        return max(wait.total_seconds() for wait in waits)

    def used(engine: Engine) -> list[float]:
        found = [longest()]
        for _ in range(2):
            engine.forward(batch())
            found.append(longest())
        return found

    found = [longest()]
    with Engine.of(Llama3(**TINY), comm=Comm(init_timeout_seconds=5)) as engine:
        found += used(engine)
    with under_torchrun(port):
        settings = ["comm.init_timeout_seconds=40", "comm.train_timeout_seconds=30", "mesh.tp=2"]
        with Engine.build(recipe_file, settings) as engine:
            found += used(engine)
            parts: Any = dict(comm=Comm(init_timeout_seconds=9, train_timeout_seconds=7))
            with Engine.of(Llama3(**TINY), **parts) as other:
                found += used(other)
    return found


@pytest.mark.ranks
def test_the_time_limits_of_a_recipe_reach_the_groups_that_are_made_for_it(
    ranks: Any, port: int, recipe_file: Path
) -> None:
    somebody_elses, made_here = [60.0] * 4, [40.0, 40.0, 30.0, 9.0, 9.0, 7.0]
    assert ranks(2, limits, port, recipe_file) == [somebody_elses + made_here] * 2


SCRIPT = """
import torch
from titancli import Batch, Engine
from titancli.models import Llama3

model = Llama3(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64)
rows = Batch({"tokens": torch.arange(32).view(2, 16), "targets": torch.arange(32).view(2, 16)})
for number in range(3):
    with Engine.of(model) as policy, Engine.of(model, frozen=True) as reference:
        policy.forward_backward(rows)
        policy.optim_step()
        reference.load_weights(policy.weights())
        print("engine", number, policy.config["world"], policy.status["tokens_seen"])
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_under_torchrun_builds_one_engine_after_the_other(tmp_path: Path, port: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--master-port", str(port), "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [f"engine {n} 2 64" for n in range(3) for _ in range(2)]


def test_a_group_that_somebody_else_made_is_left_alone() -> None:
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        Engine.of(Llama3(**TINY)).close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def test_ranks_that_cannot_meet_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(EnvironmentProblem, match="rank 0 of 2 cannot connect to the others") as caught:
        Engine.of(Llama3(**TINY))
    assert "torchrun" in str(caught.value.hint)


# ------------------------------------------------------------------------------------------------- errors


@pytest.fixture
def engine() -> Iterator[Engine]:
    training = Training(steps=9, seq_len=16, mixed_precision_param="float32")
    with Engine.of(Llama3(**TINY), training=training) as made:
        yield made


def returns(value: Any) -> Callable[[Tensor, Batch], Any]:
    return lambda log_probs, batch: value(log_probs)


GOOD = dict(batch())
TOKENS = GOOD["tokens"]
ROLLOUT = {"advantages": torch.ones(4, 16), "old_logprobs": -torch.ones(4, 16)}


def needing(needs: Any) -> Any:
    def loss(out: Tensor, batch: Batch) -> LossResult:
        return LossResult(out.sum(), 1)

    loss.needs = needs  # type: ignore[attr-defined]
    return loss


def reporting(name: Any) -> Callable[[Tensor, Batch], LossResult]:
    return lambda log_probs, batch: LossResult(log_probs.sum(), 1, {name: 23})


def with_output(name: str) -> Any:
    def loss(out: Tensor, batch: Batch) -> LossResult:
        return LossResult(out.sum(), 1)

    loss.output = name  # type: ignore[attr-defined]
    return loss


@pytest.mark.parametrize(
    ("given", "loss", "words"),
    [
        ({"targets": TOKENS}, None, "the batch has no tokens; it has targets"),
        ({"tokens": TOKENS}, None, "the batch has no targets"),
        ({}, None, "this is empty"),
        ([], None, "no batch was passed"),
        ([3], None, "this is int"),
        (3, None, "this is int"),
        (None, None, "this is NoneType"),
        (GOOD | {"tokens": TOKENS.to("meta")}, None, "tokens is on the meta device"),
        (GOOD | {"tokens": TOKENS.to_sparse()}, None, "tokens must be a dense tensor, not a sparse one"),
        ({"tokens": TOKENS, "targets": TOKENS.tolist()}, None, "targets must be a tensor.*not a list"),
        ({"tokens": TOKENS.float(), "targets": TOKENS}, None, "tokens are torch.float32"),
        ({"tokens": TOKENS, "targets": TOKENS[:, 1:]}, None, r"targets are \[4, 15\], its tokens \[4, 16\]"),
        ({"tokens": TOKENS, "targets": TOKENS[1:]}, None, "the same number of rows"),
        (
            {"tokens": TOKENS[0], "targets": TOKENS[0]},
            None,
            r"tokens are \[16\], but must be \[rows, length\]",
        ),
        ({"tokens": TOKENS[:0], "targets": TOKENS[:0]}, None, r"\[0, 16\]: the tensor is empty"),
        ({"tokens": TOKENS[:, :0], "targets": TOKENS[:, :0]}, None, r"\[4, 0\]: the tensor is empty"),
        (
            GOOD | {"tokens": TOKENS + 60},
            None,
            "token id [0-9]+ in 'tokens', but the model's vocab_size is 64",
        ),
        (GOOD | {"tokens": -TOKENS}, None, "token id -[0-9]+ in 'tokens'"),
        (GOOD | {"targets": TOKENS.clamp(max=2) - 3}, None, "token id -[123] in 'targets'"),
        (GOOD | {"targets": TOKENS + 60}, CrossEntropyFull(), "token id [0-9]+ in 'targets'"),
        (GOOD | {"positions": TOKENS - 64}, None, "the position -[0-9]+"),
        (GOOD | {"positions": TOKENS.float()}, None, "positions are torch.float32"),
        (GOOD | {"positions": TOKENS + 64}, None, "the model supports 0 to 63"),
        (GOOD | {"positions": TOKENS[:, 1:]}, None, r"positions are \[4, 15\], its tokens \[4, 16\]"),
        (GOOD | {"document_ids": TOKENS[:, 0]}, None, r"document_ids are \[4\]"),
        (GOOD | {"document_ids": TOKENS > 3}, None, "document_ids are torch.bool"),
        (GOOD | {"document_ids": TOKENS * 0 + torch.arange(16) % 2}, None, "a repeated document id"),
        ({k: v.repeat(1, 2) for k, v in GOOD.items()}, None, "rows are 32 tokens long, but .* built for 16"),
        (GOOD, Grpo(), "the loss Grpo needs advantages, old_logprobs in the batch, which only has tokens"),
        (
            GOOD | ROLLOUT | {"advantages": TOKENS[:, 0]},
            Grpo(),
            r"takes advantages as \[B, S\], .* the batch has \[4\]",
        ),
        (GOOD | ROLLOUT, Gspo(kl_coef=0.1), "needs reference_logprobs"),
        (GOOD | {"reference_row_logprobs": TOKENS.float()}, DPO(), r"takes reference_row_logprobs as \[B\]"),
        (GOOD | {"weights": torch.ones(4)}, SFT(), r"takes weights as \[B, S\], which is \[4, 16\] here"),
        ({"tokens": TOKENS}, CrossEntropyFull(), "the loss CrossEntropyFull needs targets"),
        (GOOD, needing("score"), "the loss loss needs score in the batch"),
        (GOOD | {"score": TOKENS}, needing({"score": "B"}), r"takes score as \[B\], which is \[4\] here"),
        (GOOD | {"score": TOKENS}, needing({"score": "SB"}), "needs score as 'SB'"),
        (GOOD, reporting("weight"), "reports a metric called 'weight'"),
        (GOOD, reporting("loss"), "reports a metric called 'loss'"),
        (GOOD, reporting(3), "called 3, which is not a string"),
        (GOOD, CrossEntropy, "use CrossEntropy()"),
        (GOOD, AdamW(), "AdamW is a optimizer"),
        (GOOD, 3, "int is not a loss"),
        (GOOD, torch.nn.PReLU(), "the loss PReLU has the parameter weight, which no optimizer trains"),
        (GOOD, with_output("logits"), "\"logits\"|'logits', not one of logprobs, model, hidden, projection"),
        (GOOD, returns(lambda lp: lp.sum()), "returned a Tensor"),
        (GOOD, returns(lambda lp: LossResult(lp, 1)), r"must be a scalar tensor, not \[4, 16\]"),
        (GOOD, returns(lambda lp: LossResult(1.0, 1)), "scalar tensor, not float"),
        (GOOD, returns(lambda lp: LossResult(lp.detach().sum(), 1)), "has no gradient"),
        (GOOD, returns(lambda lp: LossResult(lp.sum(), None)), "weight must be one number, not a NoneType"),
        (GOOD, returns(lambda lp: LossResult(lp.sum(), 1j)), "weight must be one number, not a complex"),
        (GOOD, returns(lambda lp: LossResult(lp.sum(), lp.sum() * 1j)), "weight .* not a complex one"),
        (GOOD, returns(lambda lp: LossResult(lp.sum(), 1, {"a": "2"})), "a must be one number, not a str"),
        (GOOD, returns(lambda lp: LossResult(lp.sum(), lp)), r"weight must be one number, not \[4, 16\]"),
    ],
)
def test_a_batch_or_a_loss_that_will_not_do_is_told(
    engine: Engine, given: Any, loss: Any, words: str
) -> None:
    engine.forward_backward(GOOD)
    with pytest.raises(TitanError, match=words):
        engine.forward_backward(given, loss)
    engine.clear_gradients()
    expected = engine.forward_backward(GOOD)["loss"]
    torch.testing.assert_close(-engine.forward(GOOD).sum() / 64, expected)


def test_what_a_loss_raises_comes_through_and_takes_the_steps_gradients_with_it(engine: Engine) -> None:
    def forgetful(log_probs: Tensor, batch: Batch) -> LossResult:
        return LossResult((log_probs * batch["advantages"]).sum(), 1)

    engine.forward_backward(GOOD)
    with pytest.raises(KeyError, match="no 'advantages'; it has tokens, targets") as caught:
        engine.forward_backward([batch(seed=1), batch(seed=2)], forgetful)
    assert isinstance(caught.value, TitanError)
    assert engine.status["accumulated"] == 0
    with pytest.raises(TitanError, match="call forward_backward first"):
        engine.optim_step()
    engine.forward_backward(GOOD)
    assert float(engine.optim_step()["grad_norm"]) > 0


def test_every_name_that_a_verb_returns_is_reserved(engine: Engine) -> None:
    found = engine.forward_backward(GOOD) | engine.optim_step() | engine.evaluate(GOOD)
    assert found.keys() <= RESERVED


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16])
def test_integers_of_any_kind_are_the_same_batch(engine: Engine, dtype: torch.dtype) -> None:
    documents = {
        "document_ids": torch.arange(16).expand(4, 16) // 5,
        "positions": torch.arange(16).expand(4, 16) % 5,
    }
    given = GOOD | documents
    other = {name: value.to(dtype) for name, value in given.items()}
    assert torch.equal(engine.forward(other), engine.forward(given))
    loss = engine.forward_backward(given)["loss"]
    assert torch.equal(engine.forward_backward(other)["loss"], loss)


def test_rows_without_a_named_length_are_as_long_as_the_model_allows() -> None:
    def rows(length: int) -> Tensor:
        return torch.ones(1, length, dtype=torch.int64)

    with Engine.of(Llama3(**TINY), frozen=True) as engine:
        assert engine.forward({"tokens": rows(64), "targets": rows(64)}).shape == (1, 64)
        with pytest.raises(TitanError, match="rows are 65 tokens long, but the model was built for 64"):
            engine.forward({"tokens": rows(65), "targets": rows(65)})


def test_what_is_looked_at_on_no_gpu_makes_every_number_nan(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.forward_backward(GOOD) | engine.optim_step() | engine.evaluate(GOOD)
    log_probs = engine.forward(GOOD)
    with Engine.of(
        Llama3(**TINY), training=Training(steps=9, seq_len=16, mixed_precision_param="float32")
    ) as same:
        monkeypatch.setattr(inputs, "readable", lambda batch: False)
        found = same.forward_backward(GOOD) | same.optim_step() | same.evaluate(GOOD)
        assert {name: float(value) for name, value in found.items()} == {
            name: float(value) for name, value in expected.items()
        }
        assert torch.equal(same.forward(GOOD), log_probs)
        before = [parameter.clone() for _, parameter in same.named_parameters()]
        for wrong in (GOOD | {"tokens": TOKENS + 60}, GOOD | {"targets": TOKENS - 7}):
            assert same.forward(wrong).isnan().all()
            assert same.evaluate([GOOD, wrong])["loss"].isnan()
            assert same.forward_backward([GOOD, wrong])["loss"].isnan()
            assert same.optim_step()["grad_norm"].isnan()
        after = [parameter for _, parameter in same.named_parameters()]
        assert same.guard is not None and all(map(torch.equal, before, after))


def test_whole_weights_are_no_adapters(engine: Engine) -> None:
    engine.converters = [SimpleNamespace(owns=lambda name: name.endswith("lora_a"))]  # type: ignore[list-item]
    with pytest.raises(TitanError, match="this engine has adapters in addition to its base"):
        engine.load_weights([])
    assert engine.version == 0


def test_a_frozen_engine_computes_and_a_closed_one_does_nothing(tmp_path: Path) -> None:
    frozen = Engine.of(Llama3(**TINY), frozen=True)
    assert frozen.evaluate(GOOD)["weight"] == 64
    for verb in (lambda: frozen.forward_backward(GOOD), frozen.optim_step, frozen.clear_gradients):
        with pytest.raises(TitanError, match="on a frozen engine"):
            verb()
    frozen.save(tmp_path / "step-0")
    frozen.load(tmp_path / "step-0")
    with pytest.raises(TitanError, match=r"load\(optimizer=True\) on a frozen engine"):
        frozen.load(tmp_path / "step-0", optimizer=True)
    frozen.close()
    for verb in (
        lambda: frozen.forward(GOOD),
        lambda: frozen.forward_backward(GOOD),
        lambda: frozen.save(tmp_path / "no"),
        lambda: frozen.load(tmp_path / "step-0"),
        lambda: dict(frozen.weights()),
        lambda: frozen.push_weights(print),
        lambda: frozen.load_weights([]),
        lambda: frozen.model,
        frozen.optim_step,
    ):
        with pytest.raises(TitanError, match="the engine is closed"):
            verb()
    assert frozen.status["step"] == 0


# ----------------------------------------------------------------------------------------------- the page


def test_the_pages_examples_run_and_print_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = blocks(ROOT / "docs" / "engine.md")
    scope: dict[str, Any] = {}
    printed = 0
    for block, after in zip(page, [*page[1:], None], strict=True):
        if block.language != "python" or block.mark == "not run":
            continue
        exec(compile(block.text, f"docs/engine.md:{block.line}", "exec"), scope)
        out = capsys.readouterr().out
        if after is not None and after.language == "":
            assert out == after.text
            printed += 1
    assert printed
