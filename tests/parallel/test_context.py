"""Rows that are cut over ranks give the answer of whole rows: all three ways, alone and with other cuts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine import cases
from tests.engine.cases import LENGTH, ROWS, Layout
from tests.models.specs import attention
from tests.ranks import runs
from tests.ranks.comparison import difference
from tests.rows import rows
from titancli.distributed.collectives import Group
from titancli.distributed.local import RowCut
from titancli.distributed.mesh import Mesh
from titancli.engine import Engine
from titancli.engine.build import row_cut_of
from titancli.errors import RecipeError, TitanError
from titancli.layout.degrees import Degrees
from titancli.losses import CrossEntropyFull
from titancli.models.blocks.attention import Attention, attend
from titancli.models.blocks.attention_window import WHOLE, Reach
from titancli.models.blocks.flash import Queries, flash, flash_backward
from titancli.models.blocks.masks import document_mask
from titancli.parallel.context import (
    _allgather,
    _causal,
    _ring,
    _ulysses,
    context_parallel,
)
from titancli.parallel.ring import ring_attention, runs_here
from titancli.protocols.result import LossResult
from titancli.registry.component import completed, component

WAYS = ("allgather", "ulysses", "ring")
HEADS = {"n_kv_heads": 4}
ODD = {"vocab_size": 65}
FULL = {"mode": "full"}
MICRO = {"microbatch_size": 2}
BY_OP = {"mode": "selective", "selective_ac_option": "op"}


@component("loss", "squared", target=f"{__name__}:Squared")
class SquaredConfig:
    """A loss that is no weighted sum of log-probabilities: its gradient is not known in forward."""


class Squared:
    output = "logprobs"

    def __init__(self, config: SquaredConfig) -> None:
        pass

    def __call__(self, out: Tensor, batch: Any) -> LossResult:
        # What a token weighs depends on where in its row it stands, so a wrong order would be seen.
        places = torch.linspace(0.5, 1.5, out.shape[1])
        counted = batch["targets"] >= 0
        return LossResult((out.square() * places).sum(), counted.sum().float(), {"mean": out.detach().sum()})


def layout(how: str, **options: Any) -> Layout:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    mesh = {name: options.pop(name) for name in names if name in options}
    return Layout(mesh=mesh, context_parallel=how, **options)


LAYOUTS: dict[str, tuple[int, Layout]] = {
    **{f"CP4, {how}": (4, layout(how, cp=4, model=HEADS)) for how in ("ulysses", "ring")},
    **{f"CP2xTP2, {how}": (4, layout(how, cp=2, tp=2, model=HEADS)) for how in ("ulysses", "ring")},
    **{
        f"compiled, AC full, {how}": (2, layout(how, cp=2, compile="aot_eager", activation_checkpoint=FULL))
        for how in WAYS
    },
    **{f"AC by op, {how}": (2, layout(how, cp=2, activation_checkpoint=BY_OP)) for how in WAYS},
    "CP2xDDP2": (4, layout("allgather", cp=2, dp_replicate=2)),
    "CP2xFSDP2, ring": (4, layout("ring", cp=2, dp_shard=2)),
    "AC full": (2, layout("allgather", cp=2, activation_checkpoint=FULL)),
    "documents, ulysses": (2, layout("ulysses", cp=2, documents=True)),
    "CP4, documents": (4, layout("allgather", cp=4, documents=True)),
    "documents, compiled": (2, layout("allgather", cp=2, documents=True, compile="aot_eager")),
    "CP2xTP2, documents": (4, layout("allgather", cp=2, tp=2, documents=True)),
    "CP2xTP2, full logits": (4, layout("ulysses", cp=2, tp=2, model=HEADS, loss=CrossEntropyFull())),
    "TP2, odd vocabulary": (2, layout("allgather", tp=2, model=ODD)),
    "TP2, odd vocabulary, tied, documents": (
        2,
        layout("allgather", tp=2, model=ODD, tied=True, documents=True),
    ),
    "TP2, odd vocabulary, compiled": (2, layout("allgather", tp=2, model=ODD, compile="aot_eager")),
    "TP2, odd vocabulary, full logits": (2, layout("allgather", tp=2, model=ODD, loss=CrossEntropyFull())),
    "TP2xFSDP2, odd vocabulary": (4, layout("allgather", tp=2, dp_shard=2, model=ODD, tied=True)),
    "PP2xTP2, odd vocabulary": (4, layout("allgather", pp=2, tp=2, pipeline=MICRO, model=ODD)),
    "CP2xTP2, odd vocabulary": (4, layout("allgather", cp=2, tp=2, model=ODD)),
    "CP2xTP2, odd vocabulary, ring": (4, layout("ring", cp=2, tp=2, model=ODD)),
    "CP2xTP2, odd vocabulary, log-probs": (
        4,
        layout("ulysses", cp=2, tp=2, model={**HEADS, **ODD}, loss=SquaredConfig()),
    ),
    "log-probs": (2, layout("allgather", cp=2, loss=SquaredConfig())),
    "CP2xTP2, log-probs": (4, layout("allgather", cp=2, tp=2, loss=SquaredConfig())),
    "tied": (2, layout("ring", cp=2, tied=True)),
    "PP2xCP2": (4, layout("allgather", pp=2, cp=2, pipeline=MICRO)),
    "PP2xCP2, documents": (4, layout("ulysses", pp=2, cp=2, pipeline=MICRO, documents=True)),
    "PP2xCP2, ZBVZeroBubble": (
        4,
        layout("ring", pp=2, cp=2, pipeline={**MICRO, "schedule": "ZBVZeroBubble"}),
    ),
}
"""The suite in tests/ranks has the plain ones."""


@pytest.fixture(scope="module")
def one_rank(ranks):
    """The run on one rank that a layout is compared with; each is run once."""
    known: dict[str, dict[str, Tensor]] = {}

    def run(this: Layout) -> dict[str, Tensor]:
        loss = SquaredConfig() if isinstance(this.loss, SquaredConfig) else Layout().loss
        plain = Layout(model=this.model, tied=this.tied, documents=this.documents, loss=loss)
        if str(plain) not in known:
            known[str(plain)] = ranks(1, runs.run, plain, "sgd")[0]
        return known[str(plain)]

    return run


SLOW = {
    *(f"compiled, AC full, {how}" for how in ("allgather", "ulysses", "ring")),
    *("TP2, odd vocabulary, compiled", "CP2xTP2, odd vocabulary, ring", "TP2xFSDP2, odd vocabulary"),
    *("documents, compiled", "CP4, ulysses"),
    *("CP2xTP2, full logits", "PP2xCP2, documents", "CP2xTP2, ring", "CP2xDDP2"),
    *("AC by op, allgather", "AC by op, ulysses", "CP4, documents", "CP2xTP2, log-probs", "PP2xCP2"),
}
"""Compiling takes long where cores are few; what is in these is in others too."""


@pytest.mark.ranks
@pytest.mark.parametrize("name", rows(LAYOUTS, slow=SLOW))
def test_parts_of_rows_give_the_answer_of_whole_rows(ranks, one_rank, name):
    world, this = LAYOUTS[name]
    if "pp" not in this.mesh:  # two layers show all that four do
        this = replace(this, model={"n_layers": 2, **this.model})
    found = difference(ranks(world, runs.run, this, "sgd"), one_rank(this))
    assert found.largest <= 1e-5, f"{found.worst}: {found}"


@pytest.mark.ranks
@pytest.mark.parametrize("how", WAYS)
def test_bfloat16_stays_close(ranks, one_rank, how):
    this = layout(how, cp=2, dtype="bfloat16")
    found = difference(ranks(2, runs.run, this, "sgd"), one_rank(this))
    assert found.largest <= 0.05, f"{found.worst}: {found}"


# ------------------------------------------------------------------------------------------- the verbs


def _log_probs(this: Layout) -> tuple[Tensor, dict[str, Any], int]:
    engine = Engine.build(cases.recipe(this))
    [batch] = cases.my_batches(engine)
    metrics = engine.forward_backward(batch)
    return engine.forward(batch), engine.evaluate(batch), metrics["tokens"]


@pytest.mark.ranks
@pytest.mark.parametrize("how", WAYS)
def test_every_rank_has_the_whole_row_in_order_and_counts_it_once(ranks, how):
    expected, evaluated, tokens = ranks(1, _log_probs, Layout())[0]
    assert tokens == ROWS * LENGTH
    for log_probs, here, count in ranks(2, _log_probs, layout(how, cp=2)):
        torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(here["loss"], evaluated["loss"])
        assert here["weight"] == evaluated["weight"]
        assert count == tokens


def _train(this: Layout, steps: range, load: str | None, save: str | None) -> list[float]:
    engine = Engine.build(cases.recipe(this))
    if load is not None:
        engine.load(load)
    losses = []
    for step in steps:
        losses.append(float(engine.forward_backward(cases.my_batches(engine, step))["loss"]))
        engine.optim_step()
    if save is not None:
        engine.save(save)
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize(
    "way", [("cp", "dp_shard"), pytest.param(("dp_shard", "cp"), marks=pytest.mark.slow)]
)
def test_a_checkpoint_goes_on_where_rows_are_cut_otherwise(ranks, tmp_path, way):
    before, after = (Layout({name: 2}) for name in way)
    folder = str(tmp_path / "step-2")
    expected = ranks(1, _train, Layout(), range(4), None, None)[0]
    ranks(2, _train, before, range(2), None, folder)
    for losses in ranks(2, _train, after, range(2, 4), folder, None):
        assert losses == pytest.approx(expected[2:], rel=1e-5)


# -------------------------------------------------------------------------------------- rows and pieces


@pytest.mark.parametrize("head_tail", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_equal_and_together_are_the_row(size, head_tail):
    row = torch.arange(2 * 24).view(2, 24)
    cuts = [RowCut(Group("", size, rank), head_tail=head_tail) for rank in range(size)]
    parts = [cut.cut(row, 1) for cut in cuts]
    assert {part.shape for part in parts} == {(2, 24 // size)}
    assert torch.equal(cuts[0].in_order(torch.cat(parts), 1), row)
    assert torch.equal(torch.cat(parts, 1).sort(1).values, row)


def test_inputs_get_positions_and_what_is_not_along_the_sequence_stays_whole():
    cut = RowCut(Group("", 2, 0), head_tail=True)
    tokens, ids = torch.arange(16).view(2, 8), torch.zeros(2, 8)
    inputs = cut.inputs({"tokens": tokens, "document_ids": ids}, {"tokens": 1, "positions": 1})
    assert inputs["tokens"].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert inputs["positions"].tolist() == [[0, 1, 6, 7]] * 2
    assert inputs["document_ids"] is ids
    given = cut.inputs({"tokens": tokens, "positions": tokens + 1}, {"tokens": 1, "positions": 1})
    assert given["positions"].tolist() == (inputs["tokens"] + 1).tolist()


def test_rows_that_cannot_be_cut_are_told():
    cut = RowCut(Group("", 4, 0), head_tail=True)
    with pytest.raises(TitanError, match="a row of 12 cannot be split into 8 equal parts"):
        cut.inputs({"tokens": torch.zeros(2, 12)}, {"tokens": 1, "positions": 1})
    with pytest.raises(TitanError, match="needs `positions`"):
        cut.inputs({"tokens": torch.zeros(2, 16)}, {"tokens": 1})


# ------------------------------------------------------------------------------------------- attention


def _pairs(how: str) -> int:
    """How many pairs of a query and a key this rank computes."""
    group = _group()
    count = 0

    def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = True) -> Tensor:
        nonlocal count
        here = torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]) if mask is None else mask
        count += int(here.sum()) * q.shape[2]
        return q

    cut = RowCut(group, head_tail=how != "ulysses")
    q = torch.zeros(1, LENGTH // group.size, 4, 8)
    if how == "ulysses":
        _ulysses(core, group, q, q, q, None)
    else:
        _allgather(core, cut, True, WHOLE, q, q, q, None)
    return count


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["allgather", "ulysses"])
@pytest.mark.parametrize("world", [2, 4])
def test_causal_work_is_even(ranks, how, world):
    whole = 4 * LENGTH * (LENGTH + 1) // 2
    assert ranks(world, _pairs, how) == [whole // world] * world


def _group() -> Group:
    import torch.distributed as dist

    return Group.of(dist.group.WORLD)  # type: ignore[arg-type]


REACHES = {"whole": WHOLE, "window": Reach(window=5), "chunks": Reach(chunk=12)}


def _attention(how: str, kv_heads: int, documents: bool, seen: str) -> dict[str, Tensor]:
    """One attention on parts of random rows: the output, and the gradients of q, k, v and sinks."""
    group = _group()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, LENGTH, heads, 8, generator=generator) for heads in (4, kv_heads, kv_heads)]
    weights = torch.randn(2, LENGTH, 4, 8, generator=generator)
    cut = RowCut(group, head_tail=how != "ulysses")
    q, k, v = (cut.cut(x, 1).requires_grad_() for x in whole)
    reach, sinks = REACHES[seen], torch.randn(4, generator=generator).requires_grad_()
    limits = {"window": reach.window, "chunk": reach.chunk}
    module = Attention(attention(32, 4, kv_heads, 8, sinks=seen != "whole", **limits))
    ids = torch.randint(0, 3, (2, LENGTH), generator=generator).sort().values
    mask = document_mask(ids, reach) if documents else None
    core = module.core_attention
    over_rows = {
        "allgather": partial(_allgather, core, cut, kv_heads == 2 and seen != "chunks", reach),
        "ulysses": partial(_ulysses, core, group),
        "ring": partial(_ring, group),
    }
    more = {"sinks": sinks} if seen != "whole" else {}
    out = (core if group.size == 1 else over_rows[how])(q, k, v, mask, **more)
    (out * cut.cut(weights, 1)).sum().backward()
    found = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
    joined = {name: cut.join(x, 1) for name, x in found.items()}  # type: ignore[arg-type]
    if sinks.grad is not None:
        torch.distributed.all_reduce(sinks.grad)
        joined["sinks"] = sinks.grad
    return joined


@pytest.mark.ranks
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("how", "documents", "seen"),
    [
        *((how, False, "whole") for how in WAYS),
        ("allgather", True, "whole"),
        ("ulysses", True, "whole"),
        *(
            (how, documents, seen)
            for how in ("allgather", "ulysses")
            for documents in (False, True)
            for seen in ("window", "chunks")
        ),
    ],
)
def test_attention_and_its_gradients_are_those_of_one_rank(ranks, how, documents, seen, kv_heads):
    expected = ranks(1, _attention, "ulysses", kv_heads, documents, seen)[0]
    for world in (2, 4)[: 1 if how == "ulysses" and kv_heads == 2 else 2]:
        for found in ranks(world, _attention, how, kv_heads, documents, seen):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def test_what_attention_cannot_do_is_told_by_name():
    group = Group("", 2, 0)
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 4)
    core = Attention(attention(24, 3, 3, 8)).core_attention
    with pytest.raises(TitanError, match="3 heads cannot be exchanged among the 2 ranks"):
        _ulysses(core, group, q, q, q, None)
    with pytest.raises(TitanError, match="cannot keep attention within documents"):
        _ring(group, q, q, q, torch.ones(1, 1, 8, 8, dtype=torch.bool))
    with pytest.raises(TitanError, match="not heads of 8 and 4"):
        ring_attention(q, q, k, group)
    with pytest.raises(TitanError, match="cannot generate with a cache"):
        _causal(partial(_ring, group), q, q, q, None, causal=False)


def test_the_ring_has_kernels_for_half_precision_alone_on_gpus():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert runs_here(cpu, torch.float32)
    assert runs_here(gpu, torch.bfloat16)
    assert runs_here(gpu, torch.float16)
    assert not runs_here(gpu, torch.float32)


# ------------------------------------------------------------------------------------------------ plans


class _Odd(nn.Module):
    """Attention that is more than a softmax."""

    def core_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = True
    ) -> Any:
        return q


def _told() -> list[str]:
    mesh = Mesh(Degrees(cp=2), torch.device("cpu"))
    where: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    said = []
    for layer, how, others in (
        (nn.Linear(2, 2), "allgather", {}),
        (_Odd(), "ring", {}),
        (_Odd(), "ring", {"device": torch.device("cuda")}),
    ):
        model = nn.ModuleDict({"layers": nn.ModuleDict({"0": layer})})
        try:
            context_parallel(model, mesh, how, **(where | others))
        except TitanError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.ranks
def test_a_model_that_cannot_be_cut_is_told(ranks):
    for found in ranks(2, _told):
        assert "no module of the model has a method `core_attention`" in found[0]
        assert "_Odd does not declare that its own is plain softmax attention" in found[1]
        assert found[2].startswith(RecipeError.__name__)
        assert "no kernel for torch.float32 on cuda" in found[2]


def test_a_plan_that_ignores_cp_is_refused():
    with pytest.raises(TitanError, match="the parallelize plan did not shard the rows"):
        row_cut_of(completed("model", nn.Linear(2, 2)), Degrees(cp=2))
    assert row_cut_of(completed("model", nn.Linear(2, 2)), Degrees()) is None


def _graphs(this: Layout) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cases.gradients(this)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.ranks
@pytest.mark.parametrize("how", rows(WAYS, slow=("ulysses", "ring")))
def test_all_blocks_share_one_compiled_graph(ranks, how):
    """Compiled one by one, torch would give up after eight."""
    this = layout(how, cp=2, compile="aot_eager", model={"n_layers": 10})
    assert ranks(2, _graphs, this) == [1, 1]


def _sends(mode: dict[str, Any]) -> int:
    from titancli.parallel import ring

    kept, count = ring._send, 0

    def counted(*args: Any) -> Tensor:
        nonlocal count
        count += 1
        return kept(*args)

    ring._send = counted  # type: ignore[assignment]
    try:
        cases.gradients(layout("ring", cp=2, activation_checkpoint=mode))
    finally:
        ring._send = kept
    return count


@pytest.mark.ranks
def test_checkpointing_by_op_keeps_what_the_ring_gave(ranks):
    """Forward sends keys and values once; backward once, and their gradients to the other rank and home."""
    layers = cases.MODEL["n_layers"]
    assert ranks(2, _sends, {"mode": "none"}) == [4 * layers] * 2
    assert ranks(2, _sends, BY_OP) == [4 * layers] * 2
    assert ranks(2, _sends, FULL) == [5 * layers] * 2


# ----------------------------------------------------------------------------------------------- on GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpus_flash_kernel_tells_the_log_sum_exp_and_takes_it_back(causal):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, 4, 128, 64), (2, 2, 128, 64), (2, 2, 128, 64), (2, 4, 128, 64))
    q, k, v, grad = (torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes)
    out, lse = flash(q, k, v, causal=causal)
    grads = flash_backward(Queries(grad, q, out, lse), k, v, causal=causal)
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in exact[1:])
    scores = exact[0] @ keys.transpose(-1, -2) / 8
    if causal:
        scores = scores.masked_fill(~torch.ones(128, 128, device="cuda").tril().bool(), float("-inf"))
    expected = scores.softmax(-1) @ values
    expected.backward(grad.float())
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-2, atol=1e-2)
    for found, reference in zip((out, *grads), (expected, *(x.grad for x in exact)), strict=True):
        assert (found.float() - reference).norm() <= 0.02 * reference.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gpus_lower_right_kernel_gives_what_a_mask_gives(compiled):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((1, 32, 4, 64), (1, 96, 2, 64), (1, 96, 2, 64))
    tensors = [torch.randn(s, device="cuda", generator=generator).bfloat16().requires_grad_() for s in shapes]
    mask = torch.ones(32, 96, dtype=torch.bool, device="cuda").tril(64)
    function = torch.compile(attend, fullgraph=True) if compiled else attend
    found, expected = (function(*tensors, seen, grouped=True) for seen in (None, mask))
    grads = [torch.autograd.grad(out.float().square().sum(), tensors) for out in (found, expected)]
    for mine, reference in zip((found, *grads[0]), (expected, *grads[1]), strict=True):
        assert (mine - reference).float().norm() <= 0.02 * reference.float().norm()
