"""`titan plan --check`: what it prints, and what it exits with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from titancli.cli import main

INTERFACES = Path(__file__).parents[2] / "docs" / "interfaces.md"
SMALL = ["plan", "llama3_debug", "model.n_layers=2", "training.seq_len=64", "--gpu", "cpu"]
PIPELINE = ["mesh.pp=2", "mesh.dp_shard=2", "--world-size", "4"]

FAULTY = '''
from titancli import component, hookimpl

@component("loss", "broken", target="{module}:build")
class Broken:
    """A loss that fails."""

@hookimpl
def titan_components():
    return [Broken]

class Loss:
    output = "logprobs"

    def token_weights(self, batch):
        return {{}}["weights"]

    def __call__(self, out, batch):
        raise AssertionError

def build(config):
    return Loss()
'''


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*SMALL, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["check"]


def test_nothing_is_checked_unasked(capsys):
    assert checked(capsys) is None


def test_the_first_rank_of_every_stage_is_checked_and_its_keys_are_told(capsys):
    check = checked(capsys, *PIPELINE, "--check")
    assert [rank["rank"] for rank in check["ranks"]] == [0, 2]
    assert [rank["place"]["pp"] for rank in check["ranks"]] == [0, 1]
    told = set(re.findall(r"`check\.([\w\[\].]+)`", INTERFACES.read_text(encoding="utf-8")))
    found = {key for key in check if key != "ranks"} | {f"ranks[].{key}" for key in check["ranks"][0]}
    assert found == told


def test_what_is_computed_is_what_is_counted(capsys):
    for layout in (["--world-size", "1"], ["--world-size", "8", "mesh.tp=2"]):
        (rank,) = checked(capsys, *layout, "--check")["ranks"]
        assert rank["computed_peak_bytes"] == pytest.approx(rank["peak_bytes"], rel=0.03)


def test_a_rank_can_be_chosen(capsys):
    check = checked(capsys, "--world-size", "8", "mesh.tp=2", "--check-rank", "7", "--check-rank", "0")
    assert [rank["rank"] for rank in check["ranks"]] == [7, 0]
    assert main([*SMALL, "--world-size", "8", "--check-rank", "8"]) == 2
    assert "rank 8 does not exist among 8 ranks" in capsys.readouterr().err


def test_people_see_both_beside_each_other(capsys):
    assert main([*SMALL, *PIPELINE, "--check", "compile.enable=true"]) == 0
    text = capsys.readouterr().out
    assert "check: 2 of 4 ranks completed a step without errors" in text
    assert re.search(r"^  2 \(pp 1\)( +\d\.\d+ GiB){5}$", text, re.MULTILINE)
    assert text.endswith("not covered: compile\n")


def test_a_plugin_that_breaks_in_a_step_exits_with_4(tmp_path, capsys):
    plugin = tmp_path / "broken_loss.py"
    plugin.write_text(FAULTY.format(module="broken_loss"))
    code = main(["-p", str(plugin), *SMALL, "--world-size", "2", "loss=broken", "--check"])
    error = capsys.readouterr().err
    assert code == 4, error
    assert "rank 0 of 2: the loss broken" in error
    assert "broken_loss.py:16 in token_weights" in error and "KeyError" in error
