"""A run stops where it learns to: sampling, checkpoints and exports know the ends of its turns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.data.small_tokenizers import chatml
from tests.generate.models import RECIPE as SMALL
from tests.ranks import Ranks
from tests.run.conftest import Finished, here, train
from titancli import Engine, Sample, SamplingParams
from titancli.checkpoint.hf.sidecar_files import end_ids, kept_of, with_ends
from titancli.cli import main
from titancli.errors import EnvironmentProblem
from titancli.generate.source import find_source

__all__ = ["here", "train"]

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
EOS, END = 256, 258
"""<|endoftext|> and <|im_end|>."""


def recipe(folder: Path, tokenizer: Path, *more: str) -> list[str]:
    """Return the overrides of a small chat run with a tokenizer."""
    (folder / "rows.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    data = f'dataset={{type="chat", path="{folder / "rows.jsonl"}", pack=false}}'
    settings = ("tokenizer.type=hf", f"tokenizer.path={tokenizer}", data, "loss=sft", "training.seq_len=32")
    plain = ("training.mixed_precision_param=float32", "model.vocab_size=264")
    return [*SMALL, *plain, *settings, *more]


def weights(folder: Path, tokenizer: Path) -> Path:
    """Write a folder of transformers with the tokenizer's files, whose ends are the tokenizer's alone."""
    with Engine.build("llama3_debug", recipe(folder, tokenizer)) as engine:
        engine.export(folder / "base")
    for name in ("generation_config.json", "config.json"):
        told = json.loads((folder / "base" / name).read_text())
        (folder / "base" / name).write_text(json.dumps(told | {"eos_token_id": EOS}))
    return folder / "base"


def learned(engine: Engine) -> list[int]:
    """Train on the conversation, and return what follows its question."""
    ids, mask = engine.tokenizer.chat_with_mask(TALK)  # type: ignore[union-attr]
    for _ in range(25):
        engine.forward_backward([Sample(ids, mask=[float(flag) for flag in mask])], "sft")
        engine.optim_step(lr=1e-2)
    return continued(engine)


def question(engine: Engine) -> list[int]:
    return engine.tokenizer.chat(TALK[:1], add_generation_prompt=True)  # type: ignore[union-attr]


def continued(engine: Engine) -> list[int]:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    [[made]] = engine.sample([question(engine)], 1, params)
    return made.tokens


def test_the_end_of_turns_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base model that ends at <|endoftext|> is trained on ChatML: its export ends at <|im_end|>."""
    from transformers import AutoModelForCausalLM

    base = weights(tmp_path, chatml(tmp_path / "t"))
    caplog.clear()
    how = recipe(tmp_path, base, f"weights={base}")
    with Engine.build("llama3_debug", how) as engine:
        assert "a turn ends with <|im_end|> (258), at which neither" in caplog.text
        said = learned(engine)
        assert said == [*engine.tokenizer.encode("bc"), END]  # type: ignore[union-attr]
        engine.save(tmp_path / "step-1")
        engine.export(tmp_path / "out")
        asked = question(engine)
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["eos_token_id"] == [EOS, END]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    made = theirs.generate(torch.tensor([asked]), max_new_tokens=8, do_sample=False)
    assert made[0].tolist() == asked + said
    # An export of an earlier version knows the base's end alone: answers to messages end all the same.
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "out", old)
    (old / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    capsys.readouterr()
    settings = ("--chat", "--temperature", "0", "--max-new-tokens", "8", "--json")
    assert main(["generate", str(old), TALK[0]["content"], *settings]) == 0
    [[told]] = [row["completions"] for row in json.loads(capsys.readouterr().out)["prompts"]]
    assert (told["finish_reason"], told["text"]) == ("eos", "bc")
    for src in ("step-1", "out"):
        source = find_source(tmp_path / src, tokenizer=None, component=None, say=print)
        assert source.end_ids == {EOS, END}
    caplog.clear()
    with Engine.build(str(tmp_path / "step-1")) as engine:
        assert continued(engine) == said and "a turn ends" not in caplog.text


def test_older_checkpoints_get_the_ends(tmp_path: Path) -> None:
    """Earlier versions saved the folder's ends alone."""
    base = weights(tmp_path, chatml(tmp_path / "t"))
    with Engine.build("llama3_debug", recipe(tmp_path, base, f"weights={base}")) as engine:
        engine.kept = kept_of(base)
        assert end_ids(engine.kept, EOS) == {EOS}
        engine.save(tmp_path / "step-1")
        engine.load(tmp_path / "step-1")
        assert end_ids(engine.kept, EOS) == {EOS, END}
        with engine.snapshot() as copy:
            assert end_ids(copy.kept, EOS) == {EOS, END}


def test_a_run_and_its_resume(train: Callable[..., Finished], here: Path) -> None:
    base = weights(here, chatml(here / "t"))
    steps = ("training.steps=2", "checkpoint.interval=1", "checkpoint.last_save_in_hf=true")
    run = [one for one in recipe(here, base, f"weights={base}", *steps) if not one.startswith("model.vocab")]
    done = train("llama3_debug", "--run-dir", "r", *run, "model.vocab_size=264", "loop=sft")
    assert done.code == 0, done.err
    ends = [end_ids(kept_of(here / f"r/checkpoints/step-{step}"), EOS) for step in (1, 2)]
    assert ends == [{EOS, END}] * 2
    exported = json.loads((here / "r/exports/step-2-hf/generation_config.json").read_text())
    assert exported["eos_token_id"] == [EOS, END]
    assert train("r", "--resume", "training.steps=3").code == 0
    assert end_ids(kept_of(here / "r/checkpoints/step-3"), EOS) == {EOS, END}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}",
            "no single token ends a turn",
        ),
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
            "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
            "{{ '<|im_end|>\\n' }}{% endfor %}",
            "leaves <|im_end|> (258), which ends a turn, out of what is trained on",
        ),
    ],
)
def test_ends_that_are_not_learned_are_named(
    template: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder := chatml(tmp_path / "t")).joinpath("chat_template.jinja").write_text(template)
    with Engine.build("llama3_debug", recipe(tmp_path, folder)):
        assert caplog.text.count(words) == 1


def test_no_ends_where_no_turn_is_learned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = chatml(tmp_path / "t")
    how = recipe(tmp_path, folder)
    text = f'dataset={{type="text_files", paths=["{tmp_path}"]}}'
    plain = [one for one in how if not one.startswith(("dataset", "loss"))]
    with Engine.build("llama3_debug", [*plain, text]) as engine:
        assert not engine.kept and engine.learned is None
    with Engine.frozen("llama3_debug", how) as engine:  # it learns nothing
        assert engine.learned is None
    (folder / "chat_template.jinja").unlink()
    with Engine.build("llama3_debug", how) as engine:  # rows of text need no template
        assert engine.learned is None and "ends a turn" not in caplog.text


def test_rollouts_stop_there_too(train: Callable[..., Finished], here: Path) -> None:
    rows = [{"prompt": [TALK[0]], "answer": "bc"}] * 2
    (here / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f'loop.task={{type="prompts", path="{here / "asked.jsonl"}"}}'
    own = ("tokenizer.type=hf", f"tokenizer.path={chatml(here / 't')}", "model.vocab_size=264")
    size = ("training.steps=1", "training.seq_len=64", "loop.prompts=2", "loop.samples=2", "loop.eval_freq=0")
    done = train("grpo_digit", "--run-dir", "r", task, *own, *size)
    assert done.code == 0, done.err
    assert "a turn ends with <|im_end|> (258)" in done.err + done.out
    assert end_ids(kept_of(here / "r/checkpoints/step-1"), EOS) == {EOS, END}


def ends_on_rank(how: list[str]) -> list[int]:
    with Engine.build("llama3_debug", how) as engine:
        return sorted(end_ids(engine.kept, EOS))


@pytest.mark.ranks
def test_ranks_have_the_same_ends(ranks: Ranks, tmp_path: Path) -> None:
    how = recipe(tmp_path, chatml(tmp_path / "t"))
    assert ranks(2, ends_on_rank, how) == [[EOS, END]] * 2


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="does not exist"):
        Engine.build("llama3_debug", recipe(tmp_path, tmp_path / "gone"))


def test_ids_of_another_tokenizer_give_way(tmp_path: Path) -> None:
    kept = {
        "config.json": json.dumps({"eos_token_id": 7, "model_type": "x", "text_config": {"eos_token_id": 7}}),
        "generation_config.json": json.dumps({"eos_token_id": [7, 8], "bos_token_id": 1, "temperature": 0.6}),
    }
    files = {name: text.encode() for name, text in kept.items()}
    made = with_ends(files, [END], EOS, None)
    assert end_ids(made, EOS) == {EOS, END}
    assert json.loads(made["generation_config.json"]) == {"temperature": 0.6, "eos_token_id": [EOS, END]}
    assert with_ends(files, [8, 7], 7, 1) is files  # nothing is new
    more = with_ends(files, [8, END], 7, 1)
    assert json.loads(more["generation_config.json"])["eos_token_id"] == [7, 8, END]
    assert more["config.json"] == json.dumps(json.loads(kept["config.json"]), indent=2).encode()
    alone = json.loads(with_ends({}, [END], EOS, 9)["generation_config.json"])
    assert alone == {"bos_token_id": 9, "eos_token_id": [EOS, END]}
    assert with_ends(made, [END], EOS, None) is made  # twice
