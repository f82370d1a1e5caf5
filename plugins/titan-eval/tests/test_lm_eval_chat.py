"""titan-eval under chat templates, and with BOS: the ids and answers of the harness's own `hf`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from tests.data.small_tokenizers import CHATML, chatml
from tests.generate.models import make_checkpoint
from titan_eval import LmEval
from titan_eval.lm import TitanLM
from titan_eval.loop import load_tasks
from titancli.cli import main
from titancli.data import ByteTokenizer
from titancli.engine import Engine
from titancli.errors import RecipeError, TitanError
from titancli.registry.component import build

KINDS: dict[str, dict[str, Any]] = {
    "no BOS": {},
    "the post-processor adds BOS": {"bos": "<|begin|>", "adds_bos": True},
    "both": {"bos": "<|begin|>", "adds_bos": True, "writes_bos": True},
}
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
fewshot_split: test
doc_to_text: "{{{{question}}}}"
{rest}
"""
TASKS = {
    "sums": """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "writing": """\
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
""",
}
HOW: dict[str, dict[str, Any]] = {
    "text": {},
    "a system text": {"system_instruction": "Add."},
    "chat": {"apply_chat_template": True},
    "turns": {"apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": "Add."},
}


def made(folder: Path, kind: str) -> tuple[Path, Path]:
    """Return a checkpoint with a tokenizer of some kind, and its export."""
    tokenizer = chatml(folder / "t", **KINDS[kind])
    step, out = folder / "step-1", folder / "hf"
    size = 259 + ("bos" in KINDS[kind])  # transformers would sample ids that the tokenizer does not have
    settings = (f"model.vocab_size={size}", "tokenizer.type=hf", f"tokenizer.path={tokenizer}")
    make_checkpoint(step, *settings, "training.seq_len=400", "model.max_seq_len=400")
    assert main(["convert-checkpoint", str(step), str(out), "--to", "hf"]) == 0
    rows = [{"question": f"{a} plus 2 is", "choices": [str(a + 2), "line"]} for a in range(3)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, rest in TASKS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, rest=rest))
    return step, out


def answers(lm: Any, folder: Path, **how: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for shots in (0, 1):
        paths = [str(folder / f"{name}.yaml") for name in TASKS]
        tasks = load_tasks(LmEval(tasks=paths, num_fewshot=shots))
        done = evaluate(lm, tasks, bootstrap_iters=0, **how)
        assert done is not None
        for name in TASKS:
            found[f"{name} {shots}"] = [[r[0] for r in s["resps"]] for s in done["samples"][name]]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_the_harness(kind: str, tmp_path: Path) -> None:
    """Texts and conversations have the ids that the harness's `hf` gives them, and the same answers."""
    step, out = made(tmp_path, kind)
    hf = HFLM(pretrained=str(out), device="cpu", dtype="float32", max_length=400, batch_size=2)
    with Engine.frozen(step) as engine:
        tokenizer = engine.tokenizer
        asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
        for how in HOW:
            lm = TitanLM(engine, tokenizer, batch_size=2)
            for messages, prompt in ((asked[:1], True), (asked, False)):
                text = hf.apply_chat_template(messages, add_generation_prompt=prompt)
                assert lm.apply_chat_template(messages, add_generation_prompt=prompt) == text
                assert lm.tok_encode(text) == hf.tok_encode(text)
            lm = TitanLM(engine, tokenizer, batch_size=2)
            assert lm.tok_encode("some text") == hf.tok_encode("some text")
            expected, found = answers(hf, tmp_path, **HOW[how]), answers(lm, tmp_path, **HOW[how])
            for name, rows in expected.items():
                if name.startswith("writing"):
                    assert found[name] == rows, (how, name)
                    continue
                values = [value for row in rows for value, _ in row]
                own = [value for row in found[name] for value, _ in row]
                assert own == pytest.approx(values, abs=1e-4, rel=1e-5), (how, name)


def test_the_command_applies_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, "no BOS")
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    scores = []
    for options in ((), ("--apply-chat-template", "--system-instruction", "Add.", "--num-fewshot", "1")):
        asked = ["lm-eval", "hf", "--tasks", "sums.yaml", *options, "training.seq_len=400", "--json"]
        assert main(asked) == 0, capfd.readouterr().err
        scores.append(json.loads(capfd.readouterr().out)["evaluations"][0]["data"])
    assert [one["num_fewshot"] for one in scores] == [0, 1]


def test_system_messages_may_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step, _ = made(tmp_path, "no BOS")
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    (tmp_path / "t/chat_template.jinja").write_text(refuses)
    with Engine.frozen(step) as engine:
        lm = TitanLM(engine, engine.tokenizer)
        messages = [{"role": role, "content": role} for role in ("system", "user")]
        without = lm.apply_chat_template(messages[1:])
        assert [lm.apply_chat_template(messages) for _ in range(2)] == [without] * 2
        assert caplog.text.count("takes no system message") == 1
        assert lm.chat_template() == "" and lm.chat_template(True) == refuses
        with pytest.raises(TitanError, match="only the tokenizer's own template"):
            lm.chat_template("tool_use")
        (tmp_path / "t/chat_template.jinja").unlink()
        with pytest.raises(RecipeError, match="has no chat template"):
            TitanLM(engine, build(engine.recipe.tokenizer)).apply_chat_template(messages)
        with pytest.raises(TitanError, match="cannot write conversations as text"):
            TitanLM(engine, build(ByteTokenizer())).apply_chat_template(messages)


def test_names_tell_tokenizers_apart(tmp_path: Path) -> None:
    """The harness keeps requests under this name, together with the template's text."""
    step, _ = made(tmp_path, "no BOS")
    with Engine.frozen(step) as engine:
        names = {TitanLM(engine, one).tokenizer_name for one in (engine.tokenizer, build(ByteTokenizer()))}
    assert len(names) == 2 and not any("/" in name for name in names)
