"""Snapshots and exports of engines, and what a script's engine saves of itself."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.docs.markdown import ROOT, blocks
from tests.engine.cases import my_batches, recipe, small
from tests.engine.test_samples import GOOD, TINY, drawn, engine_of
from tests.ranks import Ranks
from titan_rl import Grpo
from titancli import Engine, Sample, SamplingParams, TitanError
from titancli.converters import LoRA
from titancli.data import ByteTokenizer
from titancli.errors import UsageError
from titancli.models import Llama3
from titancli.optimizers import AdamW, WarmupStableDecay
from titancli.recipe.schema import Training
from titancli.run.prepare import make_plan
from titancli.run.request import Request


def held_still(layout: Any) -> None:
    """A snapshot keeps the weights that the engine goes on from, and takes nothing of it along."""
    with Engine.build(recipe(layout)) as engine:
        batches = my_batches(engine)
        engine.forward_backward(batches)
        engine.optim_step()
        engine.forward_backward(batches)
        before = engine.forward(batches[0])
        with engine.snapshot() as copy, copy.snapshot() as again:
            engine.optim_step()
            assert torch.equal(copy.forward(batches[0]), before)
            assert torch.equal(again.forward(batches[0]), before)
            assert not torch.equal(engine.forward(batches[0]), before)
            assert copy.status == {
                **engine.status,
                "step": 1,
                "version": 1,
                "tokens_seen": engine.tokens_seen // 2,
            }
            with pytest.raises(TitanError, match="forward_backward on a frozen engine"):
                copy.forward_backward(batches)
        engine.forward_backward(batches)
        engine.optim_step()


@pytest.mark.parametrize(
    ("count", "mesh"),
    [(1, {}), (2, {"dp_shard": 2}), (2, {"tp": 2}), (2, {"pp": 2}), (4, {"dp_replicate": 2, "dp_shard": 2})],
    ids=["one rank", "FSDP2", "TP2", "PP2", "HSDP2x2"],
)
def test_a_snapshot_stays_as_it_was(ranks: Ranks, count: int, mesh: dict[str, int]) -> None:
    ranks(count, held_still, small(mesh))


def test_a_snapshot_has_adapters_too(tmp_path: Path) -> None:
    """And needs nothing of what the engine was read from."""
    with engine_of() as base:
        base.export(tmp_path / "base")
    with engine_of(weights=tmp_path / "base", converters=[LoRA(rank=4, targets=["layers.*.wq"])]) as engine:
        engine.forward_backward([GOOD], "sft")
        engine.optim_step()
        (before,) = engine.forward([GOOD])
        shutil.rmtree(tmp_path / "base")
        with engine.snapshot() as copy:
            assert torch.equal(copy.forward([GOOD])[0], before)
            with copy.as_base():
                assert not torch.equal(copy.forward([GOOD])[0], before)


# ---------------------------------------------------------------------------------------------- exports


def exported(folder: Path, mesh: dict[str, int]) -> list[str]:
    """What exports say that are refused; then one that is not."""
    found = []
    with Engine.build(dataclasses.replace(recipe(small(mesh)), tokenizer=ByteTokenizer())) as engine:
        for where, options in (
            ("other", {"form": "gguf"}),
            ("other", {"dtype": "int8"}),
            ("other", {"form": "peft"}),
            ("used", {}),
            (f"rank-{dist.get_rank()}", {}),
        ):
            try:
                engine.export(folder / where, **options)
                found.append("no error")
            except TitanError as error:
                found.append(str(error))
        engine.export(folder / "hf", dtype="bfloat16")
        engine.export(folder / "again")
    return found


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"pp": 2}], ids=["FSDP2", "PP2"])
def test_transformers_loads_what_is_exported(ranks: Ranks, tmp_path: Path, mesh: dict[str, int]) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").touch()
    words = [
        "form 'gguf' is not known",
        "dtype 'int8' is not known",
        "no adapters",
        "is not empty",
        "differently",
    ]
    for found in ranks(2, exported, tmp_path, mesh):
        assert all(part in one for one, part in zip(found, words, strict=True)), found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "hf", "used"]
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("hf", "again")]
    assert [model.dtype for model in models] == [torch.bfloat16, torch.float32]


def test_what_a_script_saves_is_exported_generated_from_and_built_again(tmp_path: Path) -> None:
    """Of an engine made of parts: no dataset, no steps, a loss of samples."""
    from titancli.checkpoint.hf.convert import to_hf
    from titancli.generate.source import find_source

    sizes = {**TINY, "vocab_size": 272}
    parts: dict[str, Any] = {
        "loss": Grpo(clip_high=0.28),
        "tokenizer": ByteTokenizer(),
        "training": Training(seq_len=64),
    }
    with Engine.of(Llama3(**sizes), **parts) as engine:
        engine.save(tmp_path / "step-3")
        wanted = engine.forward(drawn())
        assert engine.tokenizer is not None and engine.tokenizer.vocab_size <= 272
        assert engine.sample([[1, 2]], 1, SamplingParams(max_tokens=2))[0][0].text is not None
    to_hf(tmp_path / "step-3", tmp_path / "hf", say=print)
    source = find_source(tmp_path / "step-3", tokenizer=None, component=None, say=print)
    assert source.config == Llama3(**sizes) and source.tokenizer.vocab_size <= 272
    with (
        Engine.build(tmp_path / "step-3") as again,
        Engine.of(Llama3(**sizes), weights=tmp_path / "hf") as read,
    ):
        for engine in (again, read):
            assert all(torch.equal(*pair) for pair in zip(engine.forward(drawn()), wanted, strict=True))
        assert again.recipe.loss == Grpo(clip_high=0.28)


def test_a_script_says_no_steps_but_where_a_schedule_needs_them_and_a_run_says_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a schedule needs a length"):
        Engine.of(Llama3(**TINY), training=Training(seq_len=16), lr_scheduler=WarmupStableDecay())
    engine_of(training=Training(seq_len=16), lr_scheduler=WarmupStableDecay(total_steps=9)).close()
    with engine_of() as engine:
        engine.save(tmp_path / "step-1")
    lock = tmp_path / "step-1/recipe.lock.toml"
    assert "steps = 1" in lock.read_text()
    with pytest.raises(TitanError, match=r"the recipe has no \[dataset\]"):
        make_plan(Request(str(lock)))


def test_adapters_are_exported_for_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with engine_of() as base:
        base.export(tmp_path / "base")
    lora = [LoRA(rank=4, targets=["layers.*.wq"])]
    with Engine.of(
        Llama3(**TINY), weights=tmp_path / "base", converters=lora, optimizer=AdamW(lr=1e-2)
    ) as engine:
        for _ in range(2):
            engine.forward_backward([GOOD], "sft")
            engine.optim_step()
        (wanted,) = engine.forward([Sample(GOOD.tokens, [1] * 4)])
        engine.export(tmp_path / "peft", "peft")
        engine.export(tmp_path / "merged")
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "peft"
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.tensor([GOOD.tokens])
    for model in (theirs, merged):
        with torch.no_grad():
            found = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(found, wanted[1:], atol=3e-6, rtol=0)


def of_the_page() -> tuple[str, str]:
    """The script of the documentation, and what the page shows of its output."""
    found = blocks(ROOT / "docs/post-training.md")
    (at,) = [number for number, one in enumerate(found) if one.value == "sorts.py"]
    return found[at].text, found[at + 1].text


def sorts(script: str, folder: Path) -> tuple[str, torch.Tensor]:
    """Run the script; returns its output, and log-probabilities of right answers as it exports, [100, 3]."""
    told, own, export = io.StringIO(), [], Engine.export

    def observed(engine: Engine, name: str) -> None:
        right = [engine.tokenizer.encode(f"{n:02}=" + "".join(sorted(f"{n:02}"))) for n in range(100)]
        own.extend(engine.forward([Sample(ids, [0, 0, 0, 1, 1]) for ids in right]))
        export(engine, folder / name)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        patch.setattr(sys, "argv", ["sorts.py"])
        patch.setattr(Engine, "export", observed)
        exec(compile(script, "docs/post-training.md", "exec"), {"__name__": "__main__"})
    return told.getvalue(), torch.stack(own)[:, 3:]


def test_the_script_of_the_documentation_learns_to_sort(tmp_path: Path) -> None:
    """As it stands in the page, and as the page says; transformers has its log-probabilities."""
    from transformers import AutoModelForCausalLM

    script, shown = of_the_page()
    assert sum(map(bool, script.splitlines())) <= 60
    told, own = sorts(script, tmp_path)
    assert re.fullmatch(re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", re.escape(shown)), told), told
    assert "100 of 100 right" in told
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "sorts")
    ids = torch.tensor([list(f"{n:02}=".encode()) + sorted(f"{n:02}".encode()) for n in range(100)])
    with torch.no_grad():
        found = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, 2:, 0]
    torch.testing.assert_close(found, own, atol=3e-6, rtol=0)


def test_the_script_of_the_documentation_is_the_same_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """As long as no draw is decided by rounding: 13 steps of it."""
    script = of_the_page()[0].replace("range(50)", "range(10)").replace("< 250", "< 13")
    ((told, alone),) = ranks(1, sorts, script, tmp_path / "1")
    for other, found in ranks(2, sorts, script, tmp_path / "2"):
        assert other == told
        torch.testing.assert_close(found, alone, atol=3e-6, rtol=0)
