"""What is gpt-oss' own; what holds for every family is in `test_families.py`."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GptOssConfig

from tests.models.families import GPT_OSS
from tests.models.specs import experts as experts_of
from titancli.errors import TitanError
from titancli.models import GptOss
from titancli.models.blocks.clamped import ClampedExperts
from titancli.models.blocks.hf import DecoderHF
from titancli.registry import current
from titancli.registry.binding import bind
from titancli.registry.component import build


def test_flops_are_those_that_torch_counts():
    """Of the forward, times 3. The formula has 128 keys for a query under a window: what is computed has
    blocks of two windows."""
    length, width = 2048, 64 * 64
    with torch.device("meta"):
        model = build(GPT_OSS.flavor("debugmodel"), seq_len=length)
        tokens = torch.empty(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    counted = 3 * counter.get_total_flops() / length
    formula = model.flops_per_token(length)
    attention = 2 * 12 * width * (length + 128)
    computed = 2 * 12 * width * (length + 128 * (2 - 128 / length))
    assert counted == pytest.approx(formula - attention + computed, rel=1e-2)


def test_the_clamped_product_keeps_nothing_that_it_can_make_again():
    """And its gradients are those of the same operations one by one."""
    experts = ClampedExperts(experts_of(16, 24, 4, joined=True, clamped=(1.7, 0.8)))
    draw = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    x = torch.randn(11, 16, generator=draw, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = experts.over_experts(x, torch.tensor([4, 0, 5, 2]))
    assert sum(kept) - sum(p.numel() for p in experts.parameters() if p.ndim == 3) <= 11 * (16 + 3 * 24) + 20
    weights = torch.randn(11, 16, generator=draw)
    mine = torch.autograd.grad((out * weights).sum(), [x, *experts.parameters()])
    rows = []
    for number, part in zip((0, 2, 3), x.split([4, 5, 2]), strict=True):
        gate, up = (part @ experts.w13[number].T + experts.w13_bias[number]).chunk(2, -1)
        gate, up = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
        inner = (up + 1) * gate * torch.sigmoid(1.7 * gate)
        rows.append(inner @ experts.w2[number].T + experts.w2_bias[number])
    torch.testing.assert_close(out, torch.cat(rows))
    wanted = torch.autograd.grad((torch.cat(rows) * weights).sum(), [x, *experts.parameters()])
    for one, other in zip(mine, wanted, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_a_config_json_without_rope_has_the_familys_own():
    config_json = DecoderHF(GPT_OSS.flavor("20b")).config_json()
    own = GptOss.from_config_json(GptOssConfig.from_dict(config_json).to_dict())
    del config_json["rope_scaling"]
    for written in (config_json, GptOssConfig.from_dict(config_json).to_dict()):
        assert bind(GptOss, GptOss.from_config_json(written), current()) == bind(GptOss, own, current())


def test_an_export_has_gate_and_up_in_turn():
    tensor = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    ((name, turned),) = DecoderHF(GPT_OSS.variant("as released")).to_hf("layers.1.moe.experts.w13", tensor)
    assert (name, turned.shape) == ("model.layers.1.mlp.experts.gate_up_proj", (2, 4, 6))
    assert torch.equal(turned[0, :, 0], tensor[0, 0]) and torch.equal(turned[0, :, 1], tensor[0, 3])


def test_experts_begin_as_matrices_of_their_depth():
    model = build(GPT_OSS.variant("balanced, tied"), seq_len=64)
    model.init_weights(lambda name: torch.Generator().manual_seed(0))
    assert float(model.layers["1"].moe.experts.w2.detach().std()) == pytest.approx(0.02 / 2, rel=0.1)


def test_a_folder_quantized_as_released_is_read_and_another_is_refused_with_what_to_do():
    keys = DecoderHF(GPT_OSS.flavor("120b")).config_json()
    plain = GptOss.from_config_json(keys)
    assert GptOss.from_config_json({**keys, "quantization_config": {"quant_method": "mxfp4"}}) == plain
    with pytest.raises(TitanError) as raised:
        GptOss.from_config_json({**keys, "quantization_config": {"quant_method": "gptq"}})
    assert "model.dequantize()" in raised.value.hint
