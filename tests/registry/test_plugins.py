"""Plugins are found, loaded each on its own, measured, blocked, and told apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.registry.distributions import Site, loss
from titancli.errors import PluginError, UsageError
from titancli.registry.discover import load_plugins
from titancli.registry.lookup import Registry
from titancli.registry.plugins import PluginStatus


def status(registry: Registry, name: str) -> PluginStatus:
    return {plugin.name: plugin for plugin in registry.plugins}[name]


def test_the_builtin_components_come_through_an_entry_point() -> None:
    titan = status(load_plugins(), "titan")
    assert (titan.state, titan.distribution) == ("ok", "titancli")
    assert "model/llama3" in titan.components


def test_an_installed_plugin_is_found_with_its_version(site: Site) -> None:
    site.add("titan-one", loss("one"), distribution="titan-one-dist", version="2.5")
    one = status(load_plugins(), "titan-one")
    assert (one.distribution, one.version, one.state) == ("titan-one-dist", "2.5", "ok")
    assert one.components == ("loss/one",)
    assert one.seconds > 0


def test_plugins_are_in_the_order_of_their_names(site: Site) -> None:
    for name in ("zeta", "alpha", "mid"):
        site.add(name, loss(name))
    names = [plugin.name for plugin in load_plugins().plugins]
    assert names == sorted(names)
    assert {"zeta", "alpha", "mid"} < set(names)


def test_a_plugin_that_cannot_be_imported_does_not_harm_the_others(site: Site) -> None:
    site.add("bad", "import no_such_module_anywhere")
    site.add("good", loss("fine"))
    registry = load_plugins()
    assert registry.find("loss", "fine").__name__ == "Config"
    bad = status(registry, "bad")
    assert bad.state == "broken"
    assert "no_such_module_anywhere" in (bad.error or "")


def test_a_fault_shows_the_plugins_own_lines_and_not_ours(site: Site) -> None:
    module = site.add("bad", "def inner():\n    raise ValueError('from inside')\ninner()\n")
    error = status(load_plugins(), "bad").error or ""
    assert error.splitlines()[0] == "Traceback (most recent call last):"
    assert module in error.splitlines()[1]
    assert error.endswith("ValueError: from inside")
    assert "importlib" not in error and "registry/plugins.py" not in error


def test_a_plugin_that_exits_does_not_end_the_process(site: Site) -> None:
    site.add("quitter", "import sys\nsys.exit(0)")
    assert status(load_plugins(), "quitter").state == "broken"


def test_what_a_plugin_prints_stays_off_stdout(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.add("loud", "print('banner')\n" + loss("quiet"))
    assert status(load_plugins(), "loud").state == "ok"
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "banner\n")


def test_a_bad_component_leaves_the_good_ones(site: Site) -> None:
    site.add("mixed", loss("good").replace("return [Config]", "return [Config, int, 'text']"))
    registry = load_plugins()
    assert registry.find("loss", "mixed/good")
    mixed = status(registry, "mixed")
    assert mixed.state == "broken"
    assert "int" in (mixed.error or "")


def test_an_undecorated_subclass_is_no_component_of_its_own(site: Site) -> None:
    code = loss("parent").replace("return [Config]", "return [Child]")
    site.add("kin", code + "\nclass Child(Config):\n    pass\n")
    assert "Child" in (status(load_plugins(), "kin").error or "")


def test_two_components_of_one_name_in_one_plugin_are_an_error(site: Site) -> None:
    code = loss("same") + loss("same", class_name="Other").replace("[Other]", "[Config, Other]")
    module = site.add("double", code)
    error = status(load_plugins(), "double").error or ""
    assert f"{module}.Config" in error and f"{module}.Other" in error


@pytest.mark.parametrize("returned", ["5", "None and 1 or 7", "Config"])
def test_a_hook_that_returns_no_list_is_a_fault(site: Site, returned: str) -> None:
    site.add("odd", loss("odd").replace("[Config]", returned))
    assert "is not a list" in (status(load_plugins(), "odd").error or "")


def test_every_implementation_of_a_hook_is_heard(site: Site) -> None:
    second = """
    @component("loss", "second", target="nowhere:build")
    class Second:
        pass

    @hookimpl(specname="titan_components")
    def more():
        return [Second]
    """
    site.add("several", loss("first", extra=second))
    assert set(status(load_plugins(), "several").components) == {"loss/first", "loss/second"}


def test_a_misspelt_hook_is_a_fault(site: Site) -> None:
    site.add("typo", loss("x").replace("titan_components", "titan_component"))
    assert "titan_component" in (status(load_plugins(), "typo").error or "")


def test_a_hook_with_an_unknown_argument_is_a_fault(site: Site) -> None:
    site.add("argued", loss("x").replace("titan_components()", "titan_components(recipe)"))
    assert "recipe" in (status(load_plugins(), "argued").error or "")


def test_one_name_of_two_distributions_is_an_error_that_names_both(site: Site) -> None:
    site.add("twin", loss("a"), distribution="first-dist", version="1.1")
    site.add("twin", loss("b"), distribution="second-dist", version="2.2")
    twin = status(load_plugins(), "twin")
    assert twin.state == "broken"
    assert "first-dist 1.1" in (twin.error or "") and "second-dist 2.2" in (twin.error or "")


def test_nobody_takes_the_name_titan(site: Site) -> None:
    site.add("titan", loss("cross_entropy"), distribution="impostor")
    titan = status(load_plugins(), "titan")
    assert (titan.state, titan.distribution) == ("ok", "titancli")


def test_a_plugin_that_pulls_torch_in_is_found_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = site.folder / "torch.py"
    fake.write_text("")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    site.add("heavy", "import torch\n" + loss("heavy"))
    site.add("light", loss("light"))
    registry = load_plugins()
    found = status(registry, "heavy").torch, status(registry, "light").torch
    del sys.modules["torch"]
    assert found == (True, False)


ODD_MODULES = """
import sys
import types
class Unset:
    @property
    def __class__(self):
        raise RuntimeError("not configured")
class Slots:
    __slots__ = ()
lazy = types.ModuleType("titan_test_lazy")
lazy.settings = Unset()
sys.modules.update({"titan_test_blocked": None, "titan_test_slots": Slots(), "titan_test_lazy": lazy})
"""


def test_what_stands_for_a_module_may_be_anything(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    site.add("odd", ODD_MODULES + loss("odd"))
    odd = status(load_plugins(), "odd")
    for name in ("titan_test_blocked", "titan_test_slots", "titan_test_lazy"):
        del sys.modules[name]
    assert (odd.state, odd.torch, odd.components) == ("ok", False, ("loss/odd",))


def test_a_full_name_loads_its_own_plugin_only(site: Site) -> None:
    module = site.add("apart", "raise RuntimeError('must not be imported')")
    load_plugins().find("model", "titan/llama3")
    assert module not in sys.modules


def test_a_blocked_plugin_is_not_imported(site: Site) -> None:
    module = site.add("unwanted", loss("unwanted"))
    registry = load_plugins(blocked=["unwanted"])
    assert status(registry, "unwanted").state == "blocked"
    assert module not in sys.modules
    with pytest.raises(PluginError, match="blocked by -p no:unwanted"):
        registry.find("loss", "unwanted/unwanted")


def test_titan_itself_cannot_be_blocked() -> None:
    with pytest.raises(UsageError, match="built-in"):
        load_plugins(blocked=["titan"])


def test_blocking_an_unknown_name_offers_the_nearest(site: Site) -> None:
    site.add("titan-muon", loss("x"))
    with pytest.raises(UsageError) as caught:
        load_plugins(blocked=["titan-moun"])
    assert caught.value.hint == "did you mean 'no:titan-muon'?"


def test_the_allow_list_leaves_out_what_it_does_not_name(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("wanted", loss("wanted"))
    other = site.add("other", loss("other"))
    monkeypatch.setenv("TITAN_PLUGINS", "wanted, absent")
    registry = load_plugins()
    assert status(registry, "titan").state == "ok"
    assert status(registry, "wanted").state == "ok"
    assert status(registry, "other").state == "unlisted"
    assert status(registry, "absent").state == "missing"
    assert other not in sys.modules


def test_an_empty_allow_list_leaves_titan_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("other", loss("other"))
    monkeypatch.setenv("TITAN_PLUGINS", "")
    assert [p.name for p in load_plugins().plugins if p.state == "ok"] == ["titan"]


# ---------------------------------------------------------------------------------------- plugin files


@pytest.fixture
def plugin_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "my_lab_loss.py"
    file.write_text(loss("lab").replace("nowhere:build", "my_lab_loss:build") + "def build(config): ...\n")
    monkeypatch.delitem(sys.modules, "my_lab_loss", raising=False)
    yield file
    sys.modules.pop("my_lab_loss", None)


def test_a_file_is_a_plugin_named_by_its_stem(plugin_file: Path) -> None:
    from titancli.registry.component import component_info, load_target

    registry = load_plugins(files=[plugin_file])
    found = registry.find("loss", "my_lab_loss/lab")
    assert load_target(component_info(found).target).__module__ == "my_lab_loss"
    assert status(registry, "my_lab_loss").file == plugin_file


def test_a_file_is_loaded_in_spite_of_the_allow_list(
    plugin_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_PLUGINS", "")
    assert status(load_plugins(files=[plugin_file]), "my_lab_loss").state == "ok"


def test_a_broken_file_is_isolated_and_leaves_no_module(plugin_file: Path) -> None:
    plugin_file.write_text("1 / 0\n")
    broken = status(load_plugins(files=[plugin_file]), "my_lab_loss")
    assert "ZeroDivisionError" in (broken.error or "") and str(plugin_file) in (broken.error or "")
    assert "my_lab_loss" not in sys.modules


def test_a_file_with_a_syntax_error_shows_the_line(plugin_file: Path) -> None:
    plugin_file.write_text("x = = 1\n")
    assert "x = = 1" in (status(load_plugins(files=[plugin_file]), "my_lab_loss").error or "")


@pytest.mark.parametrize("name", ["missing.py", "not-a-name.py", "json.py", "titan.py"])
def test_a_file_that_cannot_be_a_plugin_is_a_usage_error(tmp_path: Path, name: str) -> None:
    if name != "missing.py":
        (tmp_path / name).write_text("")
    with pytest.raises(UsageError):
        load_plugins(files=[tmp_path / name])
