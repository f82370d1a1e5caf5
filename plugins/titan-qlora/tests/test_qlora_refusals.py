"""What a recipe or a layout with a quantized base is refused for, and what the message says to do."""

from __future__ import annotations

import pytest
import torch
from qlora_cases import DENSE

from titan_qlora import QLoRA
from titan_qlora.converter import QuantisedBase
from titancli.errors import RecipeError
from titancli.recipe import load_recipe
from titancli.registry.component import build

GIVEN = ("converters=[{type='qlora'}]", "weights=./w")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("compile.enable=true",), "not compiled yet: remove compile.enable"),
        (("parallelize.cpu_offload=true",), "stays on the GPU: remove parallelize.cpu_offload"),
        (("converters=[{type='qlora'}, {type='qlora'}]",), "a second qlora converter: use a single one"),
        (("converters=[{type='lora'}, {type='qlora'}]",), r"remove the other converter \(LoRA\)"),
        (
            ("converters=[{type='float8_linear'}, {type='qlora'}]",),
            r"remove the other converter \(Float8Linear\)",
        ),
    ],
    ids=["compile", "cpu_offload", "two", "beside lora", "beside float8"],
)
def test_a_recipe_is_refused_by_name(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("llama3_debug", [*GIVEN, *overrides])


def converted(config: QLoRA, tp: int = 1) -> QuantisedBase:
    converter = QuantisedBase(config, tp)
    with torch.device("meta"):
        converter.convert(build(DENSE, seq_len=8))
    return converter


def test_tensor_parallelism_may_not_cut_a_block_and_skip_is_a_way_out() -> None:
    whole = converted(QLoRA(), tp=2)
    assert "layers.0.attention.wo.weight" in whole.quantised
    with pytest.raises(
        RecipeError, match=r"mesh.tp = 4 would cut through blocks of 64 values of layers\.0\."
    ) as said:
        converted(QLoRA(), tp=4)
    assert "use a mesh.tp that divides 2, or add it to skip" in str(said.value.hint)
    assert "layers.0.attention.wo.weight" not in converted(QLoRA(skip=["wo"]), tp=4).quantised


def test_a_skip_without_a_match_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match=r"skip = 'wo2' matches nothing that is quantized") as said:
        converted(QLoRA(skip=["wo2"]))
    assert "wo" in str(said.value.hint)


def test_a_model_whose_rows_are_no_blocks_is_refused() -> None:
    with pytest.raises(RecipeError, match="no layer of this model can be quantized"):
        converted(QLoRA(skip=["*"]))
