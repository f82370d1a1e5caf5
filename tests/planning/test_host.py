"""What waits in the host's memory, and the time that its way takes, in a plan."""

from __future__ import annotations

from typing import Any

import pytest

from titan_offload import ActivationOffload
from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import Estimate, as_data, estimate
from titancli.planning.host import Host
from titancli.planning.text import as_text
from titancli.recipe import load_recipe

OFFLOAD = 'callbacks=[{type="activation_offload"}]'
FULL = "activation_checkpoint.mode=full"
PARAMETERS = 8_030_261_248


def plan_of(*settings: str, gpu: str = "H100", name: str = "llama3_8b") -> tuple[Estimate, dict[str, Any]]:
    recipe = load_recipe(name, settings).recipe
    found = estimate(recipe, recipe.degrees(8), DEVICES[gpu])
    assert found is not None
    document = as_data(recipe, recipe.degrees(8), DEVICES[gpu], found)
    return found, document | {"verdict": {"fits": None}}


def test_nothing_on_the_host_is_no_line() -> None:
    found, document = plan_of()
    assert document["host"] is None and found.speed is not None and found.speed.host == 0
    assert "\nhost " not in as_text(document)


def test_inputs_of_blocks_are_what_full_recomputation_moves() -> None:
    """Of 31 of 32 blocks, 8192 tokens of 4096 numbers in bf16."""
    kept, _ = plan_of(FULL)
    found, document = plan_of(FULL, OFFLOAD)
    block = 8192 * 4096 * 2
    host = document["host"]
    assert host["bytes"] == host["to_host_bytes"] == host["to_device_bytes"] == 31 * block
    assert host["seconds"] == pytest.approx(31 * block / 64e9)
    assert host["exposed_seconds"] == 0  # hidden by the arithmetic of 8192 tokens
    assert found.worst.total < kept.worst.total
    assert found.speed is not None and kept.speed is not None
    assert found.speed.step == kept.speed.step
    text = as_text(document)
    assert "host          1.94 GiB per rank in the host's memory" in text
    ways = "1.94 GiB to the device, 1.94 GiB back per step"
    assert f"{ways}: 0.0325 s, 0.0325 s of them overlap with compute" in text


def test_copies_that_take_longer_than_a_pass_are_in_the_speed() -> None:
    """Everything that blocks keep: more than PCIe 4.0 takes while they compute."""
    kept, _ = plan_of("activation_checkpoint.mode=none", gpu="A100")
    found, document = plan_of("activation_checkpoint.mode=none", OFFLOAD, gpu="A100")
    slow, fast = found.speed, kept.speed
    assert slow is not None and fast is not None
    assert document["host"]["exposed_seconds"] == slow.host >= 0
    added = slow.arithmetic + slow.host - max(slow.arithmetic, slow.beside)
    assert slow.step == pytest.approx(fast.step + max(0.0, added))
    assert found.worst.total < kept.worst.total


def test_offloaded_parameters_are_counted_on_the_host_and_travel_for_each_pass() -> None:
    found, document = plan_of("parallelize.cpu_offload=true", "training.global_batch_size=16")
    host, own = document["host"], PARAMETERS / 8
    assert host["bytes"] == pytest.approx(own * (4 + 4 + 4), rel=1e-3)  # fp32, gradients, bf16 moments
    assert host["to_host_bytes"] == pytest.approx(own * 4 * 2, rel=1e-3)  # gradients of two micro-batches
    last = 128256 * 4096 + 4096  # gathered once in a pass
    assert host["to_device_bytes"] == pytest.approx((2 * PARAMETERS - last) / 8 * 4 * 2, rel=1e-3)
    assert found.speed is not None and found.speed.optimizer == 0
    assert any("the optimizer steps on the CPU" in note for note in document["notes"])


def test_what_the_link_makes_unknown_is_not_guessed() -> None:
    _, document = plan_of(FULL, OFFLOAD, gpu="cpu")
    assert document["host"] is None  # its memory is the host's


def test_both_ways_at_once_and_each_pass_by_itself() -> None:
    there = Host(1.0, (10.0, 30.0), (40.0, 5.0))
    assert there.exposed(10.0, 1.0, 5.0) == 2.0  # 3 s beside 1 s; 4 s beside 5 s


def test_a_pipeline_has_those_of_all_its_micro_batches() -> None:
    settings = ("mesh.pp=2", "training.local_batch_size=4", FULL)
    kept, _ = plan_of(*settings)
    found, document = plan_of(*settings, OFFLOAD)
    assert document["host"]["bytes"] == 2 * 16 * 8192 * 4096 * 2  # the first stage: two of 1F1B
    assert found.worst.total < kept.worst.total


def test_a_config_says_it_and_no_other_does() -> None:
    assert ActivationOffload.offloads_activations
    assert not any(one.offloads_activations for one in load_recipe("llama3_8b").recipe.callbacks)


def test_the_bound_of_mfu_is_no_more_than_all() -> None:
    """By convention it counts scores that causal attention skips, of which long rows have many."""
    _, document = plan_of("parallelize.cpu_offload=true", gpu="H200")
    assert 0.9 < document["speed"]["mfu"] <= 1
    _, long = plan_of("training.seq_len=131072", "mesh.cp=8", gpu="H200")
    assert long["speed"]["mfu"] == 1 and "100% MFU" in as_text(long)
