"""Data that change while a run trains on them end it by name; the run goes on once they are as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Finished, losses

PLUGIN = """\
from pathlib import Path
from titancli import component, hookimpl

@component("logger", "rewriter", target=f"{__name__}:Logger")
class Rewriter:
    '''Rewrites the text in place, in the same length, after the second step.'''

class Logger:
    def __init__(self, config, **runtime):
        pass

    def step_end(self, *arguments, **named):
        path = Path("text.txt")
        if path.exists() and not Path("done").exists():
            with open(path, "r+b") as file:
                file.write(path.read_bytes().replace(b"line", b"LINE"))
            Path("done").touch()

@hookimpl
def titan_components():
    return [Rewriter]
"""
SETTINGS = {
    "text": ("dataset.document_mask=true",),
    "workers": (
        *(
            "dataset.type=token_shards",
            "dataset.format=raw",
            "dataset.dtype=uint8",
            'dataset.paths=["text.txt"]',
        ),
        "training.dataloader.num_workers=1",
    ),
}


@pytest.mark.parametrize("how", SETTINGS)
def test_a_text_that_is_rewritten_ends_the_run_and_its_return_continues_it(
    train: Callable[..., Finished], here: Path, how: str
) -> None:
    (here / f"rewriter_{how}.py").write_text(PLUGIN)
    text = "".join(f"line {number} of a text\n" for number in range(60)).encode()
    (here / "text.txt").write_bytes(text)
    plugin = ("-p", f"./rewriter_{how}.py")
    settings = ("tiny.toml", *plugin, *SETTINGS[how], "training.steps=150", "lr_scheduler.total_steps=150")
    ended = train(*settings, 'loggers=[{type="rewriter"}]', "checkpoint.interval=5", "--run-dir", "r")
    assert ended.code == 5, ended
    assert "text.txt has changed since the run began: it had " in ended.err
    assert "restore the file and resume, or start a new run" in ended.err
    before = losses(here / "r")
    assert 1 < len(before) < 150
    refused = train("r", "--resume", *plugin)
    assert refused.code == 5 and "is not the data that the checkpoint was trained on: contents" in refused.err
    (here / "text.txt").write_bytes(text)
    steps = f"training.steps={len(before) + 1}"
    assert train("r", "--resume", *plugin, steps).code == 0
    assert train(*settings, steps, "--run-dir", "whole").code == 0
    assert losses(here / "r") == losses(here / "whole")
