"""Behaviour checks of components by kind: run by `check_plugin` for components that can be built.

Each file beside this one has the checks of a kind, in a table `CHECKS` from a check's name to a function that
yields faults. They run on the CPU, on rows of a few tokens; checks that need two ranks are collected and run
by `ranks.py` all at once.
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
    "store": "stores",
    "logger": "loggers",
    "callback": "callbacks",
    "task": "rollouts",
    "reward": "rollouts",
    "advantage": "rollouts",
    "generator": "rollouts",
}
"""The file with a kind's checks."""


def checks_of(kind: str) -> dict[str, Check]:
    """Return the checks of a kind by name."""
    room = ROOMS.get(kind)
    if room is None:
        return {}
    return importlib.import_module(f"{__name__}.{room}").CHECKS[kind]


def behaviour_faults(subject: Subject, skip: frozenset[str]) -> Iterator[str]:
    """Run a component's checks, and yield their faults by the check's name.

    Args:
        skip: names of checks to skip.
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
