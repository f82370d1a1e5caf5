"""What is wrong on two ranks alone is found there, and ranks that cannot be run are no success."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from titan_testing import check_plugin
from titan_testing.behaviour import checks_of
from titan_testing.behaviour.ranks import Job, later, run_jobs, take_jobs
from titancli import registry
from titancli.errors import PluginError

pytestmark = pytest.mark.ranks

CODE = '''
from titancli import component, hookimpl
from titancli.models import Llama3

@component("model", "ranked", target="ranked_plugin:build")
class Ranked(Llama3):
    """A Llama 3 that computes something else where there are two ranks, or fails on one of them."""

    fails: bool = False
    """Whether it fails."""

def build(config, *, seq_len):
    import os
    from titancli.models.blocks.decoder import Decoder

    class RankedModel(Decoder):
        def forward(self, *args, **options):
            if config.fails and os.environ.get("RANK") == "1":
                raise ArithmeticError("on rank 1")
            found = super().forward(*args, **options)
            if not hasattr(found, "sum") or not hasattr(found, "_replace"):
                return found  # of a stage of a pipeline
            return found._replace(sum=found.sum * int(os.environ.get("WORLD_SIZE", "1")))

    return RankedModel(config)

@hookimpl
def titan_components():
    return [Ranked]
'''
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 64}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "ranked_plugin.py"
    path.write_text(dedent(CODE))
    yield path
    sys.modules.pop("ranked_plugin", None)
    registry.configure()
    take_jobs()


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (False, "its result differs from that of one rank: "),
        (True, "ArithmeticError: on rank 1"),
    ],
)
def test_a_model_that_is_wrong_on_two_ranks_alone_is_found(file: Path, fails: bool, said: str) -> None:
    skip = ["initial values", "recomputation", "documents"]
    with pytest.raises(PluginError) as caught:
        check_plugin(
            "ranked_plugin",
            file=file,
            configs={"model/ranked": {**SIZES, "fails": fails}},
            skip={"model/ranked": skip},
            seconds=30.0,
        )
    assert "model/ranked: [layouts] dp_shard = 2: " in caught.value.message and said in caught.value.message


def test_ranks_that_cannot_start_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("model/gone", "layouts", {}, {"dp_shard = 2": {"dp_shard": 2}}, "gradients", 1e-4, [], {})
    later(job)
    [job] = take_jobs()
    assert take_jobs() == []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    [fault] = run_jobs([job], [])
    assert "two ranks could not be run" in fault


def test_a_check_that_there_is_not_cannot_be_left_out(file: Path) -> None:
    skip = {"model/ranked": ["spelling", *checks_of("model")]}
    with pytest.raises(PluginError, match="unknown check spelling of a model; the checks are size, initial"):
        check_plugin("ranked_plugin", file=file, configs={"model/ranked": SIZES}, skip=skip, seconds=30.0)
