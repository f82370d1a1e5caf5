"""What components do, kind by kind: the checks that `check_plugin` runs once a component can be built.

Each file beside this has the checks of a kind, in a table `CHECKS` from a check's name to a function that
yields what is wrong. They run on the CPU, on rows of a few tokens; what needs two ranks is collected and run
by `ranks.py` in one go.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from titan_testing.behaviour.subject import Check, Subject
from titancli.errors import TitanError
from titancli.registry.plugins import own_traceback

ROOMS = {
    "model": "models",
    "tokenizer": "tokenizers",
    "dataset": "datasets",
    "converter": "converters",
    "parallelize": "converters",
    "loss": "losses",
    "optimizer": "optimizers",
    "schedule": "schedules",
    "logger": "loggers",
    "callback": "callbacks",
    "task": "rollouts",
    "reward": "rollouts",
    "advantage": "rollouts",
    "generator": "rollouts",
}
"""The file that a kind's checks are in."""


def checks_of(kind: str) -> dict[str, Check]:
    """Return the checks of a kind by name."""
    room = ROOMS.get(kind)
    if room is None:
        return {}
    return importlib.import_module(f"{__name__}.{room}").CHECKS[kind]


def behaviour_faults(subject: Subject, skip: frozenset[str]) -> Iterator[str]:
    """Run a component's checks, and say by name what each found.

    Args:
        skip: names of checks to leave out.
    """
    for name, check in checks_of(subject.kind).items():
        if name in skip:
            continue
        try:
            for fault in check(subject):
                yield f"[{name}] {fault}"
        except TitanError as error:
            yield f"[{name}] {error}"
        except Exception as error:
            yield f"[{name}] it raises: {own_traceback(error)}"
