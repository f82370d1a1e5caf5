"""`training.epochs`: every row is used exactly that often, on any ranks, packed or not, and resumed."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ranks import Ranks
from tests.run.conftest import Finished, in_this_process, on_pool
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.observe.events import read_events
from titancli.optimizers.schedule import schedule_of
from titancli.process import Place
from titancli.recipe import load_recipe
from titancli.runs import RunFolder
from titancli.worker import epochs

PLUGIN = '''
import json
import torch.distributed as dist
from titancli import component, hookimpl

@component("callback", "note", target="noting:Noting")
class Note:
    """Notes the targets of each row."""

class Noting:
    def __init__(self, config, *, engine, run):
        self.engine, self.file = engine, open(run.folder / f"rows-{dist.get_rank()}.jsonl", "a")

    def around_backward(self, backward):
        for number, batch in enumerate(backward.batches):
            rows = [[t for t in row if t >= 0] for row in batch["targets"].tolist()]
            place = [self.engine.step + 1, number, dist.get_rank()]
            print(json.dumps([place, [row for row in rows if row]]), file=self.file, flush=True)

@hookimpl
def titan_components():
    return [Note]
'''
COUNT = 37
SIZES = (
    *("training.seq_len=64", "training.local_batch_size=2", "training.global_batch_size=8"),
    *("stability.sigma=0", "checkpoint.keep_latest_k=0", "checkpoint.interval=1"),
)
CHAT, TEXT = '{type="chat", path="chat.jsonl"}', '{type="jsonl", paths=["text.jsonl"]}'
FIT = ("dataset.packing=best_fit", "dataset.document_mask=true")
DATASETS = {
    "chat": (f"dataset={CHAT}",),
    "chat, one in a row": (f"dataset={CHAT}", "dataset.pack=false"),
    "chat, indexed": (f"dataset={CHAT}", "dataset.length_index=true"),
    "chat, by workers": (f"dataset={CHAT}", "dataset.length_index=true", "training.dataloader.num_workers=2"),
    "text": (f"dataset={TEXT}",),
    "text, shuffled": (f"dataset={TEXT}", "dataset.cache_tokens=true", "dataset.shuffle=true"),
    "text, best fit": (f"dataset={TEXT}", *FIT),
    "text, cached, best fit": (f"dataset={TEXT}", *FIT, "dataset.cache_tokens=true"),
    "pairs": ('dataset={type="preference", path="pairs.jsonl"}', "loop=dpo", "loss=dpo"),
}
NUMBERS = itertools.count()
Train = Callable[..., Finished]


@pytest.fixture(autouse=True)
def note(here: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The arguments of a run that notes its rows; each file of data has 37 rows with ids from 100 on."""
    monkeypatch.setenv("TITAN_CACHE", str(here / "cache"))
    rows = [(100 + n, "x" * (n * 7 % 23)) for n in range(COUNT)]
    says = lambda role, text: {"role": role, "content": text}  # noqa: E731
    chat = [[says("user", "q"), says("assistant", f"<{n}>{more}")] for n, more in rows]
    write(here / "chat.jsonl", [{"messages": messages} for messages in chat])
    write(here / "text.jsonl", [{"text": f"<{n}>{more}"} for n, more in rows])
    write(here / "pairs.jsonl", [{"prompt": "q", "chosen": f"<{n}>{m}", "rejected": "no"} for n, m in rows])
    module = f"noting_{next(NUMBERS)}"  # ranks that stand keep what they have imported
    (here / f"{module}.py").write_text(PLUGIN.replace("noting:", f"{module}:"))
    return ("tiny.toml", "-p", f"./{module}.py", 'callbacks=["note"]', *SIZES)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def seen(run: Path, last: int = 10**9) -> list[list[int]]:
    """The targets of each row that was trained on until a step, in the order of the data."""
    lines = [json.loads(line) for file in run.glob("rows-*") for line in file.read_text().splitlines()]
    return [row for place, rows in sorted(lines) for row in rows if place[0] <= last]


def ids(rows: list[list[int]]) -> Counter[str]:
    """How often each id was a target."""
    text = bytes(token for row in rows for token in row if token < 256).decode()
    return Counter(re.findall(r"(\d{3})>", text))


def each(times: int) -> Counter[str]:
    return Counter({str(100 + n): times for n in range(COUNT)})


def steps(run: Path) -> tuple[int, dict[str, float]]:
    """The number of steps that the run was to take, and the metrics of the last one."""
    last = [event for event in read_events(run / "events.jsonl") if event["event"] == "step"][-1]
    assert last["step"] == last["steps"]
    return last["steps"], last["metrics"]


@pytest.mark.parametrize("data", DATASETS)
def test_every_row_is_used_as_often_as_there_are_epochs(
    train: Train, here: Path, note: tuple[str, ...], data: str
) -> None:
    done = train(*note, *DATASETS[data], "training.epochs=2", "--run-dir", "r")
    assert done.code == 0, done.err
    count, metrics = steps(here / "r")
    assert ids(seen(here / "r")) == each(2)
    assert f"2 epochs in {count} steps" in done.err
    assert metrics["epoch"] == 2
    assert RunFolder(here / "r").outcome()["why"] == "finished"  # type: ignore[index]
    assert "training.steps" not in (here / "r/recipe.lock.toml").read_text()


@pytest.mark.ranks
@pytest.mark.parametrize("data", ["chat", "chat, one in a row", "text", "text, best fit", "pairs"])
def test_every_row_is_used_as_often_on_two_ranks_and_if_a_run_goes_on_on_another_number_of_them(
    train: Train, ranks: Ranks, here: Path, note: tuple[str, ...], data: str
) -> None:
    how = (*DATASETS[data], "training.epochs=2")
    done = train(*note, *how, "--run-dir", "two", *on_pool(ranks, 2))
    assert done.code == 0, done.err
    count, _ = steps(here / "two")
    assert ids(seen(here / "two")) == each(2)
    middle = count // 3
    for path in (here / "two/checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > middle:
            shutil.rmtree(path)
    before = seen(here / "two", middle)
    assert each(0) < ids(before) < each(2)
    for file in (here / "two").glob("rows-*"):
        file.unlink()
    done = train("two", *note[1:3], "-p", "./faulty.py", "launcher=local", "--resume")
    assert done.code == 0, done.err
    assert steps(here / "two")[0] == count
    assert ids(before + seen(here / "two")) == each(2)


def test_a_step_of_another_size_after_a_resume_changes_the_number_of_steps(
    train: Train, here: Path, note: tuple[str, ...]
) -> None:
    how = (*DATASETS["chat, one in a row"], "training.epochs=2", "--run-dir", "r")
    assert train(*note, *how).code == 0
    assert steps(here / "r")[0] == 10  # 74 rows, 8 in a step
    for number in range(4, 11):
        shutil.rmtree(here / f"r/checkpoints/step-{number}")
    before = seen(here / "r", 3)
    for file in (here / "r").glob("rows-*"):
        file.unlink()
    done = train("r", *note[1:3], "--resume", "training.global_batch_size=4", "lr_scheduler.warmup_steps=0")
    assert done.code == 0, done.err
    assert steps(here / "r")[0] == 3 + 13  # 50 rows, 4 in a step
    assert ids(before + seen(here / "r")) == each(2)


def test_more_epochs_after_the_end_use_the_following_rows(
    train: Train, here: Path, note: tuple[str, ...]
) -> None:
    """Rows that filled up the last step of an epoch are none of the next one's."""
    for data in ("chat", "text", "text, shuffled", "text, cached, best fit"):
        run = data.replace(" ", "-").replace(",", "")
        assert train(*note, *DATASETS[data], "training.epochs=1", "--run-dir", run).code == 0
        assert ids(seen(here / run)) == each(1)
        done = train(run, *note[1:3], "--resume", "training.epochs=2")
        assert done.code == 0, done.err
        assert ids(seen(here / run)) == each(2)
    assert train(run, *note[1:3], "--resume", "training.epochs=1").code == 0  # nothing is left to do
    assert ids(seen(here / run)) == each(2)


def test_a_finished_run_that_is_resumed_leaves_its_export(
    train: Train, here: Path, note: tuple[str, ...]
) -> None:
    """How many steps its epochs are is known only when its rows are counted."""
    how = (*DATASETS["chat, one in a row"], "training.epochs=1", "checkpoint.last_save_in_hf=true")
    done = train(*note, *how, "--run-dir", "r")
    assert done.code == 0 and re.search(r"Hugging Face folder: \S*/exports/step-5-hf\n", done.err), done.err
    again = train("r", *note[1:3], "--resume")
    assert again.code == 0 and "exports" not in again.err, again.err
    assert [path.name for path in (here / "r/exports").iterdir()] == ["step-5-hf"]


def test_a_part_of_an_epoch_is_rounded_up_to_whole_steps(
    train: Train, here: Path, note: tuple[str, ...]
) -> None:
    how = DATASETS["chat, one in a row"]
    assert train(*note, *how, "training.epochs=1.5", "--run-dir", "r").code == 0
    found = ids(seen(here / "r"))
    assert steps(here / "r")[0] == 7  # 55.5 rows, 8 in a step
    assert found.total() == 56 and set(found.values()) == {1, 2}


def test_the_schedule_ends_at_the_last_step(train: Train, here: Path, note: tuple[str, ...]) -> None:
    how = DATASETS["chat, one in a row"]
    assert train(*note, *how, "training.epochs=2", "--run-dir", "epochs").code == 0
    assert train(*note, *how, "training.steps=10", "--run-dir", "steps").code == 0
    rates = [
        [
            event["metrics"]["lr"]
            for event in read_events(here / run / "events.jsonl")
            if event["event"] == "step"
        ]
        for run in ("epochs", "steps")
    ]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 10


def test_what_is_said_of_the_data_is_said_once_and_one_is_no_plural(
    train: Train, here: Path, note: tuple[str, ...]
) -> None:
    once = ("training.epochs=1", "checkpoint.enable=false")
    chat = train(*note, 'dataset={type="chat", path="chat.jsonl"}', *once, "training.seq_len=4096").err
    assert chat.count("rows: messages") == 1
    assert "tokens per step, 1 epoch\n" in chat and "1 epoch in 1 step\n" in chat
    text = train(*note, 'dataset={type="jsonl", paths=["text.jsonl"], add_eos=false}', *once).err
    assert text.count("documents begin without BOS") == 1
    assert "(1 epoch) from" in train(*note, *DATASETS["chat"], *once, "--dry-run").out


def test_a_dry_run_says_steps_and_epochs(train: Train, note: tuple[str, ...]) -> None:
    how = DATASETS["chat, one in a row"]
    said = train(*note, *how, "training.epochs=2", "--dry-run").out
    assert "10 (2 epochs) from the start" in said
    plan = json.loads(train(*note, *how, "training.epochs=2", "--dry-run", "--json").out)["plan"]
    assert (plan["steps"], plan["epochs"], plan["tokens"]) == (10, 2, 10 * 8 * 64)
    missing = ('dataset={type="chat", path="nowhere.jsonl"}', "training.epochs=2")
    assert "as many as the missing data give (2 epochs)" in train(*note, *missing, "--dry-run").out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("training={steps=3, epochs=1.0}",), "in steps or in epochs, not in both"),
        (("training.epochs=0",), "epochs"),
        (("training.epochs=1e9",), "training.epochs must be at most 10000"),
        (("training.epochs=2", "dataset.repeat=false"), "the data end after one epoch"),
        (
            ("training.epochs=1", 'dataset={type="hf", path="a/b", streaming=true}'),
            "a stream has no known length",
        ),
        (
            ("training.epochs=1", f"dataset={{type='mix', datasets={{a={CHAT}}}, weights={{a=1.0}}}}"),
            "the datasets of a mix end at different times",
        ),
    ],
)
def test_what_has_no_epochs_is_refused_by_name(
    train: Train, note: tuple[str, ...], given: tuple[str, ...], said: str
) -> None:
    data = () if any("dataset={" in one for one in given) else DATASETS["chat"]
    done = train(*note, *data, *given)
    assert done.code == 3
    assert said in done.err


def test_a_recipe_without_a_length_is_told_both(here: Path, train: Train) -> None:
    done = train("tiny.toml", "--unset", "training.steps", "training.seq_len=32")
    assert done.code == 3
    assert "add to [training]: steps = …, or epochs = …" in done.err


def test_data_that_have_changed_are_refused_when_a_run_goes_on(
    train: Train, here: Path, note: tuple[str, ...]
) -> None:
    assert train(*note, *DATASETS["chat"], "training.epochs=2", "--run-dir", "r").code == 0
    shutil.copy(here / "pairs.jsonl", here / "other.jsonl")
    lines = (here / "chat.jsonl").read_text().splitlines(keepends=True)
    (here / "chat.jsonl").write_text("".join(lines[:-1]))
    done = train("r", *note[1:3], "--resume", "training.epochs=3")
    assert done.code != 0
    assert "is not the data that the checkpoint was trained on" in done.err
    assert train("r", *note[1:3], "--resume", "training.epochs=3", "--allow-drift").code == 0


def test_a_run_in_steps_of_chat_or_pairs_says_how_many_epochs_they_are(
    train: Train, note: tuple[str, ...]
) -> None:
    how = ("training.steps=2", "checkpoint.enable=false")
    assert ", 0.43 epochs of about 37 rows" in train(*note, *DATASETS["chat, one in a row"], *how).err
    assert (
        ", 0.43 epochs of 37 rows"
        in train(*note, *DATASETS["chat, one in a row"], "dataset.length_index=true", *how).err
    )
    assert ", 0.22 epochs of about 74 rows" in train(*note, *DATASETS["pairs"], *how).err


def test_what_looks_at_a_run_in_epochs_knows_its_length(
    train: Train, here: Path, note: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(*note, *DATASETS["chat"], "training.epochs=2", "--run-dir", "r").code == 0
    titan = in_this_process(capfd)
    held_out = f"validation.datasets={{held_out={CHAT}}}"
    assert titan("eval", "r", held_out, *note[1:3]).code == 0
    assert titan("generate", "r", "q", "--max-new-tokens", "1", *note[1:3]).code == 0
    count, _ = steps(here / "r")
    assert f"step {count}/{count}" in titan("runs", "show", "r").out
    again = titan("reproduce", "r", "--run-dir", "again", "--steps", str(count), *note[1:3])
    assert again.code == 0 and "bitwise equal" in again.out + again.err
    assert titan("reproduce", "r", "--run-dir", "part", "--steps", "3", *note[1:3]).code == 0


def test_ranks_that_count_different_rows_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Others(epochs.Ranks):
        def allgather_call(self, doing, function):  # type: ignore[no-untyped-def]
            return [8, None, 9, None]  # one rank of each of two machines counts

    monkeypatch.setattr(epochs, "Ranks", Others)
    recipe = load_recipe("llama3_debug", ["training.epochs=2"]).recipe
    context = SimpleNamespace(recipe=recipe, attempt={}, checkpoint=None, place=Place(0, 4))
    with pytest.raises(EnvironmentProblem, match="rank 0: 8, rank 2: 9"):
        epochs.with_steps(context)  # type: ignore[arg-type]


def test_a_script_is_told_that_an_engine_does_not_know_the_length() -> None:
    recipe = load_recipe("llama3_debug", ["training.epochs=2"]).recipe
    with pytest.raises(RecipeError, match="only a run counts the steps"):
        schedule_of(recipe)(0)
    longer = load_recipe("llama3_debug", ["training.epochs=2", "lr_scheduler.total_steps=9"]).recipe
    assert schedule_of(longer)(0) < schedule_of(longer)(8)
