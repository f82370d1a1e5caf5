"""Expert parallelism over DeepEP. This file has the config, without torch; `dispatch.py` has the code."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, MultipleOf

from titan_deepep.package import INSTALL, deep_ep
from titancli import component, hookimpl

if TYPE_CHECKING:
    from titancli import Recipe

RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Sizes of a group for which DeepEP has settings (`Buffer.get_dispatch_config`)."""
ROW = 16
"""A token's hidden state must have a multiple of this many bytes."""


@component("dispatcher", "deepep", target="titan_deepep.dispatch:DeepEP", device="cuda")
class DeepEP:
    """DeepEP's kernels over NVLink and RDMA: a token travels once to each rank that has experts for it.

    Needs the package `deep_ep`, Hopper or newer GPUs, and bfloat16.
    """

    num_sms: Annotated[int, Gt(0), MultipleOf(2)] = 20
    """Multiprocessors of a GPU that its kernels take."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if find_spec("deep_ep") is None:
            yield "", f"deepep needs the package deep_ep, which is not installed: {INSTALL}"
        ep, width, training = recipe.mesh.ep, recipe.model.dim, recipe.training
        if ep in (1, -1):
            return
        if ep not in RANKS:
            yield "", f"mesh.ep = {ep}: DeepEP has settings only for {', '.join(map(str, RANKS))}"
        if (dtype := training.mixed_precision_param) != "bfloat16":
            yield "", f'deepep sends bfloat16, but training.mixed_precision_param is "{dtype}"'
        if isinstance(width, int) and width * 2 % ROW:
            yield "", f"deepep sends whole {ROW} bytes: model.dim = {width} must be a multiple of {ROW // 2}"
        if recipe.debug.deterministic:
            yield "", "DeepEP refuses torch's deterministic algorithms: set debug.deterministic = false"

    def try_out(self) -> None:
        deep_ep()


@hookimpl
def titan_components() -> list[type]:
    return [DeepEP]
