"""The hooks of a run (`titancli.protocols.RunHook`), in the same order on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from titancli.protocols import RunHookDefaults
from titancli.registry.defaults import fill_in

if TYPE_CHECKING:
    from titancli.engine import Engine


class RunHooks:
    """The hooks that take part in a run. Leaving the block of `with` closes them."""

    def __init__(self, engine: Engine | None = None) -> None:
        """
        Args:
            engine: whose ranks hear of what a hook raises.
        """
        self._engine = engine
        self._hooks: list[Any] = []

    def add(self, hook: Any) -> None:
        """Add a hook, on every rank, before the first step."""
        self._hooks.append(fill_in(hook, RunHookDefaults))

    def has(self, moment: str) -> bool:
        """Return whether any hook has a method for a moment."""
        return any(hasattr(hook, moment) for hook in self._hooks)

    def call(self, moment: str, *given: Any) -> None:
        """Call the method of each hook that has it.

        Raises:
            Exception: what a hook raises; the other ranks hear of it in their next verb.
        """
        hooks = [hook for hook in self._hooks if hasattr(hook, moment)]
        if not hooks:
            return
        with nullcontext() if self._engine is None else self._engine.call(moment).shared():
            for hook in hooks:
                getattr(hook, moment)(*given)

    def __enter__(self) -> RunHooks:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close the hooks, all of them even if one raises."""
        with ExitStack() as stack:
            for hook in self._hooks:
                if hasattr(hook, "close"):
                    stack.callback(hook.close, error)

    def poll(self) -> list[int]:
        """Return what each hook has the ranks agree on."""
        return [hook.poll() for hook in self._hooks]

    def before_step(self, step: int, agreed: Sequence[int]) -> None:
        """Let each hook know that a step begins, and what the ranks have agreed on."""
        for hook, number in zip(self._hooks, agreed, strict=True):
            hook.before_step(step, number)
