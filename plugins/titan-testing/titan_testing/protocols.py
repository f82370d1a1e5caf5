"""Check built components against their kind's Protocol. The Protocols in `titancli.protocols` are
inspected, not repeated: their members must exist, and accept the declared arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titancli import protocols
from titancli.registry.component import component_info
from titancli.registry.plugins import own_traceback

OPTIONAL = {
    "logger": {"run_start", "step_end", "validated", "checkpoint_saved", "run_end"},
    "callback": {
        *("around_backward", "gradients_ready", "step_applied"),
        *("run_start", "step_done", "validated", "checkpoint_saved", "stop_requested", "run_end", "close"),
    },
}
"""Members of Protocols that a component may omit."""
SCHEMES = {"fsspec": "file"}
"""Schemes of stores that have other names."""
BUILT = (
    "model",
    "tokenizer",
    "dataset",
    "converter",
    "loss",
    "optimizer",
    "schedule",
    "store",
    "logger",
    "task",
    "reward",
    "advantage",
)
"""Kinds whose components can be built outside a run."""


def builder(kind: str) -> type:
    """Return the Protocol of a kind's target, e.g. `LossBuilder`."""
    return getattr(protocols, f"{kind.capitalize()}Builder")


def returned(kind: str) -> type | None:
    """Return the Protocol of what a kind's target returns, e.g. `Loss`; None for a plain callable."""
    return getattr(protocols, kind.capitalize(), None)


def defaults(kind: str) -> type | None:
    """Return the class of optional members for what a kind's target returns, e.g. `LossDefaults`, if any."""
    return getattr(protocols, f"{kind.capitalize()}Defaults", None)


def target_faults(kind: str, target: Any) -> Iterator[str]:
    """Check that a target can be called as its kind's Protocol requires."""
    protocol = builder(kind)
    if not callable(target):
        yield f"its target is {target!r}, which cannot be called"
        return
    given = list(inspect.signature(protocol.__call__).parameters.values())[2:]  # without self and config
    try:
        inspect.signature(target).bind(None, **{one.name: None for one in given}, **offered(kind, target))
    except TypeError as error:
        names = ", ".join(["config", *(["*", *(p.name for p in given)] if given else [])])
        yield f"its target cannot be called as build({names}): {error}"
    except ValueError:  # written in C, without a signature
        return


def offered(kind: str, target: Callable[..., Any]) -> dict[str, Any]:
    """Return what a run gives to targets that take it: to a loss's the model's config."""
    if kind != "loss" or "model" not in inspect.signature(target).parameters:
        return {}
    from titan_testing.behaviour.engines import small_model

    return {"model": small_model()}


def built_faults(
    kind: str, target: Callable[..., Any], config: Any, folder: Path, seq_len: int
) -> Iterator[str]:
    """Build a component as a run would, on the CPU and on one rank, and check the result."""
    if kind not in BUILT:
        return
    import torch

    try:
        with torch.device("meta" if kind == "model" else "cpu"):
            runtime = _runtime(kind, config, folder, seq_len)
            built = target(config, **runtime, **offered(kind, target))
    except Exception as error:
        yield f"it cannot be built: {own_traceback(error)}"
        return
    if kind == "optimizer":
        if not isinstance(built, torch.optim.Optimizer):
            yield f"it builds {built!r}, which is not a torch.optim.Optimizer"
        return
    if kind == "model" and not isinstance(built, torch.nn.Module):
        yield f"it builds {built!r}, which is not a torch.nn.Module"
    protocol = returned(kind)
    if protocol is not None:
        yield from _member_faults(protocol, built, OPTIONAL.get(kind, set()))
    for name, method in _methods(defaults(kind)).items():
        if callable(own := getattr(built, name, None)):
            yield from _method_faults(name, method, own)


def _runtime(kind: str, config: Any, folder: Path, seq_len: int) -> dict[str, Any]:
    """Return the runtime arguments of a kind's builder."""
    if kind == "model":
        return {"seq_len": 16}
    if kind == "dataset":
        from titancli.data import ByteTokenizer
        from titancli.recipe.schema import needs_tokenizer
        from titancli.registry.component import build

        tokenizer = build(ByteTokenizer()) if needs_tokenizer(config) else None
        return dict(tokenizer=tokenizer, seq_len=seq_len, rows=2, dp_rank=0, dp_size=1, seed=0)
    if kind == "converter":
        from titancli.layout.degrees import Degrees

        return {"mesh": Degrees(), "compile": False}
    if kind == "optimizer":
        from torch import nn

        named = list(nn.Linear(4, 3).named_parameters())
        return {"named_parameters": named, "roles": {"weight": "matrix", "bias": "other"}}
    if kind == "schedule":
        return {"steps": 1000}
    if kind == "store":
        return {"url": url_of(config, folder)}
    if kind == "task":
        return {"seed": 0}
    return {"run_folder": folder, "is_main": True} if kind == "logger" else {}


def url_of(config: Any, folder: Path) -> str:
    """Return the URL of a folder in a store, by the store's name."""
    name = component_info(config).name
    return f"{SCHEMES.get(name, name)}://{folder}"


def _methods(protocol: type | None) -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for name, value in (vars(protocol).items() if protocol is not None else ())
        if inspect.isfunction(value) and (name == "__call__" or not name.startswith("_"))
    }


def _member_faults(protocol: type, built: Any, optional: set[str]) -> Iterator[str]:
    methods = _methods(protocol)
    if optional >= methods.keys() and not any(hasattr(built, name) for name in methods):
        yield f"the result has none of {', '.join(methods)}"
    for name in (*inspect.get_annotations(protocol), *methods):
        if not hasattr(built, name):
            if name not in optional:
                yield f"the result has no {name}; see {protocol.__name__} in titancli.protocols"
        elif name in methods:
            yield from _method_faults(name, methods[name], getattr(built, name))


def _method_faults(name: str, wanted: Callable[..., Any], method: Any) -> Iterator[str]:
    parameters = list(inspect.signature(wanted).parameters.values())[1:]
    try:
        by_name = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
        inspect.signature(method).bind(*(None for p in parameters if p.name not in by_name), **by_name)
    except TypeError as error:
        words = ", ".join(parameter.name for parameter in parameters)
        yield f"{name} of the result cannot be called as {name}({words}): {error}"
    except ValueError:  # written in C, without a signature
        return
