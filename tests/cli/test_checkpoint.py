"""titan checkpoint list, show, verify."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.tensors import rewritten, save
from tests.cli.conftest import Titan
from tests.cli.test_torch_free import HEAVY, probe


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of step 2 and, written later, of step 10."""
    for step in (2, 10):
        save(tmp_path / "run" / "checkpoints" / f"step-{step}", seed=step)
    return tmp_path / "run"


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_list_has_a_line_for_each_oldest_first(titan: Titan, run: Path) -> None:
    done = titan("checkpoint", "list", "run")
    assert done.code == 0
    first, second = done.out.splitlines()
    assert first.split()[:2] == ["step-2", "2"]
    assert second.split()[:2] == ["step-10", "10"]
    assert "1 rank " in first and first.endswith("good")
    assert "kB" in first or "bytes" in first


def test_list_says_what_is_wrong_by_names_and_sizes(titan: Titan, run: Path) -> None:
    (run / "checkpoints/step-2/metadata.json").unlink()
    (run / "checkpoints/step-10/manifest.json").write_text("{}")
    (run / "checkpoints/.step-11.tmp-0-0").mkdir()
    done = titan("checkpoint", "list", "run")
    assert done.code == 0
    first, second = done.out.splitlines()
    assert first.endswith("metadata.json is missing")
    assert second.startswith("step-10") and "manifest.json is damaged" in second


def test_a_folder_that_was_renamed_to_another_step_is_told(titan: Titan, run: Path) -> None:
    (run / "checkpoints/step-10").rename(run / "checkpoints/step-7777")
    words = "is named for step 7777, but its manifest.json says step 10"
    done = titan("checkpoint", "list", "run")
    assert done.code == 0 and words in done.out.splitlines()[1]
    for named in ("run", "run/checkpoints/step-7777"):
        done = titan("checkpoint", "verify", named)
        assert done.code == 5 and words in done.out + done.err


def test_a_run_without_checkpoints_has_none(titan: Titan, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    done = titan("checkpoint", "list", "run")
    assert (done.code, done.out, done.err) == (0, "", "run has no checkpoints\n")
    assert titan("checkpoint", "verify", "run").code == 5
    assert titan("checkpoint", "show", "run").code == 5


def test_show_tells_facts_and_every_tensor(titan: Titan, run: Path) -> None:
    done = titan("checkpoint", "show", "run")
    assert done.code == 0
    assert done.out.startswith(f"{run}/checkpoints/step-10\n")
    assert "by run      run-1" in done.out
    rows = {line.split()[0]: line for line in done.out.partition("\n\n")[2].splitlines()}
    assert rows["model.layers.0.weight"].split()[1:] == ["F32", "[6,", "4]", "96", "bytes", "1", "piece"]
    assert "BF16" in rows["model.norm.weight"]
    assert "0 pieces" in rows["model.nothing"]
    placed = titan("checkpoint", "show", "run", "--layout").out
    assert "at [0, 0]  rank-00000.safetensors" in placed


def test_show_does_not_believe_a_damaged_layout(titan: Titan, run: Path) -> None:
    _flip(run / "checkpoints/step-10/metadata.json")
    done = titan("checkpoint", "show", "run/checkpoints/step-10")
    assert done.code == 5
    assert "metadata.json is damaged" in done.err


def test_verify_reads_every_byte_and_exits_5(titan: Titan, run: Path) -> None:
    good = titan("checkpoint", "verify", "run", "run/checkpoints/step-2")
    assert good.code == 0
    assert [line.split()[0] for line in good.out.splitlines()] == ["good:"] * 3
    assert f"{run}/checkpoints/step-2 (5 files, " in good.out
    _flip(run / "checkpoints/step-10/rank-00000.safetensors")
    assert titan("checkpoint", "list", "run").out.count("good") == 2
    bad = titan("checkpoint", "verify", "run")
    assert bad.code == 5
    first, second = bad.out.splitlines()
    assert first.startswith("good: ")
    assert second == (
        f"bad:  {run}/checkpoints/step-10: rank-00000.safetensors is damaged: its checksum does not match"
    )


def test_what_was_set_aside_is_reported_and_does_not_count(titan: Titan, run: Path) -> None:
    aside = run / "checkpoints/step-2.unknown-0123abcd"
    shutil.copytree(run / "checkpoints/step-2", aside)
    _flip(aside / "recipe.lock.toml")
    done = titan("checkpoint", "verify", "run")
    assert done.code == 0
    first, *others = done.out.splitlines()
    assert first.startswith(f"set aside: {aside}: recipe.lock.toml is damaged")
    assert [line.split()[0] for line in others] == ["good:", "good:"]
    assert "set aside; " in titan("checkpoint", "list", "run").out
    assert titan("checkpoint", "verify", f"run/checkpoints/{aside.name}").code == 5
    stored = titan("checkpoint", "verify", f"file://{run}")
    assert stored.code == 0 and "set aside: " in stored.out, stored.err
    document = json.loads(titan("checkpoint", "verify", "run", "--json").out)
    assert document["ok"] and [one["set_aside"] for one in document["checkpoints"]] == [True, False, False]


def test_verify_notices_files_that_are_whole_but_contradict_each_other(titan: Titan, tmp_path: Path) -> None:
    """Every checksum is right, and the data files do not hold what metadata.json says."""
    step = tmp_path / "checkpoints" / "step-1"
    save(step)
    name = "metadata-00000.json.gz"
    table = json.loads(gzip.decompress((step / name).read_bytes()))
    (chunk,) = table["tensors"]["model.layers.0.weight"]
    chunk["start"] += 4
    rewritten(step, name, gzip.compress(json.dumps(table).encode()))
    done = titan("checkpoint", "verify", "checkpoints/step-1")
    assert done.code == 5
    assert "rank-00000.safetensors does not hold 'model.layers.0.weight' as F32 [6, 4] at byte " in done.out


def test_what_is_no_checkpoint_is_told(titan: Titan, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, words in (("empty", "neither a run nor a checkpoint"), ("step-3", "does not exist")):
        for verb in ("list", "show", "verify"):
            done = titan("checkpoint", verb, name)
            assert done.code == 5
            assert words in done.err


def test_documents_say_the_same(titan: Titan, run: Path) -> None:
    _flip(run / "checkpoints/step-2/recipe.lock.toml")
    done = titan("checkpoint", "verify", "run", "--json")
    document = json.loads(done.out)
    assert (done.code, document["schema"], document["ok"]) == (5, "titan.verification", False)
    first, second = document["checkpoints"]
    assert (first["step"], first["good"], second["good"]) == (2, False, True)
    assert first["faults"] == ["recipe.lock.toml is damaged: its checksum does not match"]
    shown = json.loads(titan("checkpoint", "show", "run", "--json").out)
    assert shown["checkpoint"]["state"] == {"seed": 10}
    [norm] = [tensor for tensor in shown["tensors"] if tensor["name"] == "model.norm.weight"]
    assert (norm["dtype"], norm["shape"], norm["bytes"]) == ("BF16", [5], 10)
    assert norm["chunks"] == [{"offsets": [0], "shape": [5], "file": "rank-00000.safetensors"}]


@pytest.mark.parametrize("verb", ["list", "show", "verify"])
def test_none_of_them_imports_torch(run: Path, verb: str) -> None:
    found = probe(run.parent, "checkpoint", verb, "run")
    assert found["code"] == 0
    assert not HEAVY & set(found["seen"])


def test_urls_are_looked_at_like_folders(titan: Titan, run: Path) -> None:
    url = f"file://{run}/checkpoints"
    for words in (["list", "{}"], ["show", "{}"], ["verify", "{}"]):
        here, there = (
            titan("checkpoint", *[word.format(at) for word in words])
            for at in (str(run / "checkpoints"), url)
        )
        assert (here.code, there.code) == (0, 0), there.err
        assert there.out.replace("file://", "") == here.out
    _flip(run / "checkpoints/step-10/rank-00000.safetensors")
    done = titan("checkpoint", "verify", f"{url}/step-10")
    assert done.code == 5
    assert done.out.startswith(f"bad:  {url}/step-10: rank-00000.safetensors is damaged")
    assert titan("checkpoint", "list", f"{url}/nothing").code == 5
