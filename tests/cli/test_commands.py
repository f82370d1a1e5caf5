"""validate, recipe, list-components, show, plugin: what they print."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.cli.conftest import Titan
from tests.models.hf_configs import LLAMA, SPARSE
from titancli.registry.kinds import KINDS


@pytest.fixture
def bad(tmp_path: Path) -> str:
    file = tmp_path / "bad.toml"
    file.write_text('recipe = 1\nextends = "titan:llama3_debug"\n[training]\nstpes = 3\nseq_len = "long"\n')
    return str(file)


# -------------------------------------------------------------------------------------------- validate


def test_validate_prints_one_line_for_each_good_recipe(titan: Titan) -> None:
    done = titan("validate", "llama3_debug", "llama3_8b", "training.steps=700", "tokenizer=byte")
    assert done == (0, "ok: llama3_debug\nok: llama3_8b\n", "")


def test_validate_reports_everything_at_once_and_goes_on(titan: Titan, bad: str) -> None:
    done = titan("validate", bad, "llama3_debug")
    assert (done.code, done.out) == (3, "ok: llama3_debug\n")
    assert f"{bad}:4:1" in done.err and f"{bad}:5:" in done.err
    assert "did you mean 'steps'?" in done.err
    assert "2 problems" in done.err


def test_validate_as_json_is_one_document(titan: Titan, bad: str) -> None:
    done = titan("validate", bad, "llama3_debug", "--format", "json")
    document = json.loads(done.out)
    assert (done.code, document["version"], document["ok"]) == (3, 1, False)
    first, second = document["recipes"]
    assert (first["recipe"], first["ok"], second["ok"], second["problems"]) == (bad, False, True, [])
    assert {problem["line"] for problem in first["problems"]} == {4, 5}


def test_validate_for_github_annotates_the_line(titan: Titan, bad: str) -> None:
    done = titan("validate", bad, "--format=github")
    assert done.code == 3
    assert all(line.startswith("::error ") for line in done.out.splitlines())
    assert "line=4" in done.out


def test_validate_of_a_missing_recipe_names_it(titan: Titan) -> None:
    done = titan("validate", "llama3_debgu")
    assert done.code == 3
    assert "llama3_debgu" in done.err and "llama3_debug" in done.err


def test_validate_takes_unset(titan: Titan) -> None:
    assert titan("validate", "llama3_debug", "--unset", "training.max_norm").code == 0


BROKEN = '''
from titancli import component, hookimpl

@component("loss", "sour", target="cli_sour:build")
class Sour:
    """A loss whose code is broken."""

@component("logger", "leaves", target="cli_leaving:build")
class Leaves:
    """A logger whose code leaves."""

@hookimpl
def titan_components():
    return [Sour, Leaves]
'''


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What names a loss and a logger whose modules are there, and fail when they are imported."""
    (tmp_path / "cli_broken.py").write_text(BROKEN)
    (tmp_path / "cli_sour.py").write_text("import no_such_library\n\ndef build(config): ...\n")
    (tmp_path / "cli_leaving.py").write_text("import sys\nsys.exit(7)\n\ndef build(config): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return ["llama3_debug", "loss=sour", 'loggers=["leaves"]', "-p", str(tmp_path / "cli_broken.py")]


def test_what_cannot_be_imported_is_told_under_strict_alone(titan: Titan, broken: list[str]) -> None:
    assert titan("validate", *broken).code == 0
    done = titan("validate", "--strict", *broken)
    assert done.code == 4 and "ok:" not in done.out
    assert "loss/sour of the plugin cli_broken: 'cli_sour:build' cannot be imported" in done.err
    assert "ModuleNotFoundError: No module named 'no_such_library'" in done.err
    assert (
        "logger/leaves of the plugin cli_broken: 'cli_leaving:build' cannot be imported: SystemExit: 7"
        in done.err
    )
    assert "2 problems" in done.err and "Traceback" not in done.err


def test_what_cannot_be_imported_is_told_as_json(titan: Titan, broken: list[str]) -> None:
    done = titan("validate", "--strict", "--recipe-only", "--format", "json", "llama3_8b", *broken)
    [again, found] = json.loads(done.out)["recipes"]
    assert (done.code, found["ok"], again["ok"]) == (4, False, False)
    assert [problem["code"] for problem in found["problems"]] == ["import", "import"]
    assert "loss=sour" in str(found["problems"])


def test_what_can_be_imported_passes_under_strict(titan: Titan) -> None:
    done = titan("validate", "--strict", "--recipe-only", "llama3_debug", "llama3_8b")
    assert (done.code, done.out) == (0, "ok: llama3_debug\nok: llama3_8b\n")
    assert done.err == ""
    done = titan("validate", "--strict", "llama3_debug", "llama3_8b")
    assert (done.code, done.out) == (5, "ok: llama3_debug\n")  # the file is not here, as a start would say
    assert "error: tokenizer.path: " in done.err and "titan download " in done.err


def test_a_model_of_transformers_is_tried_under_strict_alone(titan: Titan, tmp_path: Path) -> None:
    """One whose attention is not plain: only a forward shows it."""
    good, bad = (tmp_path / name / "config.json" for name in ("good", "bad"))
    for path, values in ((good, LLAMA), (bad, SPARSE)):
        path.parent.mkdir()
        path.write_text(json.dumps(values | {"vocab_size": 300}))
    recipe = ("hf_causal_lm_debug", "training.seq_len=64")
    assert titan("validate", *recipe, f"model.config={bad.parent}").code == 0
    done = titan("validate", "--strict", *recipe, f"model.config={bad.parent}")
    assert done.code == 3 and "it also takes block_indices" in done.err and "Traceback" not in done.err
    assert titan("validate", "--strict", *recipe, f"model.config={good.parent}").code == 0


# ---------------------------------------------------------------------------------------------- config


def test_config_prints_a_recipe_that_runs_as_it_is(titan: Titan, tmp_path: Path) -> None:
    done = titan("recipe", "show", "llama3_debug", "training.steps=70")
    data = tomllib.loads(done.out)
    assert data["training"]["steps"] == 70
    assert data["model"]["type"] == "titan/llama3"
    (tmp_path / "again.toml").write_text(done.out)
    assert titan("recipe", "show", "./again.toml").out == done.out


def test_config_with_origins_is_the_same_recipe_with_comments(titan: Titan) -> None:
    plain = titan("recipe", "show", "llama3_debug", "training.steps=70")
    told = titan("recipe", "show", "llama3_debug", "training.steps=70", "--origin")
    assert tomllib.loads(told.out) == tomllib.loads(plain.out)
    lines = {line.split(" =")[0]: line for line in told.out.splitlines() if " =" in line}
    assert lines["steps"].endswith("# override training.steps=70")
    assert "llama3_debug.toml:" in lines["seq_len"]
    assert lines["gc_freq"].endswith("# default")


def test_config_as_json_holds_the_data_and_the_origins(titan: Titan) -> None:
    document = json.loads(titan("recipe", "show", "llama3_debug", "--json", "--origin").out)
    assert document["version"] == 1
    assert document["recipe"]["training"]["seq_len"] == 256
    assert document["origins"]["training.gc_freq"] == "default"
    assert "origins" not in json.loads(titan("recipe", "show", "llama3_debug", "--json").out)


def test_config_with_origins_writes_every_kind_of_value(titan: Titan, tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text(
        'extends = "titan:llama3_debug"\nname = "odd"\n'
        'description = "a # in \\"quotes\\" = and \\n a line"\n'
        '[[loggers]]\ntype = "tensorboard"\n[[loggers]]\ntype = "csv"\n'
        '[optimizer]\nno_decay = ["*norm.weight", "tok_embeddings.weight"]\n'
    )
    plain, told = titan("recipe", "show", "./odd.toml"), titan("recipe", "show", "./odd.toml", "--origin")
    assert tomllib.loads(told.out) == tomllib.loads(plain.out)
    assert len(tomllib.loads(told.out)["loggers"]) == 2


# ------------------------------------------------------------------------------------- lists and shows


def test_list_recipes_tells_names_and_descriptions(titan: Titan) -> None:
    recipes = json.loads(titan("recipe", "list", "--json").out)["recipes"]
    debug = next(recipe for recipe in recipes if recipe["name"] == "llama3_debug")
    assert debug["plugin"] == "titan"
    assert debug["description"]
    assert Path(debug["path"]).is_file()
    assert any(line.startswith("llama3_debug  ") for line in titan("recipe", "list").out.splitlines())


def test_list_recipes_survives_a_file_that_is_no_toml(titan: Titan, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "odd.toml").write_text("= =")
    file = tmp_path / "cli_recipes_plugin.py"
    file.write_text(
        "from titancli import hookimpl\n@hookimpl\ndef titan_recipes():\n    return './recipes'\n"
    )
    done = titan("recipe", "list", "-p", str(file))
    assert done.code == 0
    assert "cli_recipes_plugin:odd" in done.out and "cannot be read" in done.out


def test_list_components_has_every_kind_that_titan_offers(titan: Titan) -> None:
    components = json.loads(titan("list-components", "--json").out)["components"]
    offered = [component["kind"] for component in components]
    assert [kind for kind in KINDS if kind in offered] == list(dict.fromkeys(offered))
    assert all(component["summary"] for component in components)
    assert set(KINDS) - set(offered) <= {"converter"}


def test_list_components_of_a_kind_has_this_kind_only(titan: Titan) -> None:
    lines = titan("list-components", "tokenizer").out.splitlines()
    assert {line.split()[0] for line in lines} == {"tokenizer"}
    assert "titan/byte" in [line.split()[1] for line in lines]


@pytest.mark.parametrize("name", ["model/llama3", "titan/llama3", "llama3", "model/titan/llama3"])
def test_show_finds_a_component_by_every_form_of_its_name(titan: Titan, name: str) -> None:
    done = titan("show", name)
    assert done.code == 0
    assert done.out.startswith("model titan/llama3\n")
    assert "dim: int > 0 (required)" in done.out
    assert "Width of the residual stream." in done.out
    assert "8B: dim = 4096" in done.out


def test_show_of_a_section_has_its_fields(titan: Titan) -> None:
    done = titan("show", "training")
    assert done.code == 0
    assert done.out.startswith("section training\nLength of the run")
    assert "  steps: int > 0 (required)" in done.out
    document = json.loads(titan("show", "checkpoint", "--json").out)["component"]
    assert (document["kind"], document["name"], document["target"]) == ("section", "checkpoint", None)
    assert "interval" in [field["name"] for field in document["fields"]]


@pytest.mark.parametrize("words", [["--training.steps=5"], ["--training.steps", "5"]], ids=" ".join)
@pytest.mark.parametrize("command", ["train", "validate", "plan"])
def test_an_override_with_dashes_is_told_to_drop_them(titan: Titan, command: str, words: list[str]) -> None:
    done = titan(command, "llama3_debug", *words)
    assert done.code == 2
    assert "an override has no dashes: training.steps=5" in done.err


def test_show_as_json_holds_fields_and_flavors(titan: Titan) -> None:
    shown = json.loads(titan("show", "llama3", "--json").out)["component"]
    fields = {field["name"]: field for field in shown["fields"]}
    assert fields["rope_theta"]["default"] == 500000.0
    assert fields["dim"]["required"] is True
    assert shown["flavors"]["8B"]["n_layers"] == 32


def test_show_of_an_ambiguous_name_lists_the_kinds(titan: Titan) -> None:
    done = titan("show", "hf")
    assert done.code == 4
    assert "tokenizer/titan/hf" in done.err and "dataset/titan/hf" in done.err


@pytest.mark.parametrize(("name", "near"), [("lama3", "llama3"), ("model/lama3", "llama3")])
def test_show_of_an_unknown_name_offers_the_nearest(titan: Titan, name: str, near: str) -> None:
    done = titan("show", name)
    assert done.code == 4
    assert f"did you mean '{near}'?" in done.err


def test_plugins_shows_a_broken_one_with_its_traceback(titan: Titan, tmp_path: Path) -> None:
    file = tmp_path / "cli_cli_broken.py"
    file.write_text("import nothing_of_that_name\n")
    row = next(
        line for line in titan("plugin", "list", "-p", str(file)).out.splitlines() if "cli_broken" in line
    )
    assert "broken" in row and "No module named 'nothing_of_that_name'" in row
    shown = titan("plugin", "show", "cli_cli_broken", "-p", str(file)).out
    assert "Traceback (most recent call last)" in shown and str(file) in shown


def test_plugins_of_an_unknown_name_offers_the_nearest(titan: Titan) -> None:
    done = titan("plugin", "show", "tita")
    assert done.code == 4
    assert "did you mean 'titan'?" in done.err
