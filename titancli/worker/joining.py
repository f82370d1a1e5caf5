"""Make the ranks of a run meet."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from titancli.distributed import process_group
from titancli.distributed.together import require_same
from titancli.process import Place, environment, leave_process_group, leaving_if_orphaned, loopback_only
from titancli.provenance import file_hash, package_versions

if TYPE_CHECKING:
    import torch

    from titancli.recipe.schema import Recipe


def join(
    recipe: Recipe,
    digest: str,
    logs: Path,
    place: Place,
    stack: ExitStack,
    *,
    store: Path | None,
    plugin_files: Sequence[Path],
) -> torch.device:
    """Choose a device, meet the other ranks, and check that all of them run the same recipe and code.

    Args:
        digest: digest of the resolved recipe.
        store: a folder in which the ranks of one machine meet.
    """
    on_one_machine = store is not None or place.world == 1
    if on_one_machine and not recipe.loop.joins_other_runs:
        stack.enter_context(environment(loopback_only()))
    device = process_group.choose_device(place.local_rank)
    process_group.start_flight_recorder(logs, recipe.comm.trace_buf_size)
    with leaving_if_orphaned():
        process_group.init_process_group(
            device,
            rank=place.rank,
            world=place.world,
            restart=place.restart,
            folder=store,
            timeout_seconds=recipe.comm.init_timeout_seconds,
        )
    stack.push(leave_process_group)
    require_same("resolved recipes", digest, socket.gethostname())
    installed = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    require_same("versions", installed, socket.gethostname())
    files = ", ".join(f"{path.name} (SHA-256 {file_hash(path)[:12]})" for path in plugin_files)
    require_same("plugin files", files or "none", socket.gethostname())
    return device
