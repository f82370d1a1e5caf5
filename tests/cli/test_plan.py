"""`titan plan`: figures that belong together, a verdict, errors at the recipe's lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Titan
from tests.cli.test_torch_free import HEAVY, probe

BIG = ("llama3_8b", "--world-size", "8", "--gpu", "H100")


UNITS = 900
"""Of CPU time (`tests.yardstick`): three times what it takes, a third of it for torch."""


def told(titan: Titan, *arguments: str) -> dict:
    done = titan("plan", *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["llama3_405b", "--world-size", "512"],
        ["llama3_405b", "--world-size", "64"],
        ["llama3_8b", "--gpu", "cpu"],
    ],
    ids=" ".join,
)
def test_planning_is_quick(tmp_path: Path, arguments: list[str]) -> None:
    found = probe(tmp_path, "plan", *arguments)
    assert found["code"] == 0
    assert found["units"] < UNITS


def test_an_error_in_the_layout_does_not_wait_for_torch(tmp_path: Path) -> None:
    found = probe(tmp_path, "plan", "llama3_8b", "--world-size", "6", "mesh.tp=4")
    assert found["code"] == 3 and not (HEAVY - {"rich"}) & set(found["seen"])


def test_the_parts_make_the_whole(titan: Titan) -> None:
    document = told(titan, *BIG)
    memory, speed = document["memory"], document["speed"]
    assert sum(memory["classes"].values()) == pytest.approx(memory["peak_bytes"], abs=8)
    assert document["parameters"] == {"model": 8_030_261_248, "rank": 1_003_782_656}
    assert document["compute"]["flops_per_token"] == pytest.approx(5.791e10, rel=1e-3)
    assert document["verdict"] == {"fits": True, "change": None, "ranks": None}
    assert speed["step"] >= speed["arithmetic"] > 0
    assert speed["tokens_per_second"] * speed["step"] == pytest.approx(8192)


def test_copies_in_the_memory_of_nodes_are_counted(titan: Titan) -> None:
    """Two of a node's own state and two of its neighbour's: weights and two moments, in float32."""
    copied = ("llama3_70b", "--world-size", "64", "checkpoint.copies=peers")
    found = told(titan, *copied)
    state = 12 * found["parameters"]["model"]
    assert found["copies"] == {"nodes": 8, "bytes_per_node": 4 * state // 8}
    assert "copies        394.25 GiB in the memory of each of 8 nodes" in titan("plan", *copied).out
    alone = told(titan, "llama3_70b", "--world-size", "8", "checkpoint.copies=peers")
    assert alone["copies"] == {"nodes": 1, "bytes_per_node": 2 * state}
    assert told(titan, "llama3_70b", "--world-size", "64")["copies"] is None


def test_what_fsdp_sends_is_what_it_must(titan: Titan) -> None:
    sent = {one["name"]: one for one in told(titan, *BIG)["collectives"]}
    block, ends = 218_112_000, 2 * 128256 * 4096 + 4096
    gathered = 2 * (32 * block + 128256 * 4096) + (ends - 128256 * 4096)  # the last group once
    assert sent["all-gather"]["bytes"] == pytest.approx(7 / 8 * 2 * gathered, rel=1e-6)
    assert sent["reduce-scatter"]["bytes"] == pytest.approx(7 / 8 * 4 * (32 * block + ends), rel=1e-6)
    assert {one["link"] for one in sent.values()} == {"node"}
    assert {one["link"] for one in told(titan, "llama3_8b", "--world-size", "16")["collectives"]} == {
        "network"
    }


def test_every_kind_of_collective_is_told(titan: Titan) -> None:
    overrides = ("mesh.pp=2", "mesh.dp_replicate=2", "mesh.cp=2", "mesh.tp=2", "training.local_batch_size=4")
    found = told(titan, "llama3_8b", "--world-size", "32", *overrides)
    assert {one["over"] for one in found["collectives"]} == {"fsdp", "dp_replicate", "cp", "tp", "pp"}
    assert found["pipeline"] == {
        "schedule": "1F1B",
        "stages": 2,
        "microbatches": 4,
        "bubble": pytest.approx(1 / 5),
    }
    assert len(found["memory"]["ranks"]) == 2


def test_what_does_not_fit_gets_the_change_that_costs_least(titan: Titan) -> None:
    change = told(titan, *BIG, "training.local_batch_size=8")["verdict"]["change"]
    again = told(titan, *BIG, "training.local_batch_size=8", *change["overrides"])
    assert again["verdict"]["fits"]
    assert again["memory"]["peak_bytes"] == change["peak_bytes"] <= again["memory"]["limit_bytes"]
    assert again["speed"]["tokens_per_second"] == pytest.approx(change["tokens_per_second"])
    dearer = told(titan, *BIG, "training.local_batch_size=8", "activation_checkpoint.mode=full")
    assert dearer["speed"]["tokens_per_second"] <= change["tokens_per_second"]


def test_what_no_change_makes_fit_is_told_how_many_ranks_it_needs(titan: Titan) -> None:
    verdict = told(titan, "llama3_70b", "--world-size", "1", "--gpu", "A100")["verdict"]
    assert (verdict["fits"], verdict["change"], verdict["ranks"]) == (False, None, 32)
    arguments = ("llama3_70b", "--gpu", "A100", "--world-size")
    assert told(titan, *arguments, "32")["verdict"]["fits"]
    assert not told(titan, *arguments, "16")["verdict"]["fits"]


def test_ranks_that_nothing_sets_are_said_first(titan: Titan) -> None:
    first = "ranks         8, a node of 8: neither --world-size nor [mesh] says how many"
    assert titan("plan", "llama3_debug").out.splitlines()[0] == first
    for sets in (["--world-size", "8"], ["mesh.dp_shard=8"], ["--gpu", "cpu"]):
        assert titan("plan", "llama3_debug", *sets).out.startswith("model "), sets


def test_text_draws_the_mesh_and_says_the_verdict(titan: Titan) -> None:
    text = titan(
        "plan", "llama3_405b", "mesh.tp=8", "mesh.pp=8", "training.local_batch_size=16", "--world-size", "512"
    ).out
    assert "512 x H100: pp 8 x dp_shard 8 x tp 8" in text
    assert "pp 0, dp_shard 1" in text and "[504 505 506 507 508 509 510 511] tp" in text
    assert "micro-batches per step; a rank waits" in text
    assert "verdict       fits" in text


def test_ranks_are_those_of_the_mesh_where_none_are_given(titan: Titan) -> None:
    assert told(titan, "llama3_8b")["world"] == 8
    assert told(titan, "llama3_8b", "mesh.tp=16", "model.n_kv_heads=16")["world"] == 16
    assert told(titan, "llama3_8b", "mesh.dp_shard=4")["world"] == 4
    assert told(titan, "llama3_debug", "--gpu", "cpu")["world"] == 1


def test_nothing_is_guessed_of_a_cpu(titan: Titan) -> None:
    document = told(titan, "llama3_debug", "--gpu", "cpu")
    assert document["speed"] is None
    assert document["verdict"]["fits"] is None
    assert document["memory"]["limit_bytes"] is None
    assert "not estimated" in titan("plan", "llama3_debug", "--gpu", "cpu").out


def test_a_model_of_a_plugin_is_planned_as_it_is(titan: Titan, tmp_path: Path) -> None:
    """Its config says nothing of its sizes."""
    (tmp_path / "cli_nano.py").write_text(
        "from titancli import component, hookimpl\n\n\n"
        '@component("model", "nano", target="cli_nano:build")\n'
        "class Nano:\n"
        '    """A model of somebody else\'s."""\n\n    n_layers: int = 2\n\n\n'
        "def build(config, *, seq_len):\n"
        "    from titancli.models.blocks import decoder\n"
        "    from titancli.models.llama3 import Llama3\n\n"
        "    sizes = {'dim': 64, 'hidden_dim': 128, 'n_heads': 4, 'vocab_size': 512}\n"
        "    return decoder.build(Llama3(n_layers=config.n_layers, **sizes), seq_len=seq_len)\n\n\n"
        "@hookimpl\ndef titan_components():\n    return [Nano]\n"
    )
    arguments = ("llama3_debug", "model=nano", "--world-size", "4", "-p", str(tmp_path / "cli_nano.py"))
    document = told(titan, *arguments)
    assert document["memory"]["peak_bytes"] > document["parameters"]["rank"] * 16
    assert document["parameters"]["model"] == pytest.approx(4 * document["parameters"]["rank"], rel=0.01)
    assert document["mesh"]["dp_shard"] == 4 and document["notes"] == []
    text = titan("plan", *arguments).out
    assert "4 x H100: dp_shard 4" in text and "fits" in text


def test_what_is_taken_for_granted_is_told(titan: Titan) -> None:
    notes = told(titan, "llama3_debug", 'converters=[{type="neftune"}]', "--world-size", "8")["notes"]
    assert any("neftune" in note for note in notes)
    assert told(titan, "llama3_8b")["notes"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("llama3_8b", "mesh.tp=3"), 3, "mesh.tp = 3 does not divide"),
        (("llama3_8b", "mesh.dp_shard=3", "--world-size", "8"), 3, "does not make 8 ranks"),
        (("llama3_8b", "mesh.pp=2"), 3, "needs at least 2 micro-batches"),
        (("llama3_8b", "llama3_70b"), 2, "plan takes one recipe, not 2"),
        (("llama3_8b", "--world-size", "0"), 2, "x>=1"),
        (("llama3_8b", "--gpu", "H1000"), 2, "H1000"),
        (("no_such_recipe",), 3, "no_such_recipe"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_planned(titan: Titan, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = titan("plan", *arguments)
    assert (done.code, said in done.err, done.out) == (code, True, "")


def test_all_that_is_wrong_on_these_ranks_is_told_at_once(titan: Titan) -> None:
    done = titan(
        "plan", "llama3_8b", "mesh.dp_shard=-1", "training.global_batch_size=12", "--world-size", "8"
    )
    assert done.code == 3 and "global_batch_size = 12" in done.err
    done = titan("plan", "llama3_8b", "mesh.tp=-1", "mesh.dp_shard=1", "mesh.cp=1", "--world-size", "48")
    assert done.code == 3 and "n_heads 32" in done.err and "n_kv_heads 8" in done.err
