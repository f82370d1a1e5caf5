"""The package `deep_ep`, which may be absent."""

from __future__ import annotations

from typing import Any

from titancli.errors import RecipeError

KEY = 'parallelize.expert_dispatch = "deepep"'
INSTALL = (
    "install it on the machines of the run (https://github.com/deepseek-ai/DeepEP), or set "
    'parallelize.expert_dispatch = "all_to_all"'
)


def deep_ep() -> Any:
    """Import the package.

    Raises:
        RecipeError: it cannot be imported here.
    """
    try:
        import deep_ep
    except Exception as error:  # it looks for libraries and a compiler when it is imported
        raise RecipeError(
            f"{KEY}: the package deep_ep cannot be imported: {type(error).__name__}: {error}", hint=INSTALL
        ) from error
    return deep_ep
