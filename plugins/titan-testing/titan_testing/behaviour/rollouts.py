"""Slots of loops that learn from samples: tasks, rewards, advantages and generators."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_testing.behaviour.engines import engine_of, gradients, small_model, step, weights
from titan_testing.behaviour.subject import Check, Subject, first_difference
from titancli.data import ByteTokenizer
from titancli.protocols.batch import IGNORE, Batch
from titancli.protocols.rl import NoNumber, number_of
from titancli.protocols.samples import Completion, Prompt, Sample
from titancli.registry.component import build
from titancli.registry.plugins import own_traceback
from titancli.rl.prompts import PromptSource

SEED = 7
NUMBERS = (3, 0, 7, 1, 2, 5, 4, 6)
"""Order in which prompts are requested, besides the sorted order."""
LOG_PROBABILITIES = 0.05
"""Tolerance of a generator's log-probabilities in nats: it may compute in bfloat16."""

# ------------------------------------------------------------------------------------------------- tasks


def prompts(subject: Subject) -> Iterator[str]:
    """Check that each index has a prompt with tokens; `count` must be the number of distinct ones."""
    task = subject.build(seed=SEED)
    source = PromptSource(task, build(ByteTokenizer()), longest=1 << 20)
    source.take(len(NUMBERS))  # raises if it is not a prompt
    count = task.count
    if count is not None and (type(count) is not int or count < 1):
        yield f"count is {count!r}, but must be the number of prompts, or None"
    elif count is not None and count <= 100:
        epochs = [sorted(repr(task.prompt(n)) for n in range(first, first + count)) for first in (0, count)]
        if epochs[0] != epochs[1]:
            yield f"count is {count}, but prompts {count} to {2 * count - 1} are not those from 0 on again"


def _alike(one: Any, other: Any) -> bool:
    """Return whether two values are equal or have the same repr: rows may hold arrays, which do not
    compare, or NaN."""
    try:
        return one == other or repr(one) == repr(other)
    except (ValueError, RuntimeError):  # NumPy's and torch's errors
        return repr(one) == repr(other)


def task_again(subject: Subject) -> Iterator[str]:
    """Check that an index always has the same prompt: on a second call, in another order, in another
    instance."""
    one, other = (subject.build(seed=SEED) for _ in range(2))
    first = {number: copy.deepcopy(one.prompt(number)) for number in NUMBERS}
    for number in sorted(NUMBERS):
        if not _alike(one.prompt(number), first[number]):
            yield f"prompt {number} differs on a second call: it must depend only on the number"
            return
        if not _alike(other.prompt(number), first[number]):
            yield (
                f"prompt {number} differs in a second instance, as on another rank or after a resume: it "
                f"must depend only on the seed and the number"
            )
            return


def identity(subject: Subject) -> Iterator[str]:
    """Check that the identity is plain JSON, the same in a second instance, and different if the prompts
    are."""
    tasks = [subject.build(seed=seed) for seed in (SEED, SEED, SEED + 1)]
    before = copy.deepcopy(dict(tasks[0].identity))
    made = [[task.prompt(number) for number in range(8)] for task in tasks]
    if json.loads(json.dumps(before)) != before:
        yield f"its identity {before} is not plain JSON: a checkpoint would have another one"
    if dict(tasks[0].identity) != before or dict(tasks[1].identity) != before:
        yield "its identity changes, or differs in a second instance: a resume would be refused"
    if not _alike(made[0], made[2]) and dict(tasks[2].identity) == before:
        yield "another seed gives other prompts, but the same identity: a resume would not notice"


# ----------------------------------------------------------------------------------------------- rewards


def rated_pairs(subject: Subject) -> list[tuple[Prompt, Completion]]:
    """Return the author's prompts and completions, or some with right and wrong answers."""
    if subject.example is not None:
        return list(subject.example(4))
    questions = [("6*2=", "12"), ("2+2=", "4"), ("Say a.", "a")]
    texts = ["12", " 4 ", "a", "", "The answer is 12.", "#### 4", '```json\n{"a": 1}\n```', "é🙂 " * 9]
    return [
        (
            Prompt(prompt, answer, row={"prompt": prompt, "answer": answer, "parts": [1, 2]}),
            Completion(text, list(text.encode()), [-1.0] * len(text.encode()), "eos"),
        )
        for prompt, answer in questions
        for text in texts
    ]


def _rated(reward: Any, pairs: Sequence[tuple[Prompt, Completion]]) -> list[float | str]:
    """Return the reward of each pair, or the error."""
    found: list[float | str] = []
    for prompt, completion in pairs:
        try:
            found.append(number_of(reward(prompt, completion)))
        except NoNumber:
            raise
        except Exception as error:
            found.append(own_traceback(error))
    return found


def numbers(subject: Subject) -> Iterator[str]:
    """Check that rewards are finite numbers, and that not every call fails."""
    try:
        found = _rated(subject.build(), rated_pairs(subject))
    except NoNumber as error:
        yield str(error)
        return
    failed = [one for one in found if isinstance(one, str)]
    if len(failed) == len(found):
        yield (
            f"it fails for every completion; pass some that it can rate as examples="
            f'{{"{subject.label}": lambda rows: [(Prompt(...), Completion(...)), ...]}}: {failed[:1]}'
        )


def reward_again(subject: Subject) -> Iterator[str]:
    """Check that a completion always has the same reward: on a second call, in another order, in another
    instance."""
    pairs = rated_pairs(subject)
    reward = subject.build()
    first = _rated(reward, pairs)
    for what, found in (
        ("on a second call in another order", _rated(reward, pairs[::-1])[::-1]),
        ("in a second instance, as on another rank", _rated(subject.build(), pairs)),
    ):
        for (prompt, completion), one, other in zip(pairs, first, found, strict=True):
            if one != other and not (isinstance(one, str) and isinstance(other, str)):
                yield f"{completion.text!r} after {prompt.text!r} has the reward {one}, and {other} {what}"
                break


def reward_inputs(subject: Subject) -> Iterator[str]:
    """Check that a reward changes neither the prompt nor the completion."""
    pairs = rated_pairs(subject)
    before = copy.deepcopy(pairs)
    _rated(subject.build(), pairs)
    if not _alike(pairs, before):
        yield "it changes the prompt or the completion, which others read: work on copies"


# -------------------------------------------------------------------------------------------- advantages


def groups() -> list[tuple[Tensor, Tensor]]:
    """Return rewards [G, N] float64 and a mask of those that count, for several numbers of samples."""
    drawn = torch.Generator().manual_seed(SEED)
    found = []
    for samples in (2, 5):
        rewards = torch.rand(6, samples, dtype=torch.float64, generator=drawn)
        rewards[1] = 0.5  # all equal
        counted = torch.ones(6, samples, dtype=torch.bool)
        counted[2, 0] = False
        counted[3, 1:] = False
        counted[4] = False
        found.append((rewards, counted))
    return found


def _advantages(subject: Subject, rewards: Tensor, counted: Tensor) -> Tensor:
    return subject.build()(rewards.clone(), counted.clone())


def shape(subject: Subject) -> Iterator[str]:
    """Check that there is one finite number per sample, 0 for those that do not count."""
    for rewards, counted in groups():
        found = _advantages(subject, rewards, counted)
        wanted = list(rewards.shape)
        if not isinstance(found, Tensor) or list(found.shape) != wanted:
            what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            yield f"it returns {what}, not a tensor [prompts, samples], which is {wanted}"
            return
        if not found.isfinite().all():
            row = int((~found.isfinite()).nonzero()[0, 0])
            yield f"it is not finite for rewards {rewards[row].tolist()}, counted {counted[row].tolist()}"
        elif found[~counted].any():
            yield "it is not 0 for samples that do not count"


def order(subject: Subject) -> Iterator[str]:
    """Check that advantages follow from the counted samples of a step, in whatever order ranks have its
    prompts."""
    for rewards, counted in groups():
        whole = _advantages(subject, rewards, counted)
        turned = _advantages(subject, rewards.flip(0), counted.flip(0)).flip(0)
        if not torch.allclose(turned, whole, rtol=1e-4, atol=1e-6, equal_nan=True):  # allow fp32
            yield (
                "the advantages of a prompt change with its place in the step, which depends on the number "
                "of ranks"
            )
            return
        other = torch.where(counted, rewards, rewards + 9.0)
        if not torch.equal(_advantages(subject, other, counted)[counted], whole[counted]):
            yield "rewards of samples that do not count change the advantages of those that do"
            return


def advantage_again(subject: Subject) -> Iterator[str]:
    """Check that advantages are reproducible, also in a second instance, and that rewards are not changed."""
    advantage = subject.build()
    for rewards, counted in groups():
        given = rewards.clone(), counted.clone()
        first = advantage(*given).clone()
        if not torch.equal(given[0], rewards) or not torch.equal(given[1], counted):
            yield "it changes its arguments in place: work on copies"
            return
        if not torch.equal(advantage(*given), first):
            yield "a second call with the same rewards returns different advantages: a resume would differ"
            return


# -------------------------------------------------------------------------------------------- generators

PROMPTS = [list(b"two plus two"), list(b"?"), list(b"hello")]
SEEDS = [[1, 2], [3, 1], [5, 6]]
LIMITS = [4, 3, 1]
VOCABULARY = 272


class Trial:
    """A generator on its own engine."""

    def __init__(self, subject: Subject) -> None:
        import dataclasses

        self.engine = engine_of(dataclasses.replace(small_model(), vocab_size=VOCABULARY))
        try:
            tokenizer = build(ByteTokenizer())
            self.generator = subject.build(engine=self.engine, tokenizer=tokenizer)
            self.generator.update(self.engine.version)
        except BaseException:
            self.engine.close()
            raise

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    def sample(self, picked: Sequence[int] = (0, 1, 2), **how: Any) -> list[list[Completion]]:
        """Return its completions for some of the prompts."""
        asked = [[every[i] for i in picked] for every in (PROMPTS, SEEDS, LIMITS)]
        return self.generator.sample(*copy.deepcopy(asked), **how)

    def distance(self, made: Sequence[Sequence[Completion]], temperature: float) -> float:
        """Return the largest difference between its log-probabilities and the engine's, in nats."""
        samples = [Sample.of(prompt, one) for prompt, row in zip(PROMPTS, made, strict=True) for one in row]
        found = zip(samples, self.engine.forward(samples, temperature=temperature), strict=True)
        return max(float((torch.tensor(sample.logprobs) - own).abs().max()) for sample, own in found)


def completions(subject: Subject) -> Iterator[str]:
    """Check that there is a completion per prompt and seed, within its limit, with a log-probability per
    token."""
    with Trial(subject) as trial:
        given = copy.deepcopy([PROMPTS, SEEDS, LIMITS])
        made = trial.generator.sample(*given)
        if given != [PROMPTS, SEEDS, LIMITS]:
            yield "it changes its arguments in place: work on copies"
        if [len(row) for row in made] != [len(seeds) for seeds in SEEDS]:
            yield f"it returns {[len(row) for row in made]} completions for prompts with {[2, 2, 2]} seeds"
            return
        for limit, row in zip(LIMITS, made, strict=True):
            for one in row:
                if not isinstance(one, Completion):
                    yield f"it returns a {type(one).__name__}, not a titancli.protocols.samples.Completion"
                    return
                if len(one.tokens) > limit:
                    yield f"a completion has {len(one.tokens)} tokens, more than its limit of {limit}"
                if wrong := [i for i in one.tokens if type(i) is not int or not 0 <= i < VOCABULARY]:
                    yield f"a completion has the token {wrong[0]!r}, which is no id of the model"
                if len(one.logprobs) != len(one.tokens):
                    yield f"it returns {len(one.logprobs)} log-probabilities for {len(one.tokens)} tokens"
                    return
                if one.finish not in ("eos", "stop", "length") or not isinstance(one.text, str):
                    yield f"a completion ends by {one.finish!r} with the text {one.text!r}"


def generator_again(subject: Subject) -> Iterator[str]:
    """Check that a seed gives the same tokens again, for a prompt among others and alone; greedy ones need
    no seed."""
    with Trial(subject) as trial:
        found = [[one.tokens for one in row] for row in trial.sample()]
        if [[one.tokens for one in row] for row in trial.sample()] != found:
            yield "the same prompts and seeds give other tokens the second time: a resume would differ"
            return
        for i in range(len(PROMPTS)):
            if [[one.tokens for one in row] for row in trial.sample([i])] != [found[i]]:
                yield (
                    "a prompt alone gives other tokens than among others: what is drawn must depend on the "
                    "seed, the prompt and the weights only"
                )
                break
        for row in trial.sample(greedy=True):
            if row[0].tokens != row[1].tokens:
                yield "with greedy=True two seeds give different tokens"
                break


def log_probabilities(subject: Subject) -> Iterator[str]:
    """Check that log-probabilities are the model's at its `temperature`, also after a step."""
    with Trial(subject) as trial:
        for when in ("", " after a step and update(version): it must take over the new weights"):
            for greedy in (False, True):
                made = trial.sample(greedy=greedy)
                temperature = 1.0 if greedy else trial.generator.temperature
                away = trial.distance(made, temperature)
                if away > LOG_PROBABILITIES:
                    yield (
                        f"its log-probabilities are {away:.2g} nats from the model's own at temperature "
                        f"{temperature:g}, which know no top-k or top-p{when}"
                    )
                    return
            step(trial.engine, _completed(b"fo"), lr=0.05)  # by nats; bfloat16 changes them by less than 0.01
            trial.generator.update(trial.engine.version)


def training(subject: Subject) -> Iterator[str]:
    """Check that sampling changes neither weights nor the gradients of the next step."""
    batch = _completed(b"four")
    with Trial(subject) as trial:
        before = {**weights(trial.engine), **_gradients(trial, batch)}
        trial.sample()
        if found := first_difference(before, {**weights(trial.engine), **_gradients(trial, batch)}, 0.0):
            yield f"sampling changes training: {found}"


def _completed(text: bytes) -> Batch:
    """Return a prompt and a completion of it, as a row."""
    tokens = torch.tensor([[*PROMPTS[0], *text]])
    targets = tokens[:, 1:].clone()
    targets[:, : len(PROMPTS[0]) - 1] = IGNORE
    return Batch({"tokens": tokens[:, :-1], "targets": targets})


def _gradients(trial: Trial, batch: Any) -> dict[str, Tensor]:
    return {f"the gradient of {name}": value for name, value in gradients(trial.engine, batch).items()}


CHECKS: dict[str, dict[str, Check]] = {
    "task": {"prompts": prompts, "again": task_again, "identity": identity},
    "reward": {"numbers": numbers, "again": reward_again, "inputs": reward_inputs},
    "advantage": {"shape": shape, "prompts": order, "again": advantage_again},
    "generator": {
        "completions": completions,
        "again": generator_again,
        "log-probabilities": log_probabilities,
        "training": training,
    },
}
