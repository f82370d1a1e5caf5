"""A vocabulary that grows: new rows are the mean of the folder's, on every layout, tied or not."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.cases import Layout, recipe, small, whole_batch
from titan_testing.behaviour.engines import weights
from titancli.checkpoint.base import open_weights
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.checkpoint.hf.folder import export_hf
from titancli.checkpoint.hf.grown import Grown, grown_form
from titancli.checkpoint.hf.load import load_hf_weights
from titancli.converters import LoRA
from titancli.engine import Engine
from titancli.errors import EnvironmentProblem
from titancli.registry.component import build

ROWS = 59
"""Of the folder; the models have 64, which two ranks share, or 63, which they do not."""
LAYOUTS: tuple[dict[str, int], ...] = ({"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"pp": 2})


def model_of(rows: int, tied: bool) -> Any:
    return dataclasses.replace(recipe(small(tied=tied)).model, vocab_size=rows)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders that transformers has written, tied and not, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = {}
    for tied in (False, True):
        torch.manual_seed(3)
        keys = hf_form(model_of(ROWS, tied)).config_json()
        config = AutoConfig.for_model(**{k: v for k, v in keys.items() if k != "architectures"})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        made[tied] = tmp_path_factory.mktemp("hf")
        model.save_pretrained(made[tied])
    return made


def resized(folder: Path, rows: int) -> Any:
    """The folder as transformers resizes it, with the plain mean in new rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            table[ROWS:] = table[:ROWS].float().mean(0).bfloat16()
    return model.float()


def grown(folder: str, rows: int, tied: bool, mesh: dict[str, int], *converters: Any) -> Any:
    layout = Layout(mesh, config=model_of(rows, tied), converters=list(converters))
    return dataclasses.replace(recipe(layout), weights=Path(folder), weights_vocab="grow")


def begun(folder: str, rows: int, tied: bool, mesh: dict[str, int]) -> dict[str, Tensor]:
    """The first weights of this rank's stage, whole."""
    with Engine.build(grown(folder, rows, tied, mesh)) as engine:
        return weights(engine)


@pytest.mark.ranks
@pytest.mark.parametrize("rows", [63, 64])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_new_rows_are_the_mean(ranks: Any, folders: dict[bool, Path], tied: bool, rows: int) -> None:
    theirs = resized(folders[tied], rows)
    model = model_of(rows, tied)
    form = hf_form(model)
    meant = dict(theirs.named_parameters())
    (alone,) = ranks(1, begun, str(folders[tied]), rows, tied, {})
    for name, tensor in alone.items():
        for hf_name, value in form.to_hf(name, tensor):
            assert torch.equal(value, meant[hf_name].detach()), name
    for mesh in LAYOUTS:
        if tied and "pp" in mesh:
            continue  # refused, with or without growth
        found = ranks(4 if len(mesh) > 1 else 2, begun, str(folders[tied]), rows, tied, mesh)
        assert set().union(*found) == set(alone), mesh
        for one in found:
            assert all(torch.equal(one[name], alone[name]) for name in one), mesh


def test_export_loads_in_transformers(folders: dict[bool, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for tied in (False, True):
        model = model_of(63, tied)
        made = build(model, seq_len=16)
        form = grown_form(hf_form(model), model, folders[tied])
        load_hf_weights(folders[tied], form, dict(made.named_parameters()))
        out = tmp_path / str(tied)
        export_hf(dict(made.named_parameters()), hf_form(model), {}, out)
        assert json.loads((out / "config.json").read_text())["vocab_size"] == 63
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        assert theirs.get_input_embeddings().weight.shape == theirs.lm_head.weight.shape == (63, 32)
        tokens = torch.arange(48, 64).clamp(max=62)[None]
        expected = resized(folders[tied], 63)(tokens).logits
        with torch.no_grad():
            torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(made(tokens=tokens), expected, rtol=1e-4, atol=1e-5)


def test_only_rows_that_are_missing_grow(folders: dict[bool, Path], tmp_path: Path) -> None:
    """Another number of rows than config.json names is a damaged folder."""
    config = json.loads((folders[False] / "config.json").read_text())
    for path in folders[False].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": ROWS + 1}))
    model = model_of(64, False)
    made = build(model, seq_len=16)
    form = grown_form(hf_form(model), model, tmp_path)
    assert isinstance(form, Grown)
    with pytest.raises(EnvironmentProblem, match="shapes differ"):
        load_hf_weights(tmp_path, form, dict(made.named_parameters()))
    smaller = model_of(40, False)
    assert not isinstance(grown_form(hf_form(smaller), smaller, tmp_path), Grown)


def warned(folder: str, targets: list[str] | None) -> list[str]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("titancli").addHandler(handler)
    try:
        with Engine.build(grown(folder, 64, False, {"pp": 2}, LoRA(rank=4, targets=targets))):
            return [line for line in said if "new rows" in line]
    finally:
        logging.getLogger("titancli").removeHandler(handler)


@pytest.mark.ranks
def test_untrained_rows_are_named(ranks: Any, folders: dict[bool, Path]) -> None:
    folder = str(folders[False])
    first, second = ranks(2, warned, folder, None)
    assert "output.weight and tok_embeddings.weight" in first[0]
    assert second == []
    (line,) = ranks(2, warned, folder, ["wq", "output"])[0]
    assert "rows of tok_embeddings.weight, which" in line
    assert ranks(2, warned, folder, ["tok_embeddings", "output"]) == [[], []]


def adapted(folder: str, tied: bool, targets: list[str], saved: str) -> Tensor:
    """Log-probabilities of adapters that were trained a step; their checkpoint is saved."""
    with Engine.build(grown(folder, 64, tied, {}, LoRA(rank=4, targets=targets))) as engine:
        engine.forward_backward(whole_batch())
        engine.optim_step(1e-2)
        engine.save(Path(saved))
        return engine.forward(whole_batch())


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_adapters_of_new_rows_are_merged(
    ranks: Any, folders: dict[bool, Path], tmp_path: Path, tied: bool
) -> None:
    """As exports do, also those that the warning above asks for."""
    targets = ["wq"] if tied else ["wq", "tok_embeddings", "output"]
    saved, model = tmp_path / "step-1", model_of(64, tied)
    (beside,) = ranks(1, adapted, str(folders[tied]), tied, targets, str(saved))
    made = build(model, seq_len=16)
    weights = open_weights(saved, model)
    made.load_state_dict({name: weights.read(name) for name in weights.names()}, strict=not tied)
    batch = whole_batch()
    with torch.no_grad():
        merged = made(batch["tokens"]).log_softmax(-1)
    found = merged.gather(-1, batch["targets"].clamp(0)[..., None])[..., 0].where(batch["targets"] >= 0, 0.0)
    torch.testing.assert_close(found, beside, rtol=1e-4, atol=1e-5)
