"""`titan recipe new`: files that validate, from another recipe or from a Hugging Face folder."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Titan
from titancli.recipe import bundled_folder

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
NAMES = sorted(path.stem for path in bundled_folder().glob("*.toml"))


def config(titan: Titan, *recipe: object) -> dict:
    data = json.loads(titan("recipe", "show", *recipe, "--json").out)["recipe"]
    return {key: value for key, value in data.items() if key not in ("name", "description")}


@pytest.mark.parametrize("name", NAMES)
def test_a_new_recipe_is_its_base_and_so_it_is_with_every_key_uncommented(titan: Titan, name: str) -> None:
    done = titan("recipe", "new", "exp.toml", "--from", name, "--full")
    assert (done.code, done.out) == (0, "")
    text = Path("exp.toml").read_text()
    assert f'extends = "titan:{name}"' in text and "## Total number of optimizer steps" in text
    assert config(titan, "exp.toml") == config(titan, name)
    Path("all.toml").write_text(re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.MULTILINE))
    assert config(titan, "all.toml") == config(titan, name)
    assert Path("all.toml").read_text().count("\nsteps = ") == 1


def test_without_full_only_the_keys_that_the_base_sets_are_listed(titan: Titan) -> None:
    assert titan("recipe", "new", "exp.toml", "--from", "llama3_debug").code == 0
    text = Path("exp.toml").read_text()
    keys = re.findall(r"^# (\w+) = ", text, re.MULTILINE)
    written = re.findall(r"^(\w+) = ", (bundled_folder() / "llama3_debug.toml").read_text(), re.MULTILINE)
    assert sorted(keys) == sorted(key for key in written if key not in ("recipe", "name"))
    assert config(titan, "exp.toml") == config(titan, "llama3_debug")
    Path("all.toml").write_text(re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.MULTILINE))
    assert config(titan, "all.toml") == config(titan, "llama3_debug")
    assert len(text.splitlines()) < 70


def test_every_line_with_one_hash_is_toml(titan: Titan) -> None:
    titan("recipe", "new", "exp.toml", "--from", "llama3_debug", "--full")
    lines = [line[2:] for line in Path("exp.toml").read_text().splitlines() if line.startswith("# ")]
    for line in lines:
        tomllib.loads(line)
    assert "## weights: path; not set" in Path("exp.toml").read_text()


def hf_folder(folder: Path, **config: Any) -> Path:
    """Make a folder like one of the Hub; a value of None removes its key."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in (LLAMA | config).items() if value is not None})
    )
    return folder


def test_a_recipe_from_a_hugging_face_folder_has_its_model(titan: Titan) -> None:
    hf_folder(Path("my model"), dtype="float16")
    done = titan("recipe", "new", "exp.toml", "--from-hf", "my model")
    assert done.code == 0 and "set dataset.paths" in done.err
    found = config(titan, "exp.toml")
    assert found["model"]["type"] == "titan/llama3" and found["model"]["dim"] == 64
    assert found["weights"] == found["tokenizer"]["path"] == str(Path("my model").absolute())
    assert (found["training"]["seq_len"], found["checkpoint"]["export_dtype"]) == (512, "float16")


def test_a_model_that_is_not_titans_own_is_that_of_transformers(titan: Titan) -> None:
    hf_folder(Path("m"), model_type="mistral")
    assert titan("recipe", "new", "exp.toml", "--from-hf", "m").code == 0
    assert 'type = "titan-transformers/hf_causal_lm"\nconfig = "m"' in Path("exp.toml").read_text()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"attention_bias": True}, "titan/llama3 does not read it: config.json has attention_bias = True"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "config.json has rope_type = 'linear'"),
        ({"hidden_size": None}, "titan/llama3 does not read it: config.json lacks 'hidden_size'"),
    ],
    ids=["attention bias", "linear RoPE", "missing key"],
)
def test_a_model_that_its_family_refuses_is_that_of_transformers(
    titan: Titan, values: dict[str, Any], said: str
) -> None:
    hf_folder(Path("m"), **values)
    assert titan("recipe", "new", "exp.toml", "--from-hf", "m").code == 0
    text = Path("exp.toml").read_text()
    assert f"# {said}" in text or said in text.partition("[model]")[2].splitlines()[0]
    assert tomllib.loads(text)["model"] == {"type": "titan-transformers/hf_causal_lm", "config": "m"}


def test_what_is_no_hugging_face_folder_leaves_no_file(titan: Titan) -> None:
    for spoil, said in (("config.json", "does not exist"), ("tokenizer.json", "has no tokenizer.json")):
        folder = hf_folder(Path(f"without {spoil}"))
        (folder / spoil).unlink()
        done = titan("recipe", "new", "exp.toml", "--from-hf", str(folder))
        assert done.code == 5 and said in done.err
    folder = hf_folder(Path("damaged"))
    (folder / "config.json").write_text("[]")
    assert titan("recipe", "new", "exp.toml", "--from-hf", str(folder)).code == 5
    assert not Path("exp.toml").exists()


def test_a_base_that_is_a_file_is_named_from_the_new_files_folder(titan: Titan) -> None:
    Path("a").mkdir()
    Path("b").mkdir()
    titan("recipe", "new", "a/base.toml", "--from", "llama3_debug")
    assert titan("recipe", "new", "b/exp.toml", "--from", "a/base.toml").code == 0
    assert 'extends = "../a/base.toml"' in Path("b/exp.toml").read_text()
    assert titan("validate", "b/exp.toml").code == 0


def test_arrays_of_components_are_listed_too(titan: Titan) -> None:
    Path("base.toml").write_text('extends = "titan:llama3_debug"\n[[loggers]]\ntype = "tensorboard"\n')
    titan("recipe", "new", "exp.toml", "--from", "./base.toml")
    text = Path("exp.toml").read_text()
    assert '# [[loggers]]\n# type = "titan/tensorboard"' in text
    assert config(titan, "exp.toml") == config(titan, "base.toml")


def test_the_schema_that_the_first_line_names_is_there(titan: Titan) -> None:
    done = titan("recipe", "new", "exp.toml", "--from", "llama3_debug")
    assert done.code == 0 and "titan.schema.json: for editors" in done.err
    named = Path("exp.toml").read_text().splitlines()[0].removeprefix("#:schema ")
    assert json.loads(Path(named).read_text())["title"] == "titan recipe"
    assert Path(named).read_text() == titan("recipe", "schema").out
    Path(named).write_text("{}")
    assert "schema" not in titan("recipe", "new", "other.toml", "--from", "llama3_debug").err
    assert Path(named).read_text() == "{}"  # one that is there is left as it is


def test_a_schema_that_lies_beside_the_file_is_named_in_it(titan: Titan) -> None:
    Path("titan.schema.json").write_text(titan("recipe", "schema").out)
    titan("recipe", "new", "exp.toml", "--from", "llama3_debug")
    assert Path("exp.toml").read_text().startswith("#:schema ./titan.schema.json\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["exp.toml"],
        ["exp.txt", "--from", "llama3_debug"],
        ["exp.toml", "--from", "llama3_debug", "--from-hf", "m"],
        ["exp.toml", "--from-hf", "m", "--full"],
        ["there.toml", "--from", "llama3_debug"],
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused(titan: Titan, arguments: list[str]) -> None:
    Path("there.toml").write_text("mine\n")
    assert titan("recipe", "new", *arguments).code == 2
    assert Path("there.toml").read_text() == "mine\n" and not Path("exp.toml").exists()


def test_a_base_that_is_not_there_leaves_no_file(titan: Titan) -> None:
    assert titan("recipe", "new", "exp.toml", "--from", "nothing").code == 3
    assert not Path("exp.toml").exists()


def test_a_folder_that_is_not_there_is_named(titan: Titan) -> None:
    done = titan("recipe", "new", "no/exp.toml", "--from", "llama3_debug")
    assert done.code == 5 and "folder no does not exist" in done.err and "mkdir -p no" in done.err
