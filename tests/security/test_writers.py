"""What titan writes of other people's text: the result parses to the same value, and to nothing more."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
import torch

from tests.security.test_doors import MODULES, ROOT
from tests.security.writers import (
    COMMENTS,
    FORMULAS,
    HOSTILE,
    OWN,
    UTF8,
    WRITERS,
    check_comments,
    check_rows,
    writing,
)
from titancli.cli.new_file import next_step, write_new
from titancli.data.tables import _line
from titancli.errors import EnvironmentProblem, TitanError
from titancli.files import utf8
from titancli.loggers import CSV, TensorBoard
from titancli.loggers.csv import build as csv_logger
from titancli.loggers.tensorboard import build as tensorboard_logger
from titancli.observe import failures, notes
from titancli.observe.metrics import report
from titancli.observe.observers import Observers
from titancli.process import OutputLog
from titancli.recipe.toml import comment, inline, toml_text
from titancli.runs import RunFolder, write_atomically
from titancli.terminal import clean, printable, shell_path


def test_what_writes_has_a_row() -> None:
    check_rows("", WRITERS, OWN)


def test_every_comment_goes_through_its_function() -> None:
    check_comments("", COMMENTS)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_comment_is_one_comment(text: str) -> None:
    made = f"a = 1 {comment(text)}\nb = 2\n"
    assert tomli.loads(made) == {"a": 1, "b": 2}
    assert made.count("\n") == 2 and made.replace("\n", "").isprintable()


@pytest.mark.parametrize("text", UTF8)
def test_a_value_is_the_same_value(text: str) -> None:
    for value in (text, [text], {text: text}, [{"x": {text: [text]}}]):
        made = f"x = {inline(value)}\ny = 1\n"
        assert tomli.loads(made) == {"x": value, "y": 1}
        assert _visible(made)


@pytest.mark.parametrize("text", UTF8)
def test_a_table_is_the_same_table(text: str, tmp_path: Path) -> None:
    table = {"x": text, text or "y": {text: [text], "z": [{text: text}]}}
    made = toml_text(table)
    assert tomli.loads(made) == table
    assert _visible(made)
    write_new(tmp_path / "recipe.toml", made)
    assert tomli.loads((tmp_path / "recipe.toml").read_bytes().decode()) == table


def _visible(text: str) -> bool:
    """Whether a text has nothing that a terminal obeys or an editor hides."""
    return all(line.isprintable() for line in text.split("\n"))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    """A path of other bytes in TOML, which has no escape for them, is refused and leaves nothing behind."""
    text = toml_text({"x": os.fsdecode(b"caf\xe9")})
    for write in (write_new, write_atomically):
        with pytest.raises(EnvironmentProblem, match=r"caf.*dce9.* is not valid UTF-8"):
            write(tmp_path / "x.toml", text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", UTF8)
def test_a_shown_recipe(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`titan recipe show` prints the values of somebody else's recipe."""
    from titancli.cli import main

    data = {
        "recipe": 1,
        "extends": "titan:llama3_debug",
        "dataset": {"type": "text_files", "paths": [f"/{text}"]},
    }
    (tmp_path / "recipe.toml").write_bytes(tomli_w.dumps(data).encode())
    for words in ([], ["--origin"]):
        assert main(["recipe", "show", str(tmp_path / "recipe.toml"), *words]) == 0, capsys.readouterr().err
        made = capsys.readouterr().out
        assert tomli.loads(made)["dataset"]["paths"] == [str(Path(f"/{text}"))]
        assert _visible(made)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_terminal_is_not_steered(text: str) -> None:
    assert printable(text).isprintable()
    assert clean({text: [text]}) == {clean(text): [clean(text)]}
    assert clean(text).replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize("text", HOSTILE)
def test_a_folder_adds_no_sections(text: str, tmp_path: Path) -> None:
    """`recipe new --from-hf`, from a config.json whose keys and values are a stranger's."""
    from titancli.cli.finetune import as_toml, finetune_sections
    from titancli.cli.finetune_data import Task
    from titancli.errors import TitanError
    from titancli.registry import current

    def sections(config: dict[str, Any]) -> dict[str, Any]:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "config.json").write_text(json.dumps(config))
        made = as_toml(finetune_sections(folder, "x", current(), Task("pretrain", None), None))
        return tomli.loads(made)

    llama = {
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
    plain = {name: set(table) for name, table in sections(llama).items() if isinstance(table, dict)}
    for hostile in (
        {**llama, "model_type": text},
        {**llama, "rope_scaling": {"rope_type": text}},
        {**llama, "rope_scaling": {"rope_type": "llama3", text: 1}},
        {**llama, "hidden_act": text, "dtype": text},
        {**llama, text: text, "architectures": [text]},
    ):
        try:
            made = sections(hostile)
        except TitanError as error:
            assert text not in (str(error),) or not text  # refused
            continue
        added = {"model": {"type", "config"}}
        for name, table in made.items():
            if isinstance(table, dict):
                assert set(table) <= plain.get(name, set()) | added.get(name, set())


@pytest.mark.parametrize("text", HOSTILE)
def test_events_are_read_as_written(text: str, tmp_path: Path) -> None:
    from titancli.observe.events import EventLog, read_events

    log = EventLog(tmp_path / "events.jsonl")
    for message in (text, "after"):
        log.write("log", level="info", message=message)
    log.close()
    assert [found["message"] for found in read_events(tmp_path / "events.jsonl")] == [text, "after"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_record_is_the_same_record(text: str, tmp_path: Path) -> None:
    """`run.json`, whose arguments and folders need not be UTF-8, and notes."""
    record = {"run_id": "x", "name": text, "attempts": [{"argv": [text], "host": text, "git": {text: text}}]}
    run = RunFolder(tmp_path)
    run.write_record(record)
    assert run.record() == record
    assert {**json.loads(run.record_file.read_bytes().decode()), "xxh3_64": 0} == {**record, "xxh3_64": 0}
    if text in UTF8 and text:
        notes.write(tmp_path, text)
        assert notes.read(tmp_path) == " ".join(text.split())


@pytest.mark.parametrize("text", HOSTILE)
def test_a_row_is_one_line(text: str) -> None:
    """A row of Parquet or CSV, kept as JSON Lines."""
    for row in ({text: text}, {"x": [text, {text: [text]}]}):
        made = _line(row)
        assert made.count(b"\n") == 1 and made.endswith(b"\n")
        assert json.loads(made.decode(errors="surrogatepass")) == row


@pytest.mark.parametrize("text", HOSTILE)
def test_a_failure_is_read_as_written(text: str, tmp_path: Path) -> None:
    failures.write(tmp_path, EnvironmentProblem(text, hint=text), rank=0, world=1, step=3)
    found = json.loads(failures.error_file(tmp_path, 0).read_bytes().decode())
    assert (found["message"], found["hint"], found["step"]) == (text, text, 3)


@pytest.mark.parametrize("text", HOSTILE)
def test_output_is_appended_as_it_is(text: str, tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "rank-0.log")
    log.write(f"{text}\n")
    log.close()
    assert (tmp_path / "rank-0.log").read_bytes().decode() == f"{utf8(text)}\n"


@pytest.mark.parametrize("text", UTF8)
def test_a_path_is_one_word(text: str, tmp_path: Path) -> None:
    name = text.replace("\0", "").replace("/", "") or "x"
    word = shell_path(tmp_path / name)
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {word}"], capture_output=True, check=True, cwd=tmp_path
    )
    (seen,) = done.stdout.decode().split("\0")[:-1]
    assert shlex.split(word) == [seen] and os.path.abspath(seen) == str(tmp_path / name)
    line = next_step(Path(name)).removeprefix("next:  ")
    assert shlex.split(line) == ["titan", "train", name, "--dry-run"]


def read_csv(file: Path) -> list[list[str]]:
    with open(file, newline="", encoding="utf-8") as opened:
        return list(csv.reader(opened, strict=True))


@pytest.mark.parametrize("text", UTF8)
def test_csv(text: str, tmp_path: Path) -> None:
    logger = csv_logger(CSV(), run_folder=tmp_path, is_main=True)
    logger.run_start({"step": 0})
    logger.step_end(1, {text: 1.5, "loss": 2.0})
    logger.step_end(2, {text: 2.5, "later": 3.0})
    header, *rows = read_csv(tmp_path / "metrics.csv")
    assert header == ["step", "time", text, "loss", "later"]
    assert [row[:1] + row[2:] for row in rows] == [["1", "1.5", "2.0", ""], ["2", "2.5", "", "3.0"]]


@pytest.mark.parametrize("text", FORMULAS)
def test_csv_without_formulas(text: str, tmp_path: Path) -> None:
    """A spreadsheet shows the name of a metric, and computes nothing; numbers stay numbers."""
    logger = csv_logger(CSV(), run_folder=tmp_path, is_main=True)
    for step in (1, 2):  # the second start reads the header of the first
        logger.run_start({"step": step - 1})
        logger.step_end(step, {text: -1.5, "loss": 2.0})
    logger.step_end(2, {text: -2.5})  # in the same row
    header, *rows = read_csv(tmp_path / "metrics.csv")
    assert header == ["step", "time", f"'{text}", "loss"]
    assert [row[2] for row in rows] == ["-1.5", "-2.5"]


def test_csv_keeps_names_apart(tmp_path: Path) -> None:
    logger = csv_logger(CSV(), run_folder=tmp_path, is_main=True)
    logger.run_start({"step": 0})
    logger.step_end(1, {text: float(number) for number, text in enumerate(FORMULAS)})
    assert len({*read_csv(tmp_path / "metrics.csv")[0]}) == 2 + len(FORMULAS)


def test_csv_mends_an_old_header(tmp_path: Path) -> None:
    """A table that an earlier version wrote goes on in its column."""
    (tmp_path / "metrics.csv").write_text("step,time,=1\n1,then,0.5\n")
    logger = csv_logger(CSV(), run_folder=tmp_path, is_main=True)
    logger.run_start({"step": 1})
    logger.step_end(2, {"=1": 1.5})
    header, *rows = read_csv(tmp_path / "metrics.csv")
    assert header == ["step", "time", "'=1"] and [row[2] for row in rows] == ["0.5", "1.5"]


@pytest.mark.parametrize("text", UTF8)
def test_tensorboard(text: str, tmp_path: Path) -> None:
    """Scalars under their names, and texts that are shown as one block of code."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugin_util import markdown_to_safe_html

    lock = toml_text({"x": text, "y": [text]})
    (tmp_path / "recipe.lock.toml").write_bytes(lock.encode())
    logger = tensorboard_logger(TensorBoard(), run_folder=tmp_path, is_main=True)
    logger.run_start({"step": 0, "attempts": [{"host": text, "argv": [text]}]})
    logger.step_end(1, {text: 1.5, "loss": 2.0})
    logger.run_end({})
    found = accumulators.EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    assert sorted(found.Tags()["scalars"]) == sorted({text, "loss"})
    assert [point.value for point in found.Scalars(text)] == [1.5]

    def shown(name: str) -> str:
        (event,) = found.Tensors(f"{name}/text_summary")
        page = markdown_to_safe_html(event.tensor_proto.string_val[0].decode())
        block = re.fullmatch(r"<pre><code>([^<>]*)</code></pre>\s*", page)
        assert block is not None, page
        return html.unescape(block[1])

    assert tomli.loads(shown("recipe")) == {"x": text, "y": [text]}
    assert json.loads(shown("environment")) == {"host": text, "argv": [text]}


def test_loggers_get_utf8() -> None:
    """What is not UTF-8, such as an argument, is escaped for loggers; a metric's name is refused."""
    seen: list[Any] = []

    class Logger:
        def run_start(self, info: dict[str, Any]) -> None:
            seen.append(info)

    made = Observers([Logger()], device=torch.device("cpu"), log_freq=1, total_steps=1, info={"name": "x"})
    made.run_start({"attempts": [{"argv": ["a\udcff", "b"]}], "step": 0})
    assert seen == [{"name": "x", "attempts": [{"argv": ["a\\udcff", "b"]}], "step": 0}]
    for text in HOSTILE:
        assert utf8({text: [text]}) == {utf8(text): [utf8(text)]}
        utf8(text).encode()
    assert all(utf8(text) == text for text in UTF8)
    with pytest.raises(TitanError, match=r"dcff.*is not valid UTF-8"):
        report("a\udcff", 1.0)


PLUGINS = sorted({name.partition(".")[0] for name in MODULES if name.startswith("titan_")})


@pytest.mark.parametrize("package", PLUGINS)
def test_a_plugin_that_writes_has_its_rows(package: str) -> None:
    files = (ROOT / "plugins" / package.replace("_", "-") / "tests").glob("test_*_writers.py")
    checked = any(f'check_rows("{package}"' in file.read_text(encoding="utf-8") for file in files)
    assert checked or not writing(package), f"{writing(package)}: add a test with check_rows"
