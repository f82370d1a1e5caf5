"""The kit finds what a component does wrong, names the check, and says what to do."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

from titan_rl import Grpo
from titan_testing import Example
from titan_testing.behaviour import behaviour_faults, checks_of
from titan_testing.behaviour.engines import LENGTH, small_model
from titan_testing.behaviour.ranks import take_jobs
from titan_testing.behaviour.subject import Subject
from titancli import Batch, LossResult
from titancli.data import ByteTokenizer, PythonStdlib
from titancli.losses import CrossEntropy
from titancli.models import Llama3
from titancli.optimizers import AdamW, WarmupStableDecay
from titancli.protocols import Entry
from titancli.protocols.samples import Completion, Prompt
from titancli.registry.component import build, component, load_target
from titancli.rl import Local

Faults = Callable[..., str]


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[Faults]:
    """`faults(kind, config, target)`: what the kit says of a component, as one text."""

    def run(kind: str, config: Any, target: Any = None, *, skip: tuple[str, ...] = (), **more: Any) -> str:
        target = target or load_target(config.__component__.target)
        subject = Subject(f"{kind}/mine", kind, config, target, tmp_path, **more)
        return "\n".join(behaviour_faults(subject, frozenset(skip)))

    yield run
    take_jobs()  # which nobody runs


# --------------------------------------------------------------------------------------------------- losses


class Sums:
    """Cross-entropy as it should be; what is below it is not."""

    output = "logprobs"

    def __init__(self, config: Any = None) -> None: ...

    def __call__(self, out: torch.Tensor, batch: Batch) -> LossResult:
        return LossResult(-out.sum(), (batch["targets"] != -100).sum().float(), {"seen": out.detach().sum()})


class Averages(Sums):
    def __call__(self, out: torch.Tensor, batch: Batch) -> LossResult:
        found = super().__call__(out, batch)
        return LossResult(found.sum / found.weight, torch.ones(()))


class Noisy(Sums):
    def __call__(self, out: torch.Tensor, batch: Batch) -> LossResult:
        return LossResult(-(out * random.random()).sum(), torch.ones(()))


class Named(Sums):
    name = "weight"

    def __call__(self, out: torch.Tensor, batch: Batch) -> LossResult:
        return super().__call__(out, batch)._replace(metrics={self.name: torch.ones(())})


class Spaced(Named):
    name = "of the best"


class Sometimes(Sums):
    def __call__(self, out: torch.Tensor, batch: Batch) -> LossResult:
        told = {"late": torch.zeros(())} if (batch["targets"] == -100).any() else {}
        return super().__call__(out, batch)._replace(metrics=told)


class Filler(Sums):
    def __call__(self, out: torch.Tensor, batch: Batch) -> LossResult:
        return LossResult(-out.sum(), torch.tensor(float(out.numel())))


class OtherWeights(Sums):
    def token_weights(self, batch: Batch) -> torch.Tensor:
        return torch.full(batch["targets"].shape, 2.0)


class Blind(Sums):
    def __call__(self, out: torch.Tensor, batch: Batch) -> LossResult:
        return super().__call__(out * 0, batch)


class Needy(Sums):
    needs: ClassVar[Any] = ("moods",)


class Shaped(Needy):
    needs: ClassVar[Any] = {"moods": "B"}

    def __call__(self, out: torch.Tensor, batch: Batch) -> LossResult:
        found = super().__call__(out, batch)
        return found._replace(sum=-(out * batch["moods"][:, None]).sum())


@pytest.mark.parametrize(
    ("loss", "fault"),
    [
        (Sums, ""),
        (Shaped, ""),
        (Averages, "[accumulation] two micro-batches do not add up to one batch: "),
        (Noisy, "[backward] a second call with the same arguments returns different numbers"),
        (Named, "[metrics] it reports 'weight', a name that the engine uses"),
        (Spaced, "[metrics] it reports 'of the best': the name of a metric may contain"),
        (Sometimes, "[metrics] it reports "),
        (Filler, "[nothing left] for rows without a target, weight is not 0"),
        (OtherWeights, "[chunks] token_weights do not reproduce the loss: "),
        (Blind, "[backward] its sum does not depend on the output of the model"),
        (Needy, "it needs 'moods' in its batches, which the kit does not know: declare needs = "),
    ],
)
def test_a_loss(faults: Faults, loss: Any, fault: str) -> None:
    said = faults("loss", CrossEntropy(), loss, skip=("engine",))
    assert fault in said and bool(fault) == bool(said)


def test_a_loss_with_an_example_of_its_own(faults: Faults) -> None:
    def example(rows: int) -> Example:
        return Example(Batch({"moods": torch.ones(rows)}), out=torch.arange(rows * 3.0).view(rows, 3))

    def loss(scale: float) -> Any:
        def total(out: torch.Tensor, batch: Batch) -> LossResult:
            return LossResult((out.sum(1) * batch["moods"]).sum() ** scale, batch["moods"].sum())

        return lambda config: SimpleNamespace(output="model", __call__=None) and Called(total)

    assert faults("loss", CrossEntropy(), loss(1.0), example=example) == ""
    assert "[accumulation]" in faults("loss", CrossEntropy(), loss(2.0), example=example)


class Called:
    output = "model"

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, out: torch.Tensor, batch: Batch) -> LossResult:
        return self.function(out, batch)


def test_losses_that_need_more_than_targets_are_given_it(faults: Faults) -> None:
    assert faults("loss", Grpo(kl_coef=0.1)) == ""


# ------------------------------------------------------------------------------------------------- datasets


class Counting:
    """Rows that count up: a dataset as it should be."""

    def __init__(
        self, config: Any, *, tokenizer: Any, seq_len: int, rows: int, dp_rank: int, dp_size: int, seed: int
    ):
        self.rows, self.length, self.dp_rank, self.dp_size = rows, seq_len, dp_rank, dp_size
        self.at = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            first = self.at + self.dp_rank * self.rows
            self.at += self.rows * self.dp_size
            yield self.batch(torch.arange(first, first + self.rows))

    def batch(self, numbers: torch.Tensor) -> Batch:
        tokens = (numbers[:, None] + torch.arange(self.length)) % 250
        return Batch({"tokens": tokens, "targets": tokens + 1})

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Aliased(Counting):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        self.state["at"] = self.at
        return self.state


class Refilled(Counting):
    def batch(self, numbers: torch.Tensor) -> Batch:
        made = super().batch(numbers)
        self.memory = getattr(self, "memory", None) or made
        for name, tensor in made.items():
            self.memory[name].copy_(tensor)
        return self.memory


class Forgetful(Counting):
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OwnRows(Counting):
    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.at += self.rows
            yield self.batch(torch.arange(self.at, self.at + self.rows))


class Drawn(Counting):
    def batch(self, numbers: torch.Tensor) -> Batch:
        return Batch({"tokens": torch.randint(0, 9, (len(numbers), self.length))})


class Short(Counting):
    def __iter__(self) -> Iterator[Batch]:
        yield self.batch(torch.arange(self.rows))


class Large(Counting):
    def batch(self, numbers: torch.Tensor) -> Batch:
        return Batch({"tokens": super().batch(numbers)["tokens"] + 10_000})


class Narrow(Counting):
    def batch(self, numbers: torch.Tensor) -> Batch:
        return Batch({"tokens": super().batch(numbers)["tokens"].int()})


class Tuples(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.at,)}


@pytest.mark.parametrize(
    ("dataset", "fault"),
    [
        (Counting, ""),
        (Aliased, "[position] a state changed after it was returned"),
        (Refilled, "[batches] the first batch changed when the second was read: return new tensors"),
        (Forgetful, "[position] a new dataset with the state after a batch continues with a different batch"),
        (
            OwnRows,
            "[ranks] two ranks together have different rows than one rank: tokens has different values",
        ),
        (Drawn, "[again] batch 0 differs in a second instance: tokens has different values"),
        (Short, "[batches] it ends after 1 batches of 4 rows of 16"),
        (Large, "[batches] tokens holds 10000, which is not an id of the tokenizer"),
        (Narrow, "[batches] tokens are torch.int32, but must be int64"),
        (Tuples, "a state must be plain JSON"),
    ],
)
def test_a_dataset(faults: Faults, dataset: Any, fault: str) -> None:
    said = faults("dataset", PythonStdlib(), dataset)
    assert fault in said and bool(fault) == bool(said)


# ----------------------------------------------------------------------------------------------- tokenizers


def tokenizer(**changes: Any) -> Any:
    """Titan's byte tokenizer with other members."""
    found = build(ByteTokenizer())
    for name, value in changes.items():
        setattr(found, name, value)
    return lambda config: found


BYTES = build(ByteTokenizer())


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"vocab_size": 200}, "ids are integers below vocab_size, 200"),
        ({"eos_id": ord("e")}, "contains eos_id: a text would end in the middle"),
        ({"encode": lambda text: [7, *BYTES.encode(text)]}, "[ids] encode('') gives [7]"),
        ({"decode": lambda ids: BYTES.decode(ids) + "!"}, "[round trip] "),
        ({"encode_batch": lambda texts: [[1]] * len(texts)}, "[batches] encode_batch and encode differ for"),
        (
            {"chat_with_mask": lambda messages, first=0: (BYTES.chat(messages), [True] * 99)},
            "[chat] chat_with_mask returns different ids than chat, or a mask of a different length",
        ),
        (
            {"chat_with_mask": lambda messages, first=0: BYTES.chat_with_mask(messages)},
            "[chat] chat_with_mask(first=3) must select only the last answer",
        ),
    ],
)
def test_a_tokenizer(faults: Faults, changes: dict[str, Any], fault: str) -> None:
    said = faults("tokenizer", ByteTokenizer(), tokenizer(**changes))
    assert fault in said and bool(fault) == bool(said)


# ----------------------------------------------------------------------------------------------- optimizers


class Hidden(torch.optim.SGD):
    """Momentum in a dict of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.means: dict[Any, torch.Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.means.get(parameter, torch.zeros_like(parameter)).lerp(parameter.grad, 0.1)
                self.means[parameter] = mean
                parameter.data.sub_(mean, alpha=group["lr"])


class Counting10(torch.optim.SGD):
    """Does something every ten steps only, by a count of its own."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.param_groups[0]["k"] = self.count
        super().step()


class OwnRate(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1)


@component("optimizer", "kit", target="test_behaviour:built_optimizer")
class KitOptimizer:
    """One of those above."""

    kind: str = "AdamW"
    """Which."""
    lr: float = 0.1
    """Rate."""


def built_optimizer(config: KitOptimizer, *, named_parameters: list[Any], roles: Any) -> Any:
    parameters = [parameter for _, parameter in named_parameters]
    if config.kind == "few":
        return torch.optim.SGD(parameters[1:], lr=config.lr)
    return {"hidden": Hidden, "own rate": OwnRate, "every ten": Counting10}[config.kind](
        parameters, lr=config.lr
    )


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("hidden", "[resume] a step after a resume is different: "),
        ("hidden", "[resume] after a resume means of the optimizer is not what it was"),
        (
            "every ten",
            "[resume] after a resume count, param_groups[0]['k'] of the optimizer is not what it was",
        ),
        ("own rate", "[moves] a step with a learning rate of 0 changes weights"),
        (
            "few",
            "[moves] forward_backward: tok_embeddings.weight requires a gradient",
        ),
    ],
)
def test_an_optimizer(faults: Faults, kind: str, fault: str) -> None:
    assert fault in faults("optimizer", KitOptimizer(kind=kind), built_optimizer)


def test_titans_optimizer(faults: Faults) -> None:
    assert faults("optimizer", AdamW()) == ""
    [job] = take_jobs()
    assert job.measure == "weights" and job.layouts == {"dp_shard = 2": {"dp_shard": 2}}


# ------------------------------------------------------------------------------------------ schedules


CALLS = itertools.count()


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (lambda step: math.nan, "[factors] with 1 steps, it returns nan at step 0"),
        (lambda step: 5 - step, "[factors] with 7 steps, it returns -1 at step 6"),
        (lambda step: float(next(CALLS)), "[again] step 999 has another factor"),
    ],
)
def test_a_schedule(faults: Faults, made: Any, fault: str) -> None:
    assert fault in faults("schedule", WarmupStableDecay(), lambda config, *, steps: made)


def test_titans_schedule(faults: Faults) -> None:
    assert faults("schedule", WarmupStableDecay(decay_type="cosine", min_lr_factor=0.1)) == ""


# --------------------------------------------------------------------------------------------------- stores


@component("store", "dict", target="a:b")
class InMemory:
    """Objects in a dictionary."""


class Objects:
    """A store as it should be; what is below it is not."""

    def __init__(self, config: Any, *, url: str, kept: dict[str, bytes]) -> None:
        self.kept = kept

    def stat(self, key: str) -> Entry:
        if key in self.kept:
            return Entry(key.rpartition("/")[2], len(self.kept[key]))
        if not self.list(key):
            raise FileNotFoundError(key)
        return Entry(key.rpartition("/")[2], None)

    def read(self, key: str, start: int, size: int) -> bytes:
        self.stat(key)
        return self.kept[key][start : start + size]

    def write(self, key: str, source: IO[bytes]) -> None:
        self.kept[key] = source.read()

    def delete(self, key: str) -> None:
        self.kept.pop(key, None)

    def list(self, key: str) -> list[Entry]:
        rows = {}
        for name, data in self.kept.items():
            if name.startswith(f"{key}/"):
                first, _, rest = name.removeprefix(f"{key}/").partition("/")
                rows[first] = Entry(first, None if rest else len(data))
        return list(rows.values())


class Forgets(Objects):
    def __init__(self, config: Any, *, url: str, kept: dict[str, bytes]) -> None:
        self.kept = {}


class Whole(Objects):
    def read(self, key: str, start: int, size: int) -> bytes:
        return super().read(key, 0, start + size)


class Keeps(Objects):
    def delete(self, key: str) -> None: ...


class Appends(Objects):
    def write(self, key: str, source: IO[bytes]) -> None:
        self.kept[key] = self.kept.get(key, b"") + source.read()


class Empty(Objects):
    def read(self, key: str, start: int, size: int) -> bytes:
        return self.kept.get(key, b"")[start : start + size]


@pytest.mark.parametrize(
    ("store", "fault"),
    [
        (Objects, ""),
        (Forgets, "[objects] it raises"),
        (Whole, "[objects] read does not return the 100 bytes from byte 300 on"),
        (Keeps, "[objects] list returns {'a': 4096, 'b': 0}"),
        (Appends, "[objects] read returns 4106 bytes of an object of 4096"),
        (Empty, "[absent] read of an object that is not there returns b''"),
    ],
)
def test_a_store(faults: Faults, store: Any, fault: str) -> None:
    kept: dict[str, bytes] = {}
    said = faults("store", InMemory(), lambda config, *, url: store(config, url=url, kept=kept))
    assert fault in said and bool(fault) == bool(said)


# ------------------------------------------------------------- tasks, rewards, advantages and generators


class Numbered:
    """Prompts as they should be."""

    def __init__(self, config: Any, *, seed: int) -> None:
        self.seed, self.asked = seed, 0
        self.identity = {"task": "numbered", "seed": seed}

    def prompt(self, number: int) -> Prompt:
        return Prompt(f"{self.seed} {number}", str(number))


class Arrays(Numbered):
    """Rows with what does not compare, and with what is unlike itself."""

    def prompt(self, number: int) -> Prompt:
        return Prompt(str(number), row={"tests": np.arange(3) + self.seed, "score": float("nan")})


class InTurn(Numbered):
    def prompt(self, number: int) -> Prompt:
        self.asked += 1
        return Prompt(str(self.asked))


class FromElsewhere(Numbered):
    def prompt(self, number: int) -> Prompt:
        return Prompt(f"{id(self)} {number}")


class OneIdentity(Numbered):
    def __init__(self, config: Any, *, seed: int) -> None:
        super().__init__(config, seed=seed)
        self.identity = {"task": "numbered"}


class NoJson(Numbered):
    def __init__(self, config: Any, *, seed: int) -> None:
        super().__init__(config, seed=seed)
        self.identity = {"task": ("numbered", seed)}


class Endless(Numbered):
    count = 4


class Texts(Numbered):
    def prompt(self, number: int) -> Any:
        return str(number)


@pytest.mark.parametrize(
    ("task", "fault"),
    [
        (Numbered, ""),
        (Arrays, ""),
        (InTurn, "[again] prompt 0 differs on a second call"),
        (FromElsewhere, "[again] prompt 0 differs in a second instance"),
        (OneIdentity, "[identity] another seed gives other prompts, but the same identity"),
        (NoJson, "[identity] its identity {'task': ('numbered', 7)} is not plain JSON"),
        (Endless, "[prompts] count is 4, but prompts 4 to 7 are not those from 0 on again"),
        (Texts, "[prompts] the task Texts returned a str as prompt 0"),
    ],
)
def test_a_task(faults: Faults, task: Any, fault: str) -> None:
    said = faults("task", None, task)
    assert fault in said and bool(fault) == bool(said)


def rewarding(rate: Callable[[list[Any], Prompt, Completion], Any]) -> Any:
    """Return a reward that remembers what it was asked before."""

    def build(config: Any) -> Any:
        asked: list[Any] = []
        return lambda prompt, completion: rate(asked, prompt, completion)

    return build


def fails(*given: Any) -> float:
    raise LookupError("no tests in the row")


@pytest.mark.parametrize(
    ("rate", "fault"),
    [
        (lambda asked, prompt, completion: len(completion.text), ""),
        (lambda asked, prompt, completion: int(completion.text), ""),  # fails for those that are no number
        (lambda asked, prompt, completion: asked.append(0) or len(asked), "[again] '12' after '6*2='"),
        (lambda asked, prompt, completion: random.random(), "[again] "),
        (lambda asked, prompt, completion: prompt.row["parts"].pop(), "[inputs] it changes the prompt or"),
        (lambda asked, prompt, completion: "1", "[numbers] it returned '1', which is not a number"),
        (lambda asked, prompt, completion: float("nan"), "[numbers] it returned nan"),
        (fails, "[numbers] it fails for every completion; pass some that it can rate as examples="),
    ],
)
def test_a_reward(faults: Faults, rate: Any, fault: str) -> None:
    said = faults("reward", None, rewarding(rate))
    assert fault in said and bool(fault) == bool(said)


def test_a_reward_with_examples_of_its_own(faults: Faults) -> None:
    pair = (Prompt("?", row={"tests": [1]}), Completion("a", [97], [-1.0], "eos"))
    reward = rewarding(lambda asked, prompt, completion: len(prompt.row["tests"]))
    assert "[numbers] it fails" in faults("reward", None, reward)
    assert faults("reward", None, reward, example=lambda rows: [pair]) == ""


def centred(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    kept = torch.where(counted, rewards, 0.0)
    mean = kept.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    return torch.where(counted, rewards - mean, 0.0)


def centred_in_fp32(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Its last bits depend on how many prompts there are."""
    noise = 1e-7 * len(rewards)
    return centred(rewards.float(), counted) * (1 + noise)


def of_the_batch(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return centred(rewards, counted) / rewards[counted].std()


def of_the_first(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return torch.where(counted, rewards - torch.where(counted[0], rewards[0], 0.0).mean(), 0.0)


@pytest.mark.parametrize(
    ("advantage", "fault"),
    [
        (centred, ""),
        (centred_in_fp32, ""),
        (lambda r, c: r - r.mean(1, keepdim=True), "[shape] it is not 0 for samples that do not count"),
        (lambda r, c: centred(r, c)[:, :1], "[shape] it returns [6, 1], not a tensor"),
        (lambda r, c: centred(r, c) / r.std(1, keepdim=True), "[shape] it is not finite for rewards [0.5"),
        (of_the_batch, ""),
        (of_the_first, "[prompts] the advantages of a prompt change with its place in the step"),
        (lambda r, c: c * (r - r.max(1, keepdim=True).values), "[prompts] rewards of samples that do not"),
        (lambda r, c: centred(r, c) * torch.rand(()), "[again] a second call with the same rewards"),
        (
            lambda r, c: torch.where(c, r.sub_(r.mean(1, keepdim=True)), 0.0),
            "[again] it changes its arguments",
        ),
    ],
)
def test_an_advantage(faults: Faults, advantage: Any, fault: str) -> None:
    said = faults("advantage", None, lambda config: advantage)
    assert fault in said and bool(fault) == bool(said)


class Wrapped:
    """The generator `local`; what is below it is not as it should be."""

    temperature = 1.5

    def __init__(self, config: Any, *, engine: Any, tokenizer: Any) -> None:
        self.engine, self.calls = engine, 0
        self.local = build(Local(temperature=self.temperature), engine=engine, tokenizer=tokenizer)

    def update(self, version: int) -> None: ...

    def sample(self, prompts: Any, seeds: Any, limits: Any, *, greedy: bool = False) -> Any:
        self.calls += 1
        made = self.local.sample(prompts, self.seeds(seeds), limits, greedy=greedy)
        return [[self.changed(one) for one in row] for row in made]

    def seeds(self, seeds: Any) -> Any:
        return seeds

    def changed(self, one: Completion) -> Completion:
        return one


class OwnSeeds(Wrapped):
    def seeds(self, seeds: Any) -> Any:
        return [[seed + self.calls for seed in row] for row in seeds]


class OfThePlace(Wrapped):
    def seeds(self, seeds: Any) -> Any:
        return [[seed + 100 * place for seed in row] for place, row in enumerate(seeds)]


class Tempered(Wrapped):
    def changed(self, one: Completion) -> Completion:
        return dataclasses.replace(one, logprobs=[value / 2 for value in one.logprobs])


class Endlessly(Wrapped):
    def sample(self, prompts: Any, seeds: Any, limits: Any, *, greedy: bool = False) -> Any:
        return self.local.sample(prompts, seeds, [9] * len(limits), greedy=greedy)


class Stale(Wrapped):
    """Has what it sampled from the weights before."""

    def sample(self, prompts: Any, seeds: Any, limits: Any, *, greedy: bool = False) -> Any:
        self.kept = getattr(self, "kept", {})
        asked = repr((prompts, seeds, greedy))
        if asked not in self.kept:
            self.kept[asked] = super().sample(prompts, seeds, limits, greedy=greedy)
        return self.kept[asked]


class Trains(Wrapped):
    def sample(self, prompts: Any, seeds: Any, limits: Any, *, greedy: bool = False) -> Any:
        with torch.no_grad():
            self.engine.parts[0].output.weight.mul_(1.001)
        return super().sample(prompts, seeds, limits, greedy=greedy)


@pytest.mark.parametrize(
    ("generator", "fault"),
    [
        (Wrapped, ""),
        (OwnSeeds, "[again] the same prompts and seeds give other tokens the second time"),
        (OfThePlace, "[again] a prompt alone gives other tokens than among others"),
        (Tempered, "[log-probabilities] its log-probabilities are "),
        (Stale, "or top-p after a step and update(version): it must take over the new weights"),
        (Endlessly, "[completions] a completion has "),
        (Trains, "[training] sampling changes training: "),
    ],
)
def test_a_generator(faults: Faults, generator: Any, fault: str) -> None:
    said = faults("generator", None, generator)
    assert fault in said and bool(fault) == bool(said)


# -------------------------------------------------------------------------------------------------- loggers


class Strict:
    def __init__(self, config: Any, **options: Any) -> None: ...

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        if metrics["loss"] > 1e9:
            raise OverflowError("too much")


def test_a_logger_is_told_of_steps_without_the_numbers_that_it_expects(faults: Faults) -> None:
    assert "[run] it raises" in (said := faults("logger", None, Strict)) and "too much" in said
    assert faults("logger", None, lambda config, **options: object()) == ""


# ----------------------------------------------------------------------------------------------- converters


@component("converter", "kit", target="test_behaviour:KitConverter")
class KitConversion:
    """A converter with a fault."""

    fault: str = ""
    """Which."""


class Dropping(nn.Linear):
    generator: Any = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = super().forward(input)
        if self.generator is None:
            return dropout(found, 0.5, self.training)
        return found * torch.empty(found.shape).bernoulli_(0.5, generator=self.generator)


class KitConverter:
    def __init__(self, config: KitConversion, **runtime: Any) -> None:
        self.fault = config.fault

    def convert(self, model: Any) -> None:
        for block in model.layers.values():
            if self.fault == "renamed":
                block.feed_forward.wide = block.feed_forward.w2
                del block.feed_forward.w2
                block.feed_forward.forward = lambda x, ff=block.feed_forward: ff.wide(ff.w1(x) * ff.w3(x))
            if self.fault in ("drops", "own generator"):
                block.feed_forward.w2.__class__ = Dropping
            if self.fault == "own generator":
                block.feed_forward.w2.generator = torch.Generator()

    def after_step(self, model: Any) -> None: ...

    def plain(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self.fault == "copies" else tensor


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        ("drops", ""),
        (
            "own generator",
            "[recomputation] with activation_checkpoint.mode = 'full' the gradients differ",
        ),
        ("renamed", "[names] parameters lost their names: layers.0.feed_forward.w2.weight"),
        ("copies", "[plain] a change of plain("),
    ],
)
def test_a_converter(faults: Faults, fault: str, said: str) -> None:
    only = {"renamed": "names", "copies": "plain"}.get(fault)
    skip = tuple(name for name in checks_of("converter") if only not in (None, name))
    found = faults("converter", KitConversion(fault=fault), KitConverter, skip=skip)
    assert said in found and bool(said) == bool(found)


def test_dropout_whose_draws_are_lost_when_blocks_run_again_is_found(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    from titancli.parallel import activation_checkpoint

    kept = activation_checkpoint.checkpoint

    def without(function: Any, *args: Any, preserve_rng_state: bool = True, **options: Any) -> Any:
        return kept(function, *args, preserve_rng_state=False, **options)

    only = tuple(name for name in checks_of("converter") if name != "recomputation")
    assert faults("converter", KitConversion(fault="drops"), KitConverter, skip=only) == ""
    monkeypatch.setattr(activation_checkpoint, "checkpoint", without)
    said = faults("converter", KitConversion(fault="drops"), KitConverter, skip=only)
    assert "mode = 'full' the gradients differ from those without" in said
    assert "mode = 'selective' the gradients differ from those without" in said


# --------------------------------------------------------------------------------------------------- models


@component("model", "kit", target="test_behaviour:built_model")
class KitModel(Llama3):
    """A Llama 3 with a fault."""

    fault: str = ""
    """Which."""


def built_model(config: KitModel, *, seq_len: int) -> Any:
    from titancli.models.blocks.decoder import Decoder

    class Faulty(Decoder):
        def forward(self, tokens: Any, positions: Any = None, document_ids: Any = None, **more: Any) -> Any:
            return super().forward(
                tokens, positions, None if config.fault == "sees all" else document_ids, **more
            )

        def init_weights(self, generator_for: Any) -> None:
            drawn = torch.Generator()
            drawn.seed()
            super().init_weights((lambda name: drawn) if config.fault == "draws" else generator_for)

    return Faulty(config)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        ("sees all", "[documents] documents of one row see each other"),
        ("draws", "[initial values] a second initialization gives different values"),
    ],
)
def test_a_model(faults: Faults, fault: str, said: str) -> None:
    sizes = dataclasses.asdict(small_model())
    found = faults("model", KitModel(**{**sizes, "rope_scaling": None, "fault": fault}), built_model)
    assert said in found and bool(said) == bool(found)


def test_a_model_that_is_too_large_is_told(faults: Faults) -> None:
    large = dataclasses.replace(small_model(), dim=4096)
    said = faults("model", large, load_target(large.__component__.target))
    assert "[size] with these values it has" in said and "configs=" in said and LENGTH == 16
