"""Counting GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from titancli.launchers import devices, torchrun


@pytest.fixture
def eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr(devices, "NVIDIA", tmp_path)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 8),
        ("0,1", 2),
        ("", 0),
        ("-1", 0),
        ("3", 1),
        ("0,0,1", 1),
        ("0,9", 1),
        ("0,-1,1", 1),
        ("GPU-ab,GPU-cd", 2),
    ],
)
def test_cuda_visible_devices_is_heeded(
    eight_gpus: None, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.visible_gpus() == count


def test_a_machine_without_gpus_has_none_whatever_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "NVIDIA", tmp_path / "missing")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert devices.visible_gpus() == 0


def test_ranks_on_gpus_start_with_an_allocator_whose_segments_grow(
    eight_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in devices.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    wanted = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert devices.allocator_settings() == wanted
    assert wanted.items() <= torchrun._environment(8).items()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.allocator_settings() == {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")  # the user's own
    assert devices.allocator_settings() == {}
