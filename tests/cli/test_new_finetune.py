"""`titan recipe new --from-hf FOLDER --sft DATA` and the like: recipes that train as they are."""

from __future__ import annotations

import gzip
import json
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Titan
from tests.cli.test_new_recipe import LLAMA
from tests.generate.models import make_tokenizer
from titancli.cli.finetune_data import Kind, Task, task_of
from titancli.errors import EnvironmentProblem, TitanError, UsageError
from titancli.launchers import devices
from titancli.observe.peaks import DEVICES

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CHAT = {"messages": [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7"}]}
PAIR = {"prompt": "3 + 4?", "chosen": "7", "rejected": "8"}
ROWS: dict[str, dict[str, Any]] = {
    "pretrain": {"text": "It rained, and then it did not. " * 20},
    "sft": CHAT,
    "dpo": PAIR,
    "grpo": {"question": "3 + 4?", "answer": "7"},
}
SMALL = ("training.steps=2", "training.mixed_precision_param=float32")
RUN: dict[str, tuple[str, ...]] = {
    "pretrain": ("training.global_batch_size=2",),
    "sft": ("training.global_batch_size=2", "training.seq_len=64"),
    "dpo": ("training.global_batch_size=4", "training.seq_len=64"),
    "grpo": ("loop.prompts=2", "loop.samples=2", "loop.generator.max_new_tokens=4", "training.seq_len=64"),
}


def rows(path: str, kind: str, count: int = 40) -> str:
    Path(path).write_text("".join(json.dumps(ROWS[kind]) + "\n" for _ in range(count)))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like one of the Hub: weights, tokenizer, chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    there = make_tokenizer(tmp_path / "hf")
    config = json.loads((there / "tokenizer_config.json").read_text())
    (there / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    keys = {key: value for key, value in LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**{**keys, "vocab_size": 300})).save_pretrained(there)
    return there


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "lora"])
@pytest.mark.parametrize("kind", list(ROWS))
def test_a_recipe_trains_as_it_is(
    titan: Titan, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, adapters: bool
) -> None:
    monkeypatch.chdir(folder.parent)
    data = rows("data.jsonl", kind)
    more = ["--lora"] if adapters else []
    done = titan("recipe", "new", "mine.toml", "--from-hf", "hf", f"--{kind}", data, *more)
    assert done.code == 0, done.err
    assert "it has the smallest batch" in done.err
    made = tomllib.loads(Path("mine.toml").read_text())
    assert ("converters" in made) is adapters
    assert titan("validate", "mine.toml").code == 0
    done = titan("train", "mine.toml", *SMALL, *RUN[kind], "--run-dir", "run", "--nproc", "1")
    assert done.code == 0, done.err
    exported = json.loads(next(Path("run").rglob("config.json")).read_text())
    assert exported["architectures"] == ["LlamaForCausalLM"]


def test_adapters_alone_learn_conversations(
    titan: Titan, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert titan("recipe", "new", "a.toml", "--from-hf", "hf", "--lora", rows("c.jsonl", "sft")).code == 0
    assert titan("recipe", "new", "b.toml", "--from-hf", "hf", "--sft", "c.jsonl", "--lora").code == 0
    one, other = (Path(name).read_text() for name in ("a.toml", "b.toml"))
    assert one.replace('"a"', '"b"') == other
    made = tomllib.loads(one)
    assert made["dataset"] == {"type": "titan/chat", "path": "./c.jsonl", "pack": True}
    assert made["optimizer"]["lr"] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("7", {"type": "titan-rl/numeric"}),
        ("$1,234.50", {"type": "titan-rl/numeric"}),
        ("3 and 4 are 7. #### 7", {"type": "titan-rl/numeric", "after": "####"}),
        ("Paris", {"type": "titan-rl/exact_match"}),
    ],
)
def test_the_reward_fits_the_answers(tmp_path: Path, answer: str, reward: dict[str, str]) -> None:
    file = tmp_path / "q.jsonl"
    hostile = "no JSON\n" + "[" * 100_000 + "\n" + '{"a": "' + "x" * 3_000_000 + '"}\n[1]\n'
    file.write_text(hostile + json.dumps({"problem": "?", "solution": answer}) + "\n")
    made = Task("grpo", str(file)).sections(2048)
    assert made["[loop.rewards]"] == reward
    assert (made["loop.task"]["prompt"], made["loop.task"]["answer"]) == ("problem", "solution")
    assert ("system" in made["loop.task"]) is ("after" in reward)


FILES = {
    "q.csv": b"question,answer,text\n3 + 4?,7,It rained.\n",
    "q.json": b'[{"question": "3 + 4?", "answer": "7", "text": "It rained."}]',
    "q.jsonl.gz": gzip.compress(b'{"question": "3 + 4?", "answer": "7", "text": "It rained."}\n'),
    "q.data": b'{"question": "3 + 4?", "answer": "7", "text": "It rained."}\n' * 3,
}


@pytest.mark.parametrize("name", FILES)
def test_data_of_every_kind_are_looked_into(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    made = Task("grpo", str(tmp_path / name)).sections(64)
    assert made["loop.task"]["prompt"] == "question" and made["[loop.rewards]"]["type"] == "titan-rl/numeric"
    assert Task("pretrain", str(tmp_path / name)).sections(64)["dataset"]["type"] == "titan/jsonl"


def test_the_text_of_parquet_is_found_without_converting_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "q.parquet"
    pq.write_table(pa.table({"id": [1], "content": ["It rained."]}), file)
    made = Task("pretrain", str(file)).sections(64)["dataset"]
    assert made == {"type": "titan/parquet", "paths": [str(file)], "text": "content"}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tried"]  # its footer
    file.write_bytes(b"PAR1 and no more")
    with pytest.raises(EnvironmentProblem, match="cannot read the Parquet file"):
        Task("pretrain", str(file)).sections(64)


def test_text_is_known_by_its_content_and_a_mixture_is_refused(tmp_path: Path) -> None:
    there = tmp_path / "corpus"
    there.mkdir()
    (there / "a.jsonl").write_text("")
    (there / "b").write_text("It rained.\n")
    text = {"type": "titan/text_files", "paths": [f"{there}/b*"]}
    assert Task("pretrain", f"{there}/b*").sections(64) == {"dataset": text}
    with pytest.raises(UsageError, match="has files of text beside JSON Lines") as told:
        Task("pretrain", str(there)).sections(64)
    assert "pattern" in str(told.value.hint)
    (there / "state.json").write_text("{}")  # as save_to_disk writes it
    assert Task("pretrain", str(there)).sections(64) == {"dataset": {"type": "titan/hf", "path": str(there)}}


def test_prompts_without_a_known_key_are_refused(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"x": "3 + 4?", "answer": "7"}\n')
    with pytest.raises(UsageError, match="have no prompt: they have x, answer"):
        Task("grpo", str(tmp_path / "q.jsonl")).sections(64)


def test_the_key_of_texts_is_found(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("id,content\n1,It rained.\n")
    expected = {"type": "titan/jsonl", "paths": [str(tmp_path / "d.csv")], "text": "content"}
    assert Task("pretrain", str(tmp_path / "d.csv")).sections(64) == {"dataset": expected}


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        ("sft", PAIR, "line 1 has 'prompt', 'chosen', 'rejected'"),
        ("dpo", CHAT, "have no chosen: they have messages"),
        ("pretrain", CHAT, "have no text: they have messages"),
    ],
)
def test_rows_of_another_kind_are_refused(tmp_path: Path, kind: Kind, row: dict[str, Any], said: str) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    with pytest.raises(TitanError, match=said):
        Task(kind, str(tmp_path / "d.jsonl")).sections(64)


def test_data_that_are_not_there_are_refused_before_anything_is_written(
    titan: Titan, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    done = titan("recipe", "new", "mine.toml", "--from-hf", "hf", "--sft", "no.jsonl")
    assert done.code == 5 and "no.jsonl does not exist" in done.err
    for words, said in (
        (["--from", "llama3_debug", "--sft", "x"], "asked for with --from-hf"),
        (["--from-hf", "hf", "--sft", "hf", "--dpo", "hf"], "it learns one thing, not sft and dpo"),
        (["--from-hf", "hf", "--dpo", "hf", "--lora", "hf"], "it learns one thing"),
    ):
        done = titan("recipe", "new", "mine.toml", *words)
        assert done.code == 2 and said in " ".join(done.err.split())
    assert not Path("mine.toml").exists()
    assert task_of("sft", "OWNER/NAME").data == "OWNER/NAME"
    with pytest.raises(EnvironmentProblem):
        task_of("sft", "data/chats.jsonl")


BIG = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("words", "said", "rows_at_once"),
    [
        (["--gpu", "H100"], "it does not fit", 1),
        (["--gpu", "h100", "--world-size", "8"], "fits with training.local_batch_size=2", 2),
        (["--gpu", "H200", "--lora"], "fits with training.local_batch_size=8", 8),
        (["--gpu", "RTX4090", "--lora"], "fits with training.dtype=bfloat16", 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_batch_is_the_largest_that_fits_by_plan(
    titan: Titan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    said: str,
    rows_at_once: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tokenizer(tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text(json.dumps(LLAMA | BIG))
    done = titan("recipe", "new", "mine.toml", "--from-hf", "hf", "--sft", rows("c.jsonl", "sft"), *words)
    assert done.code == 0, done.err
    assert said in " ".join(done.err.split())
    assert tomllib.loads(Path("mine.toml").read_text())["training"]["local_batch_size"] == rows_at_once


def test_text_that_is_not_named_yet_is_sized_too(
    titan: Titan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tokenizer(tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text(json.dumps(LLAMA | BIG))
    done = titan("recipe", "new", "mine.toml", "--from-hf", "hf", "--gpu", "B200")
    assert done.code == 0 and "fits with" in done.err and "set dataset.paths" in done.err
    made = tomllib.loads(Path("mine.toml").read_text())
    assert made["training"]["local_batch_size"] > 1 and made["dataset"]["paths"] == ["text/*.txt"]


def test_the_gpus_of_the_machine_are_known_by_their_makers_names(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["GPU 0: NVIDIA H200 (UUID: GPU-1)", "GPU 1: NVIDIA GeForce RTX 4090 (UUID: GPU-2)"]
    monkeypatch.setattr(devices, "_listed", lambda: lines)
    monkeypatch.setattr(devices, "_installed", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.visible_gpu_models() == ["NVIDIA H200", "NVIDIA GeForce RTX 4090"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.visible_gpu_models() == ["NVIDIA GeForce RTX 4090"]
    assert DEVICES["RTX4090"].known_as("NVIDIA GeForce RTX 4090")
    assert DEVICES["A100"].known_as("NVIDIA A100-SXM4-80GB")
    assert not DEVICES["A10"].known_as("NVIDIA A100-SXM4-80GB")
    assert not DEVICES["L4"].known_as("NVIDIA L40S")
