"""A plugin for tests: a cross-entropy that is slow, or goes wrong on one rank at one step."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Literal

from titancli import component, hookimpl


@component("loss", "faulty", target="faulty:build")
class Faulty:
    """Cross-entropy with a fault."""

    fault: Literal["none", "error", "advice", "kill", "hang", "not_finite", "spike", "slow"] = "none"
    rank: int = 0
    call: int = 3
    """The call, from 1, at which it goes wrong."""
    until: int | None = None
    """The last call with wrong numbers; None: there is only one."""
    sleep: float = 0.0
    """Seconds that each call takes longer; under the fault "slow" on that rank alone."""


@hookimpl
def titan_components() -> list[type]:
    return [Faulty]


def build(config: Faulty) -> Any:
    from titancli.errors import TitanError
    from titancli.losses.cross_entropy import CrossEntropy

    class Loss(CrossEntropy):
        calls = 0

        def __call__(self, out: Any, batch: Any) -> Any:
            self.calls += 1
            here = int(os.environ.get("RANK", "0")) == config.rank
            time.sleep(config.sleep if here or config.fault != "slow" else 0.0)
            if self.calls == config.call and int(os.environ.get("RANK", "0")) == config.rank:
                if config.fault == "error":
                    raise ValueError("a row of 13 tokens")
                if config.fault == "advice":
                    raise TitanError("the teacher does not answer", hint="start it first")
                if config.fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if config.fault == "hang":
                    time.sleep(3600)
            result = super().__call__(out, batch)
            if self.goes_wrong():
                result = result._replace(sum=result.sum * (100 if config.fault == "spike" else float("nan")))
            return result

        def goes_wrong(self) -> bool:
            here = int(os.environ.get("RANK", "0")) == config.rank
            last = config.until or config.call
            return here and config.fault in ("not_finite", "spike") and config.call <= self.calls <= last

    loss = Loss()
    if config.fault in ("not_finite", "spike"):
        loss.token_weights = None  # or the head would make the sum by itself
    return loss
