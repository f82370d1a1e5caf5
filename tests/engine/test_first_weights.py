"""Folders of weights that a run cannot begin from are told by name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engine.cases import Layout, recipe
from tests.ranks.layouts import MIXTRAL
from titan_testing.behaviour.engines import weights
from titancli.checkpoint.hf.config_match import refuse_other_model
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.checkpoint.start_from import start_from
from titancli.distributed.together import Ranks
from titancli.engine import Engine
from titancli.engine.first_weights import _same_on_all, load_weights
from titancli.errors import EnvironmentProblem, RecipeError, TitanError
from titancli.models.blocks.hf import DecoderHF


@pytest.mark.parametrize(
    ("config", "form", "kind", "words"),
    [
        (None, DecoderHF, EnvironmentProblem, "is neither a Hugging Face folder"),
        ('{"model_type": "lla', DecoderHF, EnvironmentProblem, "config.json is damaged, or has no"),
        ("[]", DecoderHF, EnvironmentProblem, "config.json is damaged, or has no model_type"),
        (
            '{"model_type": "gpt2"}',
            DecoderHF,
            EnvironmentProblem,
            "holds a 'gpt2' model, but this .* 'llama' model",
        ),
        ('{"model_type": "llama"}', None, RecipeError, "cannot be read from a Hugging Face folder"),
    ],
)
def test_what_cannot_be_begun_from_is_told(
    tmp_path: Path, config: str | None, form: Any, kind: type[TitanError], words: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    made = dataclasses.replace(recipe(Layout()), weights=tmp_path)
    with pytest.raises(kind, match=words) as caught:
        load_weights(made, start_from(made), form and form(made.model), {}, [], None)
    assert caught.value.hint


def test_weights_of_another_rotary_base_are_refused_unless_it_is_meant(tmp_path: Path) -> None:
    own = recipe(Layout())
    form = DecoderHF(own.model)
    (tmp_path / "config.json").write_text(json.dumps({**form.config_json(), "rope_theta": 1e7}))
    made = dataclasses.replace(own, weights=tmp_path)
    with pytest.raises(EnvironmentProblem, match=r"rope_theta is .* in the recipe and 10000000.0 there"):
        load_weights(made, start_from(made), form, {}, [], None)
    meant = dataclasses.replace(own.checkpoint, model_differs=["rope_theta"])
    refuse_other_model(dataclasses.replace(made, checkpoint=meant), tmp_path)


def begun(mesh: dict[str, int]) -> dict[str, bytes]:
    """A model's initial values, of this rank's pipeline stage, whole."""
    with Engine.build(recipe(Layout(mesh, config=MIXTRAL))) as engine:
        return {name: whole.numpy().tobytes() for name, whole in weights(engine).items()}


@pytest.mark.ranks
def test_initial_values_are_the_same_bits_on_every_layout(ranks: Any) -> None:
    (expected,) = ranks(1, begun, {})
    for mesh in ({"dp_shard": 2, "tp": 2}, {"dp_shard": 4, "ep": 2}, {"pp": 2, "dp_shard": 2, "ep": 2}):
        found = ranks(4, begun, mesh)
        assert set().union(*found) == set(expected), mesh
        for one in found:
            assert one == {name: expected[name] for name in one}, mesh


def test_ranks_that_see_different_folders_are_refused(tmp_path: Path) -> None:
    _same_on_all(tmp_path, ["a", "a"])
    with pytest.raises(EnvironmentProblem, match=r"rank 2 sees another .* than rank 0") as caught:
        _same_on_all(tmp_path, ["a", "a", "b"])
    assert caught.value.hint


def refused(path: str) -> list[str]:
    """What a rank says whose copy of the folder is its own, and then what both have gathered."""
    rank = dist.get_rank()
    made = dataclasses.replace(recipe(Layout()), weights=Path(path) / str(rank))
    with pytest.raises(EnvironmentProblem) as caught:
        load_weights(made, start_from(made), DecoderHF(made.model), {}, [], None)
    return [caught.value.message, *Ranks().allgather_call("gathering", lambda: str(rank))]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"config.json": "OWN"}, {}, " is neither a Hugging Face folder"),
        ({"config.json": "OWN"}, {"config.json": '{"model_type": "gpt2"}'}, " holds a 'gpt2' model"),
        ({"config.json": "OWN"}, {"manifest.json": ""}, "/manifest.json is damaged"),
    ],
)
def test_a_folder_that_one_rank_cannot_use_is_an_error_on_all_ranks(
    ranks: Any, tmp_path: Path, first: dict[str, str], second: dict[str, str], words: str
) -> None:
    own = json.dumps(hf_form(recipe(Layout()).model).config_json())
    for rank, files in enumerate((first, second)):
        (tmp_path / str(rank)).mkdir()
        for name, text in files.items():
            (tmp_path / str(rank) / name).write_text(text.replace("OWN", own))
    said = ranks(2, refused, str(tmp_path))
    assert said[0] == said[1] and said[0][1:] == ["0", "1"]
    assert f"{tmp_path}/1{words}" in said[0][0]


def beside(path: str) -> list[Any]:
    """The same, of what lies beside the weights; and whether an engine that has refused it loads another."""
    rank = dist.get_rank()
    engine = Engine.build(recipe(Layout({"dp_shard": 2})))
    engine.save(Path(path) / "step-0")
    dist.barrier()
    own = Path(path) / str(rank) / "step-0"
    shutil.copytree(Path(path) / "step-0", own)
    if rank == 1:
        (own / "hf-config.json").write_text("{")
    made = dataclasses.replace(recipe(Layout({"dp_shard": 2})), weights=own)
    said = []
    for load in (lambda: load_weights(made, start_from(made), None, {}, [], None), lambda: engine.load(own)):
        with pytest.raises(EnvironmentProblem) as caught:
            load()
        said.append(caught.value.message)
    leaves_out = dataclasses.replace(made.checkpoint, exclude_from_loading=["optimizer"])
    made = dataclasses.replace(made, checkpoint=leaves_out)
    (own / "hf-config.json").unlink(missing_ok=True)
    (own / "recipe.lock.toml").unlink(missing_ok=True)
    if rank == 1:
        (own / "recipe.lock.toml").mkdir()
    with pytest.raises(EnvironmentProblem) as caught:
        load_weights(made, start_from(made), None, {}, [], None)
    said.append(caught.value.message)
    engine.load(Path(path) / "step-0")
    engine.close()
    return said


@pytest.mark.ranks
def test_what_one_rank_cannot_read_beside_the_weights_is_an_error_on_all_ranks(
    ranks: Any, tmp_path: Path
) -> None:
    first, second = ranks(2, beside, str(tmp_path))
    assert first == second
    assert all(f"{tmp_path}/1/step-0/hf-config.json is damaged" in message for message in first[:2])
    assert f"checkpoint {tmp_path}/1/step-0 is damaged: recipe.lock.toml cannot be read" in first[2]


def test_a_quantized_folder_is_the_same_model_and_one_that_is_not_read_is_refused(tmp_path: Path) -> None:
    own = recipe(Layout())
    keys = hf_form(own.model).config_json()
    how: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**keys, "quantization_config": how}))
    refuse_other_model(own, tmp_path)
    how["quant_method"] = "awq"
    (tmp_path / "config.json").write_text(json.dumps({**keys, "quantization_config": how}))
    with pytest.raises(EnvironmentProblem, match="quantized with 'awq'; read are fp8"):
        refuse_other_model(own, tmp_path)
