"""transformers' modules in titan's engine, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.engine import cases
from tests.engine.cases import Layout
from tests.generate.models import feed
from tests.models.hf_configs import CONFIGS, LLAMA, config
from titan_transformers import HFCausalLM
from titan_transformers.model import TransformersModel, build
from titan_transformers.tensor_plan import parts_fault
from titan_transformers.theirs import hf_config
from titan_transformers.tiny import tiny
from titan_transformers.weights import FolderForm
from titancli.checkpoint import export_hf, read_hf
from titancli.engine import Engine
from titancli.engine.first_weights import allocate
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.losses import CrossEntropy
from titancli.models.blocks.state import named_state
from titancli.protocols.batch import Batch
from titancli.registry.component import build as build_component

CLOSE = dict(rtol=1e-5, atol=1e-6)


def generator_for(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name)))


def made(name: str) -> TransformersModel:
    return made_of(CONFIGS[name])


def made_of(values: dict[str, Any]) -> TransformersModel:
    """As the engine makes it, with weights that are apart from their initial values."""
    with torch.device("meta"):
        model = build(HFCausalLM(config=values), seq_len=64)
    allocate(model, torch.device("cpu"))
    model.init_weights(generator_for)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator_for(key)))
    return model


def in_transformers(model: TransformersModel) -> PreTrainedModel:
    values = model.config.values
    theirs = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[values["model_type"]].from_dict(values), attn_implementation="eager"
    )
    theirs.load_state_dict(model.state_dict())  # all of it, under the same names
    return theirs


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, record_property: Callable[[str, object], None]) -> None:
    """In rows beyond a sliding window, and within documents."""
    ours, text = made(name), tokens(2, 24)
    record_property("logits", f"transformers' {ours.config.values['model_type']}")
    theirs = in_transformers(ours)
    positions = torch.cat((torch.arange(10), torch.arange(14))).expand(2, -1)
    documents = (torch.arange(24) >= 10).int().expand(2, -1)
    with torch.no_grad():
        torch.testing.assert_close(ours(text), theirs(text, use_cache=False).logits, **CLOSE)
        packed = theirs(text, position_ids=positions, use_cache=False).logits  # it sees the documents itself
        torch.testing.assert_close(ours(text, positions, documents), packed, **CLOSE)
        # positions alone are no documents: a row is one document by default
        assert (ours(text, positions) - packed).abs().max() > 0.01


@pytest.mark.parametrize("name", ["llama, tied", "gemma3", "experts"])
def test_loss_and_gradients_equal_a_plain_loop(name: str) -> None:
    ours, text = made(name), tokens(2, 25)
    theirs = in_transformers(ours)
    targets = text[:, 1:].clone()
    targets[0, :7] = -100
    batch = Batch({"tokens": text[:, :-1], "targets": targets})
    result = ours(batch["tokens"], batch=batch, loss=build_component(CrossEntropy()))
    result.sum.backward()
    logits = theirs(text[:, :-1], use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    torch.testing.assert_close(result.sum, loss)
    expected = dict(theirs.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(expected)
    for key, parameter in ours.named_parameters():
        reference = expected[key].grad
        assert (parameter.grad - reference).norm() <= 1e-5 * reference.norm(), key


class Reads(TorchDispatchMode):
    """Counts what waits for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        self.count += func in waits
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_forward_waits_for_no_device(name: str) -> None:
    ours, text = made(name), tokens(2, 24)
    theirs, documents = in_transformers(ours), torch.zeros(2, 24, dtype=torch.int32)
    with Reads() as reads, torch.no_grad():
        ours(text)
        ours(text, torch.arange(24).expand(2, -1), documents)
        assert reads.count == 0
        theirs(text, use_cache=False)
        assert reads.count > 0  # what is avoided


@pytest.mark.parametrize("name", CONFIGS)
def test_initial_values_are_those_that_transformers_draws(name: str) -> None:
    """The same distributions, parameter by parameter; and the buffers as they are there."""
    with torch.device("meta"):
        ours = build(config(name), seq_len=64)
    allocate(ours, torch.device("cpu"))
    ours.init_weights(generator_for)
    values = ours.config.values
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[values["model_type"]].from_dict(values))
    expected = dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        for moment in (torch.mean, torch.std) if parameter.numel() > 1 else ():
            assert moment(parameter.detach()) == pytest.approx(
                float(moment(expected[key].detach())), rel=0.25, abs=5e-3
            ), key
    assert any(parameter.std() > 0.01 for parameter in ours.parameters())
    buffers = dict(theirs.named_buffers())
    assert {key for key, _ in ours.named_buffers()} == buffers.keys()
    for key, buffer in ours.to(torch.bfloat16).named_buffers():
        torch.testing.assert_close(buffer, buffers[key], msg=key)  # fp32 still


def test_initial_values_follow_from_the_seed_alone() -> None:
    first, second = made("gpt2"), made("gpt2")
    torch.rand(1)
    for (key, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, other), key
    names = [f"transformer.h.{layer}.attn.c_proj.weight" for layer in (0, 1)]
    assert not torch.equal(*(first.get_parameter(name) for name in names))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@torch.no_grad()
def test_a_cache_gives_the_logits_of_the_whole_row(name: str) -> None:
    """Padding is not seen, and rows can be chosen; beyond the window too."""
    model, text = made(name).eval(), tokens(3, 20)
    whole = model(text)
    lengths = [12, 7, 3]
    cache = model.new_cache()
    last = [length - 1 for length in lengths]
    opened = [cache.begin() for _ in lengths]
    found = feed(model, cache, opened, [text[row, :length] for row, length in enumerate(lengths)])
    torch.testing.assert_close(found, whole[range(3), last], **CLOSE)
    numbers, rows = [opened[2], opened[0], *cache.fork(opened[0], 1)], [2, 0, 0]
    cache.close(opened[1])
    for step in range(1, 6):
        at = [lengths[row] - 1 + step for row in rows]
        found = feed(model, cache, numbers, [text[row, n : n + 1] for row, n in zip(rows, at, strict=True)])
        torch.testing.assert_close(found, whole[rows, at], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gemma3", "gpt2", "gpt_neox", "experts"])
def test_a_folder_of_transformers_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    theirs = in_transformers(made(name)).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    component = HFCausalLM(config=tmp_path / "theirs")
    form = FolderForm(component)
    with torch.device("meta"):
        shapes = {key: tuple(t.shape) for key, t in named_state(build(component, seq_len=1))}
    reader = read_hf(tmp_path / "theirs", form)
    reader.check(shapes)
    state = {key: reader.parameter(key) for key in shapes}
    export_hf(state, form, {}, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs) and again.dtype == torch.bfloat16
    found = dict(again.named_parameters())
    for key, parameter in theirs.named_parameters():
        assert torch.equal(found[key], parameter), key
    told, kept = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("ours", "theirs"))
    assert {key: told[key] for key in kept if key != "transformers_version"} == {
        key: value for key, value in kept.items() if key != "transformers_version"
    }


def test_files_that_do_not_become_single_parameters_are_refused() -> None:
    values = {**CONFIG_MAPPING["hrm_text"]().to_dict(), "model_type": "hrm_text"}
    with pytest.raises(EnvironmentProblem, match="hrm_text: the rules by which transformers reads a folder"):
        FolderForm(HFCausalLM(config=tiny(values))).sources("model.embed_tokens.weight")


def test_experts_that_a_token_does_not_visit_cost_nothing() -> None:
    with torch.device("meta"):
        few, all_ = (build(config("experts", num_experts_per_tok=n), seq_len=64) for n in (2, 8))
    experts = sum(p.numel() for name, p in few.named_parameters() if ".experts." in name)
    assert all_.flops_per_token(64) - few.flops_per_token(64) == pytest.approx(6 * experts * 6 / 8)


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2"])
def test_flops_are_those_that_torch_counts(name: str) -> None:
    """Return the FLOPs of forward, times 3; biases and norms count as matrices in the formula."""
    with torch.device("meta"):
        model = build(config(name), seq_len=64)
        text = torch.empty(1, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(text)
    assert 3 * counter.get_total_flops() / 64 == pytest.approx(model.flops_per_token(64), rel=0.05)


@pytest.mark.parametrize(("model_type", "key", "value"), [
    ("hrm_text", "model.z_L_init", 0.0), ("zaya", "model.input_hidden_states_scale", 1.0)
])  # fmt: skip
def test_what_belongs_to_no_module_within_has_its_initial_value(
    model_type: str, key: str, value: float
) -> None:
    with torch.device("meta"):
        model = TransformersModel(HFCausalLM(config=tiny_default(model_type)))
    allocate(model, torch.device("cpu"))
    parameter = model.get_parameter(key)
    with torch.no_grad():
        parameter.fill_(7.0)
    model.init_weights(generator_for)
    assert torch.equal(parameter, torch.full_like(parameter, value))


# ------------------------------------------------------------------------------------------- a run


def saved_and_resumed(folder: str) -> list[str]:
    """Return the parameters that differ between a run and a resumed one; FSDP2, buffers and tied weights."""
    layout = Layout(mesh={"dp_shard": 2}, config=config("gemma3"))
    through, resumed = (Engine.build(cases.recipe(layout)) for _ in range(2))
    for step in range(3):
        if step == 2:
            through.save(folder)
            resumed.load(folder)
        through.forward_backward(cases.my_batches(through, step))
        through.optim_step()
    resumed.forward_backward(cases.my_batches(resumed, 2))
    resumed.optim_step()
    one, other = (cases.wholes(engine.named_parameters()) for engine in (through, resumed))
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.ranks
def test_a_resume_is_bitwise(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, saved_and_resumed, str(tmp_path / "checkpoint")) == [[], []]


# ------------------------------------------------------------------------------------- what is refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": (dict(model_type="no_such_model"), "has no such model"),
    "an encoder": (dict(model_type="bert"), "BertLMHeadModel has no output layer that is a single matrix"),
    "no causal model": (dict(model_type="vit"), "no causal language model of this type"),
    "more than a matrix": (
        dict(model_type="electra"),
        "ElectraForCausalLM has parameters outside its blocks: generator_predictions",
    ),
    "multimodal": (dict(model_type="gemma3"), "a multimodal model"),
    "dropout": ({**LLAMA, "attention_dropout": 0.1}, "uses dropout (attention_dropout = 0.1)"),
    "both directions": (
        {**CONFIGS["gemma3"], "use_bidirectional_attention": True},
        "Gemma3DecoderLayer has no causal attention",
    ),
    "nonsense": ({**LLAMA, "num_attention_heads": 5}, "llama"),
    "code": ({**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "refers to code that comes with"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_wrong_is_refused_by_name(case: str) -> None:
    values, words = REFUSED[case]
    with pytest.raises(RecipeError) as caught, torch.device("meta"):
        build(HFCausalLM(config=values), seq_len=16)
    assert words in caught.value.message, caught.value.message
    assert caught.value.message.startswith("model.config: ")


def test_tensor_parallel_without_a_plan_is_refused() -> None:
    with torch.device("meta"):
        model = build(config("gpt2"), seq_len=16)
    assert model.mesh_faults == {
        "tp": "transformers declares no tensor parallel plan for gpt2, and its layers have other names"
    }


def test_what_a_plan_leaves_out_has_no_style() -> None:
    with torch.device("meta"):
        model = build(config("gpt2"), seq_len=16)
    styles = {key: model.tensor_plan.get(key) for key, _ in model.named_parameters()}
    assert styles["transformer.wte.weight"] == "vocab" and styles["transformer.ln_f.bias"] == "norm"
    assert styles["transformer.h.0.attn.c_attn.weight"] is None


def tiny_default(model_type: str) -> dict[str, Any]:
    return tiny({**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type})


WHOLE = {
    "deepseek_v3": "transformers' plan leaves it out",
    "diffllama": "pairs of heads are far from each other, so that parts do not add up",
}


@pytest.mark.parametrize("model_type", WHOLE)
def test_attention_that_is_not_sharded_is_computed_whole(model_type: str) -> None:
    with torch.device("meta"):
        model = build(HFCausalLM(config=tiny_default(model_type)), seq_len=16)
    assert "layers.0.self_attn" in model.sharded.whole and "layers.0.mlp" in model.sharded.regions
    assert model.tensor_plan["model.layers.0.self_attn.o_proj.weight"] == "replicate"
    assert model.tensor_plan["model.layers.0.mlp.down_proj.weight"] == "row"
    assert not model.mesh_faults


def test_layers_whose_heads_differ_are_counted_one_by_one() -> None:
    """Gemma 4, whose global layers have wider heads."""
    with torch.device("meta"):
        model = TransformersModel(HFCausalLM(config=tiny_default("gemma4_unified_text")))
    widths = [block.self_attn.q_proj.out_features for block in model.layers]
    assert len(set(widths)) == 2
    assert model.flops_per_token(2) - model.flops_per_token(1) == 12 * sum(widths)


STAGED: dict[str, tuple[dict[str, Any], bool]] = {
    "a norm without parameters follows the last block": ({"model_type": "olmo"}, True),
    "embeddings are scaled in place": ({"model_type": "ctrl"}, False),
    "embeddings are scaled": ({"model_type": "granite", "embedding_multiplier": 3.0}, False),
}


@pytest.mark.parametrize("what", STAGED)
def test_embeddings_that_are_changed_stay_with_the_first_block(what: str) -> None:
    values, alone = STAGED[what]
    plain = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    with torch.device("meta"):
        model = build(HFCausalLM(config={**tiny_default(values["model_type"]), **plain, **values}), seq_len=8)
    assert "pp" not in model.mesh_faults and model.embeds_alone is alone
    blocks = [f"layers.{n}" for n in range(len(model.layers))]
    if alone:
        assert model.stage(["embeddings"]).first
    else:
        with pytest.raises(RecipeError, match="embeddings are changed before the first block"):
            model.stage(blocks)


def test_parts_that_do_not_add_up_are_found() -> None:
    """A scale of a part's own, which no plan knows of."""
    module = Mlp()
    styles = {"up_proj": "colwise", "down_proj": "rowwise"}
    assert parts_fault(module, styles, (torch.ones(1, 3, 8),), {}) is None
    module.uneven = True
    assert "parts differ by" in (parts_fault(module, styles, (torch.ones(1, 3, 8),), {}) or "")
    assert "shape" in (parts_fault(module, {"up_proj": "colwise"}, (torch.ones(1, 3, 8),), {}) or "")


class Mlp(nn.Module):
    uneven = False

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up_proj(x)
        return self.down_proj(inner / inner.shape[-1] if self.uneven else inner)


def test_a_model_whose_rows_cannot_be_sharded_still_says_its_styles() -> None:
    """Adapters ask for them on one rank, too."""
    with torch.device("meta"):
        model = build(HFCausalLM(config=tiny_default("bloom")), seq_len=16)
    assert set(model.mesh_faults) == {"cp", "tp"}
    assert model.tensor_plan["transformer.word_embeddings.weight"] == "vocab"


def test_the_plan_is_the_one_that_transformers_declares() -> None:
    with torch.device("meta"):
        plan = build(config("gemma3"), seq_len=16).tensor_plan
    block = "model.layers.1"
    assert plan["model.embed_tokens.weight"] == plan["lm_head.weight"] == "vocab"
    assert plan[f"{block}.self_attn.q_proj.weight"] == plan[f"{block}.mlp.up_proj.weight"] == "column"
    assert plan[f"{block}.self_attn.o_proj.weight"] == plan[f"{block}.mlp.down_proj.weight"] == "row"
    assert plan[f"{block}.self_attn.q_norm.weight"] == plan["model.norm.weight"] == "norm"


def test_the_kernels_that_a_config_names_are_not_transformers_choice() -> None:
    values = {**LLAMA, "_attn_implementation": "flash_attention_2", "experts_implementation": "sonicmoe"}
    config = hf_config(values)
    assert (config._attn_implementation, config._experts_implementation) == (None, None)
    assert made_of(values)(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, LLAMA["vocab_size"])
