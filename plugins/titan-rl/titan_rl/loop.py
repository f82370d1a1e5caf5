"""Reinforcement learning from rewards: the loop, from top to bottom.

Source: GRPO, arXiv 2402.03300, algorithm 1; which loss and which advantage are the recipe's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from titan_rl.failures import Failures
from titan_rl.recorded import Recorder
from titan_rl.rollouts import Stopwatch, collect
from titan_rl.sampled import record_routes
from titan_rl.scoring import Scorer
from titan_rl.steps import Evaluation, Learner, check_fits
from titancli.registry.component import build as build_component

if TYPE_CHECKING:
    from titan_rl import GrpoLoop
    from titancli.engine import Engine
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers
    from titancli.protocols import Advantage, Generator
    from titancli.rl.prompts import PromptSource


def build(
    config: GrpoLoop, *, engine: Engine, data: PromptSource, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    """
    Raises:
        RecipeError: the prompts of a step cannot be dealt to the ranks evenly.
        TitanError: the generator cannot sample from this engine, or not record the routes to replay.
    """
    check_fits(config, engine.mesh.degrees.dp)
    generator = build_component(config.generator, engine=engine, tokenizer=tokenizer)
    if config.moe_replay != "none":
        record_routes(generator)
    scorer = Scorer(config.rewards, config.reward_timeout, config.reward_concurrency)
    data.require(scorer.refuses, strict=getattr(config.task, "strict", False))
    advantage = build_component(config.advantage)
    learner = Learner(config, engine, run, advantage)
    evaluation = Evaluation(config, engine, data, tokenizer, generator, scorer, run.batch_shape[1])
    return partial(
        grpo, config, engine, data, generator, scorer, advantage, learner, evaluation, observers, run
    )


def grpo(
    config: GrpoLoop,
    engine: Engine,
    data: PromptSource,
    generator: Generator,
    scorer: Scorer,
    advantage: Advantage,
    learner: Learner,
    evaluation: Evaluation,
    observers: Observers,
    run: Run,
) -> None:
    """Train until the last step or a signal; save on the way and at the end.

    Raises:
        TitanError: all is saved, and rewards failed every time, or in too many samplings in a row, or
            nothing was sampled, or no sample left, in as many.
    """
    recorder, clock = Recorder(run.folder) if run.folder else None, Stopwatch()
    # A step without samples is skipped; the run ends with their reason before the guard ends it with its own.
    most_without = -(-engine.recipe.stability.max_skips // (config.updates * config.passes))
    failures = Failures(scorer, config.max_failed, engine, most_without=most_without)
    while not failures.too_many and run.should_continue(engine.step):
        step = engine.step
        clock.start()
        rollouts = collect(config, engine, data, generator, scorer, run.batch_shape[1], clock)
        engine.loss.sampled_at(generator.temperature)
        rollouts.rate(advantage, engine)
        measured = rollouts.metrics(engine, scorer.names)
        failures.count(rollouts, step + 1)
        if recorder is not None and config.save_rollouts and step % config.save_rollouts == 0:
            rollouts.save(recorder, step + 1, engine)
        clock.lap("reward_seconds", more=True)
        for lag, samples in enumerate(learner.minibatches(rollouts)):
            metrics = learner.step(samples)
            clock.lap("train_seconds", after=metrics["grad_norm"])
            generator.update(engine.version)
            if evaluation.due(engine.step, run.steps):
                observers.evaluated(*evaluation())
            observers.step_end(engine.step, metrics | measured | clock.seconds | {"version_lag": lag})
            run.step_done(engine.step)
        if run.checkpoint_due(engine.step):
            run.save(engine, data)
    run.finish(engine, data)
    if (error := failures.verdict(run.why)) is not None:
        raise error
