"""`titan replay`: a step is repeated bit for bit, and reported on."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.ranks import Ranks
from tests.run.conftest import Finished, furnish, in_this_process, on_pool, train_here
from titan_proof import Probe
from titan_proof.digests import read_digests
from titan_proof.replay import RESULT, find_source, suspect, verdict
from titan_proof.watching import added, numbers_of, watched
from titan_testing import check_plugin
from titancli.engine import Engine
from titancli.errors import RecipeError
from titancli.observe.digests import RECORD, checksum_of, path_of
from titancli.recipe import load_recipe
from titancli.registry.component import build
from titancli.worker.data import open_dataset

SMALL = ("training.steps=7", "checkpoint.interval=3", "checkpoint.keep_latest_k=0")
SMALL += ("training.mixed_precision_param=float32",)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run `r` of seven steps, with checkpoints of steps 3, 6 and 7."""
    folder, before = furnish(tmp_path_factory.mktemp("replay")), Path.cwd()
    os.chdir(folder)
    try:
        assert train_here("tiny.toml", "--run-dir", "r", *SMALL) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def titan(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Finished]:
    """Return a function that runs `titan …` in that folder, in this process."""
    monkeypatch.chdir(finished)
    monkeypatch.delenv("TITAN_RUNS", raising=False)

    return in_this_process(capfd)


def replayed(titan: Callable[..., Finished], *arguments: Any, code: int = 0) -> dict[str, Any]:
    done = titan("replay", *arguments, "--json")
    assert done.code == code, done.err
    document: dict[str, Any] = json.loads(done.out)
    assert document["schema"] == "titan.replay"
    return document


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_step_is_the_recorded_one_and_shown_from_inside(
    titan: Callable[..., Finished], finished: Path
) -> None:
    """Against a plain loop: torch's own cross-entropy and gradients, and hooks, over a model of the run's."""
    before = files(finished / "r")
    found = replayed(titan, "r", "--step", 5, "--layer", "1")
    assert files(finished / "r") == before
    assert found["verdict"] == {"result": "bitwise", "step": None, "what": [], "compared": 2}
    assert found["checkpoint"].endswith("r/checkpoints/step-3")
    assert found["recorded"]["loss"] == found["replayed"]["loss"]
    model, tokens, targets = before_step(finished / "r", 5)
    outputs: dict[str, torch.Tensor] = {}
    for name in ("layers.1", "layers.1.attention", "norm"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda m, i, out, name=name: outputs.update({name: out.detach()}))
    logits, named = model(tokens), dict(model.named_parameters())
    for row in found["rows"]:
        b = row["row"] - 1
        loss = cross_entropy(logits[b], targets[b])
        own = torch.autograd.grad(loss / len(tokens), list(named.values()), retain_graph=True)
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(norm(own), rel=1e-4)
        assert row["targets"] == 32 and row["position"]["epoch"] == 0
        assert (
            "".join(document["text"] for document in row["documents"]) == bytes(tokens[b].tolist()).decode()
        )
    whole = cross_entropy(logits.flatten(0, 1), targets.flatten())
    grads = dict(zip(named, torch.autograd.grad(whole, list(named.values())), strict=True))
    assert found["replayed"]["loss"] == pytest.approx(whole.item(), rel=1e-5)
    assert found["replayed"]["grad_norm"] == pytest.approx(norm(grads.values()), rel=1e-4)
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert {"tok_embeddings", "layers.0", "layers.1", "layers.1.attention", "norm"} <= layers.keys()
    for name, out in outputs.items():
        assert layers[name]["rms"] == pytest.approx(out.square().mean().sqrt().item(), rel=1e-5), name
        assert layers[name]["max"] == pytest.approx(out.abs().max().item(), rel=1e-5), name
    for name, one in found["parameters"].items():
        assert one["gradient_norm"] == pytest.approx(norm([grads[name]]), rel=1e-3, abs=1e-7), name
        assert one["weight_norm"] == pytest.approx(norm([named[name].detach()]), rel=1e-5), name
    inside = [grad for name, grad in grads.items() if name.startswith("layers.1.")]
    assert layers["layers.1"]["gradient_norm"] == pytest.approx(norm(inside), rel=1e-4)


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(float(tensor.square().sum()) for tensor in tensors) ** 0.5)


def before_step(run: Path, step: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a plain model as it was before a step, trained from step 3 on by a loop of its own, and that
    step's tokens and targets."""
    recipe = load_recipe(run).recipe
    with Engine.build(run, device="cpu") as engine:
        data = open_dataset(recipe, build(recipe.tokenizer), engine, recipe.dataset)
        data.load_state_dict(engine.load(run / "checkpoints/step-3")["data"])
        batches = iter(data)
        while engine.step < step - 1:
            engine.forward_backward(next(batches))
            engine.optim_step()
        weights = {
            name: getattr(tensor, "full_tensor", lambda t=tensor: t)().clone()
            for name, tensor in engine.plain_parameters()
        }
    model = build(recipe.model, seq_len=32)
    model.load_state_dict(weights, strict=False)
    batch = next(batches)
    return model, batch["tokens"], batch["targets"]


def test_what_if_is_shown_beside_what_was(titan: Callable[..., Finished]) -> None:
    found = replayed(titan, "r", "--step", 7, "--without", 2, "--with", "optimizer.lr=0.0")
    assert found["verdict"]["result"] == "bitwise" and found["verdict"]["compared"] == 1
    rows = {row["row"]: row["loss"] for row in found["rows"]}
    assert found["replayed"]["loss"] == pytest.approx((rows[1] + rows[2]) / 2, rel=1e-6)
    assert found["tried"]["loss"] == pytest.approx(rows[1], rel=1e-6)  # the other row alone
    assert found["tried"]["loss_after"] == pytest.approx(rows[1], rel=1e-6)  # no step was made
    assert found["replayed"]["loss_after"] < rows[1]
    same = replayed(titan, "r", "--step", 7, "--with", "optimizer.beta2=0.95")  # as it was
    assert same["tried"]["loss_after"] == same["replayed"]["loss_after"]
    assert same["tried"]["grad_norm"] == same["recorded"]["grad_norm"]


def test_a_step_that_parts_is_named_with_what_differs(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "r", tmp_path / "r")
    file = path_of(tmp_path / "r", 1, 0, 0)
    data = bytearray(file.read_bytes())
    place = len(data) - 4 * RECORD.itemsize  # of step 4
    data[place + RECORD.fields["weights"][1]] ^= 1
    file.write_bytes(data)
    done = titan("replay", tmp_path / "r", "--step", 6)
    assert done.code == 0 and "rank-0.bin is damaged: the checksum of step 4 does not match" in done.err
    record = bytes(data[place : place + RECORD.itemsize])
    data[place : place + RECORD.itemsize] = record[:-4] + checksum_of(record).to_bytes(4, "little")
    file.write_bytes(data)
    done = titan("replay", tmp_path / "r", "--step", 6)
    assert (
        done.code == 1 and "step 6: diverges from the record at step 4: weights (several tensors)" in done.out
    )
    assert titan("replay", tmp_path / "r", "--step", 3).code == 0  # from the beginning
    file.write_bytes(b'{"format":1}\n' + data)
    done = titan("replay", tmp_path / "r", "--step", 7)
    assert done.code == 0 and "step 7: loss and gradient norm as logged" in done.out
    assert "event log can be compared" in done.err and "no digests that this version of titan" in done.err
    shutil.rmtree(tmp_path / "r/digests")
    done = titan("replay", tmp_path / "r", "--step", 6)
    assert done.code == 0 and "step 6: loss and gradient norm as logged" in done.out
    assert "step 6 has no digest" in done.err and "repeating 3 steps from step-3, about 1 s" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nowhere", "--step", 3), 5, "run folder"),
        (("r", "r", "--step", 3), 2, "replay takes one run, not r and r"),
        (("r", "--step", 9), 5, "has not reached step 9: its last recorded step is 7"),
        (("r", "--step", 0), 2, "0 is not in the range"),
        (("r", "--step", 5, "--with", "lr"), 2, "--with takes KEY=VALUE, not 'lr'"),
        (("r", "--step", 5, "--with", "model.dim=8"), 2, "--with model.dim: a step can be tried with other"),
        (("r", "--step", 5, "--with", "optimizer.lrr=8"), 3, "optimizer.lrr"),
        (("r", "--step", 5, "--without", 3), 2, "the step has the rows 1 to 2"),
        (("r", "--step", 5, "--without", 1, "--without", 2), 2, "no targets would be left"),
        (("r", "--step", 5, "--layer", "7"), 2, "--layer 7: the model has no such module or parameter"),
        (("r", "--step", 5, "dataset.paths=['tiny.toml']"), 5, "is not the data"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(
    titan: Callable[..., Finished],
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[Any, ...],
    code: int,
    message: str,
) -> None:
    before = files(finished / "r")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    done = titan("replay", *arguments)
    assert (done.code, "Traceback" in done.err) == (code, False), done.err
    assert message in done.err
    assert files(finished / "r") == before
    assert code != 2 or not list((tmp_path / "tmp").iterdir())  # nothing is left behind


def test_a_step_after_a_changed_recipe_is_replayed_under_its_own(
    titan: Callable[..., Finished], tmp_path: Path
) -> None:
    furnish(tmp_path)
    os.chdir(tmp_path)
    more = ("training.steps=4", "checkpoint.keep_latest_k=0")
    assert titan("train", "tiny.toml", "--run-dir", "r", *more).code == 0
    assert titan("train", "r", "--resume", "training.steps=6", "optimizer.lr=5e-3").code == 0
    for step, begun in ((3, "step-2"), (6, "step-4")):
        found = replayed(titan, "r", "--step", step)
        assert found["verdict"]["result"] == "bitwise" and found["checkpoint"].endswith(begun)
    shutil.copytree(tmp_path / "r", tmp_path / "s")
    shutil.rmtree(tmp_path / "r/checkpoints/step-4")
    done = titan("replay", "r", "--step", 5)
    assert done.code == 5 and "step 5 was made after a resume from step 4 under another recipe" in done.err
    # Steps 4 and 6 have checkpoints, but those do not belong to the run's history any more.
    changed = ("training.steps=5", "optimizer.lr=1e-2", "checkpoint.interval=100")
    assert titan("train", "s", "--resume", "--step", 2, *changed).code == 0
    found = replayed(titan, "s", "--step", 5)
    assert found["verdict"]["result"] == "bitwise" and found["checkpoint"].endswith("step-2")


def on_ranks(titan: Callable[..., Finished], ranks: Ranks, folder: Path, *mesh: str) -> dict[str, Any]:
    os.chdir(furnish(folder))
    pool = on_pool(ranks, 2)
    assert titan("train", "tiny.toml", "--run-dir", "r", *SMALL, *mesh, *pool).code == 0
    return replayed(titan, "r", "--step", 5, "--without", 1, *pool[:3])


@pytest.mark.ranks
def test_the_same_ranks_repeat_it_bit_for_bit(
    titan: Callable[..., Finished], ranks: Ranks, tmp_path: Path
) -> None:
    found = on_ranks(titan, ranks, tmp_path, "mesh.dp_shard=2")
    assert found["verdict"] == {"result": "bitwise", "step": None, "what": [], "compared": 2}
    assert [(row["row"], row["dp_rank"]) for row in found["rows"]] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert all(row["gradient_norm"] > 0 and "position" in row for row in found["rows"])
    assert found["tried"]["loss"] == pytest.approx(sum(row["loss"] for row in found["rows"][1:]) / 3)
    other = replayed(titan, "r", "--step", 5, "--nproc", 1, "mesh.dp_shard=1", "training.global_batch_size=4")
    assert other["verdict"]["result"] == "within_envelope"
    assert [row["loss"] for row in other["rows"]] == pytest.approx([row["loss"] for row in found["rows"]])
    norms = [[row["gradient_norm"] for row in one["rows"]] for one in (other, found)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh", [("mesh.tp=2",), ("mesh.pp=2",), ("mesh.cp=2",), ("compile.enable=true",)], ids=str
)
def test_other_layouts(
    titan: Callable[..., Finished], ranks: Ranks, tmp_path: Path, finished: Path, mesh: tuple[str, ...]
) -> None:
    found = on_ranks(titan, ranks, tmp_path, *mesh)
    assert found["verdict"]["result"] == "bitwise"
    expected = replayed(titan, finished / "r", "--step", 5)
    if mesh[0].startswith("mesh"):
        for name in ("loss", "gradient_norm"):
            values = [[row[name] for row in one["rows"]] for one in (found, expected)]
            assert values[0] == pytest.approx(values[1], rel=1e-3)
        layers = [[(one["name"], one["rms"]) for one in doc["layers"]] for doc in (found, expected)]
        assert [name for name, _ in layers[0]] == [name for name, _ in layers[1]]
        assert [rms for _, rms in layers[0]] == pytest.approx([rms for _, rms in layers[1]], rel=1e-3)


def poisoned(folder: Path, steps: int, where: dict[int, int]) -> None:
    """Make a run of 8 rows a step, on text with rows of garbage; `where` gives the row by step."""
    furnish(folder)
    text = bytearray((folder / "text.txt").read_bytes() * (1 + steps * 256 // 100_000))
    generator = random.Random(0)
    for step, row in where.items():
        begin = ((step - 1) * 8 + row - 1) * 32
        text[begin : begin + 33] = bytes(generator.choices(range(33, 127), k=33))
    (folder / "text.txt").write_bytes(text)


@pytest.mark.parametrize(
    ("steps", "count"), [(40, 2), pytest.param(1000, 20, marks=pytest.mark.slow)], ids=["2", "20"]
)
def test_a_poisoned_row_is_named(
    titan: Callable[..., Finished], tmp_path: Path, steps: int, count: int
) -> None:
    generator = random.Random(1)
    where = {step: generator.randint(1, 8) for step in generator.sample(range(steps // 4, steps + 1), count)}
    poisoned(tmp_path, steps, where)
    os.chdir(tmp_path)
    settings = (f"training.steps={steps}", "training.local_batch_size=8", "checkpoint.keep_latest_k=0")
    more = (f"checkpoint.interval={max(10, steps // 40)}", "metrics.log_freq=100", "optimizer.lr=5e-3")
    assert titan("train", "tiny.toml", "--run-dir", "r", *settings, *more).code == 0
    named = {step: replayed(titan, "r", "--step", step)["stands_out"] for step in where}
    assert {step: found and found["row"] for step, found in named.items()} == where


def test_activations_that_are_not_numbers_or_not_there_are_shown_as_they_are() -> None:
    engine: Any = SimpleNamespace(parts=[torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Flatten())])
    with watched(engine, ["0", "1"], plainly=False) as found:
        engine.parts[0](torch.empty(2, 0))
        assert not found
        engine.parts[0](torch.tensor([[1.0, float("nan")]]))
        engine.parts[0](torch.tensor([[7.0, 2.0]]))
    for ranks in ([numbers_of(found), {"1": [9.0, 1.0, 3.0]}], [{"1": [9.0, 1.0, 3.0]}, numbers_of(found)]):
        assert str(added(ranks)["1"]) == "{'rms': nan, 'max': nan}"


def test_a_step_of_numbers_that_are_not_finite_is_shown(
    titan: Callable[..., Finished], tmp_path: Path
) -> None:
    os.chdir(furnish(tmp_path))
    wild = ("optimizer.lr=1e30", "stability.skip_nonfinite=false", "stability.sigma=0")
    assert titan("train", "tiny.toml", "--run-dir", "r", *SMALL, *wild).code == 0

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    found = json.loads(titan("replay", "r", "--step", 5, "--json").out, parse_constant=refuse)
    assert (found["verdict"]["result"], found["stands_out"]) == ("bitwise", None)
    assert (
        found["replayed"]["loss"] == "NaN" == {one["name"]: one for one in found["layers"]}["output"]["max"]
    )


def test_the_callbacks_of_the_run_take_part_and_its_own_probe_gives_way(
    titan: Callable[..., Finished], tmp_path: Path
) -> None:
    os.chdir(furnish(tmp_path))
    own = 'callbacks=[{type="ema", decay=0.9}, {type="titan-proof/probe", step=5}]'
    assert titan("train", "tiny.toml", "--run-dir", "r", *SMALL, own).code == 0
    assert json.loads((tmp_path / "r" / RESULT).read_text())["done"]["loss"] > 0
    assert list(read_digests(tmp_path / "r")) == [1, 2, 3, 4, 5]  # the run ended with step 5
    found = replayed(titan, "r", "--step", 4, "--with", "optimizer.lr=0.0")
    assert found["verdict"]["result"] == "bitwise" and found["checkpoint"].endswith("step-3")
    assert found["tried"]["loss_after"] != found["replayed"]["loss_after"]
    done = titan("replay", "r", "--step", 4, "callbacks=[]")
    assert done.code == 2 and "leave out the override of callbacks" in done.err
    assert titan("train", "tiny.toml", "--run-dir", "s", *SMALL, "training.steps=2", own).code == 1
    error = "the run ended before step 5: 2 steps were done"
    assert error in (tmp_path / "s/logs/rank-0.error.json").read_text()


def test_the_probe_leaves_steps_as_they_are() -> None:
    check_plugin("titan-proof", configs={"callback/probe": {"step": 2, "layers": ["1"]}})


def test_a_step_that_no_probe_can_look_at_is_refused() -> None:
    last, ema = "the last of the callbacks", {"type": "ema"}
    for others in ([{"type": "titan-proof/probe", "step": 2}], [ema]):
        callbacks = [{"type": "titan-proof/probe", "step": 1}, *others]
        with pytest.raises(RecipeError, match=last):
            load_recipe("llama3_debug", [f"callbacks={json.dumps(callbacks).replace(': ', '=')}"])
    together: Any = SimpleNamespace(callbacks=[], loop=SimpleNamespace(joins_other_runs=True))
    [(_, problem)] = Probe(step=1).check(together)
    assert "a step of several runs that train together cannot be replayed" in problem


def test_on_another_layout_nothing_is_called_bitwise(finished: Path) -> None:
    source = find_source(finished / "r", 5)
    layout = replace(source.recorded[5].layout, world=2)
    other = {step: replace(one, layout=layout) for step, one in source.recorded.items()}
    assert verdict(source, source.recorded)["result"] == "bitwise"
    assert verdict(source, other)["result"] == "within_envelope"
    wrong = {**other, 5: replace(other[5], rows=1)}
    assert verdict(source, wrong)["result"] == "parts"


def test_no_row_stands_out_where_most_have_no_finite_loss() -> None:
    def rows(losses: list[Any]) -> list[dict[str, Any]]:
        return [{"row": n, "loss": loss, "gradient_norm": loss} for n, loss in enumerate(losses, 1)]

    for bad in ("NaN", "Infinity"):
        assert suspect(rows([bad] * 4)) is None and suspect(rows([3.0, bad, bad])) is None
        found = suspect(rows([3.0, 3.1, bad, 2.9]))
        assert found is not None and found["row"] == 3


def test_the_document_has_the_keys_that_are_documented(titan: Callable[..., Finished]) -> None:
    found = replayed(titan, "r", "--step", 4, "--without", 1)
    body = (Path(__file__).parents[3] / "docs/interfaces.md").read_text().split("### titan.replay\n")[1]
    documented = set(re.findall(r"`([\w.\[\]]+)`", body.split("\n### ")[0]))
    assert {key for key in found if key not in ("schema", "version", "verdict", "rows")} <= documented
    assert {f"verdict.{key}" for key in found["verdict"]} <= documented
    assert {f"rows[].{key}" for key in found["rows"][0]} <= documented
    tables = [found["replayed"], found["tried"], found["recorded"], found["guard"], found["layers"][0]]
    tables += [found["rows"][0]["documents"][0], next(iter(found["parameters"].values()))]
    assert {key for table in tables for key in table} <= documented


PAIRS = (
    "dpo_debug",
    "model.dim=32",
    "model.n_layers=1",
    "model.hidden_dim=64",
    "training.local_batch_size=4",
)
SAMPLES = ("grpo_digit", "model.dim=32", "model.hidden_dim=64", "loop.prompts=4", "loop.samples=4")
LOOPS = {
    "dpo": (*PAIRS, "training.steps=5"),
    "grpo": (*SAMPLES, "training.steps=6", "loop.updates=2", "checkpoint.interval=2"),
    "experts": (
        "tiny.toml",
        *SMALL,
        'model={type="qwen3", flavor="debugmodel_moe", dim=32, n_layers=2}',
        "training.seq_len=32",
    ),
    "lora": ("tiny.toml", *SMALL, "weights=r/checkpoints/step-3", 'converters=[{type="lora", rank=2}]'),
    "documents": ("tiny.toml", *SMALL, "dataset.document_mask=true", "training.global_batch_size=4"),
}


@pytest.mark.parametrize(
    "name", [name if name == "dpo" else pytest.param(name, marks=pytest.mark.slow) for name in LOOPS]
)
def test_every_loop_is_repeated(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    os.chdir(tmp_path)
    done = titan("train", *LOOPS[name], "--run-dir", "own", "checkpoint.interval=2")
    assert done.code == 0, done.err
    found = replayed(titan, "own", "--step", 4, "--with", "training.max_norm=1e-3")
    assert found["verdict"]["result"] == "bitwise"
    assert all(row["gradient_norm"] >= 0 for row in found["rows"])
    assert found["tried"]["grad_norm"] == found["replayed"]["grad_norm"]  # before clipping
    assert found["tried"]["loss_after"] != found["replayed"]["loss_after"]
    if name == "dpo":
        norms = [row["gradient_norm"] for row in found["rows"]]
        assert norms[::2] == norms[1::2]  # of both rows of a pair
    assert ("position" in found["rows"][0]) is (name != "grpo")
    assert len(found["rows"]) == {"dpo": 4, "grpo": 32, "documents": 4}.get(name, 2)


TWICE = '''
from titancli import component, hookimpl


@component("loop", "twice", target="twice:build")
class Twice:
    """Adds up gradients over two calls."""


@hookimpl
def titan_components():
    return [Twice]


def build(config, *, engine, data, tokenizer, observers, run):
    def go():
        while run.should_continue(engine.step):
            for batch in run.next_microbatches(data, 2):
                metrics = engine.forward_backward([batch])
            observers.step_end(engine.step + 1, metrics | engine.optim_step())
            if run.checkpoint_due(engine.step):
                run.save(engine, data)
        run.finish(engine, data)

    return go
'''


def test_a_loop_that_cannot_be_shown_is_refused_by_name(
    titan: Callable[..., Finished], tmp_path: Path
) -> None:
    os.chdir(furnish(tmp_path))
    (tmp_path / "twice.py").write_text(TWICE)
    plugin = ("-p", "./twice.py")
    done = titan("train", "tiny.toml", "--run-dir", "r", "loop=twice", "training.steps=3", *plugin)
    assert done.code == 0 and list(read_digests(tmp_path / "r")) == [1, 2, 3], done.err
    done = titan("replay", "r", "--step", 3, *plugin)
    assert done.code == 1 and "the loop calls forward_backward more than once in a step" in done.err
    done = titan("replay", "r", "--step", 3)
    assert done.code == 4 and "the run was started with -p" in done.err
