"""The verbs: what they return, what they refuse, and that they leave nothing behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.engine import cases
from tests.engine.cases import Layout, small
from titancli.engine import Engine
from titancli.engine.dry_run import local
from titancli.errors import TitanError

pytestmark = pytest.mark.ranks


def log_probs(layout):
    engine = Engine.build(cases.recipe(layout))
    batch = cases.my_batches(engine)[0]
    return engine.forward(batch), batch["targets"], engine.evaluate(batch)


def test_forward_gives_log_probs_of_the_targets(ranks):
    (values, targets, metrics), *_ = ranks(1, log_probs, small())
    assert values.shape == targets.shape
    assert values.dtype == torch.float32
    assert not values.requires_grad
    assert (values[targets == -100] == 0).all()
    count = (targets != -100).sum()
    assert metrics["weight"] == count
    torch.testing.assert_close(metrics["loss"], -values.sum() / count)


def test_evaluate_averages_over_all_ranks(ranks):
    (_, _, one), *_ = ranks(1, log_probs, small())
    for _, _, metrics in ranks(2, log_probs, small({"dp_shard": 2})):
        torch.testing.assert_close(metrics["loss"], one["loss"])


IDS = [("targets", 64), ("targets", -1), ("targets", -7), ("tokens", 64), ("tokens", -100)]
CUT = [{"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 1, "cp": 2}, {"dp_shard": 1, "pp": 2}]


def ids_that_are_none(meshes):
    found = []
    for mesh in meshes:
        with Engine.build(cases.recipe(small(mesh, pipeline={"microbatch_size": 4}))) as engine:
            good = cases.my_batches(engine)[0]
            before = engine.evaluate(good)["loss"]
            for name, number in IDS:
                other = good[name].clone()
                other[1, 3] = number
                wrong = {**good, name: other}
                for verb, given in (
                    (engine.forward, wrong),
                    (engine.evaluate, wrong),
                    (engine.forward_backward, [good, wrong]),
                ):
                    try:
                        verb(given)
                        found.append("no error")
                    except TitanError as error:
                        found.append(str(error) if f"token id {number} in '{name}'" not in str(error) else "")
            if engine.mesh.degrees.cp > 1:
                with pytest.raises(TitanError, match=r"rows are 10 tokens long, .* into 4 pieces"):
                    engine.forward_backward({name: value[:, :10] for name, value in good.items()})
            found.append("" if torch.equal(engine.evaluate(good)["loss"], before) else "it has changed")
            found.append("" if engine.status["accumulated"] == 0 else "gradients are there")
    return found


def test_an_id_that_the_model_has_no_row_for_is_told_on_every_layout(ranks):
    for found in ranks(2, ids_that_are_none, CUT):
        assert found == [""] * len(found) and len(found) == len(CUT) * (3 * len(IDS) + 2)


def evaluate_between_steps():
    plain, disturbed = (Engine.build(cases.recipe(small({"dp_shard": 2}))) for _ in range(2))
    for step in range(2):
        for engine in (plain, disturbed):
            if engine is disturbed:
                engine.evaluate(cases.my_batches(engine, 9))
            engine.forward_backward(cases.my_batches(engine, step))
            if engine is disturbed:
                engine.forward(cases.my_batches(engine, 8)[0])
            engine.optim_step()
    return [
        torch.equal(local(a), local(b))
        for (_, a), (_, b) in zip(plain.named_parameters(), disturbed.named_parameters(), strict=True)
    ]


def test_forward_and_evaluate_do_not_disturb_training(ranks):
    assert all(all(same) for same in ranks(2, evaluate_between_steps))


def two_calls_against_one():
    layout = small({"dp_shard": 2}, micro_batches=2)
    together, apart = (Engine.build(cases.recipe(layout)) for _ in range(2))
    batches = cases.my_batches(together)
    together.forward_backward(batches)
    for batch in batches:
        apart.forward_backward(batch)
    norms = [engine.optim_step()["grad_norm"] for engine in (together, apart)]
    return norms, together.tokens_seen, apart.tokens_seen


def test_calls_before_a_step_add_up(ranks):
    (norms, tokens, tokens_apart), _ = ranks(2, two_calls_against_one)
    torch.testing.assert_close(norms[0], norms[1])
    assert tokens == tokens_apart == cases.ROWS * cases.LENGTH


def clip():
    """Hooks of an optimizer find the gradients that it steps on, divided and clipped."""
    loose = Engine.build(cases.recipe(small(), max_norm=0.0))
    tight = Engine.build(cases.recipe(small(), max_norm=1e-3))
    result = []
    for engine in (loose, tight):
        engine.forward_backward(cases.my_batches(engine))
        reference = [cases.whole(p.grad) / engine.pending.weight for _, p in engine.named_parameters()]
        before = torch.nn.utils.get_total_norm(reference)
        captured = []
        engine.optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs, into=captured: into.extend(
                cases.whole(p.grad) for group in optimizer.param_groups for p in group["params"]
            )
        )
        norm = engine.optim_step()["grad_norm"]
        result.append((before, norm, torch.nn.utils.get_total_norm(captured)))
    return result


def test_clipping_limits_the_norm_and_zero_never_clips(ranks):
    (before, norm, after), (_, tight_norm, tight_after) = ranks(1, clip)[0]
    torch.testing.assert_close(norm, before)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(tight_norm, before)
    assert tight_after <= 1.001e-3


def refusals():
    engine = Engine.build(cases.recipe(small()))
    frozen = Engine.build(cases.recipe(small()), frozen=True)
    batch = cases.my_batches(engine)[0]
    messages = []
    for call in (
        engine.optim_step,
        lambda: frozen.forward_backward(batch),
        lambda: engine.evaluate([]),
        lambda: Engine.build(cases.recipe(small({"dp_shard": 3}))),
        lambda: Engine.build(cases.recipe(small(compile="inductr"))),
        lambda: Engine.build(cases.recipe(small(), global_batch_size=7)),
        lambda: Engine.build(cases.recipe(Layout({"ep": 2}, model={"n_heads": 3}))),
    ):
        try:
            call()
            messages.append("no error")
        except TitanError as error:
            messages.append(str(error))
    return messages, frozen.forward(batch).shape


def test_what_cannot_be_done_is_refused_by_name(ranks):
    messages, shape = ranks(1, refusals)[0]
    expected = [
        "call forward_backward first",
        "frozen engine",
        "no batch",
        "does not make 1 rank",
        "inductr",
        "not a multiple",
        "mesh.ep = 2: the model has no experts",
    ]
    for message, part in zip(messages, expected, strict=True):
        assert part in message
    assert "model.n_heads: dim 32 is not divisible by n_heads 3" in messages[-1], "all is said at once"
    assert shape == (cases.ROWS, cases.LENGTH)


def hugging_face_weights(layout):
    engine = Engine.build(cases.recipe(layout))
    return dict(engine.weights()), cases.initial_weights(layout)


def test_weights_have_hugging_face_names_and_stand_on_rank_0(ranks):
    (first, plain), (second, _) = ranks(2, hugging_face_weights, small({"dp_shard": 2}))
    assert list(first) == list(second)
    assert all(value is None for value in second.values())
    torch.testing.assert_close(
        first["model.layers.1.mlp.down_proj.weight"], plain["layers.1.feed_forward.w2.weight"]
    )
    assert len(first) == len(plain)


def resume(folder):
    layout = small({"dp_shard": dist.get_world_size()})
    straight = Engine.build(cases.recipe(layout))
    for step in range(4):
        straight.forward_backward(cases.my_batches(straight, step))
        straight.optim_step()
        if step == 1:
            straight.save(folder)
    resumed = Engine.build(cases.recipe(layout, seed=3))
    resumed.load(folder)
    losses = []
    for step in range(resumed.step, 4):
        losses.append(resumed.forward_backward(cases.my_batches(resumed, step))["loss"])
        resumed.optim_step()
    same = [
        torch.equal(local(a), local(b))
        for (_, a), (_, b) in zip(straight.named_parameters(), resumed.named_parameters(), strict=True)
    ]
    return all(same), straight.status == resumed.status


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_engine_is_bitwise_the_one_that_went_on(ranks, tmp_path, world):
    assert ranks(world, resume, str(tmp_path / "step-2")) == [(True, True)] * world


def saved_before_the_first_step(folder):
    layout = small({"dp_shard": dist.get_world_size()})
    plain, saving = (Engine.build(cases.recipe(layout)) for _ in range(2))
    for engine in (plain, saving):
        for number in range(2):
            engine.forward_backward(cases.my_batches(engine, number))
            if engine is saving:
                engine.save(folder / f"step-{number}")
    norms = [float(engine.optim_step()["grad_norm"]) for engine in (plain, saving)]
    return norms, [
        torch.equal(local(a), local(b))
        for (_, a), (_, b) in zip(plain.named_parameters(), saving.named_parameters(), strict=True)
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_saving_before_the_first_step_leaves_the_gradients_alone(ranks, tmp_path, world):
    for (norm, saved), same in ranks(world, saved_before_the_first_step, tmp_path):
        assert norm == saved > 0
        assert all(same)
