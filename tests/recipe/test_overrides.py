"""`KEY=VALUE` and `--unset KEY`."""

from __future__ import annotations

import itertools

import pytest

from tests.recipe.conftest import BASE
from titancli.errors import RecipeError

CONVERTERS = (
    BASE
    + """
[[converters]]
type = "cast"
skip = ["output"]
[[converters]]
type = "cast"
"""
)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.steps=5", ("training", "steps"), 5),
        ("training.steps = 5", ("training", "steps"), 5),
        ("optimizer.lr=1e-4", ("optimizer", "lr"), 1e-4),
        ("optimizer.lr=1", ("optimizer", "lr"), 1.0),
        ("optimizer.betas=[0.1, 0.2]", ("optimizer", "betas"), [0.1, 0.2]),
        ("compile.enable=true", ("compile", "enable"), True),
        ("name=exp7", ("name",), "exp7"),
        ('name="10"', ("name",), "10"),
        ("name='10'", ("name",), "10"),
        ("description=a = b # c", ("description",), "a = b # c"),
        ("description=1 # c", ("description",), "1 # c"),
        ("description=1\n[training]", ("description",), "1\n[training]"),
        ("description=1\nname = 2", ("description",), "1\nname = 2"),
        ("description=", ("description",), ""),
        ("description=[x", ("description",), "[x"),
        ("description= x ", ("description",), " x "),
        ('description="""a\nb"""', ("description",), "a\nb"),
        ('dataset.columns."a.b"=3', ("dataset", "columns"), {"a.b": 3}),
        ("dataset.columns.0=3", ("dataset", "columns"), {"0": 3}),
        ("dataset.columns={a = 1, b = 2}", ("dataset", "columns"), {"a": 1, "b": 2}),
        ("mesh.dp_shard=-1", ("mesh", "dp_shard"), -1),
    ],
)
def test_a_value_is_one_toml_value_or_else_text(
    load, override: str, path: tuple[str, ...], value: object
) -> None:
    data = load(BASE, override).data
    for key in path:
        data = data[key]
    assert data == value and type(data) is type(value)


def test_overrides_are_one_layer_in_any_order(load) -> None:
    text = BASE + '[optimizer]\ntype = "adamw"\nbetas = [0.1, 0.2]\n'
    overrides = ["optimizer=muon", "optimizer.lr=0.5", "optimizer.momentum=0.1"]
    for order in itertools.permutations(overrides):
        optimizer = load(text, *order).data["optimizer"]
        assert (optimizer["type"], optimizer["lr"], optimizer["momentum"]) == ("titan-muon/muon", 0.5, 0.1)


def test_of_two_values_for_a_key_the_last_wins(load) -> None:
    assert load(BASE, "training.steps=5", "training.steps=6").recipe.training.steps == 6
    assert load(BASE, "optimizer={lr = 1.0}", "optimizer.lr=2.0").recipe.optimizer.lr == 2.0
    assert load(BASE, "optimizer.lr=2.0", "optimizer={lr = 1.0}").recipe.optimizer.lr == 1.0
    assert load(BASE, "optimizer=muon", "optimizer=adamw").data["optimizer"]["type"] == "titan/adamw"


def test_a_component_named_after_a_table_is_the_one_that_is_used() -> None:
    from titancli.recipe import load_recipe

    tables = ['optimizer={type="adamw"}', "loss={type='sft'}"]
    for overrides, found in (
        ([*tables, "optimizer=muon", "loss=cross_entropy"], ("Muon", "CrossEntropy")),
        (["optimizer=muon", "loss=cross_entropy", *tables], ("AdamW", "SFT")),
    ):
        recipe = load_recipe("llama3_debug", overrides).recipe
        assert (type(recipe.optimizer).__name__, type(recipe.loss).__name__) == found
    with pytest.raises(RecipeError, match="momentum"):
        load_recipe("llama3_debug", ['optimizer={type="muon",momentum=0.9}', "optimizer=adamw"])


def test_numbers_name_elements_of_arrays(load) -> None:
    loaded = load(CONVERTERS, "converters.0.recipe=tensorwise", 'converters.0.skip.0="last"')
    assert [(c.recipe, c.skip) for c in loaded.recipe.converters] == [
        ("tensorwise", ["last"]),
        ("rowwise", []),
    ]


def test_an_array_and_its_elements_can_be_overridden_together(load) -> None:
    overrides = ("converters.1.recipe=tensorwise", 'converters=["cast", {type = "cast", skip = ["x"]}]')
    for order in (overrides, overrides[::-1]):
        converters = load(BASE, *order).recipe.converters
        assert [(c.recipe, c.skip) for c in converters] == [("rowwise", []), ("tensorwise", ["x"])]


@pytest.mark.parametrize(
    "text", [CONVERTERS, BASE + "[[converters]]\ntype='cast'\n[[converters]]\ntype='cast'\n"]
)
def test_an_element_that_is_not_there_is_refused(problem, text: str) -> None:
    found = problem(text, "converters.2.recipe=tensorwise")
    assert (found.code, found.message) == ("no-element", "converters has no element 2")
    assert found.hint == "it has 2, numbered from 0; to add elements, give the whole array"


def test_an_element_of_an_array_that_is_not_written_is_refused(problem) -> None:
    found = problem(BASE, "converters.0.recipe=tensorwise")
    assert found.message == "converters must be an array, not a table"
    assert found.hint == "there is no array here whose elements could be changed; give the whole array"


@pytest.mark.parametrize("override", ["=5", "a b=5", ".a=5", "a..b=5", "a.=5", '"a=5', "[a]=5", "\udc80=1"])
def test_what_is_no_key_is_refused(problems, override: str) -> None:
    (found,) = problems(BASE, override)
    assert found.code == "bad-override"


def test_a_file_cannot_be_extended_by_an_override(problem) -> None:
    assert problem(BASE, "extends=base.toml").message == "extends can only be set in a recipe file"


def test_an_error_points_at_the_override(problem) -> None:
    found = problem(BASE, "training.stpes=5")
    assert (found.code, found.hint) == ("unknown-key", "did you mean 'steps'?")
    at = found.location
    assert (at.path, at.line, at.column, at.length) == ("override", 1, 10, 5)
    assert at.source == "training.stpes=5"


@pytest.mark.parametrize("value", ["10", "1.5", "true", "2024-01-01", "inf", "nan"])
def test_a_text_field_that_got_another_type_is_told_how_to_quote(problem, value: str) -> None:
    found = problem(BASE, f"name={value}")
    assert found.hint == f"""for a string, put quotes around it: 'name="{value}"'"""


@pytest.mark.parametrize(
    "override",
    ["optimizer={type=muon}", "converters=[{type='cast'}", "training={steps=x}", 'model="tiny', "mesh=[1"],
)
def test_a_value_that_is_almost_toml_is_told_to_be_none(problem, override: str) -> None:
    assert problem(BASE, override).hint.startswith("this is not a TOML value, so it was read as a string")


def test_a_flavor_over_a_resolved_recipe_takes_that_flavor_whole(load, write, registry) -> None:
    from titancli.recipe import load_recipe, lock_text

    text = BASE.replace('type = "tiny"', 'type = "tiny"\nflavor = "small"')
    lock = write(lock_text(load(text)), "lock.toml")
    large = load_recipe(lock, ["model.flavor=large"], registry=registry)
    assert large.data["model"] == load(BASE, "model.flavor=large").data["model"]
    assert (large.recipe.model.dim, large.recipe.model.rope.factor) == (512, 8.0)
    small = load_recipe(lock, ["model.flavor=large", "model.dim=7"], registry=registry)
    assert (small.recipe.model.dim, small.recipe.model.layers) == (7, 8)


# -------------------------------------------------------------------------------------------- unset


def test_unset_returns_a_key_to_its_default(load) -> None:
    text = BASE + "global_batch_size = 16\nseq_len = 64\n"
    training = load(text, unset=("training.global_batch_size", "training.seq_len")).recipe.training
    assert (training.global_batch_size, training.seq_len) == (None, 2048)


def test_unset_takes_away_what_a_flavor_gives_and_the_lock_keeps_it_away(load, write, registry) -> None:
    from titancli.recipe import load_recipe, lock_text

    loaded = load(BASE, "model.flavor=large", unset=("model.rope",))
    assert loaded.recipe.model.rope is None and loaded.recipe.model.dim == 512
    again = load_recipe(write(lock_text(loaded), "lock.toml"), registry=registry)
    assert again.data == loaded.data


def test_unset_of_what_is_not_set_is_no_mistake(load) -> None:
    assert load(BASE, unset=("training.global_batch_size", "model.flavor")).recipe.training.steps == 1000


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("training.global_batchsize", "did you mean 'global_batch_size'?"),
        ("trainning", "did you mean 'training'?"),
        ("model.dmi", "did you mean 'dim'?"),
    ],
)
def test_unset_of_a_key_that_does_not_exist_is_refused(problem, key: str, hint: str) -> None:
    found = problem(BASE, unset=(key,))
    assert (found.code, found.hint, found.location.source) == ("unknown-key", hint, key)


def test_unset_of_an_element_is_refused(problem) -> None:
    found = problem(CONVERTERS, unset=("converters.0",))
    assert found.message == "cannot unset converters.0: it is an element of an array"


def test_unset_reaches_into_elements(load) -> None:
    assert load(CONVERTERS, unset=("converters.0.skip",)).recipe.converters[0].skip == []


def test_text_in_an_array_is_quoted_there(problem) -> None:
    assert problem(BASE, "requires.plugins=[1, 'pluggy']").hint == 'for a string, put quotes around it: "1"'


def test_unset_of_a_required_key_is_a_missing_key(problem) -> None:
    found = problem(BASE, unset=("training.steps",))
    assert (found.code, found.message) == ("missing-key", "training needs 'steps'")
    assert found.location.source == "[training]"
