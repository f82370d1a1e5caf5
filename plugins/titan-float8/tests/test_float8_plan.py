"""`titan plan` counts low precision: the rate of its products, and the memory of its operands."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from titancli.engine.dry_run import dry_run
from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import Estimate, as_data, estimate
from titancli.recipe import load_recipe

LLAMA = ("llama3_8b", "training.seq_len=4096", "compile.enable=true")
EXPERTS = ("qwen3_30b_a3b", "training.seq_len=4096", "compile.enable=true")
ROWS = ("training.local_batch_size=4", "training.global_batch_size=32")
ROW = ("training.local_batch_size=1", "training.global_batch_size=8")


@cache
def planned(device: str, base: tuple[str, ...], converter: str = "", world: int = 8) -> Estimate:
    name, *overrides = base
    converters = [f"converters=[{converter}]"] if converter else ["converters=[]"]
    recipe = load_recipe(name, [*overrides, *converters]).recipe
    found = estimate(recipe, recipe.degrees(world), DEVICES[device])
    assert found is not None
    assert as_data(recipe, recipe.degrees(world), DEVICES[device], found)["notes"] == []
    return found


def toml(name: str, **fields: Any) -> str:
    values = "".join(f", {key} = {json.dumps(value)}" for key, value in fields.items())
    return f"{{type = '{name}'{values}}}"


def flops(found: Estimate) -> dict[int, float]:
    """Return the products of one block of each kind, by the bits of their operands."""
    sums: dict[int, float] = {}
    for part, piece in found.work.measured().pieces.items():
        for one in piece.operators if isinstance(part, int) else ():
            if one.flops:
                sums[one.bits] = sums.get(one.bits, 0.0) + one.flops
    return sums


def test_rates_are_those_of_data_sheets() -> None:
    assert DEVICES["H100"].peak(8) == 1979e12 and DEVICES["H100"].peak(16) == 989e12
    assert DEVICES["B200"].peak(4) == 9000e12 and DEVICES["B200"].peak(8) == 4500e12
    assert DEVICES["A100"].peak(8) == DEVICES["A100"].peak(4) == DEVICES["A100"].flops
    assert DEVICES["cpu"].peak(8) is None


@pytest.mark.parametrize(
    ("device", "base", "converter", "bits"),
    [
        ("H100", LLAMA, toml("float8_linear", skip=["output"]), 8),
        ("H100", LLAMA, toml("float8_linear", recipe="rowwise", skip=["output"]), 8),
        ("H100", (*EXPERTS, *ROWS), toml("float8_experts"), 8),
        ("H100", (*EXPERTS, *ROW), toml("float8_experts"), 8),
        ("B200", LLAMA, toml("mxfp8_linear", skip=["output"]), 8),
        ("B200", (*EXPERTS, *ROWS), toml("mxfp8_experts"), 8),
        ("B200", LLAMA, toml("nvfp4_linear", skip=["output"]), 4),
    ],
    ids=["tensorwise", "rowwise", "float8 experts", "one row", "MXFP8", "MXFP8 experts", "NVFP4"],
)
def test_products_run_at_the_rate_of_their_operands(
    device: str, base: tuple[str, ...], converter: str, bits: int
) -> None:
    plain, low = planned(device, base), planned(device, base, converter)
    assert set(flops(plain)) == {16} and set(flops(low)) == {16, bits}
    assert sum(flops(low).values()) == pytest.approx(sum(flops(plain).values()), rel=1e-2)
    assert flops(low)[bits] > 0.4 * sum(flops(low).values())
    assert plain.speed is not None and low.speed is not None
    assert 1.03 < plain.speed.step / low.speed.step < 16 / bits
    assert low.worst.parameters == plain.worst.parameters
    # Operands are kept in bf16, and cast one product at a time.
    assert 0.98 < low.worst.total / plain.worst.total < 1.1


def test_gradients_of_weights_in_bf16_are_counted_as_such() -> None:
    whole = planned("B200", LLAMA, toml("mxfp8_linear", skip=["output"]))
    part = planned("B200", LLAMA, toml("mxfp8_linear", skip=["output"], wgrad_with_hp=True))
    assert flops(part)[8] == pytest.approx(flops(whole)[8] * 2 / 3)


def test_with_few_tokens_casts_take_most_of_what_products_of_experts_save() -> None:
    few = (*EXPERTS, *ROW, "training.seq_len=256")
    plain, low = planned("H100", few).speed, planned("H100", few, toml("float8_experts")).speed
    assert plain is not None and low is not None
    assert 1 <= plain.step / low.step < 1.01


def test_where_the_device_lacks_it_emulation_is_planned() -> None:
    """In bf16, with the casts in addition."""
    plain, low = planned("A100", LLAMA), planned("A100", LLAMA, toml("float8_linear", skip=["output"]))
    assert set(flops(low)) == {16}
    assert plain.speed is not None and low.speed is not None
    assert low.speed.step > plain.speed.step
    asked = planned("B200", LLAMA, toml("mxfp8_linear", skip=["output"], emulate=True))
    assert set(flops(asked)) == {16}


@pytest.mark.parametrize("name", ["mxfp8_linear", "nvfp4_linear", "float8_linear"])
def test_memory_is_that_of_a_dry_run(name: str) -> None:
    small = ["model.n_layers=2", "model.vocab_size=256", "training.seq_len=512", "compile.enable=false"]
    skip = toml(name, skip=["output"])
    recipe = load_recipe("llama3_debug", [*small, f"converters=[{skip}]"]).recipe
    found = estimate(recipe, recipe.degrees(1), DEVICES["cpu"])
    (real,) = dry_run(recipe, 1).ranks
    assert found is not None
    assert found.worst.total == pytest.approx(real.peak_bytes, rel=0.05)
