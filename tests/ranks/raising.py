"""What the ranks run for "raise, then go on": an error in the middle of each verb, then one clean step.

Two engines do the same steps. In one of them each verb raises in turn, on all ranks alike; then both do a
clean step, which must be the same to the last bit, or the engine must refuse all verbs until it is mended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.engine.cases import Layout, my_batches, recipe
from tests.engine.test_unusable import damage
from titancli import Batch, LossResult
from titancli.engine import Engine
from titancli.engine.inputs import LogProbs
from titancli.engine.sampling import refuse_layout
from titancli.engine.weights import Renewal
from titancli.errors import EnvironmentProblem, TitanError

EQUAL, REFUSES, NOT_THERE = "equal", "refuses", "-"


class Broken(Exception):
    """What the tests raise."""


class Outcome(NamedTuple):
    verb: str
    what: str
    found: str
    """EQUAL, REFUSES (until it is loaded), NOT_THERE, or what is wrong."""


class Harm(NamedTuple):
    verb: str
    what: str
    do: Callable[[Engine, list[Batch], Path], Any]
    """Must raise."""
    gradients: str = ""
    """Gradients that wait when it raises: "lost" with it, "kept" for the step after it, or none."""
    expected: type[Exception] | tuple[type[Exception], ...] = Broken


# ------------------------------------------------------------------------------------------ what raises


@contextmanager
def layer_raises(engine: Engine, *, call: int = 1, recomputed: bool = False) -> Iterator[None]:
    """A layer in the middle raises the `call`th time; or where it runs again in backward."""
    block = list(engine.parts[0].layers.values())[-1]
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        in_backward = torch._C._current_graph_task_id() != -1
        calls += in_backward == recomputed
        if calls == call and in_backward == recomputed:
            raise Broken

    handle = (block.attention if recomputed else block).register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def gradient_raises(engine: Engine, *, call: int = 1) -> Iterator[None]:
    """Backward raises in the middle of the layers, the `call`th time."""
    calls = 0

    def backward(_: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Broken

    def hook(module: Any, args: Any, output: Any) -> None:
        (output if isinstance(output, Tensor) else output[0]).register_hook(backward)

    handle = next(iter(engine.parts[0].layers.values())).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def loss_that_raises(call: int) -> Callable[[Tensor, Batch], LossResult]:
    calls = 0

    def loss(out: Tensor, batch: Batch) -> LossResult:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Broken
        return LossResult(-out.sum(), (batch["targets"] != -100).sum())

    return loss


def forgetful(out: Tensor, batch: Batch) -> LossResult:
    return LossResult((out * batch["advantages"]).sum(), 1)


class AfterStep:
    """A converter that raises when the step is done."""

    def after_step(self, part: Any) -> None:
        raise Broken

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        return tensor


# ---------------------------------------------------------------------------------------------- the verbs


def within(context: Any, call: Callable[[], Any]) -> Any:
    with context:
        return call()


def optimizer_raises(engine: Engine, batches: list[Batch], folder: Path) -> None:
    engine.forward_backward(batches)
    kept = engine.optimizer.step

    def step(*args: Any, **kwargs: Any) -> None:
        kept(*args, **kwargs)
        raise Broken

    within(replaced(engine.optimizer, "step", step), engine.optim_step)


def after_step_raises(engine: Engine, batches: list[Batch], folder: Path) -> None:
    engine.forward_backward(batches)
    renewal = next(hook for hook in engine.hooks if isinstance(hook, Renewal))
    within(replaced(renewal, "_converters", [AfterStep()]), engine.optim_step)


def save_fails(engine: Engine, batches: list[Batch], folder: Path) -> None:
    blocked = folder / "a file"
    blocked.touch()
    engine.save(blocked / "step-1")


def load_damaged(engine: Engine, batches: list[Batch], folder: Path) -> None:
    engine.save(folder / "step-7")
    if dist.get_rank() == 0:
        damage(folder / "step-7")
    dist.barrier()
    engine.load(folder / "step-7")


def load_nothing(engine: Engine, batches: list[Batch], folder: Path) -> None:
    engine.load(folder / "is not there")


def body_raises(engine: Engine, batches: list[Batch], folder: Path) -> None:
    with engine.sampling(), layer_raises(engine):
        engine.runner.forward(batches[0], LogProbs())


def gathering_raises(engine: Engine, batches: list[Batch], folder: Path) -> None:
    calls, kept = 0, FSDPModule.unshard

    def unshard(module: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Broken
        return kept(module, *args)

    with replaced(FSDPModule, "unshard", unshard), engine.sampling():
        pass


def load_good(engine: Engine, batches: list[Batch], folder: Path) -> None:
    engine.load(folder / "step-0")
    raise Broken  # nothing of it is titan's: gradients that waited are forgotten


def cleared(engine: Engine, batches: list[Batch], folder: Path) -> None:
    engine.forward_backward(batches)
    engine.clear_gradients()
    raise Broken  # nothing of it is titan's


def harms(layout: Layout) -> list[Harm]:
    """Each verb, and where in it something raises."""
    last = layout.micro_batches
    found = [
        Harm("forward", "a layer", lambda e, b, f: within(layer_raises(e), lambda: e.forward(b[0]))),
        Harm(
            "evaluate",
            "the loss, at the second batch",
            lambda e, b, f: e.evaluate([b[0], b[0]], loss_that_raises(2)),
            "kept",
        ),
        Harm(
            "evaluate",
            "a layer, at the second batch",
            lambda e, b, f: within(layer_raises(e, call=2), lambda: e.evaluate([b[0], b[0]])),
        ),
        Harm("evaluate", "a batch lacks a key", lambda e, b, f: e.evaluate(b, forgetful), "", KeyError),
        Harm(
            "forward_backward",
            "a batch lacks a key",
            lambda e, b, f: e.forward_backward(b, forgetful),
            "lost",
            KeyError,
        ),
        *(
            Harm(
                "forward_backward",
                f"{what}, micro-batch {call}",
                lambda e, b, f, call=call, how=how: how(e, b, call),
                "lost" if call == last else "",
            )
            for call in sorted({1, last})
            for what, how in {
                "the loss": lambda e, b, call: e.forward_backward(b, loss_that_raises(call)),
                "a layer": lambda e, b, call: within(
                    layer_raises(e, call=call), lambda: e.forward_backward(b)
                ),
                "backward": lambda e, b, call: within(
                    gradient_raises(e, call=call), lambda: e.forward_backward(b)
                ),
            }.items()
        ),
        Harm("clear_gradients", "by hand", cleared),
        Harm("optim_step", "the optimizer", optimizer_raises),
        Harm("optim_step", "a converter's after_step", after_step_raises),
        Harm("save", "the disk", save_fails, "kept", EnvironmentProblem),
        Harm("load", "nothing there", load_nothing, "kept", EnvironmentProblem),
        Harm("load", "a good one, gradients wait", load_good, "lost"),
        Harm("load", "a damaged file", load_damaged, "lost", EnvironmentProblem),
        Harm("sampling", "inside", body_raises, "kept"),
        Harm("sampling", "gathering", gathering_raises, "kept"),
    ]
    if layout.activation_checkpoint["mode"] == "full" and layout.compile is None:
        again = Harm(
            "forward_backward",
            "recomputation",
            lambda e, b, f: within(layer_raises(e, recomputed=True), lambda: e.forward_backward(b)),
        )
        found.insert(5, again)
    return found


def run(layout: Layout, folder: Path, exchanging: str = "forward_backward") -> list[Outcome]:
    """Every harm in turn, on the same two engines.

    Args:
        exchanging: the verb in which a pipeline raises at last, while its ranks exchange tensors.
    """
    plain, hurt = (Engine.build(recipe(layout)) for _ in range(2))
    found = []
    pipeline = hurt.mesh.degrees.pp > 1
    for number, harm in enumerate(harms(layout)):
        if pipeline and harm.verb in ("forward", "evaluate", "forward_backward"):
            continue  # a stage that raises alone leaves the others waiting for it
        found.append(Outcome(harm.verb, harm.what, one(plain, hurt, harm, number, folder / str(number))))
    if pipeline:
        found.append(Outcome(exchanging, "all stages", stages_raise(hurt, exchanging, folder)))
    return found


def stages_raise(engine: Engine, verb: str, folder: Path) -> str:
    """Each stage raises once it has handed on what the next one needs to come so far."""
    batches = my_batches(engine)
    engine.save(folder / "step-9")
    verbs: dict[str, Callable[[], Any]] = {
        "forward": lambda: engine.forward(batches[0]),
        "evaluate": lambda: engine.evaluate(batches),
        "forward_backward": lambda: engine.forward_backward(batches),
    }
    try:
        with layer_raises(engine, call=engine.mesh.degrees.pp - engine.mesh.pp_rank):
            verbs[verb]()
    except Broken:
        pass
    else:
        return "nothing was raised"
    try:
        engine.load(folder / "step-9")
    except TitanError as error:
        if "the engine is unusable" in str(error) and refused(engine, batches):
            return REFUSES
    return "is usable"


def stages_alone(layout: Layout, verb: str, folder: Path) -> str:
    return stages_raise(Engine.build(recipe(layout)), verb, folder)


def first_of_all(world: int, by_hand: bool) -> list[str]:
    """What differs where a new engine's first forward, or its first gathering, has raised."""
    layout = Layout({"dp_shard": world}, micro_batches=2, accumulate="unsharded")
    found = []
    with ExitStack() as stack:
        if by_hand and hasattr(FSDPModule, "reset_iter_state"):
            kept = FSDPModule.reset_iter_state
            del FSDPModule.reset_iter_state
            stack.callback(setattr, FSDPModule, "reset_iter_state", kept)
        for what, raises in {
            **({"gathering": gathering_raises} if world > 1 else {}),
            "evaluate": lambda e, b, f: within(layer_raises(e), lambda: e.evaluate(b)),
            "forward": lambda e, b, f: within(layer_raises(e, call=2), lambda: e.forward_backward(b)),
            "backward": lambda e, b, f: within(gradient_raises(e, call=2), lambda: e.forward_backward(b)),
        }.items():
            plain, hurt = (Engine.build(recipe(layout)) for _ in range(2))
            for _ in range(2):
                with suppress(Broken):
                    raises(hurt, my_batches(hurt, 5), Path())
                    found.append(f"{what}: nothing was raised")
                if wrong := differs(plain, hurt, 0):
                    found.append(f"{what}: {wrong}")
    return found


def gathers(engine: Engine) -> bool:
    """Whether parameters are sharded, which those of one rank are not."""
    return any(isinstance(module, FSDPModule) for part in engine.parts for module in part.modules())


def one(plain: Engine, hurt: Engine, harm: Harm, number: int, folder: Path) -> str:
    if harm.verb == "sampling" and not (sampled(hurt) and (harm.what != "gathering" or gathers(hurt))):
        return NOT_THERE
    folder.mkdir(parents=True, exist_ok=True)
    if harm.verb in ("optim_step", "load"):  # others leave nothing to be mended
        hurt.save(folder / "step-0")
    earlier = my_batches(plain, 100 + number)
    if harm.gradients == "kept":
        plain.forward_backward(earlier)
    if harm.gradients:
        hurt.forward_backward(earlier)
    try:
        harm.do(hurt, my_batches(plain, 200 + number), folder)
    except harm.expected:
        pass
    else:
        return "nothing was raised"
    outcome = EQUAL
    if hurt.unusable is not None:
        outcome = REFUSES
        if not refused(hurt, earlier):
            return "is unusable, and goes on"
        hurt.load(folder / "step-0")
    elif harm.gradients != "kept" and hurt.status["accumulated"]:
        return "gradients are left"
    return differs(plain, hurt, number) or outcome


def differs(plain: Engine, hurt: Engine, number: int) -> str:
    """Do a step with both; what it makes different, or nothing."""
    batches = my_batches(plain, number)
    for engine in (plain, hurt):
        engine.forward_backward(batches)
    norms = [engine.optim_step()["grad_norm"] for engine in (plain, hurt)]
    if not torch.equal(*norms):
        return f"grad_norm {float(norms[1]):.6g}, not {float(norms[0]):.6g}"
    for (name, here), (_, there) in zip(plain.plain_parameters(), hurt.plain_parameters(), strict=True):
        if not torch.equal(local(here), local(there)):
            return f"{name} differs"
    return ""


def sampled(engine: Engine) -> bool:
    try:
        refuse_layout(engine.parts[0], engine.mesh.degrees)
    except TitanError:
        return False
    return True


def refused(engine: Engine, batches: list[Batch]) -> bool:
    """Whether every verb says that the engine is unusable."""
    verbs: tuple[Callable[[], Any], ...] = (
        lambda: engine.forward(batches[0]),
        lambda: engine.evaluate(batches),
        lambda: engine.forward_backward(batches),
        engine.optim_step,
        lambda: engine.save("nowhere"),
        lambda: next(engine.weights()),
        lambda: ExitStack().enter_context(engine.sampling()),
    )
    for verb in verbs:
        try:
            verb()
        except TitanError as error:
            if "the engine is unusable" not in str(error):
                return False
        else:
            return False
    return True


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
