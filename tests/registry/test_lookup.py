"""Names become components, and every other answer says what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.registry.distributions import Site, loss
from titancli import component
from titancli.errors import PluginError
from titancli.registry import first_party
from titancli.registry.discover import load_plugins
from titancli.registry.lookup import Registry


def make(kind: str, name: str) -> type:
    @component(kind, name, target="nowhere:build")
    class Config:
        pass

    return Config


MUON, OTHER_MUON = make("optimizer", "muon"), make("optimizer", "muon")
DPO, HF_DATA, HF_TOKENIZER = make("loss", "dpo"), make("dataset", "hf"), make("tokenizer", "hf")


@pytest.fixture
def registry() -> Registry:
    return Registry(components=[("lab", MUON), ("lab", DPO), ("titan", HF_DATA), ("titan", HF_TOKENIZER)])


def test_a_bare_and_a_full_name_find_the_same(registry: Registry) -> None:
    assert registry.find("optimizer", "muon") is MUON
    assert registry.find("optimizer", "lab/muon") is MUON


def test_one_name_of_two_kinds_is_no_conflict(registry: Registry) -> None:
    assert registry.find("dataset", "hf") is HF_DATA
    assert registry.find("tokenizer", "hf") is HF_TOKENIZER


def test_a_full_name_is_told_for_a_class_and_for_a_config(registry: Registry) -> None:
    assert registry.full_name(MUON) == "lab/muon"
    assert registry.full_name(MUON()) == "lab/muon"


def test_a_class_that_nobody_offers_has_no_full_name(registry: Registry) -> None:
    with pytest.raises(PluginError, match="not provided by any plugin"):
        registry.full_name(OTHER_MUON)


def test_components_are_in_the_order_of_kinds_and_names(registry: Registry) -> None:
    assert [name for name, _ in registry.components()] == ["titan/hf", "titan/hf", "lab/dpo", "lab/muon"]
    assert registry.names("loss") == ["lab/dpo"]


def test_names_for_a_hint_are_titans_first_and_say_how_many_more_there_are(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = Registry(components=[("aaa", MUON), ("titan", HF_DATA), ("aaa", HF_DATA), ("zzz", OTHER_MUON)])
    assert many.choices("dataset") == "titan/hf, aaa/hf" and many.choices("reward") == "none is installed"
    assert registry.choices("optimizer") == "muon"
    monkeypatch.setattr("titancli.registry.lookup.SHOWN", 2)
    assert many.choices("dataset") == "titan/hf, aaa/hf"
    monkeypatch.setattr("titancli.registry.lookup.SHOWN", 1)
    assert many.choices("dataset") == "titan/hf, and 1 more: titan list-components dataset"


def test_an_ambiguous_name_tells_both_and_the_fix() -> None:
    registry = Registry(components=[("lab", MUON), ("titan-muon", OTHER_MUON)])
    with pytest.raises(PluginError) as caught:
        registry.find("optimizer", "muon")
    assert "lab, titan-muon" in caught.value.message
    assert "'lab/muon' or 'titan-muon/muon'" in (caught.value.hint or "")
    assert "-p no:titan-muon" in (caught.value.hint or "")
    assert registry.find("optimizer", "titan-muon/muon") is OTHER_MUON


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        ("optimizer", "moun", "did you mean 'muon'?"),
        ("optimizer", "lab/moun", "did you mean 'lab/muon'?"),
        ("optimizer", "lba/muon", "did you mean 'lab/muon'?"),
        ("loss", "muon", "'muon' is of kind optimizer"),
        ("optimizer", "qqqqqq", "known: muon"),
        ("launcher", "qqqqqq", "known: none is installed"),
    ],
)
def test_an_unknown_name_gets_advice(registry: Registry, kind: str, name: str, hint: str) -> None:
    with pytest.raises(PluginError) as caught:
        registry.find(kind, name)
    assert hint in (caught.value.hint or "")


def test_a_hint_knows_components_whose_name_another_kind_has_too() -> None:
    both = [("lab", make("loss", "grpo")), ("lab", make("loop", "grpo")), ("lab", make("loss", "gspo"))]
    for order in (both, both[::-1]):
        with pytest.raises(PluginError) as caught:
            Registry(components=order).find("loss", "grpoo")
        assert caught.value.hint == "did you mean 'grpo'?"
        with pytest.raises(PluginError) as caught:
            Registry(components=order).find("loss", "qqqqqq")
        assert caught.value.hint == "known: grpo, gspo"


def test_a_name_that_a_broken_plugin_may_offer_shows_its_traceback(site: Site) -> None:
    site.add("titan-muon", "raise RuntimeError('libmuon.so is missing')")
    registry = load_plugins()
    for name in ("shiny", "titan-muon/shiny"):
        with pytest.raises(PluginError) as caught:
            registry.find("optimizer", name)
        assert "plugin 'titan-muon', which may provide it, is broken" in caught.value.message
        assert "RuntimeError: libmuon.so is missing" in caught.value.message


def test_a_near_name_does_not_hide_that_a_broken_plugin_may_be_meant(site: Site) -> None:
    site.add("titan-eight", "raise RuntimeError")
    with pytest.raises(PluginError) as caught:
        load_plugins().find("optimizer", "adam8")
    assert caught.value.hint == "did you mean 'adamw'? Or fix titan-eight, which may provide 'adam8'"


def test_a_broken_plugin_does_not_stop_what_others_offer(site: Site) -> None:
    site.add("bad", "raise RuntimeError('bad')")
    assert load_plugins().find("model", "llama3")


def test_recipe_folders_carry_the_plugins_name(site: Site, tmp_path: Path) -> None:
    hook = "\n@hookimpl\ndef titan_recipes():\n    return {!r}\n"
    site.add("lab", loss("a", extra=hook.format(str(tmp_path))))
    site.add("lost", loss("b", extra=hook.format("/no/such/folder")))
    registry = load_plugins()
    assert ("lab", tmp_path) in registry.recipe_folders()
    broken = [p.name for p in registry.plugins if p.state == "broken"]
    assert broken == ["lost"]


def test_commands_carry_the_plugins_name_and_cannot_take_a_reserved_one(site: Site) -> None:
    site.add(
        "lab",
        """
        import click
        from titancli import hookimpl

        @hookimpl
        def titan_commands():
            return [click.Command("brew"), click.Command("train"), click.Command(None), "text"]
        """,
    )
    registry = load_plugins()
    commands = [
        (plugin, command.name)
        for plugin, command in registry.commands({"train"})
        if plugin not in first_party.COMMANDS.values()
    ]
    assert commands == [("lab", "brew")]
    assert "train" in next(p.error or "" for p in registry.plugins if p.name == "lab")


CHECK = """
@hookimpl
def titan_checks(recipe):
    {}
"""


def test_the_checks_of_all_plugins_are_heard(site: Site) -> None:
    site.add("lab", loss("a", extra=CHECK.format("return [('training.steps', f'{recipe.steps} is few')]")))
    site.add("lab2", loss("b", extra=CHECK.format("return []")))
    assert load_plugins().checks(SimpleNamespace(steps=3)) == [  # type: ignore[arg-type]
        ("training.steps", "3 is few (reported by plugin lab)")
    ]


@pytest.mark.parametrize("body", ["raise RuntimeError('check fell over')", "return ['check fell over']"])
def test_a_broken_check_stops_only_a_recipe_that_uses_its_plugin(site: Site, body: str) -> None:
    site.add("lab", loss("a", extra=CHECK.format(body)))
    registry = load_plugins()
    assert registry.checks([make("loss", "foreign")()]) == []  # type: ignore[arg-type]
    registry = load_plugins()
    with pytest.raises(PluginError, match="check fell over"):
        registry.checks([registry.find("loss", "lab/a")()])  # type: ignore[arg-type]


def test_a_worker_loads_only_the_plugins_that_its_lock_file_names(site: Site) -> None:
    module = site.add("aaa", loss("unused", extra=CHECK.format("raise RuntimeError")))
    registry = load_plugins(checks=False)
    config = registry.find("loss", "titan/cross_entropy")
    assert registry.full_name(config) == "titan/cross_entropy"
    assert registry.checks(config()) == []
    assert module not in sys.modules


def test_the_registry_of_the_process_is_made_once_and_again_after_configure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from titancli import registry

    monkeypatch.setattr(registry, "_current", None)
    first = registry.current()
    assert registry.current() is first
    file = tmp_path / "extra_titan_file.py"
    file.write_text("")
    try:
        registry.configure(files=[file])
        assert registry.current() is not first
        assert registry.plugin_files() == [file]
    finally:
        registry.configure()
