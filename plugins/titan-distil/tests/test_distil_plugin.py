"""The plugin is sound by the kit's rules."""

from __future__ import annotations

from pathlib import Path

from distil_cases import save_teacher

from titan_testing import check_plugin


def test_the_plugin_is_sound(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path)
    loss = ["backward", "metrics", "accumulation", "nothing left", "chunks", "engine"]  # it has a teacher
    check_plugin(
        "titan-distil",
        configs={
            "loop/distil": {"teacher": {"weights": str(folder)}},
            "loop/distil_on_policy": {"teacher": {"weights": str(folder)}, "task": {"type": "titan/sum"}},
        },
        skip={"loss/distil": loss},
    )
