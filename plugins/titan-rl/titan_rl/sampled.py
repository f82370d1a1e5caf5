"""The completions of a step's prompts, as a generator makes them: dealt over ranks, and checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titancli.engine.rng import derive
from titancli.errors import TitanError
from titancli.protocols.samples import Completion
from titancli.rl.prompts import TokenizedPrompt

if TYPE_CHECKING:
    from titancli.engine import Engine
    from titancli.protocols import Generator
    from titancli.protocols.samples import Prompt


@dataclass(frozen=True)
class Sampled:
    """This rank's prompts of a step, and their completions."""

    asked: list[TokenizedPrompt]
    completions: list[list[Completion]]
    version: int = 0
    """Optimizer steps of the weights that sampled."""

    @property
    def pairs(self) -> list[tuple[Prompt, Sequence[Completion]]]:
        return [(asked.prompt, made) for asked, made in zip(self.asked, self.completions, strict=True)]


def sample(
    generator: Generator,
    engine: Engine,
    asked: Sequence[TokenizedPrompt],
    samples: int,
    seq_len: int,
    number: int = 0,
) -> Sampled:
    """Continue this rank's share of a step's prompts, which are numbered from `number` on; seeds are of
    (seed, step, prompt, sample)."""
    share = len(asked) // engine.mesh.degrees.dp
    first = engine.mesh.dp_rank * share
    seeds = [
        [derive(engine.settings.seed, "sample", engine.step, number + prompt, one) for one in range(samples)]
        for prompt in range(first, first + share)
    ]
    made = continued(generator, asked[first : first + share], seeds, seq_len)
    return replace(made, version=engine.version)


def continued(
    generator: Generator,
    asked: Sequence[TokenizedPrompt],
    seeds: list[list[int]],
    seq_len: int,
    *,
    greedy: bool = False,
) -> Sampled:
    limits = [seq_len + 1 - len(one.tokens) for one in asked]
    made = generator.sample([one.tokens for one in asked], seeds, limits, greedy=greedy)
    _check_made(made, [len(row) for row in seeds], type(generator).__name__)
    return Sampled(list(asked), made)


def _check_made(made: Any, wanted: list[int], name: str) -> None:
    """
    Raises:
        TitanError: what a generator returned is not each prompt's completions, one for each seed.
    """
    if not isinstance(made, Sequence) or not all(isinstance(row, Sequence) for row in made):
        raise TitanError(
            f"the generator {name} returned a {type(made).__name__} that is not a list of lists",
            hint="sample(...) returns for each prompt a list of its completions, one for each seed",
        )
    if (found := [len(row) for row in made]) != wanted:
        raise TitanError(
            f"the generator {name} returned {found} completions for the prompts of this rank, which have "
            f"{wanted} seeds"
        )
    if wrong := [type(one).__name__ for row in made for one in row if not isinstance(one, Completion)]:
        raise TitanError(
            f"the generator {name} returned a {wrong[0]} as a completion",
            hint="it must be a titancli.protocols.samples.Completion",
        )
    for one in (one for row in made for one in row):
        _check_log_probs(one, name)


def _check_log_probs(made: Completion, name: str) -> None:
    """
    Raises:
        TitanError: there is not one finite number for each token.
    """
    found = [] if made.logprobs is None else made.logprobs
    if len(found) != len(made.tokens):
        raise TitanError(
            f"the generator {name} returned a completion of {len(made.tokens)} tokens with {len(found)} "
            f"log-probabilities",
            hint="it must return one for each sampled token",
        )
    if wrong := [value for value in found if not math.isfinite(value)]:
        raise TitanError(
            f"the generator {name} returned a log-probability of {float(wrong[0])}",
            hint="it must return those of the model at its temperature, without top-k or top-p",
        )


def record_routes(generator: Generator) -> None:
    """Have a generator record the experts that tokens visit.

    Raises:
        TitanError: it cannot.
    """
    if generator.record_routes is None:
        raise TitanError(
            f"loop.moe_replay: the generator {type(generator).__name__} cannot record which experts tokens "
            "visit: it has no record_routes",
            hint='set loop.moe_replay = "none", or loop.generator = "local"',
        )
    generator.record_routes()


def check_routes(sampled: Sampled, name: str) -> None:
    """
    Raises:
        TitanError: a completion does not have the routes of its prompt and its tokens.
    """
    for asked, made in zip(sampled.asked, sampled.completions, strict=True):
        for one in made:
            tokens = len(asked.tokens) + len(one.tokens)
            if one.routes is None or len(one.routes) not in (tokens - 1, tokens):
                what = "no routes" if one.routes is None else f"routes of {len(one.routes)}"
                raise TitanError(
                    f"the generator {name} returned {what} for a prompt and a completion of {tokens} tokens",
                    hint="with loop.moe_replay it must return those of all tokens; the last may be missing",
                )
