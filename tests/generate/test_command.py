"""`titan generate` in this process: where a model comes from, what is printed, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Titan
from tests.cli.test_torch_free import probe
from tests.generate.models import make_checkpoint, make_tokenizer
from titancli.data import HFTokenizer
from titancli.generate.source import encode, find_source
from titancli.models.blocks.decoder import Decoder
from titancli.registry.component import build

Generated = Callable[..., dict[str, Any]]
SHORT = ("--max-new-tokens", "12")


def texts(document: dict[str, Any]) -> list[list[str]]:
    return [[c["text"] for c in row["completions"]] for row in document["prompts"]]


# ---------------------------------------------------------------------------------------------- sources


def test_a_run_stands_for_its_newest_good_checkpoint(titan: Titan, checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(checkpoint.parent, run / "checkpoints")
    shutil.copytree(checkpoint, run / "checkpoints" / "step-9")
    (run / "checkpoints" / "step-9" / "metadata.json").write_text("{}")
    done = titan("generate", run, "def ", *SHORT)
    assert done.code == 0, done.err
    assert "step-9 is skipped" in done.err
    assert f"llama3 from {run}/checkpoints/step-3, float32 on cpu" in done.err
    assert done.out == titan("generate", checkpoint, "def ", *SHORT).out


def test_a_hugging_face_folder_says_what_transformers_says(generated: Generated, hf_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_folder)
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    assert prompt["input_ids"][0, 0] == tokenizer.bos_token_id
    model = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    made = model.generate(**prompt, do_sample=False, max_new_tokens=30, pad_token_id=0)
    new = made[0, prompt["input_ids"].shape[1] :]
    document = generated(hf_folder, "Once upon a time", "--temperature", "0", "--max-new-tokens", "30")
    [row] = document["prompts"]
    assert row["tokens"] == prompt["input_ids"].shape[1]
    [completion] = row["completions"]
    assert completion["text"] == tokenizer.decode(new, skip_special_tokens=True)
    assert completion["tokens"] == len(new)


def test_a_checkpoint_and_its_export_say_the_same(
    titan: Titan, generated: Generated, checkpoint: Path, tmp_path: Path
) -> None:
    assert titan("convert-checkpoint", checkpoint, "out", "--to", "hf").code == 0
    done = titan("generate", "out", "x")
    assert done.code == 5
    assert "have no tokenizer" in done.err and "--tokenizer" in done.err
    expected = texts(generated(checkpoint, "x", *SHORT))
    assert texts(generated("out", "x", "--tokenizer", "byte", *SHORT)) == expected
    # and back: weights alone, which name no tokenizer
    assert titan("convert-checkpoint", "out", "back", "--to", "titan").code == 0
    assert "have no tokenizer" in titan("generate", "back", "x").err
    assert texts(generated("back", "x", "--tokenizer", "byte", *SHORT)) == expected


def test_bos_begins_a_prompt_where_the_model_has_learnt_it(
    generated: Generated, titan: Titan, hf_folder: Path, checkpoint: Path
) -> None:
    def count(*arguments: object) -> int:
        return generated(*arguments, "ab", "--max-new-tokens", "1")["prompts"][0]["tokens"]

    step = hf_folder.parent / "step-1"
    assert [count(hf_folder), count(hf_folder, "--no-bos")] == [3, 2]
    assert [count(step), count(step, "--no-bos")] == [3, 2]  # as its training text
    done = titan("generate", checkpoint, "ab", "--bos")
    assert (done.code, "no BOS" in done.err) == (2, True)


def test_an_empty_prompt_begins_a_new_text(generated: Generated, checkpoint: Path, hf_folder: Path) -> None:
    source = find_source(checkpoint, tokenizer=None, component=None, say=print)
    assert encode(source, ["", "a"]) == [[256], [97]]
    assert generated(checkpoint, "", *SHORT)["prompts"][0]["tokens"] == 1
    source = find_source(hf_folder, tokenizer=None, component=None, say=print)
    assert encode(source, [""]) == [[source.tokenizer.bos_id]]


def test_in_bfloat16_it_computes_in_bfloat16(generated: Generated, checkpoint: Path) -> None:
    document = generated(checkpoint, "x", "--dtype", "bfloat16", *SHORT)
    assert document["dtype"] == "bfloat16"
    assert document["tokens"] == 12


def test_tied_weights_stay_tied(generated: Generated, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "step-1", "model.tied=true")
    assert generated(tmp_path / "step-1", "x", *SHORT)["tokens"] == 12


# ----------------------------------------------------------------------------------------- what is made


@pytest.mark.parametrize(
    "options", [("--temperature", "0"), ("--temperature", "1.1", "-n", "3", "--top-k", "40")]
)
def test_a_batch_equals_its_prompts_alone(
    generated: Generated, checkpoint: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    prompts = ["a", "a longer one, by far", "日本", "a"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    options = (*options, "--max-new-tokens", "20", "--seed", "4")
    together = generated(checkpoint, "--prompts", file, *options, "--batch-size", "5")
    assert [row["prompt"] for row in together["prompts"]] == prompts
    assert together["prompts"] == [generated(checkpoint, p, *options)["prompts"][0] for p in prompts]


def test_the_seed_decides_what_is_drawn(generated: Generated, checkpoint: Path) -> None:
    def draw(seed: int) -> list[list[str]]:
        return texts(generated(checkpoint, "x", "--seed", seed, "-n", 2, *SHORT))

    assert draw(1) == draw(1) != draw(2)
    [[one, two]] = draw(1)
    assert one != two


def test_a_stop_text_ends_a_completion_before_it(generated: Generated, checkpoint: Path) -> None:
    [[whole]] = texts(generated(checkpoint, "x", "--max-new-tokens", "40"))
    for stop in (whole[5:7], whole[10:11]):
        document = generated(checkpoint, "x", "--max-new-tokens", "40", "--stop", "\x00", "--stop", stop)
        [completion] = document["prompts"][0]["completions"]
        assert completion["text"] == whole[: whole.index(stop)]
        assert completion["finish_reason"] == "stop"
        assert completion["tokens"] < 40


def test_any_end_marker_that_the_folder_names_ends_a_completion(
    generated: Generated, hf_folder: Path, tmp_path: Path
) -> None:
    options = ("Once", "--temperature", "0", "--max-new-tokens", "30")
    before = generated(hf_folder, *options)["prompts"][0]["completions"][0]
    assert before["finish_reason"] == "length"
    text = before["text"]
    end = next(letter for letter in text[3:] if letter.isascii() and letter.isprintable())
    assert build(HFTokenizer(path=hf_folder)).encode(end) == [ord(end) - ord("!")]  # its one token
    other = shutil.copytree(hf_folder, tmp_path / "hf")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, ord(end) - ord("!")]}))
    after = generated(other, *options)["prompts"][0]["completions"][0]
    assert after["finish_reason"] == "eos"
    assert after["text"] == text[: text.index(end)]


def test_the_models_context_ends_a_completion(generated: Generated, titan: Titan, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "step-1", "model.max_seq_len=20", "training.seq_len=16", seed=1)
    file = tmp_path / "prompts.txt"
    file.write_text("0123456789abcde\nab\n")
    document = generated("step-1", "--prompts", file, "--max-new-tokens", "9")
    ends = [
        (row["completions"][0]["tokens"], row["completions"][0]["finish_reason"])
        for row in document["prompts"]
    ]
    assert ends == [(5, "length"), (9, "length")]
    done = titan("generate", "step-1", "0123456789abcdefghij")
    assert (done.code, done.out) == (2, "")
    assert "the prompt has 20 tokens, but the model's context (max_seq_len) is 20" in done.err


# -------------------------------------------------------------------------------------- what is printed


def test_one_completion_is_streamed_and_nothing_else_is_on_stdout(
    titan: Titan, generated: Generated, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import titancli.cli.generate as command

    pieces: list[str] = []
    show = command._Show.text
    monkeypatch.setattr(command._Show, "text", lambda self, text: (pieces.append(text), show(self, text)))
    done = titan("generate", checkpoint, "x", *SHORT)
    [[text]] = texts(generated(checkpoint, "x", *SHORT))
    assert done.out == text + "\n"
    assert len(pieces) > 5
    assert "12 tokens in" in done.err and "tokens/s; end: length" in done.err


def test_several_completions_have_headings(titan: Titan, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\nb\n")
    out = titan("generate", checkpoint, "--prompts", "p.txt", "-n", "2", "--max-new-tokens", "4").out
    headings = [line for line in out.split("\n") if line.startswith("==>")]
    assert headings == [f"==> prompt {p}, sample {s} <==" for p in (1, 2) for s in (1, 2)]
    out = titan("generate", checkpoint, "a", "-n", "2", "--max-new-tokens", "4").out
    assert out.startswith("==> sample 1 <==\n")


def test_json_is_one_document(generated: Generated, checkpoint: Path) -> None:
    document = generated(checkpoint, "x", "-n", 2, "--top-p", "0.9", "--stop", "~~", *SHORT)
    assert (document["schema"], document["version"]) == ("titan.generation", 1)
    assert document["source"] == str(checkpoint)
    assert document["settings"] == {
        "temperature": 0.8,
        "top_k": None,
        "top_p": 0.9,
        "max_new_tokens": 12,
        "seed": 0,
        "stop": ["~~"],
        "samples": 2,
        "batch_size": 16,
        "bos": False,
        "chat": False,
        "system": None,
    }
    [row] = document["prompts"]
    assert (row["prompt"], row["tokens"], len(row["completions"])) == ("x", 1, 2)
    assert document["tokens"] == sum(c["tokens"] for c in row["completions"])
    assert document["tokens_per_second"] == pytest.approx(document["tokens"] / document["seconds"])


# --------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--prompts", "none.txt"], ["run", "a", "--stop", ""]]
)
def test_what_needs_no_model_imports_no_torch(tmp_path: Path, arguments: list[str]) -> None:
    found = probe(tmp_path, "generate", *arguments)
    assert not {"torch", "transformers", "numpy", "pydantic"} & set(found["seen"])
    assert found["code"] == {"--help": 0, "run": 5 if "none.txt" in arguments else 2}[arguments[0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "'-1' is not 0, or at least 0.001"),
        (["--temperature", "1e-9"], "is not 0, or at least 0.001"),
        (["--temperature", "nan"], "is not 0, or at least 0.001"),
        (["--temperature", "inf"], "is not 0, or at least 0.001"),
        (["--top-p", "0"], "is not above 0 and at most 1"),
        (["--top-p", "1.5"], "is not above 0 and at most 1"),
        (["--top-k", "0"], "top-k"),
        (["--max-new-tokens", "0"], "max-new-tokens"),
        (["--stop", ""], "must not be empty"),
        (["-n", "2", "--temperature", "0"], "gives identical completions"),
        (["--prompts", "p.txt"], "only one of them"),
        (["--model-component", "llama3"], "can only be used with a Hugging Face folder"),
        (["--tokenizer", "hf"], "this tokenizer needs path"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_make_no_sense(titan: Titan, checkpoint: Path, options: list[str], message: str) -> None:
    done = titan("generate", checkpoint, "x", *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_source_that_is_none(titan: Titan, tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for source, message in [
        ("none", "does not exist"),
        ("bare", "is not a run"),
        ("run", "a run with a good checkpoint"),
    ]:
        done = titan("generate", source, "x")
        assert (done.code, done.out) == (5, "")
        assert message in done.err and source in done.err
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    [weights] = damaged.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    done = titan("generate", damaged, "x")
    assert (done.code, "is damaged" in done.err) == (5, True)


def test_a_tokenizer_of_another_model(titan: Titan, hf_folder: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "step-1", "model.vocab_size=200")
    done = titan("generate", "step-1", "日")
    assert done.code == 5
    assert "the prompt contains the token" in done.err and "only 200 tokens" in done.err
    done = titan("generate", hf_folder, "x", "--tokenizer", "nothing")
    assert (done.code, "unknown tokenizer 'nothing'" in done.err) == (4, True)


def test_a_tokenizer_that_has_moved_is_named_anew(titan: Titan, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "old")
    make_checkpoint(tmp_path / "step-1", "model.vocab_size=259", "tokenizer.type=hf", "tokenizer.path=old")
    (tmp_path / "old").rename(tmp_path / "new")
    done = titan("generate", "step-1", "x", *SHORT)
    assert done.code == 5
    assert "old does not exist" in done.err and "--tokenizer FOLDER" in done.err
    assert titan("generate", "step-1", "x", "--tokenizer", "new", *SHORT).code == 0


def test_a_gpu_that_is_not_there(titan: Titan, checkpoint: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = titan("generate", checkpoint, "x", "--device", "cuda")
    assert (done.code, "torch finds no GPU" in done.err) == (5, True)


def test_a_model_without_a_cache_is_named(
    titan: Titan, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Decoder, "new_cache")
    done = titan("generate", checkpoint, "x")
    assert (done.code, "llama3 cannot generate: it has no new_cache" in done.err) == (4, True)


def test_an_interrupt_leaves_130(titan: Titan, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("titancli.rl.complete.decode", interrupted)
    assert titan("generate", checkpoint, "x").code == 130
