"""`extends`: one recipe on another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipe.components import registry_of
from tests.recipe.conftest import BASE
from titancli.errors import RecipeError
from titancli.recipe import load_recipe, merge, render_problems
from titancli.recipe.find import find_recipe
from titancli.recipe.read import read_file


def test_tables_merge_deep_and_arrays_are_replaced_whole(write, load) -> None:
    write(BASE + "seq_len = 128\n[optimizer]\nlr = 0.5\nbetas = [0.1, 0.2]\n", "base.toml")
    loaded = load('extends = "base.toml"\n[training]\nsteps = 5\n[optimizer]\nbetas = [0.3, 0.4, 0.5]\n')
    assert (loaded.recipe.training.steps, loaded.recipe.training.seq_len) == (5, 128)
    assert (loaded.recipe.optimizer.lr, loaded.recipe.optimizer.betas) == (0.5, [0.3, 0.4, 0.5])


def test_a_base_is_relative_to_the_file_that_names_it(write, load) -> None:
    write(BASE, "a/base.toml")
    write('extends = "../a/base.toml"\n', "b/middle.toml")
    assert load('extends = "b/middle.toml"\n').recipe.training.steps == 1000


def test_of_several_bases_the_right_one_wins(write, load) -> None:
    write(BASE, "base.toml")
    write("[training]\nsteps = 7\nseq_len = 64\n", "short.toml")
    write("[training]\nsteps = 8\n", "eight.toml")
    loaded = load('extends = ["base.toml", "short.toml", "eight.toml"]\n')
    assert (loaded.recipe.training.steps, loaded.recipe.training.seq_len) == (8, 64)


def test_one_base_may_be_reached_on_two_ways(write, load) -> None:
    write(BASE, "base.toml")
    write('extends = "base.toml"\n[training]\nseq_len = 64\n', "left.toml")
    write('extends = "base.toml"\n[training]\nlocal_batch_size = 2\n', "right.toml")
    training = load('extends = ["left.toml", "right.toml"]\n').recipe.training
    assert (training.seq_len, training.local_batch_size) == (64, 2)


def test_a_changed_type_discards_the_other_keys(write, load) -> None:
    write(BASE + '[optimizer]\ntype = "adamw"\nbetas = [0.1, 0.2]\nlr = 0.5\n', "base.toml")
    optimizer = load('extends = "base.toml"\n[optimizer]\ntype = "muon"\n').data["optimizer"]
    assert optimizer == {"type": "titan-muon/muon", "lr": 0.02, "momentum": 0.95, "groups": []}


def test_a_type_other_than_the_default_discards_the_keys_written_for_the_default(write, load) -> None:
    write(BASE + "[optimizer]\nlr = 0.5\n", "base.toml")
    assert load('extends = "base.toml"\noptimizer = "muon"\n').recipe.optimizer.lr == 0.02
    assert load('extends = "base.toml"\noptimizer = "adamw"\n').recipe.optimizer.lr == 0.5


@pytest.mark.parametrize(("low", "high"), [("adamw", "titan/adamw"), ("titan/adamw", "adamw")])
def test_a_bare_name_equals_a_full_name_that_ends_in_it(write, load, low: str, high: str) -> None:
    write(BASE + f'[optimizer]\ntype = "{low}"\nlr = 0.5\n', "base.toml")
    loaded = load(f'extends = "base.toml"\n[optimizer]\ntype = "{high}"\n')
    assert loaded.data["optimizer"]["lr"] == 0.5
    assert loaded.data["optimizer"]["type"] == "titan/adamw"


def test_a_bare_name_over_a_full_name_means_that_one_even_if_another_plugin_offers_it_too(write) -> None:
    from tests.recipe.components import OtherAdamW

    write(BASE + '[optimizer]\ntype = "titan/adamw"\nlr = 0.5\n', "base.toml")
    registry = registry_of(("zz", OtherAdamW))
    path = write('extends = "base.toml"\noptimizer = "adamw"\n')
    assert load_recipe(path, registry=registry).data["optimizer"]["type"] == "titan/adamw"


def test_a_changed_flavor_discards_the_other_keys_but_the_type(write, load) -> None:
    base = BASE.replace('type = "tiny"', 'type = "tiny"\nflavor = "small"\ndim = 99\ntied = true')
    write(base, "base.toml")
    model = load('extends = "base.toml"\n[model]\nflavor = "large"\n').data["model"]
    assert (model["dim"], model["tied"], model["flavor"]) == (512, False, "large")
    model = load('extends = "base.toml"\n[model]\nflavor = "small"\n').data["model"]
    assert (model["dim"], model["tied"]) == (99, True)


def test_a_flavor_over_none_discards_too(write, load) -> None:
    write(BASE.replace('type = "tiny"', 'type = "tiny"\ndim = 99'), "base.toml")
    assert load('extends = "base.toml"\n[model]\nflavor = "small"\n').recipe.model.dim == 64


def test_a_string_and_a_table_for_one_component_merge(write, load) -> None:
    write('optimizer = "adamw"\n' + BASE, "base.toml")
    assert load('extends = "base.toml"\n[optimizer]\nlr = 0.5\n').recipe.optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("files", "chain"),
    [
        ({"exp.toml": 'extends = "exp.toml"\n'}, "exp.toml -> exp.toml"),
        (
            {
                "exp.toml": 'extends = "b.toml"\n',
                "b.toml": 'extends = ["c.toml"]\n',
                "c.toml": 'extends="b.toml"',
            },
            "b.toml -> c.toml -> b.toml",
        ),
    ],
)
def test_a_cycle_is_refused_with_its_way(write, registry, files: dict[str, str], chain: str) -> None:
    for name, text in files.items():
        write(text, name)
    with pytest.raises(RecipeError) as caught:
        load_recipe("exp.toml", registry=registry)
    (problem,) = caught.value.problems
    assert problem.code == "cycle" and chain in problem.message and problem.location is not None


def test_a_missing_base_is_told_at_the_line_that_names_it_with_the_nearest(write, problem) -> None:
    write(BASE, "base_8b.toml")
    found = problem('recipe = 1\nextends = "base_8.toml"\n')
    assert (found.code, found.hint) == ("no-recipe", "did you mean 'base_8b.toml'?")
    assert found.location is not None and (found.location.line, found.location.column) == (2, 11)


def test_each_base_is_read_once(write, load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lattice of 30 floors has 2^30 ways from its top to its base."""
    read = []
    monkeypatch.setattr(merge, "read_file", lambda *given: read.append(given[0]) or read_file(*given))
    write(BASE, "0.toml")
    for floor in range(1, 31):
        write(
            f'extends = ["{floor - 1}.toml", "./{floor - 1}.toml"]\n[training]\nsteps = {floor}\n',
            f"{floor}.toml",
        )
    assert load('extends = "30.toml"\n').recipe.training.steps == 30
    assert len(read) == 32


def test_bases_are_counted(write, problem) -> None:
    for floor in range(merge.MOST_FILES):
        write(f'extends = "{floor + 1}.toml"\n', f"{floor}.toml")
    found = problem('extends = "0.toml"\n')
    assert found.code == "too-many-files" and found.location is not None


@pytest.mark.parametrize("value", ["3", "[3]", '{a = "b"}'])
def test_extends_must_be_text(problem, value: str) -> None:
    assert problem(f"extends = {value}\n").message == "extends must be a string"


def test_problems_lie_in_the_file_that_holds_the_line(write, problems) -> None:
    write(BASE + "seq_len = -1\n", "base.toml")
    found = problems('extends = "base.toml"\n\n[training]\nstpes = 5\n')
    places = [(p.code, p.location.path, p.location.line) for p in found]
    assert places == [("unknown-key", "exp.toml", 4), ("out-of-range", "base.toml", 18)]


def test_broken_files_are_all_told_and_nothing_that_follows_from_them(write, problems) -> None:
    write("x = [1, 2\n", "a.toml")
    write("y = 1\ny = 2\n", "b.toml")
    found = problems('extends = ["a.toml", "b.toml", "c.toml"]\n')
    assert [(p.code, p.location.path) for p in found] == [
        ("no-recipe", "exp.toml"),
        ("syntax", "a.toml"),
        ("syntax", "b.toml"),
    ]


def test_extends_is_no_key_of_the_result(write, load) -> None:
    write(BASE, "base.toml")
    loaded = load('extends = "base.toml"\nname = "child"\n')
    assert "extends" not in loaded.data and loaded.data["name"] == "child"


def test_a_base_of_a_newer_format_is_refused(write, problem) -> None:
    write(BASE.replace("recipe = 1", "recipe = 2"), "base.toml")
    found = problem('recipe = 1\nextends = "base.toml"\n')
    assert found.code == "bad-format" and found.location is not None and found.location.path == "base.toml"


# --------------------------------------------------------------------------------- finding by name


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry):
    for plugin, names in {"titan": ["llama3_8b", "shared"], "titan-other": ["shared", "mixed"]}.items():
        (tmp_path / plugin).mkdir()
        for name in names:
            (tmp_path / plugin / f"{name}.toml").write_text(BASE.replace("base", name))
    folders = [(plugin, tmp_path / plugin) for plugin in ("titan", "titan-other")]
    monkeypatch.setattr(registry, "recipe_folders", lambda: folders)
    monkeypatch.chdir(tmp_path)
    return registry


def test_what_is_no_recipe_file_is_not_read_and_not_shown(tmp_path, write, problem) -> None:
    (tmp_path / "passwd").write_text("root:x:0:0:hunter2\n")
    found = problem(f'extends = "{tmp_path}/passwd"\n')
    assert "does not end in .toml" in found.message
    assert "hunter2" not in render_problems([found])


@pytest.mark.parametrize("reference", ["llama3_8b", "titan:llama3_8b", "titan/llama3_8b.toml", "mixed"])
def test_a_recipe_is_found_by_name_or_path(named, reference: str) -> None:
    assert load_recipe(reference, registry=named).recipe.name == Path(reference.split(":")[-1]).stem


def test_a_recipe_can_be_extended_by_name(named, write) -> None:
    path = write('extends = "titan-other:shared"\n')
    assert load_recipe(path, registry=named).recipe.name == "shared"


def test_a_file_without_its_ending_is_told_how_it_is_called(named, write) -> None:
    write(BASE, "mine.toml")
    with pytest.raises(RecipeError) as caught:
        load_recipe("mine", registry=named)
    assert caught.value.problems[0].hint == "for the file, write ./mine.toml"


def test_a_run_folder_stands_for_its_lock_file(named, write) -> None:
    lock = write(BASE, "run/recipe.lock.toml")
    assert find_recipe("run", registry=named) == lock
    assert find_recipe(Path("run"), registry=named) == lock


@pytest.mark.parametrize(
    ("reference", "message", "hint"),
    [
        ("llama3_8", "there is no recipe 'llama3_8'", "did you mean 'llama3_8b'?"),
        ("titan:llama3_8", "there is no recipe 'titan:llama3_8'", "did you mean 'titan:llama3_8b'?"),
        ("nothing", "there is no recipe 'nothing'", "`titan recipe list` lists them"),
        ("shared", "'shared' is the name of 2 recipes", "write titan-other:shared or titan:shared"),
        (
            "titan/llama3_8.toml",
            "recipe titan/llama3_8.toml does not exist",
            "did you mean 'llama3_8b.toml'?",
        ),
        ("./titan", "titan is a folder without a recipe.lock.toml", "give a recipe file or a run folder"),
        ("a\0b.toml", "does not exist", ""),
    ],
)
def test_a_reference_to_nothing_is_told_with_the_nearest(
    named, reference: str, message: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(reference, registry=named)
    (problem,) = caught.value.problems
    assert message in problem.message and hint in (problem.hint or "")
