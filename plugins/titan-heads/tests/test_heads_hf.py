"""Folders of transformers with a head, written and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.families import FAMILIES, Family
from titan_heads import Classification, Embedding, Reward
from titancli import TitanError
from titancli.checkpoint.format.tensors import MemoryTensors
from titancli.checkpoint.hf.compare import verdict
from titancli.checkpoint.hf.detect_model import hf_form, parameter_shapes
from titancli.checkpoint.hf.folder import export_hf, read_hf
from titancli.models.blocks.state import named_state

CLASSES = ["bad", "so-so", "good"]
LOSSES: dict[str, Any] = {
    "reward": Reward(pad_id=7),
    "classes": Classification(classes=CLASSES),
    "embedding": Embedding(),
}
WITHOUT = ("glm4_moe", "granite", "llama4")


def written(family: Family, variant: str, loss: Any, folder: Path) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Export a small model with a head; return its config, its form, what was written and config.json."""
    config = family.variant(variant)
    tensors = dict(named_state(family.model(variant)))
    form = loss.hf_form(hf_form(config), parameter_shapes(config))
    if not isinstance(loss, Embedding):
        count = 1 if isinstance(loss, Reward) else len(CLASSES)
        draw = torch.Generator().manual_seed(5)
        tensors["loss.score.weight"] = torch.randn(count, config.dim, generator=draw)
    export_hf(tensors, form, {}, folder)
    return config, form, MemoryTensors(tensors), json.loads((folder / "config.json").read_bytes())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_transformers_loads_a_head_and_says_the_same(family: Family, name: str, tmp_path: Path) -> None:
    variant = next(iter(family.variants))
    if name != "embedding" and family.name in WITHOUT:
        with pytest.raises(TitanError, match="no class of this kind for the model_type"):
            LOSSES[name].hf_form(hf_form(family.variant(variant)), {})
        return
    config, form, tensors, written_json = written(family, variant, LOSSES[name], tmp_path / "out")
    lines, good = verdict(config, tensors, tmp_path / "out", None, form)
    assert good, lines
    [found] = [float(line.split()[4]) for line in lines if line.startswith("largest")]
    assert found < 1e-4
    import transformers

    model = getattr(transformers, form.loader).from_pretrained(tmp_path / "out")
    assert written_json["architectures"] == [type(model).__name__]
    if name == "embedding":
        return
    assert type(model).__name__.endswith("ForSequenceClassification")
    assert torch.equal(model.score.weight, tensors.read("loss.score.weight"))
    if name == "reward":
        assert model.config.num_labels == 1 and model.config.get_text_config().pad_token_id == 7
    else:
        assert model.config.id2label == dict(enumerate(CLASSES))
        assert model.config.problem_type == "single_label_classification"


def test_a_comparison_sees_another_head_and_another_model(tmp_path: Path) -> None:
    family = FAMILIES[0]
    for name, changed in (("classes", "loss.score.weight"), ("embedding", "layers.1.attention.wq.weight")):
        config, form, tensors, _ = written(family, "grouped", LOSSES[name], tmp_path / name)
        assert verdict(config, tensors, tmp_path / name, None, form)[1]
        other = {key: tensors.read(key).clone() for key in tensors.names()}
        other[changed][0] += 0.1
        assert not verdict(config, MemoryTensors(other), tmp_path / name, None, form)[1]


@pytest.mark.parametrize("variant", ["grouped", "tied"])
def test_a_folder_with_a_head_is_read_again(variant: str, tmp_path: Path) -> None:
    for name in LOSSES:
        _, form, tensors, _ = written(FAMILIES[0], variant, LOSSES[name], tmp_path / name)
        shapes = {key: tuple(tensors.shape(key)) for key in tensors.names()}
        reader = read_hf(tmp_path / name, form)
        reader.check(shapes)
        for key in shapes:
            expected = tensors.read(key)
            if key.startswith("output."):
                expected = torch.zeros_like(expected)
            assert torch.equal(reader.parameter(key), expected), key


def test_ours_are_theirs_for_padded_rows_too(tmp_path: Path) -> None:
    _, _, tensors, _ = written(FAMILIES[0], "grouped", LOSSES["reward"], tmp_path / "out")
    from transformers import AutoModelForSequenceClassification

    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    rows = torch.randint(8, 128, (3, 9), generator=torch.Generator().manual_seed(0))
    lengths = [9, 5, 1]
    padded = torch.where(torch.arange(9) < torch.tensor(lengths)[:, None], rows, 7)
    ours = FAMILIES[0].model("grouped")
    ours.output = nn.Identity()
    ours.output.forward = lambda hidden, *rest: hidden  # type: ignore[method-assign]
    with torch.no_grad():
        hidden = torch.cat([ours(tokens=rows[i : i + 1, :n])[:, -1] for i, n in enumerate(lengths)])
        expected = hidden @ tensors.read("loss.score.weight").T
        found = theirs(input_ids=padded, attention_mask=(padded != 7).long()).logits
    assert (found - expected).abs().max() < 1e-5
