"""Everything wrong is told at once, at its place, with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.recipe.components import AdamW, Cast, OtherAdamW, registry_of
from tests.recipe.conftest import BASE
from titancli.errors import PluginError, RecipeError
from titancli.recipe import load_recipe
from titancli.registry.component import component
from titancli.registry.plugins import Plugin


def test_everything_wrong_is_told_at_once(problems) -> None:
    text = """\
recipe = 1
[model]
type = "tinny"
[tokenizer]
type = "chars"
[training]
stpes = 100
seq_len = "10"
[lr_scheduler]
decay_type = "cosin"
[optimizer]
lr = 2024-01-01
[loss]
type = "cross_entropy"
weight = 1
[[converters]]
type = "cast"
recipe = 3
"""
    found = problems(text, "mesh.tp=0")
    assert [(p.code, p.location.line, p.location.column, p.hint) for p in found] == [
        ("missing-key", 1, 1, "add [dataset] with a type, one of: lines"),
        ("unknown-component", 3, 8, "did you mean 'tiny'?"),
        ("unknown-key", 7, 1, "did you mean 'steps'?"),
        ("wrong-type", 8, 11, "write 10 without quotes"),
        ("bad-choice", 10, 14, "did you mean 'cosine'?"),
        ("wrong-type", 12, 6, 'for a string, put quotes around it: "2024-01-01"'),
        ("unknown-key", 15, 1, "known: type"),
        ("bad-choice", 18, 10, 'for a string, put quotes around it: "3"'),
        ("out-of-range", 1, 9, None),
    ]


@pytest.mark.parametrize(
    ("line", "code", "message", "hint"),
    [
        ('steps = "10"', "wrong-type", "must be an integer, not the string", "write 10 without quotes"),
        ("steps = 10.5", "wrong-type", "must be an integer, not 10.5", None),
        ("steps = 10.0", "wrong-type", "must be an integer, not 10.0", "use 10"),
        ("steps = true", "wrong-type", "must be an integer, not true", None),
        ("steps = [10]", "wrong-type", "must be an integer, not the array [10]", None),
        ("steps = {a = 1}", "wrong-type", "must be an integer, not a table", None),
        ("steps = 0", "out-of-range", "must be more than 0, not 0", None),
        ("steps = 0x_1", "syntax", "", "a number is written 10, 0.5 or 1e-4"),
        ("steps = 99999999999999999999", "out-of-range", "must fit in 64 bits", None),
        ("max_norm = -1", "out-of-range", "must be at least 0, not -1", None),
        ("max_norm = nan", "not-finite", "nan and inf", None),
        ("max_norm = -inf", "not-finite", "nan and inf", None),
        ("max_norm = 1e999", "not-finite", "nan and inf", None),
        ("max_norm = 07:32:00", "wrong-type", "dates and times", "for a string, put quotes"),
        ('dtype = "half"', "bad-choice", "one of 'float32' or 'bfloat16', not 'half'", None),
        ('dtype = "bfloat"', "bad-choice", "not 'bfloat'", "did you mean 'bfloat16'?"),
        ("dtype = 16", "bad-choice", "not 16", 'for a string, put quotes around it: "16"'),
        (
            "warmup_steps = 3",
            "unknown-key",
            "'warmup_steps' in training",
            "this key belongs in [lr_scheduler]",
        ),
        ("lr = 3", "unknown-key", "unknown key 'lr' in training", "this key belongs in [optimizer]"),
        (
            "weights = 'x'",
            "unknown-key",
            "'weights'",
            "this key belongs at the top, before the first [section]",
        ),
        ("qqq = 3", "unknown-key", "unknown key 'qqq' in training", None),
    ],
)
def test_a_wrong_line_of_training(problem, line: str, code: str, message: str, hint: str | None) -> None:
    text = BASE.replace("steps = 1000", line if line.startswith("steps") else f"steps = 1000\n{line}")
    found = problem(text)
    assert found.code == code and message in found.message
    assert hint is None or (found.hint or "").startswith(hint)
    if hint is None and code != "unknown-key":
        assert found.hint is None
    lines = text.splitlines()
    assert found.location.source == lines[found.location.line - 1]


@pytest.mark.parametrize("value", ['"false"', '"True"', '"yes"', "0", "1"])
def test_nothing_but_a_boolean_is_a_boolean(problem, value: str) -> None:
    found = problem(BASE + f"[compile]\nenable = {value}\n")
    assert found.code == "wrong-type" and "must be true or false" in found.message
    if value.startswith('"'):
        assert found.hint in ("use true", "use false")


def test_the_alternatives_of_a_union_are_told_as_one(problem) -> None:
    assert problem(BASE, "mesh.tp=x").message == 'mesh.tp must be an integer or -1, not the string "x"'
    assert problem(BASE, "mesh.tp=0").message == "mesh.tp must be at least 1 or -1, not 0"
    found = problem(BASE, "launcher.nproc=al")
    assert found.message == "launcher.nproc must be an integer or 'auto', not 'al'"


def test_a_misspelt_required_key_is_one_mistake_not_two(problem) -> None:
    assert problem(BASE.replace("steps = 1000", "stpes = 1000")).code == "unknown-key"


def test_a_missing_key_points_at_its_table(problem) -> None:
    found = problem(BASE.replace("steps = 1000", "seq_len = 8"))
    assert (found.code, found.message, found.location.source) == (
        "missing-key",
        "training needs 'steps'",
        "[training]",
    )
    assert found.hint == "add to [training]: steps = …, or epochs = …"


def test_missing_sections_say_what_they_need(problems) -> None:
    found = problems("recipe = 1\n")
    assert [p.hint for p in found] == [
        "add [model] with a type, one of: plain, tiny; or weights = HF_FOLDER, to use the model of that "
        "folder",
        "add [tokenizer] with a type, one of: chars",
        "add [dataset] with a type, one of: lines",
        "add [training] with steps",
    ]


def test_an_empty_file_is_a_recipe_without_anything(problems) -> None:
    assert {p.code for p in problems("")} == {"missing-key"}


@pytest.mark.parametrize(
    "wrong", ["checkpoint.interval=0", "training.sead=1", "checkpoint.keep_latest_k=[1]"]
)
def test_what_is_wrong_with_the_whole_is_told_beside_a_value_that_is_wrong(problems, wrong: str) -> None:
    found = problems(BASE, wrong, "name=a b")
    assert [problem.location.path for problem in found] == ["override", "override"]
    assert any("cannot be the start of a run folder" in problem.message for problem in found)


def test_nothing_is_told_that_a_default_alone_would_make_wrong(problems) -> None:
    # 12 rows are no multiple of the default, which is not what was meant
    [found] = problems(BASE, "training.local_batch_size=x", "training.global_batch_size=13")
    assert "training.local_batch_size must be" in found.message


def test_an_unknown_section_is_named_as_one(problem) -> None:
    found = problem(BASE + "[parallelize_by]\nx = 2\n")
    assert found.message == "unknown section [parallelize_by]" and "'parallelize'" in found.hint
    assert problem(BASE + "[trainning]\n").hint == "did you mean 'training'?"
    assert problem(BASE + "[metrics]\nlogfreq = 1\n").hint == "did you mean 'log_freq'?"
    assert problem("steps = 10\n" + BASE).hint == "this key belongs in [training]"


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("a = [1, 2\nb = 3\n", 1, 5),
        ("a = 1\na = 2\n", 2, 5),
        ("[a\n", 1, 3),
        ("a = \n", 1, 5),
        ("a = 'x\n", 1, 5),
        ("\ufeffa = 1\r\nb = x\r\n", 2, 5),
    ],
)
def test_a_syntax_error_has_its_place(problem, text: str, line: int, column: int) -> None:
    found = problem(text)
    assert found.code == "syntax"
    assert (found.location.line, found.location.column) == (line, column)


def test_a_file_with_a_byte_order_mark_and_crlf_is_read(write, registry, problem) -> None:
    path = write("\ufeff" + BASE.replace("\n", "\r\n"))
    assert load_recipe(path, registry=registry).recipe.training.steps == 1000
    found = problem("\ufeff" + BASE.replace("\n", "\r\n") + "stpes = 1\r\n")
    assert (found.location.line, found.location.column, found.location.source) == (18, 1, "stpes = 1")


def test_a_file_that_is_not_utf8_is_told_with_the_line(tmp_path: Path, registry) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"name = 'a'\ndescription = 'caf\xe9'\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, registry=registry)
    (found,) = caught.value.problems
    assert (found.code, found.location.line, found.hint) == ("not-utf8", 2, "save it as UTF-8")


def test_a_file_that_cannot_be_read_says_why(
    tmp_path: Path, registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(BASE)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("titancli.recipe.read.open", refuse, raising=False)
    with pytest.raises(RecipeError, match=r"cannot read .*x\.toml: Permission denied"):
        load_recipe(path, registry=registry)


@pytest.mark.parametrize(
    "text", ["a=" + "[" * 5000 + "]" * 5000, ".".join("a" * 3000) + "=1", "a=" + "9" * 5000]
)
def test_absurd_files_are_refused_in_words(problem, text: str) -> None:
    assert problem(text).code == "syntax"


def test_a_newer_format_is_refused_before_its_keys_are(problem) -> None:
    found = problem("recipe = 2\n[brand_new]\nx = 1\n")
    assert (found.code, found.hint) == ("bad-format", "pip install --upgrade titancli")


# --------------------------------------------------------------------------------------- components


@pytest.mark.parametrize(
    ("section", "code", "message"),
    [
        ("model = 3", "wrong-type", "model must be a table with a type, or the name of a model"),
        ("[model]\ndim = 3", "missing-key", "model needs a type, the name of a model"),
        ("[model]\ntype = 3", "wrong-type", "model.type must be a string"),
        ("model = 'cast'", "unknown-component", "unknown model 'cast'"),
        ("[model]\ntype = 'tiny'\ndmi = 3", "unknown-key", "unknown key 'dmi' in model (titan/tiny)"),
        ("[model]\ntype = 'tiny'\nflavour = 'x'", "unknown-key", "unknown key 'flavour'"),
        ("[model]\ntype = 'tiny'\nflavor = 'smal'", "bad-choice", "titan/tiny has no flavor 'smal'"),
        ("[model]\ntype = 'tiny'\nflavor = 8", "wrong-type", "model.flavor must be a string"),
        ("[model]\ntype = 'plain'\nflavor = '8B'", "unknown-key", "titan/plain has no flavors"),
        ("[model]\ntype = 'plain'", "missing-key", "model (titan/plain) needs 'dim'"),
        ("[model]\ntype = 'tiny'\nrope = 3", "wrong-type", "model.rope must be a table, not 3"),
        ("[model]\ntype = 'tiny'\nrope = {thta = 3}", "unknown-key", "unknown key 'thta' in model.rope"),
    ],
)
def test_a_wrong_component(problem, section: str, code: str, message: str) -> None:
    rest = BASE.replace('[model]\ntype = "tiny"\n', "")
    found = problem(rest + section + "\n" if section.startswith("[") else section + "\n" + rest)
    assert found.code == code and message in found.message


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("converters = 'cast'\n", "wrong-type", "converters must be an array"),
        ("converters = [3]\n", "wrong-type", "converters.0 must be a table with a type"),
        ("converters = ['cats']\n", "unknown-component", "unknown converter 'cats'"),
        (
            "converters = [{type = 'cast', recipe = 'row'}]\n",
            "bad-choice",
            "converters.0.recipe must be one of",
        ),
        ("optimizer = {type = 'muon', fallback = 'adam'}\n", "unknown-component", "unknown optimizer 'adam'"),
        (
            "optimizer = {type = 'muon', fallback = {lr = 1}}\n",
            "missing-key",
            "optimizer.fallback needs a type",
        ),
        (
            "optimizer = {type = 'muon', groups = ['muon', {type = 'adamw', lr = 'x'}]}\n",
            "wrong-type",
            "optimizer.groups.1.lr must be a number",
        ),
    ],
)
def test_wrong_things_in_slots_of_slots(problem, text: str, code: str, message: str) -> None:
    found = problem(text + BASE)
    assert found.code == code and message in found.message and found.location.line == 1


def test_a_component_named_as_in_torchtitan_is_told_of_type(problem) -> None:
    found = problem(BASE.replace('type = "tiny"', 'name = "tiny"'))
    assert found.hint == "use type, not name; known: plain, tiny"
    found = problem(BASE + '[optimizer]\nname = "adamw"\n')
    assert found.hint == "a component is selected by its type: set type = …"


def test_a_table_for_an_array_is_told_how_to_begin_one(problem) -> None:
    found = problem(BASE + "[converters]\ntype = 'cast'\n")
    assert found.hint == "an array of tables starts with [[converters]]"


def test_slots_bind_recursively(load) -> None:
    text = """
[optimizer]
type = "muon"
groups = ["adamw", {type = "titan/adamw", lr = 3}]
[optimizer.fallback]
type = "adamw"
betas = [0.5, 0.6]
"""
    loaded = load(BASE + text)
    optimizer = loaded.recipe.optimizer
    assert optimizer.fallback == AdamW(betas=[0.5, 0.6])
    assert optimizer.groups == [AdamW(), AdamW(lr=3.0)]
    assert loaded.data["optimizer"]["fallback"]["type"] == "titan/adamw"


def test_a_name_that_two_plugins_offer_needs_its_full_name(write) -> None:
    registry = registry_of(("titan-other", OtherAdamW))
    path = write('optimizer = "adamw"\n' + BASE)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, registry=registry)
    (found,) = caught.value.problems
    assert found.code == "ambiguous-component" and "'titan/adamw'" in found.hint
    for full, lr in (("titan/adamw", 1e-3), ("titan-other/adamw", 1.0)):
        assert load_recipe(path, [f"optimizer={full}"], registry=registry).recipe.optimizer.lr == lr


def _broken_plugin() -> Plugin:
    def load() -> object:
        raise ZeroDivisionError("deep inside")

    return Plugin("titan-broken", load)


def test_a_broken_plugin_stops_a_recipe_that_names_it_with_its_own_traceback(write) -> None:
    registry = registry_of()
    registry._plugins["titan-broken"] = _broken_plugin()
    path = write(BASE)
    with pytest.raises(PluginError, match="ZeroDivisionError: deep inside") as caught:
        load_recipe(path, ["loss=titan-broken/x"], registry=registry)
    assert caught.value.exit_code == 4
    assert load_recipe(path, registry=registry).recipe.training.steps == 1000


def test_a_class_that_cannot_be_bound_is_the_plugins_mistake(write) -> None:
    @component("loss", "odd", target="tests.recipe.components:unused")
    class Odd:
        field: Plugin

    with pytest.raises(PluginError, match="Odd cannot be bound"):
        load_recipe(write(BASE), ["loss=odd"], registry=registry_of(("titan-odd", Odd)))


class Fussy:
    rate: float = 1.0

    def __post_init__(self) -> None:
        if self.rate > 10:
            raise TypeError("a bug")
        if self.rate > 5:
            raise ValueError("rate is too high for this loss")


def test_what_a_config_says_of_its_own_values_is_told_at_the_component(write) -> None:
    registry = registry_of(
        ("titan-fussy", component("loss", "fussy", target="tests.recipe.components:unused")(Fussy))
    )
    path = write(BASE + '[loss]\ntype = "fussy"\nrate = 6\n')
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, registry=registry)
    (found,) = caught.value.problems
    assert (found.code, found.message) == ("bad-value", "loss: rate is too high for this loss")
    assert found.location.source == "[loss]"
    with pytest.raises(PluginError, match="Fussy cannot be created: TypeError: a bug"):
        load_recipe(path, ["loss.rate=11"], registry=registry)


def test_a_bad_value_in_a_flavor_is_told_at_the_flavor_with_the_value(write) -> None:
    @component("loss", "rows", target="tests.recipe.components:unused")
    class Rows:
        flavors: ClassVar[dict[str, dict[str, Any]]] = {"bad": {"rate": "high"}}
        rate: float = 1.0

    path = write(BASE + '[loss]\ntype = "rows"\nflavor = "bad"\n')
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, registry=registry_of(("titan-rows", Rows)))
    (found,) = caught.value.problems
    assert found.message == 'loss.rate must be a number, not the string "high"'
    assert found.location.source == 'flavor = "bad"'


@pytest.mark.parametrize("version", ["true", "1.0", '"1"', "[1]"])
def test_the_format_version_is_an_integer(problem, version: str) -> None:
    assert problem(BASE.replace("recipe = 1", f"recipe = {version}")).message.startswith("recipe must be 1")


@pytest.mark.parametrize(("key", "value"), [("mesh.dp_shard", "-1.0"), ("mesh.dp_replicate", "true")])
def test_a_literal_is_as_strict_as_its_type(problem, key: str, value: str) -> None:
    assert problem(BASE, f"{key}={value}").code == "wrong-type"


# ------------------------------------------------------------------------------------------- values


def test_paths_are_absolute_from_where_the_command_runs(load) -> None:
    text = BASE + '[[loggers]]\ntype = "book"\n'
    loaded = load('weights = "w/x"\n' + text, 'dataset.paths=["a.txt", "/b/c.txt"]')
    here = Path.cwd()
    assert loaded.recipe.weights == here / "w/x"
    assert loaded.recipe.dataset.paths == [here / "a.txt", Path("/b/c.txt")]
    assert loaded.recipe.loggers[0].folder == here / "book"
    assert loaded.data["weights"] == str(here / "w/x")
    assert loaded.data["dataset"]["paths"] == [str(here / "a.txt"), "/b/c.txt"]


def test_a_tilde_is_the_home_folder(load, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.toml").write_text(BASE)
    loaded = load('extends = "~/base.toml"\nweights = "~/w"\n', 'dataset.paths=["~/a.txt"]')
    assert loaded.recipe.weights == tmp_path / "w"
    assert loaded.recipe.dataset.paths == [tmp_path / "a.txt"]


def test_a_path_may_be_relative_to_the_file_that_says_it(tmp_path, registry) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/base.toml").write_text(
        BASE.replace('"lines"', '"lines"\npaths = ["recipe:a/*.txt", "b.txt"]')
    )
    (tmp_path / "top.toml").write_text('extends = "deep/base.toml"\nweights = "recipe:w"\n')
    loaded = load_recipe(tmp_path / "top.toml", registry=registry)
    assert loaded.recipe.weights == tmp_path / "w"
    assert loaded.recipe.dataset.paths == [tmp_path / "deep/a/*.txt", Path.cwd() / "b.txt"]
    assert loaded.data["dataset"]["paths"] == [str(tmp_path / "deep/a/*.txt"), str(Path.cwd() / "b.txt")]


def test_on_the_command_line_nothing_is_beside_a_recipe(problem) -> None:
    found = problem(BASE, "weights=recipe:w")
    assert "stands for the folder of a recipe file" in found.message and found.location.path == "override"


def test_a_flavor_fills_in_its_row_and_written_keys_win(load) -> None:
    text = BASE.replace('"tiny"', '"tiny"\nflavor = "large"\nlayers = 3\nrope.theta = 1.5')
    model = load(text).recipe.model
    assert (model.dim, model.layers, model.rope.theta, model.rope.factor) == (512, 3, 1.5, 8.0)


def test_converters_keep_their_order(load) -> None:
    text = BASE + "".join(f"[[converters]]\ntype = 'cast'\nskip = ['{i}']\n" for i in range(3))
    assert load(text).recipe.converters == [Cast(skip=[str(i)]) for i in range(3)]


def test_origins_tell_where_each_value_comes_from(write, load) -> None:
    write(BASE + "[optimizer]\nlr = 0.5\n", "base.toml")
    text = 'extends = "base.toml"\n[model]\ntype = "tiny"\nflavor = "large"\n[[converters]]\ntype = "cast"\n'
    loaded = load(text, "training.steps=7")
    told = {key: str(origin) for key, origin in loaded.origins.items()}
    assert told["optimizer.lr"] == "base.toml:19"
    assert told["optimizer.type"] == "default"
    assert told["training.steps"] == "override training.steps=7"
    assert told["training.seq_len"] == "default"
    assert told["model.dim"] == "flavor 'large' of titan/tiny (exp.toml:4)"
    assert told["model.rope.factor"] == "flavor 'large' of titan/tiny (exp.toml:4)"
    assert told["converters.0.type"] == "exp.toml:6"
    assert told["loggers"] == "default"
