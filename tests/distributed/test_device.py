"""Which GPU an engine takes, without one: torch's answers are stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from titancli.distributed import process_group
from titancli.errors import EnvironmentProblem


@pytest.mark.parametrize("is_initialized", [True, False])
def test_the_gpu_of_an_engine_is_made_the_current_one(
    is_initialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events, streams and collectives are of the current GPU where nothing else is said."""
    current, met = [0], list[Any]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device.index))
    monkeypatch.setattr(dist, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(process_group, "_made_here", False)
    monkeypatch.setattr(process_group, "_excepthook", None)

    def meet(device: torch.device, **more: Any) -> None:
        met.append((device.index, current[0]))

    monkeypatch.setattr(process_group, "init_process_group", meet)
    assert process_group.join("cuda:1", 1) == torch.device("cuda", 1)
    assert current == [1]
    assert met == ([] if is_initialized else [(1, 1)])
    found = process_group.join("cuda", 1)  # the one that is current, or this rank's
    assert found == torch.device("cuda", 1 if is_initialized else 0) and current == [found.index]
    with pytest.raises(EnvironmentProblem, match="cannot use cuda:2: 2 GPUs are visible"):
        process_group.join("cuda:2", 1)
    assert current == [found.index]
