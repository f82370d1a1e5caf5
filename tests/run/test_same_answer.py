"""`titan validate`, `titan train --dry-run` and the start: the same problems, hints and exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.run.conftest import Finished, in_this_process, trained
from titancli.data import Chat, JsonLines, TextFiles, first_look
from titancli.data.formats import Format
from titancli.runs import RunFolder

Titan = Callable[..., Finished]
HF = ("tokenizer=hf", "tokenizer.path=tok")


@pytest.fixture
def titan(here: Path, capfd: pytest.CaptureFixture[str]) -> Titan:
    return in_this_process(capfd)


def tokenizer(folder: Path, ids: int, **config: str) -> None:
    """Write a Hugging Face tokenizer with so many ids, the first of which ends a text."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    vocab = {"<end>": 0} | {f"t{n}": n for n in range(1, ids)}
    Tokenizer(models.WordLevel(vocab, unk_token="<end>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"} | config))


def a_run(here: Path) -> None:
    run = RunFolder.create("x", here / "other")
    run.write_recipe_lock("[model]\n")


def no_weights(here: Path) -> None:
    (here / "empty").mkdir()


def damaged(here: Path) -> None:
    tokenizer(here / "tok", 10)
    (here / "tok/tokenizer.json").write_text("{}")


def other_model(here: Path) -> None:
    (here / "hf").mkdir()
    (here / "hf/config.json").write_text(json.dumps({"model_type": "mamba"}))


def incomplete(here: Path) -> None:
    (here / "hf").mkdir()
    (here / "hf/config.json").write_text("{")


def written(name: str, data: bytes | str) -> Callable[[Path], object]:
    """Return what writes a file."""

    def write(here: Path) -> None:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return write


def table(here: Path, **columns: list[object]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), here / "d.parquet")


def saved(here: Path) -> None:
    """Write what `save_to_disk` of a split does."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"body": ["a"]}).save_to_disk(str(here / "saved"))


def without_template(here: Path) -> None:
    tokenizer(here / "tok", 10)
    (here / "c.jsonl").write_text(50 * CHAT)


def templated(template: str) -> Callable[[Path], object]:
    """Return what writes a tokenizer with a chat template, and conversations."""

    def write(here: Path) -> None:
        tokenizer(here / "tok", 10, chat_template=template)
        (here / "c.jsonl").write_text(50 * CHAT)

    return write


def weights(here: Path, name: str | None, data: bytes = b"") -> None:
    """Write a folder of the recipe's own model, with one file of weights."""
    (here / "hf").mkdir()
    (here / "hf/config.json").write_text(json.dumps(MODEL))
    if name is not None:
        (here / "hf" / name).write_bytes(data)


def adapters(here: Path, **more: object) -> None:
    weights(here, "model.safetensors", EMPTY)
    (here / "peft").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "base_model_name_or_path": str(here / "hf")}
    (here / "peft/adapter_config.json").write_text(json.dumps({**config, **more}))


def trained_adapters(here: Path) -> None:
    """Leave the run `other/r`, of adapters beside the weights of `base/r`."""
    lora = (f"weights={here}/base/r/checkpoints/step-1", 'converters=[{type="lora"}]')
    for name, more in (("base", ()), ("other", lora)):
        (here / name).mkdir()
        trained(here / name, "--run-dir", "r", "training.steps=1", *more)


def cut_checkpoint(here: Path) -> None:
    (here / "other").mkdir()
    trained(here / "other", "--run-dir", "r", "training.steps=1")
    [file] = (here / "other/r/checkpoints/step-1").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


CHAT = (
    json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
)
QUESTION = json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n"
BINARY = bytes(range(256)) * 99
EMPTY = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without tensors."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "num_key_value_heads": 16,
    "head_dim": 2,
    "intermediate_size": 768,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": 256,
    "dtype": "float32",
}
"""The config.json of `tiny.toml`'s model."""


def dataset(kind: str, value: str, **more: str | bool) -> str:
    key = "path" if kind in ("chat", "hf") else "paths"
    shown = json.dumps(value if key == "path" else [value])
    fields = "".join(f", {name} = {json.dumps(one)}" for name, one in more.items())
    return f'dataset={{type = "{kind}", {key} = {shown}{fields}}}'


BROKEN: dict[str, tuple[Callable[[Path], object] | None, tuple[str, ...], str]] = {
    "no data": (None, ('dataset.paths=["gone.txt"]',), "gone.txt does not exist"),
    "no match": (None, ('dataset.paths=["gone/*.txt"]',), "no file matches"),
    "no validation data": (
        None,
        ('validation.datasets.v={type="text_files", paths=["no.txt"]}',),
        "no.txt does not exist",
    ),
    "no tokenizer": (None, HF, "tokenizer.path: "),
    "tokenizer without tokenizer.json": (lambda h: (h / "tok").mkdir(), HF, "has no tokenizer.json"),
    "damaged tokenizer": (damaged, HF, "cannot be read as a tokenizer"),
    "tokenizer without an end": (
        lambda h: tokenizer(h / "tok", 9, eos_token="no such"),
        HF,
        "defines the token that ends a text",
    ),
    "tokenizer with an unknown end": (
        lambda h: tokenizer(h / "tok", 9),
        (*HF, "tokenizer.eos=<none>"),
        "is not a token of",
    ),
    "tokenizer larger than the model": (
        lambda h: tokenizer(h / "tok", 300),
        (*HF, "model.vocab_size=256"),
        "the tokenizer has 300 ids",
    ),
    "no weights": (None, ("weights=gone",), "gone does not exist"),
    "weights that are a run": (a_run, ("weights=other",), "is a run, not one of its checkpoints"),
    "a folder without weights": (no_weights, ("weights=empty",), "is neither a Hugging Face folder"),
    "weights of another family": (other_model, ("weights=hf",), "holds a 'mamba' model"),
    "a damaged config.json": (incomplete, ("weights=hf",), "config.json is damaged"),
    "an unknown key": (None, ("training.stpes=2",), "did you mean 'steps'?"),
    "a schedule that begins too late": (None, ("lr_scheduler.start_step=6",), "before it begins"),
    "an unknown component": (None, ("loss=nothing",), "unknown loss 'nothing'"),
    "an unknown flavor": (None, ("model.flavor=7B",), "has no flavor '7B'"),
    "text for a number": (None, ('training.steps="10"',), "must be an integer"),
    "no steps": (None, ("training.steps=0",), "must be more than 0"),
    "a rate that is no number": (None, ("optimizer.lr=nan",), "nan and inf are not allowed"),
    "an odd batch": (None, ("training.global_batch_size=7", "training.local_batch_size=2"), "7"),
    "ranks that do not divide": (None, ("mesh.tp=3",), "3"),
    "adapters without a base": (None, ('converters=[{type="lora"}]',), "adapters need a base"),
    "a plugin that is not there": (None, ('requires.plugins=["titan-nothing"]',), "titan-nothing"),
    "a store that is a word": (None, ("checkpoint.remote=bucket",), "bucket"),
    "an unknown schedule": (None, ("pipeline.schedule=Fast",), "Fast"),
    "a variable of the shell": (None, ('env.LD_PRELOAD="x"',), "LD_PRELOAD"),
    "an unknown launcher": (None, ("launcher=ray",), "unknown launcher 'ray'"),
    "a name that is a path": (None, ("name=../x",), "name"),
    "a key of another trainer": (None, ("learning_rate=1e-4",), "in titan: optimizer.lr=1e-4"),
    "a choice in place of a type": (None, ("lr_scheduler=cosine",), "decay_type"),
    "two weights": (None, ("weights=a.bin",), "a.bin"),
    "a loop without its task": (None, ("loop=grpo",), "needs 'task'"),
    "binary data": (written("b.bin", BINARY), ('dataset.paths=["b.bin"]',), "b.bin is binary data"),
    "a FIFO": (lambda h: os.mkfifo(h / "f"), ('dataset.paths=["f"]',), "f is not a regular file"),
    "a FIFO of rows": (
        lambda h: os.mkfifo(h / "f.jsonl"),
        (dataset("jsonl", "f.jsonl"),),
        "f.jsonl is not a regular file",
    ),
    "a FIFO of conversations": (
        lambda h: os.mkfifo(h / "f.jsonl"),
        (dataset("chat", "./f.jsonl"),),
        "f.jsonl is not a regular file",
    ),
    "a FIFO for `datasets`": (
        lambda h: os.mkfifo(h / "f.jsonl"),
        (dataset("hf", "./f.jsonl"),),
        "f.jsonl is not a regular file",
    ),
    "an unknown store": (None, ('checkpoint.remote="nope://b/x"',), "Protocol not known: nope"),
    "a store below a file": (
        written("store", ""),
        ('checkpoint.remote="file://{here}/store/x"',),
        "cannot be written: Not a directory",
    ),
    "a store that refuses": (
        None,
        ('checkpoint.remote="file:///proc/x"',),
        "no checkpoint can be uploaded: file:///proc/x cannot be written",
    ),
    "conversations without a template": (
        without_template,
        (*HF, "model.vocab_size=256", dataset("chat", "./c.jsonl")),
        "has no chat template",
    ),
    "a template that is not Jinja": (
        templated("{% for message in messages %}\n{{ message.content }"),
        (*HF, "model.vocab_size=256", dataset("chat", "./c.jsonl")),
        "tok is not a template of Jinja: line 2: unexpected '}'",
    ),
    "a template of what is not there": (
        templated("{{ messages[0].content.text.upper() }}"),
        (*HF, "model.vocab_size=256", dataset("chat", "./c.jsonl")),
        "tok rejects a conversation: ",
    ),
    "an empty file": (written("e.txt", ""), ('dataset.paths=["e.txt"]',), "every file is empty"),
    "an empty file of rows": (written("e.jsonl", ""), (dataset("jsonl", "e.jsonl"),), "every file is empty"),
    "a folder without files": (lambda h: (h / "d").mkdir(), ('dataset.paths=["d"]',), "has no files"),
    "a folder of pictures": (
        written("d/1.png", b"\x89PNG\r\n\x1a\n" + BINARY),
        ('dataset.paths=["d"]',),
        "1.png is binary data",
    ),
    "rows as text": (
        written("a.jsonl", 9 * '{"text": "a"}\n'),
        ('dataset.paths=["a.jsonl"]',),
        'use dataset.type = "jsonl" for it',
    ),
    "text of another encoding": (
        written("l.txt", 99 * "é".encode("latin1")),
        ('dataset.paths=["l.txt"]',),
        "is not UTF-8 text: byte 0",
    ),
    "a damaged gzip file": (
        written("a.txt.gz", b"\x1f\x8b\x08aaa"),
        ('dataset.paths=["a.txt.gz"]',),
        "cannot read the file",
    ),
    "a table without the column": (
        lambda h: table(h, body=["a"]),
        (dataset("parquet", "d.parquet"),),
        "dataset.text may be one of: body",
    ),
    "a column of numbers": (
        lambda h: table(h, text=[1]),
        (dataset("parquet", "d.parquet"),),
        "has the type int64, which is not text",
    ),
    "text as a table": (None, (dataset("parquet", "text.txt"),), "cannot read the Parquet file"),
    "a part of a mix": (
        written("b.bin", BINARY),
        (
            'dataset={type="mix", weights={a=1}, datasets={a={type="text_files", paths=["text.txt"]}, '
            'b={type="text_files", paths=["b.bin"]}}}',
        ),
        "b.bin is binary data",
    ),
    "binary data for validation": (
        written("b.bin", BINARY),
        ('validation.datasets.v={type="text_files", paths=["b.bin"], repeat=false}',),
        "validation.datasets.v: ",
    ),
    "rows of no known format": (
        written("a.jsonl", 9 * '{"body": "a"}\n'),
        (dataset("chat", "./a.jsonl"),),
        "the format of the rows is not known",
    ),
    "rows of two formats": (
        written("a.jsonl", CHAT + '{"text": "a"}\n'),
        (dataset("chat", "./a.jsonl"),),
        "rows have different formats",
    ),
    "rows that are all bad": (
        written("a.jsonl", 3 * '{"messages": "a"}\n' + 3 * QUESTION),
        (dataset("chat", "./a.jsonl"),),
        "has no rows to train on",
    ),
    "a bad row of text": (
        written("a.jsonl", '{"text": "a"}\n{"text": 1}\n'),
        (dataset("jsonl", "a.jsonl", strict=True),),
        "a.jsonl, line 2: 'text' is int, not a string",
    ),
    "a bad row of a table": (
        written("a.csv", "text,n\na,1\nb\n"),
        (dataset("jsonl", "a.csv", strict=True),),
        "a.csv, row 2: it is list, not an object",
    ),
    "a bad row of conversations": (
        written("a.jsonl", 9 * CHAT + QUESTION),
        (dataset("chat", "./a.jsonl", strict=True),),
        "a.jsonl, line 10: it has no assistant message",
    ),
    "rows without the key": (
        written("a.jsonl", 9 * '{"body": "a"}\n'),
        (dataset("jsonl", "a.jsonl"),),
        "has no rows to train on: {here}/a.jsonl, line 1: it has no key 'text', only 'body'",
    ),
    "text as rows": (
        written("a.txt", 9 * "a\n"),
        (dataset("jsonl", "a.txt"),),
        "has no rows to train on: {here}/a.txt, line 1: it is not JSON",
    ),
    "a list of rows that are all bad": (
        written("a.json", '[{"messages": "a"}, {"messages": "b"}]'),
        (dataset("chat", "./a.json"),),
        "has no rows to train on: {here}/a.json, row 1: 'messages' is str, not a list of messages",
    ),
    "bundled data that is not there": (None, (dataset("chat", "titan:no"),), "titan has no bundled data"),
    "shards that are text": (
        None,
        (dataset("token_shards", "text.txt"),),
        "is a file, not a folder of token shards",
    ),
    "a file that `datasets` does not read": (
        written("a.xyz", "a"),
        (dataset("hf", "./a.xyz"),),
        "the extension .xyz are not supported",
    ),
    "a saved dataset without the split": (
        saved,
        (dataset("hf", "./saved", split="test"),),
        "saved has no split 'test'\n dataset.split may be one of: train",
    ),
    "a saved dataset without the column": (
        saved,
        (dataset("hf", "./saved"),),
        "saved has no column 'text'\n dataset.text may be one of: body",
    ),
    "a saved dataset as a stream": (
        saved,
        (dataset("hf", "./saved", streaming=True, shuffle=False),),
        "was saved by save_to_disk and cannot be streamed",
    ),
    "a file that is one split": (
        written("a.jsonl", '{"text": "a"}\n'),
        (dataset("hf", "./a.jsonl", split="train+test"),),
        "a.jsonl has no split 'test'\n dataset.split may be one of: train",
    ),
    "a file without the column": (
        written("a.jsonl", '{"body": "a"}\n'),
        (dataset("hf", "./a.jsonl"),),
        "a.jsonl has no column 'text'\n dataset.text may be one of: body",
    ),
    "a folder without the split": (
        written("d/test.csv", "text,n\na,1\n"),
        (dataset("hf", "./d"),),
        "/d has no split 'train'\n dataset.split may be one of: test",
    ),
    "a folder without the column": (
        written("d/train.csv", "body,n\na,1\n"),
        (dataset("hf", "./d"),),
        "/d has no column 'text'\n dataset.text may be one of: body, n",
    ),
    "a folder that `datasets` does not read": (
        written("d/a.unknown", "a"),
        (dataset("hf", "./d"),),
        "/d cannot be loaded: ",
    ),
    "conversations without the split": (
        saved,
        (dataset("chat", "./saved", split="test"),),
        "saved has no split 'test'",
    ),
    "a model without weights": (lambda h: weights(h, None), ("weights=hf",), "contains no weights"),
    "pickled weights": (
        lambda h: weights(h, "pytorch_model.bin"),
        ("weights=hf",),
        "holds pickled weights (pytorch_model.bin)",
    ),
    "weights that are a pointer": (
        lambda h: weights(h, "model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        ("weights=hf",),
        "is a pointer of Git LFS",
    ),
    "weights that are cut off": (
        lambda h: weights(h, "model.safetensors", EMPTY[:-1]),
        ("weights=hf",),
        "is not a complete safetensors file",
    ),
    "weights of which a file is missing": (
        lambda h: weights(h, "model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}'),
        ("weights=hf",),
        "b.safetensors cannot be read",
    ),
    "adapters without a file": (adapters, ("weights=peft",), "has no adapter_model.safetensors"),
    "adapters of another rank": (
        adapters,
        ("weights=peft", 'converters=[{type="lora", alpha=4.0}]'),
        "holds adapters with rank = 4, but this recipe has 8",
    ),
    "adapters that titan does not have": (
        lambda h: adapters(h, modules_to_save=["lm_head"]),
        ("weights=peft",),
        "has modules_to_save = ['lm_head'], which titan's adapters do not have",
    ),
    "a checkpoint of adapters of another rank": (
        trained_adapters,
        ("weights=other/r/checkpoints/step-1", 'converters=[{type="lora", rank=4}]'),
        "contains adapters with rank = 8, but this recipe has 4",
    ),
    "a checkpoint of adapters as a model": (
        trained_adapters,
        ("weights=other/r/checkpoints/step-1",),
        "contains adapters (lora), not the weights of a model",
    ),
    "adapters whose base is gone": (
        lambda h: (trained_adapters(h), shutil.rmtree(h / "base")),
        ("weights=other/r/checkpoints/step-1", 'converters=[{type="lora"}]'),
        "holds adapters, but their base",
    ),
    "a checkpoint that is cut off": (
        cut_checkpoint,
        ("weights=other/r/checkpoints/step-1",),
        "bytes instead of",
    ),
}


def problems(done: Finished) -> list[str]:
    """Return the lines of what is wrong, and the hints, without those of one command alone."""
    lines = (line.strip() for line in done.err.splitlines())
    return [line for line in lines if line and not re.match(r"(note|run folder|looking|tiny.toml):", line)]


@pytest.mark.parametrize("name", BROKEN)
def test_three_commands_one_answer(titan: Titan, here: Path, name: str) -> None:
    prepare, templates, words = BROKEN[name]
    overrides = [one.replace("{here}", str(here)) for one in templates]
    if prepare is not None:
        prepare(here)
    checked = titan("validate", "tiny.toml", *overrides)
    shown = titan("train", "tiny.toml", "--run-dir", "r", *overrides, "--dry-run")
    started = titan("train", "tiny.toml", "--run-dir", "r", *overrides)
    assert words.replace("{here}", str(here)) in started.err
    assert problems(checked) == problems(shown) == problems(started)
    assert checked.code == shown.code == started.code != 0
    assert not (here / "r").exists()  # known before anything is written


def test_a_resume_with_other_adapters(titan: Titan, here: Path) -> None:
    trained_adapters(here)
    words = ("train", "other/r", "--resume", "training.steps=2", "converters.0.rank=4")
    shown, started = titan(*words, "--dry-run"), titan(*words)
    assert "contains adapters with rank = 8, but this recipe has 4" in shown.err
    assert (shown.code, problems(shown)) == (started.code, problems(started)) == (3, problems(started))


def test_data_that_may_not_be_read(titan: Titan, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("titancli.data.formats.regular", refuse)
    commands = (("validate",), ("train", "--run-dir", "r", "--dry-run"), ("train", "--run-dir", "r"))
    done = [titan(*words, "tiny.toml") for words in commands]
    assert all("text.txt: Permission denied" in one.err for one in done)


def test_a_run_folder_below_a_file(titan: Titan, here: Path) -> None:
    (here / "file").write_text("")
    shown = titan("train", "tiny.toml", "--run-dir", "file/r", "--dry-run")
    started = titan("train", "tiny.toml", "--run-dir", "file/r")
    assert f"cannot create the run folder {here}/file/r: Not a directory ({here}/file)" in started.err
    assert (shown.code, problems(shown)) == (started.code, problems(started)) == (5, problems(started))


def test_a_look_at_data_is_cheap(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many files there are, few are listed and opened."""
    (here / "d").mkdir()
    for number in range(200):
        (here / f"d/{number:03}.txt").write_text("a\n")
    opened = []
    monkeypatch.setattr(first_look, "LISTED", 100)
    monkeypatch.setattr(first_look, "format_of", lambda path: opened.append(path) or Format("text"))
    first_look.look(TextFiles(paths=[here / "d"]))
    assert len(opened) == first_look.OPENED < 100
    monkeypatch.setattr(first_look, "SECONDS", -1.0)
    first_look.look(TextFiles(paths=[here / "d"]))
    assert len(opened) == first_look.OPENED


def test_rows_that_a_look_leaves_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of rows that were not read."""
    (here / "a.jsonl").write_text(9 * '{"text": "a"}\n')
    (here / "b.jsonl.gz").write_bytes(b"\x1f\x8b\x08aaa")
    without = SimpleNamespace(files={})  # no chat template, which rows of text do not need
    first_look.look(Chat(path=f"{here}/*.jsonl*", skip_damaged=True), without)
    first_look.look(JsonLines(paths=[here / "a.jsonl"], text="no", strict=True, skip_damaged=True))
    monkeypatch.setattr(first_look, "SECONDS", -1.0)
    first_look.look(Chat(path=f"{here}/a.jsonl"), without)


def test_the_hint_for_a_run_can_be_used(titan: Titan, here: Path) -> None:
    assert titan("train", "tiny.toml", "--run-dir", "first", "training.steps=1").code == 0
    failed = titan("train", "tiny.toml", "--run-dir", "second", "weights=first")
    change = re.search(r"give its newest checkpoint: (\S+)", failed.err)
    assert failed.code == 5 and change is not None
    assert titan("validate", "tiny.toml", change[1]).code == 0


def test_a_pattern_without_a_match_is_a_note(titan: Titan, here: Path) -> None:
    usual = ('optimizer.no_decay=["*bias*", "*norm*"]', "training.steps=1")
    said = "optimizer.no_decay: '*bias*' matches no parameter"
    assert titan("validate", "tiny.toml", *usual).code == 0
    shown = titan("train", "tiny.toml", *usual, "--dry-run")
    assert shown.code == 0 and said in shown.out and "'*norm*'" not in shown.out
    started = titan("train", "tiny.toml", *usual, "--run-dir", "r")
    assert started.code == 0 and f"warning: {said}" in started.err


@pytest.mark.parametrize("fits", [True, False])
def test_a_dry_run_says_whether_it_fits(
    titan: Titan, monkeypatch: pytest.MonkeyPatch, here: Path, fits: bool
) -> None:
    gib = 20.0 if fits else 2**-14
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else round(gib * 2**18))
    done = titan("train", "tiny.toml", "--dry-run")
    assert done.code == 0, done.err
    assert ("GiB here: it fits" if fits else "it does not fit: `titan plan` proposes changes") in done.out


def test_files_that_are_elsewhere(titan: Titan, here: Path) -> None:
    missing = 'dataset.paths=["/cluster/only.txt"]'
    assert titan("validate", "tiny.toml", missing).code == 5
    assert titan("validate", "tiny.toml", missing, "--recipe-only").code == 0
    assert titan("validate", "tiny.toml", "training.stpes=2", "--recipe-only").code == 3
    shutil.rmtree(here / "runs", ignore_errors=True)
