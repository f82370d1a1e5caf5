"""`check_plugin` finds what is wrong with a plugin, all of it, and nothing in a good one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from titan_testing import check_plugin
from titancli import registry
from titancli.errors import PluginError

GOOD = '''
from titancli import LossResult, component, hookimpl

@component("loss", "fair", target="checked_plugin:Loss")
class Fair:
    """A loss that is as it should be."""

    weight: float = 1.0
    """How much it counts."""

class Loss:
    output = "logprobs"

    def __init__(self, config):
        self.weight = config.weight

    def __call__(self, out, batch):
        counted = (batch["targets"] != -100).sum().float()
        return LossResult(-self.weight * out.sum(), counted)

@hookimpl
def titan_components():
    return [Fair]
'''


@pytest.fixture
def check(tmp_path: Path) -> Iterator:
    """`check(code, …)`: the faults of a plugin with this code, as one text; empty where there are none."""

    def run(code: str, **options: object) -> str:
        sys.modules.pop("checked_plugin", None)
        file = tmp_path / "checked_plugin.py"
        file.write_text(dedent(code))
        try:
            check_plugin("checked_plugin", file=file, **options)  # type: ignore[arg-type]
        except PluginError as error:
            return error.message
        return ""

    yield run
    sys.modules.pop("checked_plugin", None)
    registry.configure()


def test_a_good_plugin_passes(check) -> None:
    assert check(GOOD) == ""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("from titancli import", "import numpy\nfrom titancli import", "its module imports numpy"),
        ("from titancli import", "1 / 0\nfrom titancli import", "ZeroDivisionError"),
        ("from titancli import", "sum(range(10**7))\nfrom titancli import", "to load, more than 0.02 s"),
        ('    """A loss that is as it should be."""\n', "", "loss/fair: it has no docstring"),
        ('    """How much it counts."""\n', "", "loss/fair: the field weight has no docstring"),
        ("weight: float = 1.0", "weight: complex = 1.0", "cannot be created"),
        ("weight: float = 1.0", "weight: list[float] = (1.0,)", "becomes"),
        ("weight: float = 1.0", "weight: float | str = 1e400", "cannot be created"),
        ("checked_plugin:Loss", "checked_plugin:Lost", "has no attribute 'Lost'"),
        ("checked_plugin:Loss", "no_such_module:Loss", "No module named 'no_such_module'"),
        ("def __init__(self, config):", "def __init__(self, config, scale):", "called as build(config)"),
        ("self.weight = config.weight", "self.weight = config.wait", "it cannot be built: "),
        ('output = "logprobs"', "", "the result has no output; see Loss"),
        ("def __call__(self, out, batch):", "def __call__(self, out):", "called as __call__(out, batch)"),
        ("return [Fair]", "return [Fair, 3]", "titan_components returned 3"),
    ],
)  # fmt: skip
def test_a_fault_is_found(check, old: str, new: str, fault: str) -> None:
    assert old in GOOD
    limit = 0.02 if "to load" in fault else 30.0
    assert fault in check(GOOD.replace(old, new, 1), seconds=limit)


def test_all_faults_are_told_at_once(check) -> None:
    told = check(
        GOOD.replace('    """How much it counts."""\n', "").replace('output = "logprobs"', "output: str"),
        configs={"loss/unfair": {}},
    )
    assert "plugin 'checked_plugin' has 3 faults" in told
    assert told.count("\n- ") == 3


def test_a_component_that_needs_values_is_built_with_those_that_are_given(check) -> None:
    code = GOOD.replace("weight: float = 1.0", "weight: float")
    code = code.replace("self.weight = config.weight", "self.weight = 1 / config.weight")
    assert check(code) == ""
    assert check(code, configs={"loss/fair": {"weight": 2.0}}) == ""
    assert "ZeroDivisionError" in check(code, configs={"loss/fair": {"weight": 0.0}})
    assert "cannot be created" in check(code, configs={"loss/fair": {"weight": "much"}})


def test_a_recipe_that_is_not_valid_is_a_fault(check, tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "bad.toml").write_text('extends = "titan:llama3_debug"\n[training]\nstpes = 1\n')
    code = GOOD + dedent(f"""
        @hookimpl
        def titan_recipes():
            from pathlib import Path

            return Path({str(folder)!r})
        """)
    told = check(code)
    assert "its recipe bad.toml is not valid" in told and "did you mean 'steps'?" in told


def test_a_plugin_that_is_not_installed_is_told() -> None:
    with pytest.raises(PluginError, match="not installed, or its entry point has a different name"):
        check_plugin("titan-nowhere")
