"""Multi-token prediction: DeepSeek-V3 (arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.cases import Layout, recipe
from tests.models.families import DEEPSEEK, GLM4_MOE, Family
from titan_preference import DPO
from titan_rl import Grpo
from titancli.checkpoint import export_hf
from titancli.checkpoint.base import open_base
from titancli.checkpoint.hf.config_match import complaint
from titancli.checkpoint.hf.convert import to_hf, to_titan
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.checkpoint.hf.load import load_hf_weights
from titancli.checkpoint.hf.quantise import quantisation
from titancli.checkpoint.reader import CheckpointReader
from titancli.checkpoint.start_from import start_from
from titancli.engine.first_weights import load_weights
from titancli.errors import TitanError
from titancli.losses.cross_entropy import CrossEntropy, CrossEntropyFull
from titancli.losses.sft import SFT
from titancli.models.blocks.state import named_state
from titancli.observe.metrics import collector
from titancli.protocols.batch import IGNORE, Batch
from titancli.recipe import load_recipe
from titancli.recipe.schema import Mesh
from titancli.registry.component import build

ROWS, LENGTH = 3, 11
DOCUMENTS = torch.tensor([[0] * LENGTH, [0] * 5 + [1] * 6, [0, 0, 1, 2, 2, 2, 2, 3, 3, 3, 4]])


def predicting(
    layers: int = 2, *, family: Family = DEEPSEEK, variant: str = "V3, groups, YaRN", **changes: Any
) -> Any:
    """A small model that predicts further tokens, each of its parameters its own."""
    own = replace(family, small={**family.small, "n_layers": 2, "n_mtp_layers": layers, **changes})
    return own.model(variant)


def batch(*, documents: bool, weights: bool = False) -> Batch:
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 128, (ROWS, LENGTH + 1), generator=draw)
    targets = tokens[:, 1:].clone()
    targets[0, :4] = IGNORE  # a prompt
    found = {"tokens": tokens[:, :-1].contiguous(), "targets": targets}
    if documents:
        places = torch.arange(LENGTH).expand(ROWS, LENGTH)
        begins = torch.cat((torch.ones(ROWS, 1, dtype=torch.bool), DOCUMENTS[:, 1:] != DOCUMENTS[:, :-1]), 1)
        found["document_ids"] = DOCUMENTS.int()
        found["positions"] = places - torch.where(begins, places, 0).cummax(1).values
    if weights:
        found["weights"] = torch.rand(ROWS, LENGTH, generator=draw)
    return Batch(found)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def reference(model: Any, given: Batch) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The loss of next tokens, and of each depth the loss with the weight of its targets: token by token, in
    plain torch; of the model only what any block does is taken. It is dense: experts take no float64."""
    config, state = model.config, dict(named_state(model))
    ids = given["document_ids"] if "document_ids" in given else torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    positions = given["positions"] if "positions" in given else torch.arange(LENGTH)[None]
    mask = (ids[:, :, None] == ids[:, None]).tril()[:, None]
    angles = model.angles(positions)[model.layers["0"].attention.angles]
    table, blocks = state["tok_embeddings.weight"], [*model.layers.values()]
    weights = given["weights"] if "weights" in given else torch.ones(ROWS, LENGTH)

    def through(block: Any, x: Tensor) -> Tensor:
        x, inside = block.attention_branch(x, *angles, mask, None)
        return x + (block.moe or block.feed_forward)(inside)

    def loss(hidden: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        logits = hidden @ model.output.weight.T
        total, weight = logits.new_zeros(()), torch.zeros(())
        for row in range(ROWS):
            for i in range(LENGTH - depth):
                target = int(given["targets"][row, i + depth])
                seen = ids[row, i : i + depth + (2 if depth else 0)]  # the target's as well
                if target != IGNORE and bool((seen == ids[row, i]).all()):
                    own = weights[row, i + depth]
                    total = total - own * logits[row, i].log_softmax(-1)[target]
                    weight += own
        return total, weight

    hidden = table[given["tokens"]]
    for block in blocks[: config.n_layers]:
        hidden = through(block, hidden)
    hidden = normed(hidden, state["norm.weight"], config.norm_eps)
    main, further = loss(hidden, 0)[0], []
    for depth, block in enumerate(blocks[config.n_layers :], start=1):
        at = f"layers.{config.n_layers + depth - 1}."
        ahead = torch.cat((given["tokens"][:, depth:], torch.zeros(ROWS, depth, dtype=torch.int64)), 1)
        e = normed(table[ahead], state[at + "enorm.weight"], config.norm_eps)
        h = normed(hidden, state[at + "hnorm.weight"], config.norm_eps)
        hidden = through(block, torch.cat((e, h), -1) @ state[at + "eh_proj.weight"].T)
        hidden = normed(hidden, state[at + "head_norm.weight"], config.norm_eps)
        further.append(loss(hidden, depth))
    return main, further


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_loss_and_gradients_are_those_of_a_plain_reference(documents: bool, tied: bool) -> None:
    model = predicting(n_dense_layers=9, tied=tied, mtp_loss_weight=0.7).double()
    given = batch(documents=documents, weights=tied)
    parameters = dict(model.named_parameters())
    main, further = reference(model, given)
    whole = main + 0.7 / 2 * sum(total for total, _ in further)
    expected = torch.autograd.grad(whole, [*parameters.values()])
    collector.drain()
    found = model(**{k: v for k, v in given.items() if k in model.inputs}, batch=given, loss=SFT())
    found.sum.backward()
    assert float(found.sum.detach()) == pytest.approx(float(main.detach()), rel=1e-6)
    reading = collector.drain()["mtp_loss"]
    assert float(reading.value) == pytest.approx(
        0.35 * float(sum(total.detach() for total, _ in further)), rel=1e-6
    )
    assert float(reading.count) == pytest.approx(0.35 * float(sum(weight for _, weight in further)))
    for (name, parameter), gradient in zip(parameters.items(), expected, strict=True):
        assert (parameter.grad - gradient).norm() <= 1e-6 * gradient.norm(), name
        assert gradient.any(), name


def test_nothing_else_knows_of_them() -> None:
    """Logits, a cache and an evaluation are those of the model without; what it is made of says the same."""
    model, given = predicting(1), batch(documents=False)
    plain = build(replace(model.config, n_mtp_layers=0), seq_len=64)
    own = dict(named_state(plain))
    plain.load_state_dict({name: tensor for name, tensor in named_state(model) if name in own})
    with torch.no_grad():
        assert torch.equal(model(given["tokens"]), plain(given["tokens"]))
        cache = model.new_cache()
        assert list(cache.layers) == ["0", "1"]
        collector.drain()
        both = [m(given["tokens"], batch=given, loss=CrossEntropy()).sum for m in (model, plain)]
        assert both[0] == both[1] and "mtp_loss" not in collector.drain()
    sizes = [sum(p.numel() for p in one.parameters()) for one in (model, plain)]
    experts = sum(p.numel() for p in model.layers["2"].moe.experts.parameters())
    more = sizes[0] - sizes[1] - experts + experts * 3 // 8 + model.output.weight.numel()
    attention = model.config.shape().blocks[-1].attention.flops(64)
    assert model.flops_per_token(64) - plain.flops_per_token(64) == 6 * more + attention


def test_a_loss_that_does_not_weigh_tokens_is_refused() -> None:
    model, given = predicting(1), batch(documents=False)
    with pytest.raises(TitanError, match="n_mtp_layers: the loss CrossEntropyFull is not a weighted sum"):
        model(given["tokens"], batch=given, loss=CrossEntropyFull())
    with torch.no_grad():
        assert model(given["tokens"], batch=given, loss=CrossEntropyFull()).sum.isfinite()


def test_what_does_not_fit_is_refused_by_name() -> None:
    recipe = load_recipe("deepseek_v3_debug", ["model.n_mtp_layers=1"]).recipe
    changes: dict[str, Any] = {
        "on one rank, but mesh.pp is 2": {"mesh": Mesh(pp=2)},
        "the loss dpo cannot be trained on tokens further ahead": {"loss": DPO()},
        "the loss grpo cannot be trained on tokens further ahead": {"loss": Grpo()},
    }
    assert not list(recipe.model.check(recipe))
    for message, change in changes.items():
        ((key, found),) = recipe.model.check(replace(recipe, **change))
        assert key == "n_mtp_layers" and message in found


# ------------------------------------------------------------------------------------ Hugging Face folders


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "variant"), [(DEEPSEEK, "V3, groups, YaRN"), (GLM4_MOE, "as released")], ids=["V3", "GLM"]
)
def test_a_folder_comes_back_byte_for_byte(
    family: Family, variant: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With what releases have of the embedding and the output in each of these layers."""
    model = predicting(2, family=family, variant=variant, tied=tied)
    form, state = hf_form(model.config), {name: t.detach() for name, t in named_state(model)}
    export_hf(state, form, {}, tmp_path / "one")
    written = load_file(tmp_path / "one" / "model.safetensors")
    for at in (2, 3):
        kept = {name.removeprefix(f"model.layers.{at}.") for name in written if f"model.layers.{at}." in name}
        assert kept >= {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
        assert torch.equal(written[f"model.layers.{at}.embed_tokens.weight"], state["tok_embeddings.weight"])
        output = state["tok_embeddings.weight" if tied else "output.weight"]
        assert torch.equal(written[f"model.layers.{at}.shared_head.head.weight"], output)
    assert form.config_json()["num_nextn_predict_layers"] == 2
    back = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    load_hf_weights(tmp_path / "one", form, back)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    export_hf(back, form, {}, tmp_path / "two")
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    to_titan(tmp_path / "one", tmp_path / "checkpoint", say=print)
    assert "left out" not in caplog.text
    to_hf(tmp_path / "checkpoint", tmp_path / "three", say=print)
    assert (tmp_path / "three" / "model.safetensors").read_bytes() == one.read_bytes()


def test_folders_with_and_without_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Left out in words; missing by name, with what to do; a copy that is none is not taken for one."""
    model = predicting(1)
    with_them, without = (hf_form(replace(model.config, n_mtp_layers=n)) for n in (1, 0))
    state = {name: tensor.detach() for name, tensor in named_state(model)}
    export_hf(state, with_them, {}, tmp_path / "with")
    own = {name: torch.empty_like(t) for name, t in state.items() if not name.startswith("layers.2.")}
    load_hf_weights(tmp_path / "with", without, own)
    assert all(torch.equal(own[name], state[name]) for name in own)
    assert "layers beyond the 2 of the model, which predict further tokens, are left out" in caplog.text
    assert "model.n_mtp_layers is 0" in caplog.text
    assert not type(model.config).from_config_json(with_them.config_json()).get("n_mtp_layers")
    assert complaint(model.config, tmp_path / "with", ()) is None
    assert complaint(replace(model.config, n_mtp_layers=0), tmp_path / "with", ()) is None

    export_hf(own, without, {}, tmp_path / "without")
    with pytest.raises(TitanError, match=r"lacks: .*model.layers.2") as caught:
        load_hf_weights(tmp_path / "without", with_them, state)
    assert "are not in this folder" in caught.value.hint and "set model.n_mtp_layers = 0" in caught.value.hint
    file = tmp_path / "with" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.embed_tokens.weight"][3, 5] += 1
    save_file(tensors, file)
    with pytest.raises(TitanError, match=r"layers\.2\.embed_tokens\.weight differs from model\.embed_tokens"):
        load_hf_weights(tmp_path / "with", with_them, state)
    said: list[str] = []
    to_titan(tmp_path / "with", tmp_path / "part", say=said.append)
    assert "not read with { n_mtp_layers = 1 }" in said[0] and "differs from model.embed_tokens" in said[0]
    kept = CheckpointReader(tmp_path / "part", prefix="model.").names()
    assert kept and not any(name.startswith("layers.2.") for name in kept)


def test_a_model_without_them_begins_from_a_converted_folder_that_has_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = predicting(1)
    state = {name: tensor.detach() for name, tensor in named_state(model)}
    export_hf(state, hf_form(model.config), {}, tmp_path / "hf")
    to_titan(tmp_path / "hf", tmp_path / "titan", say=print)
    for layers, own in ((1, state), (0, {n: t for n, t in state.items() if not n.startswith("layers.2.")})):
        config = replace(model.config, n_mtp_layers=layers)
        made = replace(recipe(Layout(config=config)), weights=tmp_path / "titan")
        found = {name: torch.full_like(tensor, 7.0) for name, tensor in own.items()}
        load_weights(made, start_from(made), hf_form(config), found, [], None)
        assert all(torch.equal(found[name], own[name]) for name in own)
        assert {*open_base(tmp_path / "titan", config).names()} == own.keys()
        assert ("model.layers.2 left out: model.n_mtp_layers is 0" in caplog.text) == (layers == 0)


def test_of_them_fp8_leaves_what_releases_leave_as_it_is() -> None:
    config = DEEPSEEK.flavor("debugmodel")
    config = replace(config, n_mtp_layers=1, moe=replace(config.moe, score_func="sigmoid"))
    left = quantisation("fp8", config, hf_form(config)).table["modules_to_not_convert"]
    assert {"model.layers.6.eh_proj", "model.layers.6.shared_head.head", "lm_head"} <= {*left}
    assert "model.layers.6.self_attn.o_proj" not in left
