"""Compiling within a budget of activations: the compiler chooses what backward makes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from titancli.errors import RecipeError, TitanError
from titancli.parallel.activation_checkpoint import draws


@lru_cache  # blocks share compiled code only while their backend is one object
def within_budget(backend: str, budget: float) -> Callable[..., Any]:
    """Return a backend that may keep this share of a graph's activations for backward, and recomputes the
    others.

    The partitioner chooses, by the time that each would take (`torch._functorch.config`); the setting holds
    while a graph is compiled, and nowhere else.

    Raises:
        RecipeError: a graph draws random numbers. Making activations again, torch draws others.
    """

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if budget < 1 and (op := _drawing(graph)):
            raise RecipeError(
                f'activation_checkpoint.mode = "memory_budget": a block uses random numbers ({op}), and '
                "torch would draw different ones when it recomputes activations",
                hint='set mode = "selective", "full" or "none"',
            )
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return torch._dynamo.lookup_backend(backend)(graph, inputs, **options)

    return compile_graph


def in_our_words(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code whose backend's refusals come through without the compiler's words around them."""

    from torch._dynamo.exc import BackendCompilerFailed  # the compiler is imported when it is wanted

    @wraps(compiled)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, TitanError):
                raise error.inner_exception from None
            raise

    return called


class _Random(TorchDispatchMode):
    """Notes the operator that draws random numbers."""

    supports_higher_order_operators = True
    found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            self.found = str(func)
        return func(*args, **(kwargs or {}))


def _drawing(graph: torch.fx.GraphModule) -> str:
    """Return the name of an operator of a traced graph that draws random numbers; "" if none does."""
    inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    fakes = [value.fake_mode for value in inputs if isinstance(value, FakeTensor)]
    with torch.no_grad(), fakes[0] if fakes else FakeTensorMode(), _Random() as random:
        graph(*inputs)
    return random.found
