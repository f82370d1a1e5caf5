"""What is checked of a recipe as a whole, and what it requires."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

import pytest

from tests.recipe.components import registry_of
from tests.recipe.conftest import BASE
from titancli import __version__
from titancli.errors import PluginError, RecipeError
from titancli.recipe import load_recipe
from titancli.registry.component import component


def test_only_one_degree_may_be_free(problem) -> None:
    assert "only one degree may be -1" in problem(BASE, "mesh.dp_replicate=-1").message


@pytest.mark.parametrize(
    ("overrides", "good"),
    [
        (["training.global_batch_size=16"], True),
        (["training.global_batch_size=12"], False),
        (["training.global_batch_size=16", "mesh.dp_replicate=2"], True),
        (["training.global_batch_size=24", "mesh.dp_replicate=2"], False),
        (["training.global_batch_size=32", "mesh.dp_replicate=2", "mesh.dp_shard=2"], True),
        (["training.global_batch_size=48", "mesh.dp_replicate=2", "mesh.dp_shard=2"], False),
    ],
)
def test_the_global_batch_divides_by_what_is_known(load, overrides: list[str], good: bool) -> None:
    if good:
        load(BASE, *overrides)
        return
    with pytest.raises(RecipeError, match="is not a multiple of local_batch_size"):
        load(BASE, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["activation_checkpoint.selective_ac_option=0"], None),
        (['activation_checkpoint.selective_ac_option="0"'], "selective_ac_option must be"),
        (["activation_checkpoint.mode=memory_budget"], "no block is compiled"),
        (
            [
                "activation_checkpoint.mode=memory_budget",
                "compile.enable=true",
                'compile.components=["loss"]',
            ],
            "no block is compiled",
        ),
        (
            ["activation_checkpoint.mode=memory_budget", "compile.enable=true", "compile.backend=eager"],
            "keeps all activations",
        ),
        (["name=a/b"], "cannot be the start of a run folder's name"),
        (["name=.."], "cannot be the start of a run folder's name"),
        (["name="], "cannot be the start of a run folder's name"),
        (["training.seq_len=8192"], "model.dim: this model is too small"),
    ],
)
def test_what_does_not_fit_together_is_refused(problem, overrides: list[str], message: str | None) -> None:
    found = problem(BASE, *overrides)
    if message is not None:
        assert found.code == "check" and message in found.message


@pytest.mark.parametrize(
    "overrides",
    [
        ["lr_scheduler.warmup_steps=1001"],
        ['activation_checkpoint.selective_ac_option="2"'],
        ["activation_checkpoint.mode=memory_budget", "compile.enable=true"],
        ["name=Llama-3.1_8b"],
    ],
)
def test_what_just_fits_is_taken(load, overrides: list[str]) -> None:
    load(BASE, *overrides)


def test_all_checks_are_told_together_each_at_its_key(problems) -> None:
    found = problems(BASE + "seq_len = 8191\n[mesh]\ntp = 2\nep = 2\n")
    assert [(p.location.line, p.message.partition(" ")[0]) for p in found] == [
        (4, "model.dim:"),
        (20, "mesh.tp"),
        (21, "mesh.ep"),
    ]


def test_the_check_of_a_component_in_a_slot_of_another_is_asked_too(write) -> None:
    @component("optimizer", "inner", target="tests.recipe.components:unused")
    class Inner:
        rate: float = 1.0

        def check(self, recipe: object) -> Iterator[tuple[str, str]]:
            yield "rate", "too fast"

    registry = registry_of(("titan-inner", Inner))
    path = write(BASE + '[optimizer]\ntype = "muon"\n[optimizer.fallback]\ntype = "inner"\nrate = 3.0\n')
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, registry=registry)
    (found,) = caught.value.problems
    assert (found.message, found.location.source) == ("too fast", "rate = 3.0")


def test_the_checks_of_plugins_are_asked(load, registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "checks", lambda recipe: [("training.steps", f"{recipe.name} is too long")])
    with pytest.raises(RecipeError) as caught:
        load(BASE)
    (found,) = caught.value.problems
    assert (found.message, found.location.source) == ("base is too long", "steps = 1000")


def test_a_check_that_breaks_is_the_plugins_mistake(write) -> None:
    @component("loss", "bad", target="tests.recipe.components:unused")
    class Bad:
        def check(self, recipe: object) -> Iterator[tuple[str, str]]:
            yield "x", str(1 / 0)

    with pytest.raises(PluginError, match=r"Bad\.check failed: ZeroDivisionError"):
        load_recipe(write(BASE), ["loss=bad"], registry=registry_of(("titan-bad", Bad)))


# ----------------------------------------------------------------------------------------- requires


def test_what_is_required_and_there_is_no_problem(load) -> None:
    version = metadata.version("pluggy")
    plugins = f"""["pluggy>={version}", "x; sys_platform == 'os2'"]"""
    text = BASE + f'[requires]\ntitan = "=={__version__}"\nplugins = {plugins}\n'
    assert load(text).recipe.requires.titan == f"=={__version__}"


def test_a_missing_plugin_is_told_once_with_how_to_install_it(problem) -> None:
    text = BASE + '[requires]\nplugins = ["titan-no-such-thing>=0.1"]\n'
    found = problem('converters = ["float8_linear"]\n' + text)
    assert found.code == "requires"
    assert found.hint == "pip install 'titan-no-such-thing>=0.1'"


def test_a_missing_plugin_of_titans_own_is_installed_from_the_checkout(
    problem, monkeypatch, tmp_path
) -> None:
    (tmp_path / "titan-no-such-thing").mkdir()
    (tmp_path / "titan-no-such-thing" / "pyproject.toml").touch()
    monkeypatch.setattr("titancli.registry.first_party.FOLDER", tmp_path)
    text = BASE + '[requires]\nplugins = ["titan_no.such-thing>=0.1"]\n'
    assert problem(text).hint == "pip install ./titan-no-such-thing"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert problem(text).hint == f"pip install {tmp_path}/titan-no-such-thing"


def test_other_mistakes_are_told_beside_a_missing_plugin(problems) -> None:
    found = problems(BASE + 'stpes = 1\n[requires]\nplugins = ["titan-no-such-thing"]\n')
    assert [p.code for p in found] == ["unknown-key", "requires"]


def test_a_loop_of_a_missing_plugin_is_not_said_to_need_a_dataset(problem) -> None:
    without = re.sub(r"\[dataset\]\n(.+\n)*", "", BASE)
    assert without != BASE
    found = problem('loop = "no_such"\n' + without + '[requires]\nplugins = ["titan-no-such-thing"]\n')
    assert found.code == "requires"


@pytest.mark.parametrize(
    ("line", "code", "hint"),
    [
        ('titan = ">=99"', "requires", "pip install 'titancli>=99'"),
        ('titan = "99"', "bad-value", 'use a version specifier such as ">=0.1"'),
        ('plugins = ["pluggy>=99"]', "requires", "pip install --upgrade 'pluggy>=99'"),
        ('plugins = ["a b c"]', "bad-value", None),
        ("titan = 1", "wrong-type", 'for a string, put quotes around it: "1"'),
        ("plugins = [1]", "wrong-type", 'for a string, put quotes around it: "1"'),
        ('plugins = "pluggy"', "wrong-type", 'write ["pluggy"]'),
    ],
)
def test_a_requirement_that_is_not_met_or_none(problem, line: str, code: str, hint: str | None) -> None:
    found = problem(BASE + f"[requires]\n{line}\n")
    assert found.code == code and (hint is None or found.hint == hint)
    assert found.location.line == 19
