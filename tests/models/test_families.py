"""Every family of models, against its published sizes and against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.generate.models import feed
from tests.models.by_spec import BY_SPEC
from tests.models.families import FAMILIES, LENGTH, LLAMA3, Family
from titancli.checkpoint import export_hf, read_hf
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.errors import RecipeError, TitanError
from titancli.models import Llama3
from titancli.models.blocks.moe import moe_layers
from titancli.models.blocks.state import named_state
from titancli.protocols.samples import SamplingParams
from titancli.recipe import load_recipe
from titancli.registry import current
from titancli.registry.binding import bind
from titancli.registry.component import build
from titancli.rl.decode import Row, decode

CPU = torch.device("cpu")
ALL = (*FAMILIES, *BY_SPEC)
TOKENS = torch.randint(0, 128, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def each(rows: Callable[[Family], Any]) -> pytest.MarkDecorator:
    """A test for each row of each family."""
    found = [(family, row) for family in ALL for row in rows(family)]
    return pytest.mark.parametrize(
        ("family", "row"), found, ids=[f"{family.name}-{i}" for i, (family, _) in enumerate(found)]
    )


def named(names: Callable[[Family], Any]) -> pytest.MarkDecorator:
    """The same of names."""
    found = [(family, name) for family in ALL for name in names(family)]
    return pytest.mark.parametrize(
        ("family", "name"), found, ids=[f"{family.name}-{name}" for family, name in found]
    )


def on_meta(config: Any, seq_len: int = 8192) -> Any:
    with torch.device("meta"):
        return build(config, seq_len=seq_len)


@named(lambda family: family.sizes)
def test_a_flavor_has_its_published_size_and_flops(family: Family, name: str) -> None:
    config = family.flavor(name)
    model = on_meta(config)
    assert sum(p.numel() for p in model.parameters()) == family.sizes[name]
    if name in family.flops:
        found = model.flops_per_token(2048 if name.startswith("debug") else 8192) + family.not_seen(config)
        assert found == pytest.approx(family.flops[name], rel=5e-4)
    assert len(model.experts) == len(moe_layers(model))


@named(lambda family: family.counted)
def test_flops_are_those_that_torch_counts(family: Family, name: str) -> None:
    """Of the forward, times 3; torch counts attention whole, as the formula does."""
    length, config = 2048, family.flavor(name)
    model = on_meta(replace(config, n_layers=min(config.n_layers, 6)), length)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, length, dtype=torch.int64, device="meta"))
    assert 3 * counter.get_total_flops() / length == pytest.approx(model.flops_per_token(length), rel=1e-2)


@named(lambda family: [name for name in family.sizes if not name.startswith("debug")])
def test_transformers_takes_a_flavors_config_for_its_own_model(family: Family, name: str, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_form(family.flavor(name)).config_json()))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(p.numel() for p in theirs.parameters()) == family.sizes[name]


VARIANTS = [(family, name) for family in ALL for name in family.variants]


@pytest.fixture(scope="module", params=VARIANTS, ids=[f"{family.name}-{name}" for family, name in VARIANTS])
def exported(request, tmp_path_factory) -> Iterator[Any]:
    """A small model, its family's form, its export, and transformers' reading of that."""
    family, name = request.param
    ours = family.model(name)
    form = hf_form(ours.config)
    folder = tmp_path_factory.mktemp("hf") / "model"
    export_hf({n: t.detach() for n, t in named_state(ours)}, form, {}, folder)
    theirs, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.get_input_embeddings().padding_idx = None  # whose row would have no gradient
    return family, ours, form, folder, theirs.eval()


def test_greedy_completions_equal_those_of_transformers(exported) -> None:
    """Of prompts that begin in turn, over the edges of windows, chunks and pages."""
    _, ours, _, _, theirs = exported
    prompts = [TOKENS[0, :15].tolist(), TOKENS[1, :3].tolist(), TOKENS[1, 40:49].tolist()]
    made: list[list[int]] = [[] for _ in prompts]

    def keep(row: int, token: int) -> bool:
        made[row].append(token)
        return True

    rows = [Row(number, 0, 20) for number in range(3)]
    decode(ours, prompts, rows, SamplingParams(temperature=0.0), keep, device=CPU, batch_size=2)
    options = {"do_sample": False, "max_new_tokens": 20, "use_cache": False, "eos_token_id": None}
    for prompt, found in zip(prompts, made, strict=True):
        ids = torch.tensor([prompt])
        whole = theirs.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        assert found == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("length", [7, LENGTH])
def test_logits_and_gradients_equal_transformers(exported, record_property, length: int) -> None:
    family, ours, form, _, theirs = exported
    record_property("logits", family.name)
    tokens = TOKENS[:, :length]
    expected, found = theirs(tokens).logits, ours(tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    for model, logits in ((theirs, expected), (ours, found)):
        model.zero_grad()
        logits.square().mean().backward()
    given, compared = dict(theirs.named_parameters()), set()
    for name, parameter in ours.named_parameters():
        for hf_name, gradient in form.to_hf(name, parameter.grad):
            hf_name = hf_name.replace("block_sparse_moe", "mlp")  # as transformers has it once it is read
            if hf_name in given:  # transformers has the experts of some families in other tensors
                reference = given[hf_name].grad
                # 6e-5 is seen with the kernels of AVX2
                assert (gradient - reference).norm() <= 1e-4 * reference.norm(), name
                compared.add(hf_name)
    assert {name for name in given if "experts" not in name} <= compared
    for name, layer in moe_layers(ours).items():
        apart = {key: weight.grad for key, weight in layer.experts.named_parameters()}
        theirs_of = f"model.{name.removesuffix('moe')}mlp.experts"
        if (
            "w1" in apart and f"{theirs_of}.down_proj" in given
        ):  # one by one in folders, stacked here and there
            pairs = {"gate_up_proj": torch.cat((apart["w1"], apart["w3"]), 1), "down_proj": apart["w2"]}
            for key, gradient in pairs.items():
                reference = given[f"{theirs_of}.{key}"].grad
                assert (gradient - reference).norm() <= 2e-5 * reference.norm(), (name, key)


def test_an_export_comes_back_bit_for_bit(exported, tmp_path) -> None:
    family, ours, form, folder, theirs = exported
    state = {name: tensor.detach() for name, tensor in named_state(ours)}
    theirs.save_pretrained(tmp_path / "again")  # and as transformers writes it
    for source in (folder, tmp_path / "again"):
        reader = read_hf(source, form)
        reader.check({name: tuple(tensor.shape) for name, tensor in state.items()})
        for name, tensor in state.items():
            assert torch.equal(reader.parameter(name), tensor), name
            assert reader.dtype(name) == tensor.dtype
        keys = family.config.from_config_json(json.loads((source / "config.json").read_text()))
        assert hf_form(bind(family.config, keys, current())).config_json() == form.config_json()
        assert keys == family.config.from_config_json(form.config_json())
    inside = {name: reader.parameter(name) for name in state}
    export_hf(inside, form, {}, tmp_path / "third")
    written = (tmp_path / "third" / "model.safetensors").read_bytes()
    assert written == (folder / "model.safetensors").read_bytes()


@named(lambda family: family.caches)
def test_weights_in_bf16_come_back_bit_for_bit(family: Family, name: str, tmp_path) -> None:
    model = family.model(name)
    form = hf_form(model.config)
    kept = {n: t.dtype if "expert_bias" in n else torch.bfloat16 for n, t in named_state(model)}
    state = {n: t.detach().to(kept[n]) for n, t in named_state(model)}
    export_hf(state, form, {}, tmp_path / "hf")
    reader = read_hf(tmp_path / "hf", form)
    for name, tensor in state.items():
        assert torch.equal(reader.parameter(name), tensor), name
        assert reader.dtype(name) == tensor.dtype


@each(lambda family: family.refused)
def test_a_config_that_a_family_cannot_express_is_refused(family: Family, row: Any) -> None:
    name, change = row
    good = hf_form(family.flavor(name)).config_json()
    family.config.from_config_json(json.loads(json.dumps(good)))
    with pytest.raises(TitanError, match=f"{family.name} does not support|{family.refusals}"):
        family.config.from_config_json({**good, **change})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_dropout_and_losses_of_routers_are_refused_by_name(family: Family) -> None:
    """Training would do without, and not say so; at zero they change nothing."""
    config = hf_form(family.variant(next(iter(family.variants)))).config_json()
    text = config.get("text_config", config)
    found = family.config.from_config_json(config)
    for key, value in {
        "attention_dropout": 0.1,
        "router_jitter_noise": 0.2,
        "output_router_logits": True,
    }.items():
        for off in (0.0, None):
            assert family.config.from_config_json({**text, key: off}) == found
        with pytest.raises(TitanError, match=f"config.json has {key} = {value}, which the model"):
            family.config.from_config_json({**text, key: value})


def test_layers_that_are_all_plain_are_no_other_model() -> None:
    """Releases say it in layer_types, which a family without other kinds of layers does not read."""
    config = hf_form(LLAMA3.flavor("8B")).config_json()
    plain = Llama3.from_config_json(config)
    assert Llama3.from_config_json({**config, "layer_types": ["full_attention"] * 32}) == plain
    with pytest.raises(TitanError, match="has layer_types"):
        Llama3.from_config_json({**config, "layer_types": ["full_attention", "sliding_attention"]})


@each(lambda family: family.routing)
def test_routing_that_transformers_cannot_express_is_refused(family: Family, row: Any) -> None:
    name, change, message = row
    config = family.variant(name)
    with pytest.raises(TitanError, match=message):
        hf_form(replace(config, moe=replace(config.moe, **change))).config_json()


@each(lambda family: family.unfit)
def test_what_does_not_fit_is_said_at_the_recipes_line(family: Family, row: Any) -> None:
    overrides, message = row
    with pytest.raises(RecipeError) as caught:
        load_recipe(f"{family.name}_debug", overrides.split())
    assert message in "\n".join([str(caught.value), *(p.message for p in caught.value.problems)])


@named(lambda family: family.caches)
def test_a_cache_gives_the_logits_of_the_whole_row(
    family: Family, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the edges of windows, chunks and pages; of rows that have begun earlier and later, of which one is
    a copy of another; and of several tokens after others."""
    model = family.model(name)
    monkeypatch.setattr("titancli.models.blocks.cache.PAGE", 4)
    row = TOKENS[0, :40]
    with torch.no_grad():
        whole, tail = model(row[None])[0], model(row[None, 5:])[0]
    cache = model.new_cache()
    first, second = cache.begin(), cache.begin()
    feed(model, cache, [first], [row[:9]])
    feed(model, cache, [first, second], [row[9:17], row[5:9]])
    feed(model, cache, [second], [row[9:17]])
    (third,) = cache.fork(second, 1)
    for at in range(17, 40):
        rows = [second, first, third] if at < 30 else [third, first]
        step = feed(model, cache, rows, [row[at : at + 1]] * len(rows))
        expected = torch.stack([whole[at] if n == first else tail[at - 5] for n in rows])
        torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-4)
        if at == 29:
            cache.close(second)


@named(lambda family: family.caches)
def test_documents_in_one_row_equal_documents_apart(family: Family, name: str) -> None:
    """Positions, windows and chunks count from a document's own beginning."""
    model = family.model(name)
    row = TOKENS[:1, :70]
    positions = torch.cat((torch.arange(27), torch.arange(43)))[None]
    ids = torch.tensor([[0] * 27 + [1] * 43], dtype=torch.int32)
    with torch.no_grad():
        together = model(row, positions, ids)
        apart = torch.cat((model(row[:, :27]), model(row[:, 27:])), dim=1)
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)


@named(lambda family: family.variants)
def test_initial_values(family: Family, name: str) -> None:
    """Every parameter is drawn, and what is added begins as nothing."""
    model = build(family.variant(name), seq_len=64)
    with torch.no_grad():
        for _, tensor in named_state(model):
            tensor.fill_(float("nan"))
    model.init_weights(lambda name: torch.Generator().manual_seed(0))
    for parameter, tensor in named_state(model):
        assert tensor.isfinite().all(), parameter
        assert not (parameter.endswith("bias") and not parameter.endswith("dt_bias") and tensor.any()), (
            parameter
        )
