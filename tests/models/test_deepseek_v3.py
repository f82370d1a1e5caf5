"""DeepSeek-V2 and V3, against their published sizes and against transformers."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from titancli.checkpoint import export_hf, read_hf
from titancli.errors import TitanError
from titancli.models import DeepSeekV3
from titancli.models.blocks.moe import moe_layers
from titancli.models.blocks.state import named_state
from titancli.models.deepseek_v3 import LatentYarn
from titancli.models.deepseek_v3.model import DeepSeekHF, build, softmax_scale
from titancli.models.sections import MoE
from titancli.recipe import load_recipe
from titancli.registry import current
from titancli.registry.binding import bind

SIZES = {
    "debugmodel": 33_014_016,
    "16B": 15_706_484_224,
    "236B": 235_741_434_880,
    "671B": 671_026_404_352,
}
# FLOPs per token with rows of 8,192 (the debug model: 2,048).
FLOPS = {"debugmodel": 5.429e8, "16B": 2.150e10, "236B": 2.459e11, "671B": 3.426e11}
SMALL = dict(
    dim=64,
    n_layers=3,
    n_heads=4,
    hidden_dim=96,
    vocab_size=128,
    kv_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
SOFTMAX = dict(
    num_experts=8,
    top_k=3,
    hidden_dim=24,
    num_shared_experts=2,
    score_func="softmax",
    score_before_experts=False,
    load_balance_coeff=1e-3,
)
SIGMOID = dict(SOFTMAX, score_func="sigmoid", route_norm=True, route_scale=2.5, num_shared_experts=1)
GROUPS = dict(num_expert_groups=4, num_limited_groups=2)
YARN = LatentYarn(factor=4.0, original_max_position=32, mscale=0.7)
VARIANTS = {
    "V2": dict(moe=MoE(**SOFTMAX)),
    "V2, groups, query latent, YaRN": dict(
        q_lora_rank=40,
        rope_scaling=YARN,
        moe=MoE(**SOFTMAX, **GROUPS, route_scale=16.0, group_top_k=1),
    ),
    "V3": dict(q_lora_rank=40, n_dense_layers=2, moe=MoE(**SIGMOID)),
    "V3, groups, YaRN": dict(
        q_lora_rank=40, rope_scaling=replace(YARN, mscale=1.0), moe=MoE(**SIGMOID, **GROUPS)
    ),
    "V3, no bias, tied": dict(
        n_dense_layers=0, tied=True, moe=MoE(**{**SIGMOID, "load_balance_coeff": None, "route_norm": False})
    ),
}
TOKENS = torch.randint(0, 128, (2, 96), generator=torch.Generator().manual_seed(1))
"""Three times as long as the small models' original context."""


def flavor(name: str) -> DeepSeekV3:
    return bind(DeepSeekV3, DeepSeekV3.flavors[name], current())


def small(variant: str, **changes) -> DeepSeekV3:
    return DeepSeekV3(**{**SMALL, **VARIANTS[variant], **changes})


@pytest.mark.parametrize("name", SIZES)
def test_a_flavor_has_its_published_size_and_operations(name):
    with torch.device("meta"):
        model = build(flavor(name), seq_len=4096)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]
    length = 2048 if name == "debugmodel" else 8192
    assert model.flops_per_token(length) == pytest.approx(FLOPS[name], rel=5e-4)
    for parameter, _ in model.named_parameters():
        styles = [style for pattern, style in model.tensor_plan.items() if fnmatchcase(parameter, pattern)]
        assert len(styles) == 1 or ".experts." in parameter, parameter
    assert len(model.experts) == len(model.layers) - model.config.n_dense_layers


@pytest.mark.parametrize("name", ["debugmodel", "671B"])
def test_flops_are_those_that_torch_counts(name):
    """Of the forward, times 3; torch counts attention whole, as the formula does."""
    length = 2048
    with torch.device("meta"):
        model = build(replace(flavor(name), n_layers=5), seq_len=length)
        tokens = torch.empty(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    assert 3 * counter.get_total_flops() / length == pytest.approx(model.flops_per_token(length), rel=1e-2)


def made(config: DeepSeekV3):
    model = build(config, seq_len=128)
    model.init_weights(lambda name: torch.Generator().manual_seed(sum(map(ord, name))))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # each its own, so that a norm that is taken for another shows
                parameter.normal_(1.0, 0.2, generator=torch.Generator().manual_seed(len(name)))
            elif "attention" in name or "moe" in name:
                parameter.mul_(
                    8
                )  # they weigh as much as the rest, and attention looks at some more than others
        for number, layer in enumerate(moe_layers(model).values()):
            if layer.expert_bias is not None and config.moe.score_func == "sigmoid":
                layer.expert_bias.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
    return model.eval()


@pytest.fixture(scope="module", params=VARIANTS)
def exported(request, tmp_path_factory):
    """A small model, its export, and transformers' reading of that."""
    ours = made(small(request.param))
    folder = tmp_path_factory.mktemp("hf") / "model"
    export_hf({n: t.detach() for n, t in named_state(ours)}, DeepSeekHF(ours.config), {}, folder)
    theirs, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return ours, folder, theirs.eval()


@pytest.mark.parametrize("length", [7, 96])
def test_logits_and_gradients_equal_transformers(exported, record_property, length):
    record_property("logits", "deepseek_v3")
    ours, _, theirs = exported
    tokens = TOKENS[:, :length]
    expected, found = theirs(tokens).logits, ours(tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    for model, logits in ((theirs, expected), (ours, found)):
        model.zero_grad()
        logits.square().mean().backward()
    embedding = theirs.model.embed_tokens.weight.grad
    assert (ours.tok_embeddings.weight.grad - embedding).norm() <= 1e-5 * embedding.norm()
    form, given = DeepSeekHF(ours.config), dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if ".attention.w" in name:  # turned rows have turned gradients
            ((hf_name, gradient),) = form.to_hf(name, parameter.grad)
            reference = given[hf_name].grad
            assert (gradient - reference).norm() <= 2e-5 * reference.norm(), name


def test_an_export_comes_back_bit_for_bit(exported, tmp_path):
    ours, folder, theirs = exported
    form = DeepSeekHF(ours.config)
    theirs.save_pretrained(tmp_path / "again")  # and as transformers writes it
    for source in (folder, tmp_path / "again"):
        reader = read_hf(source, form)
        reader.check({name: tuple(tensor.shape) for name, tensor in named_state(ours)})
        for name, tensor in named_state(ours):
            assert torch.equal(reader.parameter(name), tensor), name
            assert reader.dtype(name) == tensor.dtype
        assert f"model.layers.{2}.mlp.experts.3.up_proj.weight" in reader._places
        read = json.loads((source / "config.json").read_text())
        keys = DeepSeekHF.from_config_json(read)
        same = DeepSeekHF(bind(DeepSeekV3, keys, current())).config_json()
        assert same == form.config_json()


def test_files_as_they_are_come_back_bit_for_bit(exported, tmp_path):
    """The other way: transformers' tensors to ours, and to its names and order of rows again."""
    ours, folder, _ = exported
    form, reader = DeepSeekHF(ours.config), read_hf(folder, DeepSeekHF(ours.config))
    inside = {name: reader.parameter(name) for name, _ in named_state(ours)}
    export_hf(inside, form, {}, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()


def test_pairs_are_told_apart():
    """Not a permutation that is its own inverse: rows 0, 1, 2, 3, … are pairs in the files."""
    config = small("V2", n_heads=1, qk_nope_head_dim=2, qk_rope_head_dim=6)
    rows = torch.arange(8.0)[:, None]
    form = DeepSeekHF(config)
    inside = form.from_hf("layers.0.attention.wq.weight", [rows])
    assert inside.flatten().tolist() == [0, 1, 2, 4, 6, 3, 5, 7]
    ((_, back),) = form.to_hf("layers.0.attention.wq.weight", inside)
    assert torch.equal(back, rows)


def test_the_scale_of_attention_grows_with_the_context():
    plain = (128 + 64) ** -0.5
    assert softmax_scale(flavor("671B")) == pytest.approx(plain * (0.1 * math.log(40) + 1) ** 2)
    assert softmax_scale(flavor("16B")) == pytest.approx(plain * (0.0707 * math.log(40) + 1) ** 2)
    assert softmax_scale(replace(flavor("16B"), rope_scaling=None)) == plain
    assert softmax_scale(small("V2")) == pytest.approx(24**-0.5)


def test_a_v2_export_says_what_it_leaves_out(caplog):
    form = DeepSeekHF(small("V2"))
    with caplog.at_level(logging.WARNING):
        assert list(form.to_hf("layers.1.moe.expert_bias", torch.ones(8))) == []
    assert "have no place in a Hugging Face folder" in caplog.text
    assert torch.equal(form.from_hf("layers.1.moe.expert_bias", []), torch.zeros(8))


def test_a_bias_keeps_its_digits_and_none_is_lost(tmp_path):
    """V3's bias is fp32 in files of bf16; a model without one reads no other than zeros."""
    ours = made(small("V3"))
    state = {name: tensor.detach() for name, tensor in named_state(ours)}
    export_hf(state, DeepSeekHF(ours.config), {}, tmp_path / "hf", dtype=torch.bfloat16)
    reader = read_hf(tmp_path / "hf", DeepSeekHF(ours.config))
    name = "layers.2.moe.expert_bias"
    assert torch.equal(reader.parameter(name), state[name])
    assert reader.parameter("output.weight").dtype == torch.bfloat16
    without = DeepSeekHF(replace(ours.config, moe=replace(ours.config.moe, load_balance_coeff=None)))
    with pytest.raises(TitanError, match=r"layers.2.mlp.gate.e_score_correction_bias is not zero"):
        read_hf(tmp_path / "hf", without).parameter("layers.2.moe.router.gate.weight")


def test_layers_that_predict_further_tokens_are_left_unread_in_words(caplog):
    form = DeepSeekHF(small("V3"))
    with caplog.at_level(logging.WARNING):
        assert form.ignored("model.layers.3.eh_proj.weight")
        assert form.ignored("model.layers.3.mlp.experts.0.up_proj.weight")
        assert not form.ignored("model.layers.2.eh_proj.weight")
    assert [record.getMessage() for record in caplog.records] == [
        "layers beyond the 3 of the model are not read"
    ]


def test_a_released_config_is_that_of_its_flavor():
    """DeepSeek-V2-Lite's, the keys that say something of the model."""
    released = {
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    }
    assert bind(DeepSeekV3, DeepSeekHF.from_config_json(released), current()) == flavor("16B")


@pytest.mark.parametrize(("name", "mscale"), [("16B", 0.707), ("236B", 0.707), ("671B", 1.0)])
def test_the_flavors_are_what_was_released(name: str, mscale: float) -> None:
    config = flavor(name)
    assert (config.norm_eps, config.max_seq_len, config.rope_scaling.mscale) == (1e-6, 163840, mscale)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("671B", {"attention_bias": True}),
        ("671B", {"hidden_act": "gelu"}),
        ("671B", {"num_key_value_heads": 8}),
        ("671B", {"moe_layer_freq": 2}),
        ("671B", {"scoring_func": "softmax"}),
        ("671B", {"rope_interleave": False}),
        ("671B", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("671B", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5}}),
        ("671B", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0}}),
        ("671B", {"quantization_config": {"quant_method": "fp8"}}),
        ("236B", {"norm_topk_prob": True}),
        ("236B", {"n_shared_experts": None}),
    ],
)
def test_a_config_that_it_cannot_express_is_refused(name, change):
    good = DeepSeekHF(flavor(name)).config_json()
    DeepSeekHF.from_config_json(good)
    with pytest.raises(TitanError, match=r"deepseek_v3 does not have|quantised by 'fp8'"):
        DeepSeekHF.from_config_json({**good, **change})


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("V2", {"route_norm": True}, "DeepSeek-V2 has no moe.route_norm = True"),
        ("V2", {**GROUPS}, "DeepSeek-V2 has no moe.group_top_k = 2"),
        ("V3, groups, YaRN", {"group_top_k": 1}, "DeepSeek-V3 has no moe.group_top_k = 1"),
        ("V3", {"score_before_experts": True, "num_shared_experts": 0}, "True, moe.num_shared_experts = 0"),
    ],
)
def test_routing_that_transformers_cannot_express_is_refused(variant, change, message):
    config = small(variant)
    with pytest.raises(TitanError, match=message):
        DeepSeekHF(replace(config, moe=replace(config.moe, **change))).config_json()


@pytest.mark.parametrize("name", [name for name in SIZES if name != "debugmodel"])
def test_transformers_takes_a_flavors_config_for_its_own_model(name, tmp_path):
    config = flavor(name)
    (tmp_path / "config.json").write_text(json.dumps(DeepSeekHF(config).config_json()))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(p.numel() for p in theirs.parameters()) == SIZES[name]


@pytest.mark.parametrize("variant", ["V2", "V3, groups, YaRN"])
def test_a_cache_gives_the_logits_of_the_whole_row(variant):
    model = made(small(variant))
    tokens, padding = TOKENS[:, :48], torch.tensor([5, 0])
    with torch.no_grad():
        alone = model(tokens[:1, 5:])
        whole = model(tokens)
        for given, reference in ((None, whole), (padding, alone)):
            cache = model.new_cache(48, given)
            model(tokens[:, :40], cache=cache)
            for at in range(40, 48):
                step = model(tokens[:, at : at + 1], cache=cache)
                place = at if given is None else at - 5
                torch.testing.assert_close(step[:1, 0], reference[:1, place], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.qk_rope_head_dim=63"], "rotary embedding needs an even qk_rope_head_dim"),
        (["model.v_head_dim=200"], "v_head_dim 200 is more than qk_nope_head_dim + qk_rope_head_dim, 192"),
        (["model.n_dense_layers=3"], "n_dense_layers 3 leaves none of the 3 layers to experts"),
        (["model.moe.top_k=9"], "top_k 9 is more than num_experts 8"),
        (["training.seq_len=20000"], "training.seq_len 20000 is beyond the model's 16384"),
        (
            ["model.moe.num_expert_groups=8", "model.moe.num_limited_groups=4"],
            "num_experts 8 cannot be divided into 8 groups of group_top_k 2 or more",
        ),
        (["mesh.tp=3"], "mesh.tp = 3 does not divide n_heads 8"),
        (["mesh.ep=3"], "mesh.ep = 3 does not divide n_experts 8"),
        (
            ["mesh.cp=2", "parallelize.context_parallel=ring"],
            "the ring passes keys and values of one width around, and the model deepseek_v3 has others",
        ),
    ],
)
def test_what_does_not_fit_is_said_at_the_recipes_line(overrides, message):
    with pytest.raises(TitanError) as caught:
        load_recipe("deepseek_v3_debug", overrides)
    assert message in "\n".join([str(caught.value), *(p.message for p in caught.value.problems)])
