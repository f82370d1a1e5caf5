"""Every way in which a plugin can be bad: it is reported, and harms no recipe that does not need it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_testing import recipe

pytestmark = pytest.mark.cold  # which libraries a plugin pulls in is seen only where none is there yet

FAULTY = Path(__file__).parents[1] / "plugins" / "faulty"
REPORTED = {
    "bad_import": ("broken", "No module named 'no_such_library'"),
    "wrong_api": ("broken", "it needs titancli >=99,<100, but this is titancli "),
    "unknown_hook": ("broken", "titan_schedulers"),
    "duplicate_names": (
        "broken",
        "two components loss/twice: duplicate_names.First and duplicate_names.Second",
    ),
    "bad_target": ("broken", "loss/absent: the target 'bad_target_code.loss:build' does not exist"),
    "malformed_target": ("broken", "'some.module.build' is not of the form 'module:callable'"),
    "hook_raises": ("broken", "ValueError: the hook of hook_raises"),
    "check_raises": ("ok", None),  # its check is asked with a recipe only
    "command_raises": ("broken", "ValueError: the commands of command_raises"),
    "shadows_command": ("broken", "'train', which is the name of a built-in command"),
    "imports_torch": ("ok", None),
    "calls_exit": ("broken", "calls_exit wants to stop"),
    "prints": ("ok", None),
}
NEEDED = {
    "bad_import": ("loss=bad_import/any", "No module named 'no_such_library'"),
    "wrong_api": ("loss=wrong_api/any", "it needs titancli >=99,<100"),
    "duplicate_names": ("loss=twice", "two components loss/twice"),
    "bad_target": ("loss=absent", "no module 'bad_target_code.loss'"),
    "malformed_target": ("loss=malformed_target/malformed", "is not of the form 'module:callable'"),
    "hook_raises": ("loss=hook_raises/any", 'hook_raises.py", line 8'),
    "check_raises": ("loss=unchecked", 'check_raises.py", line 18'),
    "calls_exit": ("loss=calls_exit/any", "SystemExit: calls_exit wants to stop"),
}
"""What of each a recipe may need, and what it is then told."""


def install(site: Path, *names: str) -> None:
    """Leave the plugins in a folder as pip would."""
    site.mkdir(exist_ok=True)
    for name in names:
        code = (FAULTY / f"{name}.py").read_text()
        (site / f"{name}.py").write_text(code)
        requires = [line.removeprefix("# requires:") for line in code.splitlines() if "# requires:" in line]
        info = site / f"{name}-1.2.dist-info"
        info.mkdir()
        metadata = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.2"]
        metadata += [f"Requires-Dist:{requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(metadata) + "\n\nA faulty plugin.\n")
        (info / "entry_points.txt").write_text(f"[titancli]\n{name} = {name}\n")


def titan(site: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("TITAN_PLUGINS", None)
    command = [sys.executable, "-m", "titancli", *map(str, arguments)]
    return subprocess.run(command, cwd=site.parent, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def all_of_them(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("all") / "site"
    install(site, *REPORTED)
    return site


@pytest.fixture(scope="module")
def reports(all_of_them: Path) -> dict[str, dict]:
    done = titan(all_of_them, "plugin", "list", "--json")
    assert done.returncode == 0, done.stderr
    assert "a banner" in done.stderr and "and another" in done.stderr
    return {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}


def test_there_is_a_report_of_every_faulty_plugin() -> None:
    assert {file.stem for file in FAULTY.glob("*.py")} == set(REPORTED)


@pytest.mark.parametrize("name", REPORTED)
def test_a_faulty_plugin_is_reported(reports: dict[str, dict], name: str) -> None:
    state, cause = REPORTED[name]
    report = reports[name]
    assert (report["state"], report["version"]) == (state, "1.2")
    assert report["seconds"] >= 0
    assert report["torch"] is (name == "imports_torch")
    assert (cause is None and report["error"] is None) or cause in report["error"]


def test_the_good_ones_beside_them_are_well(reports: dict[str, dict]) -> None:
    assert reports["titan"]["state"] == "ok" and reports["titan"]["torch"] is False


def test_none_changes_what_a_recipe_does_that_does_not_need_it(all_of_them: Path, tmp_path: Path) -> None:
    file = recipe(tmp_path)
    nothing = tmp_path / "site"
    nothing.mkdir()
    alone, beside = titan(nothing, "recipe", "show", file), titan(all_of_them, "recipe", "show", file)
    assert (beside.returncode, beside.stdout) == (0, alone.stdout), beside.stderr


@pytest.mark.parametrize("name", NEEDED)
def test_a_recipe_that_needs_one_stops_with_exit_4_and_its_own_traceback(tmp_path: Path, name: str) -> None:
    override, words = NEEDED[name]
    site = tmp_path / "site"
    install(site, name)
    done = titan(site, "validate", recipe(tmp_path), override)
    assert (done.returncode, done.stdout) == (4, "")
    assert words in done.stderr
    assert name in done.stderr
    assert "registry/plugins.py" not in done.stderr and "pluggy" not in done.stderr


def test_two_distributions_of_one_plugin_name_are_both_named(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "prints", "check_raises")
    (site / "check_raises-1.2.dist-info" / "entry_points.txt").write_text(
        "[titancli]\nprints = check_raises\n"
    )
    (report,) = json.loads(titan(site, "plugin", "show", "prints", "--json").stdout)["plugins"]
    assert report["state"] == "broken"
    assert "check_raises 1.2 and prints 1.2" in report["error"]


def test_a_requirement_that_is_met_is_none() -> None:
    from titancli.registry.discover import REQUIRES_TITAN, _satisfied

    version = importlib.metadata.version("titancli")
    for line in (f"titancli=={version}", "titancli (>=0.0.1)", "titancli[tensorboard]>=0.0.1 ; extra == 'x'"):
        found = REQUIRES_TITAN.match(f"Requires-Dist: {line}")
        assert found and _satisfied(found["specifier"].strip())
    assert REQUIRES_TITAN.match("Requires-Dist: titancli") is not None


SAME_NAME = '''
from titancli import component, hookimpl


@component("optimizer", "adamw", target="same_name:build")
class AdamW:
    """Another one of the name."""


@hookimpl
def titan_components():
    return [AdamW]


def build(config, *, named_parameters, roles):
    return None
'''


def test_a_plugin_installed_later_does_not_change_an_old_run(tmp_path: Path) -> None:
    site, file = tmp_path / "site", recipe(tmp_path, '[optimizer]\ntype = "adamw"')
    site.mkdir()
    lock = tmp_path / "recipe.lock.toml"
    lock.write_text(titan(site, "recipe", "show", file).stdout)
    (site / "same_name.py").write_text(SAME_NAME)
    info = site / "same_name-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: same-name\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[titancli]\nsame-name = same_name\n")
    ambiguous = titan(site, "validate", file)
    assert ambiguous.returncode == 4
    assert "'same-name/adamw' or 'titan/adamw'" in ambiguous.stderr and "-p no:same-name" in ambiguous.stderr
    assert titan(site, "recipe", "show", lock).stdout == lock.read_text()
