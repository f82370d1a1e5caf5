"""Hugging Face datasets: saved, local files, streams, and what cannot be had."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.data.helpers import global_rows, make, rows_of, stream
from titan_preference import Preference
from titan_rl import Prompts
from titancli.data import Chat, HFDataset
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.parallel import Decoder
from titancli.registry.component import build

TEXTS = [f"row {i} " * (i % 5) for i in range(150)]
"""Some are empty."""
LAYOUT = SimpleNamespace(
    parallelize=Decoder(),
    mesh=SimpleNamespace(cp=1, pp=1),
    training=SimpleNamespace(local_batch_size=2),
    pipeline=SimpleNamespace(microbatch_size=2),
)
"""What of a recipe the configs look at."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A folder with the texts in two files of JSON lines, which a sorted reading puts in order."""
    folder = tmp_path / "lines"
    folder.mkdir()
    for name, texts in (("a.jsonl", TEXTS[:70]), ("b.jsonl", TEXTS[70:])):
        (folder / name).write_text("".join(json.dumps({"text": t, "n": len(t)}) + "\n" for t in texts))
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The texts, saved by save_to_disk."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS, "n": [1] * len(TEXTS)}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def tokens_of(config: HFDataset) -> list[int]:
    """All tokens but the last, of a dataset that does not repeat."""
    dataset = make(config, seq_len=1, rows=1)
    return [t for row, _ in rows_of(list(dataset)) for t in row]


def test_saved_dataset_is_read_in_its_order(saved: Path) -> None:
    assert tokens_of(HFDataset(path=str(saved), repeat=False)) == stream(TEXTS)[:-1]


@pytest.mark.parametrize("streaming", [False, True])
def test_folder_of_json_lines_is_read_in_its_order(lines: Path, streaming: bool) -> None:
    config = HFDataset(path=str(lines), repeat=False, streaming=streaming)
    assert tokens_of(config) == stream(TEXTS)[:-1]


@pytest.mark.parametrize("streaming", [False, True])
def test_single_file_is_read_by_its_ending(lines: Path, streaming: bool) -> None:
    config = HFDataset(path=str(lines / "b.jsonl"), repeat=False, streaming=streaming)
    assert tokens_of(config) == stream(TEXTS[70:])[:-1]


def test_parquet_is_read_and_another_column_may_hold_the_text(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "parquet"
    folder.mkdir()
    datasets.Dataset.from_dict({"content": ["one", None, "three"]}).to_parquet(folder / "train.parquet")
    for streaming in (False, True):
        config = HFDataset(path=str(folder), text="content", repeat=False, streaming=streaming)
        assert tokens_of(config) == stream(["one", "three"])[:-1]


@pytest.mark.parametrize("options", [{"shuffle": True}, {}, {"streaming": True}])
def test_stopping_anywhere_and_going_on_with_other_ranks_changes_nothing(
    lines: Path, options: dict[str, Any]
) -> None:
    config = HFDataset(path=str(lines), **options)
    whole, last = global_rows(config, 400, dp_size=1, rows=1)
    assert last["epoch"] > 1, "the test must cross the end of an epoch"
    draw = random.Random(0)
    got: list[Any] = []
    state = None
    while len(got) < 400:
        dp_size, rows = draw.choice([1, 2]), draw.choice([1, 2, 4])
        part, state = global_rows(config, draw.randint(1, 30), dp_size=dp_size, rows=rows, state=state)
        state = json.loads(json.dumps(state))
        got += part
    assert got[:400] == whole


def test_shuffled_epochs_have_the_same_documents_in_another_order(saved: Path) -> None:
    size = len(stream(TEXTS))
    batches = iter(make(HFDataset(path=str(saved), shuffle=True), seq_len=1, rows=1))
    first, second = ([next(batches)["tokens"].item() for _ in range(size)] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == sorted(stream(TEXTS))


def test_resume_on_other_rows_is_refused(saved: Path, lines: Path, tmp_path: Path) -> None:
    state = make(HFDataset(path=str(saved))).state_dict()
    saved = saved.rename(tmp_path / "moved")
    make(HFDataset(path=str(saved))).load_state_dict(state)
    with pytest.raises(EnvironmentProblem, match="contents was"):
        make(HFDataset(path=str(lines))).load_state_dict(state)
    with pytest.raises(EnvironmentProblem, match="rows was 150 and is 80"):
        make(HFDataset(path=str(lines / "b.jsonl"))).load_state_dict(state)


def test_local_paths_are_stored_absolute_and_hub_names_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert HFDataset(path="./a/../b").path == str(tmp_path / "b")
    assert HFDataset(path="~/data").path == str(Path.home() / "data")
    assert HFDataset(path="allenai/c4").path == "allenai/c4"


def test_a_stream_is_neither_shuffled_nor_sliced() -> None:
    recipe: Any = None
    assert list(HFDataset(path="allenai/c4", streaming=True).check(recipe)) == []
    keys = [
        key for key, _ in HFDataset(path="x", streaming=True, shuffle=True, split="train[:5]").check(recipe)
    ]
    assert keys == ["shuffle", "split"]


def test_what_cannot_be_loaded_is_named_with_a_way_out(
    saved: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["x"]})}).save_to_disk(tmp_path / "d")
    (tmp_path / "x.docx").write_text("x")
    monkeypatch.chdir(tmp_path)
    for options, kind, said, hint in (
        ({"path": "./gone"}, EnvironmentProblem, "gone does not exist", "dataset.path"),
        ({"path": "lines"}, RecipeError, "could be a local folder or", "'./lines'"),
        ({"path": "text"}, RecipeError, "'text' is a reader of the datasets library", "'./data.jsonl'"),
        ({"path": "pandas"}, RecipeError, "'pandas' is a reader of the datasets library", "'./data.jsonl'"),
        ({"path": "./d"}, RecipeError, "no split 'train'", "test"),
        ({"path": str(saved), "split": "test"}, RecipeError, "no split 'test'", "one of: train"),
        (
            {"path": str(saved), "name": "en"},
            RecipeError,
            "name only applies to datasets on the Hub",
            "remove name",
        ),
        ({"path": str(saved), "streaming": True}, RecipeError, "save_to_disk", "streaming = false"),
        ({"path": str(saved), "text": "body"}, RecipeError, "no column 'body'", "text, n"),
        ({"path": str(saved), "text": "n"}, RecipeError, "column 'n' holds int", "dataset.text"),
        ({"path": str(lines), "streaming": True, "text": "b"}, RecipeError, "no column 'b'", "text"),
        ({"path": str(lines), "split": "dev"}, EnvironmentProblem, 'cannot be loaded: .*"dev"', "split"),
        (
            {"path": "./x.docx"},
            EnvironmentProblem,
            "files with the extension .docx are not supported",
            "text_files",
        ),
        ({"path": "no-such/dataset"}, EnvironmentProblem, "no-such/dataset cannot be loaded", "network"),
    ):
        with pytest.raises(kind, match=said) as error:
            next(iter(make(HFDataset(**options))))
        assert hint in (error.value.hint or "")


def test_a_stream_that_breaks_off_says_so(lines: Path) -> None:
    dataset = make(HFDataset(path=str(lines), streaming=True))
    (lines / "b.jsonl").write_text('{"text": "x"\n]')
    with pytest.raises(EnvironmentProblem, match="broke off"):
        for _ in dataset:
            pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str | None, list[str]]:
    """A dataset on a Hub of our own: its texts at each revision, which `datasets` is asked for as ever."""
    import datasets

    texts: dict[str | None, list[str]] = {None: ["of main"] * 9, "v1": ["of v1"] * 9, "v2": ["of v1"] * 9}

    def load_dataset(path: str, name: Any = None, *, revision: Any, split: str, streaming: bool) -> Any:
        assert (path, name, split) == ("some/corpus", None, "train")
        rows = datasets.Dataset.from_dict({"text": texts[revision]})
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return texts


@pytest.mark.parametrize("streaming", [False, True])
def test_the_revision_is_what_is_read_and_belongs_to_what_a_resume_compares(hub, streaming: bool) -> None:
    def config(revision: str | None) -> HFDataset:
        return HFDataset(path="some/corpus", revision=revision, streaming=streaming, repeat=False)

    for revision, texts in hub.items():
        assert tokens_of(config(revision)) == stream(texts)[:-1]
    state = make(config("v1")).state_dict()
    make(config("v1")).load_state_dict(state)
    for other in ("v2", None):  # v2 holds what v1 does: it is another revision all the same
        with pytest.raises(EnvironmentProblem, match=f"revision was v1 and is {other}"):
            make(config(other)).load_state_dict(state)


def test_conversations_are_read_at_their_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(path: str, name: str | None = None, *, revision=None, **options: Any) -> Any:
        talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"at {revision}"}]
        return datasets.Dataset.from_list([{"messages": talk}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    read = make(Chat(path="some/talks", revision="v1"), seq_len=64)
    assert b"at v1" in bytes(i for i in next(iter(read))["tokens"][0].tolist() if i < 256)
    other = make(Chat(path="some/talks", revision="v2"), seq_len=64)
    with pytest.raises(EnvironmentProblem, match="revision was v1 and is v2"):
        other.load_state_dict(read.state_dict())


@pytest.mark.parametrize("path", ["./here", "./rows.jsonl", "titan:sums"])
@pytest.mark.parametrize("key", ["name", "revision"])
def test_what_only_the_hub_has_is_refused_for_data_on_this_machine(
    saved: Path, lines: Path, path: str, key: str
) -> None:
    path = {"./here": str(saved), "./rows.jsonl": str(lines / "a.jsonl")}.get(path, path)
    configs: list[Any] = [Chat(path=path, **{key: "x"}), Preference(path=path, **{key: "x"})]
    if not path.startswith("titan:"):
        configs += [HFDataset(path=path, **{key: "x"}), Prompts(path=path, **{key: "x"})]
    for config in configs:
        assert key in dict(config.check(cast(Any, LAYOUT)))
        with pytest.raises(
            RecipeError, match=f"dataset.{key}: a {key} only applies to datasets on the Hub, not to "
        ):
            build(config, seed=0) if isinstance(config, Prompts) else make(config)
