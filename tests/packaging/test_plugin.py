"""An installed plugin takes part in everything; a broken one beside it harms nobody."""

from __future__ import annotations

import json

import pytest

from tests.packaging.conftest import Environment

pytestmark = pytest.mark.e2e


def test_help_lists_the_plugins_command_beside_a_broken_plugin(plugged: Environment) -> None:
    done = plugged.titan("--help")
    assert done.returncode == 0, done.stderr
    assert "fixture-hello" in done.stdout and "(titan-fixture)" in done.stdout


def test_the_plugins_command_runs(plugged: Environment) -> None:
    done = plugged.titan("fixture-hello", "there")
    assert (done.returncode, done.stdout) == (0, "hello there\n"), done.stderr


def test_plugins_tells_the_state_of_each(plugged: Environment) -> None:
    done = plugged.titan("plugin", "list", "--json")
    plugins = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    assert {name: plugin["state"] for name, plugin in plugins.items()} == {
        "titan": "ok",
        "titan-broken": "broken",
        "titan-fixture": "ok",
    }
    assert plugins["titan-fixture"]["version"] == "0.3.1"
    assert plugins["titan-fixture"]["torch"] is False
    assert "libbroken.so.7" in plugins["titan-broken"]["error"]


def test_list_components_names_the_plugins_and_notes_the_broken_one(plugged: Environment) -> None:
    done = plugged.titan("list-components", "loss", "--json")
    components = json.loads(done.stdout)["components"]
    summary = "Cross-entropy against smoothed targets."
    assert {"kind": "loss", "name": "titan-fixture/smoothed", "summary": summary} in components
    assert "titan/cross_entropy" in [component["name"] for component in components]
    assert "titan-broken" in done.stderr and "titan-broken" not in done.stdout


def test_show_tells_the_fields_of_the_plugins_component(plugged: Environment) -> None:
    done = plugged.titan("show", "smoothed", "--json")
    (field,) = json.loads(done.stdout)["component"]["fields"]
    assert field == {
        "name": "smoothing",
        "type": "float >= 0, < 1",
        "required": False,
        "default": 0.1,
        "doc": "The share of probability that is spread over the whole vocabulary.",
    }


@pytest.mark.parametrize("name", ["fixture_debug", "titan-fixture:fixture_debug"])
def test_the_plugins_recipe_is_valid_beside_a_broken_plugin(plugged: Environment, name: str) -> None:
    done = plugged.titan("validate", name)
    assert (done.returncode, done.stdout) == (0, f"ok: {name}\n"), done.stderr


def test_the_plugins_check_is_heard(plugged: Environment) -> None:
    done = plugged.titan("validate", "fixture_debug", "training.seq_len=4")
    assert done.returncode == 3
    assert "the smoothed loss wants rows of at least 8 tokens" in done.stderr


def test_a_blocked_plugin_is_missed_by_its_recipe(plugged: Environment) -> None:
    done = plugged.titan("validate", "llama3_debug", "loss=smoothed", "-p", "no:titan-fixture")
    assert done.returncode == 4
    assert "smoothed" in done.stderr and "titan-fixture" in done.stderr


def test_the_allow_list_leaves_plugins_out(plugged: Environment) -> None:
    done = plugged.titan("list-components", "loss", TITAN_PLUGINS="")
    assert "titan/cross_entropy" in done.stdout
    assert "titan-fixture" not in done.stdout


def test_a_recipe_that_needs_the_broken_plugin_gets_its_traceback(plugged: Environment) -> None:
    done = plugged.titan("validate", "llama3_debug", "optimizer=titan-broken/shiny")
    assert done.returncode == 4
    assert "titan-broken" in done.stderr
    assert "ImportError: libbroken.so.7: cannot open shared object file" in done.stderr
    assert "registry/plugins.py" not in done.stderr


def test_config_writes_full_names(plugged: Environment) -> None:
    done = plugged.titan("recipe", "show", "fixture_debug")
    assert 'type = "titan-fixture/smoothed"' in done.stdout
    assert 'type = "titan/llama3"' in done.stdout


def test_what_a_broken_plugin_prints_never_reaches_stdout(plugged: Environment) -> None:
    done = plugged.titan("list-components", "--json")
    assert json.loads(done.stdout)["version"] == 1


# -------------------------------------------------------------------------------------- a run with them


def test_a_run_uses_the_plugins_loss_converter_and_logger(plugged: Environment) -> None:
    done = plugged.titan("train", "fixture_debug", "--run-dir", "with-plugin", "checkpoint.enable=false")
    assert done.returncode == 0, done.stderr
    lines = (plugged.cwd / "with-plugin" / "text.log").read_text().splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["step", "1"], ["step", "2"], ["step", "3"]]
    assert "fixture_converted" in lines[0]  # reported by the converter, written by the logger
    assert lines[-1] == "end finished"


PLUGIN_FILE = '''
from titancli import component, hookimpl

@component("loss", "doubled", target="e2e_plugin_file:build")
class Doubled:
    """Twice the cross-entropy."""

@hookimpl
def titan_components():
    return [Doubled]

def build(config):
    from titancli import LossResult

    class Loss:
        output = "logprobs"

        def __call__(self, out, batch):
            return LossResult(sum=-2 * out.sum(), weight=(batch["targets"] != -100).sum().float())

    return Loss()
'''


@pytest.mark.slow  # ranks of tests/run have plugins of one file too, and torch already
def test_a_plugin_file_reaches_every_worker_and_a_resume_asks_for_it(plugged: Environment) -> None:
    file = plugged.cwd / "e2e_plugin_file.py"
    file.write_text(PLUGIN_FILE)
    small = ["training.steps=2", "training.seq_len=32", "training.local_batch_size=1"]
    small += ["lr_scheduler.warmup_steps=1", "metrics.log_freq=1"]
    recipe = ["llama3_debug", "loss=doubled", *small, "--run-dir", "with-file"]
    done = plugged.titan("train", *recipe, "--nproc", "2", "-p", file)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (plugged.cwd / "with-file" / "events.jsonl").open()]
    losses = [
        event["metrics"]["loss"] for event in events if "metrics" in event and "loss" in event["metrics"]
    ]
    assert losses[0] > 12  # twice what a new model has: log 2048 = 7.6
    resume = ("train", "with-file", "--resume", "training.steps=3")
    missed = plugged.titan(*resume)
    assert missed.returncode in (3, 4), missed.stderr
    assert "e2e_plugin_file" in missed.stderr and f"-p {file}" in missed.stderr
    assert plugged.titan(*resume, "--dry-run", "-p", file).returncode == 0
