"""What the authors of plugins test with. Needs no pytest, and loads nothing into it by itself.

from titancli.testing import check_plugin, recipe, run_cli

def test_the_plugin_is_sound():
    check_plugin("titan-lab")

def test_it_trains(tmp_path):
    done = run_cli("train", recipe(tmp_path, '[loss]\\ntype = "lab"'), cwd=tmp_path)
    assert done.code == 0, done.stderr
"""

from __future__ import annotations

from titancli.testing.behaviour.subject import Example
from titancli.testing.check import check_plugin
from titancli.testing.commands import Done, run_cli
from titancli.testing.recipes import recipe

__all__ = ["Done", "Example", "check_plugin", "recipe", "run_cli"]
