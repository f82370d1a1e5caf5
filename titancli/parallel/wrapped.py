"""Wrappers of titan around a module's methods (activation checkpointing, compiled code, local parameters).
They can be distinguished from those of a converter or a plugin, and be removed for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_WRAPPED = "_titan_wrapped"
"""Attribute of a module: for each method, the instance's own method before titan's first wrapper (None: it
used the class's), and titan's last wrapper."""


def wrap(module: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a module's method by a wrapper of titan's, which calls the current method."""
    wrapped = vars(module).setdefault(_WRAPPED, {})
    here = vars(module).get(name)
    before, last = wrapped.get(name, (here, here))
    if here is not last:  # someone else's is around titan's, and stays
        before = here
    wrapped[name] = before, wrapper
    setattr(module, name, wrapper)


def parts(block: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the methods of a block that stand for it where it cannot be taken whole: its `parts()`, or
    `forward`.

    Between the parts of a block of experts tokens leave, in numbers that no compiler knows.
    """
    own: Any = getattr(block, "parts", None)
    return own() if callable(own) else [(block, "forward")]


def is_wrapped(module: Any, name: str = "forward") -> bool:
    """Return whether the outermost wrapper of a method is one of titan's."""
    wrapped = vars(module).get(_WRAPPED, {})
    return name in wrapped and vars(module).get(name) is wrapped[name][1]


@contextmanager
def as_written(block: Any) -> Iterator[None]:
    """Take titan's wrappers off a block's methods, and put them back. What a converter or a plugin has put
    there is a part of the model, and stays."""
    methods = [(block, "forward"), *parts(block)]
    replaced = [
        (m, name, *vars(m)[_WRAPPED][name]) for m, name in dict.fromkeys(methods) if is_wrapped(m, name)
    ]
    try:
        for module, name, before, _ in replaced:
            if before is None:
                vars(module).pop(name)
            else:
                vars(module)[name] = before
        yield
    finally:
        for module, name, _, wrapper in replaced:
            vars(module)[name] = wrapper
