"""`[env]`: what a recipe may set, and that what it may not is never shown."""

from __future__ import annotations

import pytest

from tests.recipe.conftest import BASE
from titancli.recipe import lock_text, render_problems

GOOD = ["NCCL_DEBUG", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "NCCL_SOCKET_IFNAME"]
SECRET = ["HF_TOKEN", "WANDB_API_KEY", "hf_token", "AWS_SECRET_ACCESS", "MY_PASSWORD_FILE", "S3_SECRET"]
OTHERS = [
    "RANK",
    "MASTER_ADDR",
    "PYTHONPATH",
    "LD_PRELOAD",
    "TITAN_PLUGINS",
    "CUDA_VISIBLE_DEVICES",
    "PATH",
    "CXX",
    "LD_LIBRARY_PATH",
    "NCCL_NET_PLUGIN",
    "CUDA_INJECTION64_PATH",
    "PYTHONWARNINGS",
    "nccl_debug",
    "HF_HOME",
    "KEYBOARD",
    '"a b"',
    '""',
]


@pytest.mark.parametrize("name", GOOD)
def test_a_variable_is_taken_and_kept_in_the_lock(load, name: str) -> None:
    loaded = load(f'{BASE}\n[env]\n{name} = "x"\n')
    assert loaded.recipe.env == {name: "x"}
    assert f'[env]\n{name} = "x"' in lock_text(loaded)


@pytest.mark.parametrize("name", SECRET)
def test_a_secret_is_refused_and_its_value_not_shown(problem, name: str) -> None:
    found = problem(f'{BASE}\n[env]\n{name} = "hunter2"\n')
    assert "looks like a secret" in found.message
    for style in ("text", "json", "github"):
        assert "hunter2" not in render_problems([found], style)
    assert found.location.source == f"{name} = …"
    assert "hunter2" not in render_problems([problem(BASE, f"env.{name}=hunter2")])
    assert "hunter2" not in render_problems(
        [problem(f'{BASE}\n[env]\nNCCL_DEBUG = "1"\n', f"env={{{name}='hunter2'}}")]
    )


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_for_a_recipe_is_refused(problem, name: str) -> None:
    assert problem(f'{BASE}\n[env]\n{name} = "x"\n').code == "check"


def test_what_a_recipe_may_not_set_is_given_on_the_command_line(problem) -> None:
    found = problem(f'{BASE}\n[env]\nCXX = "x"\n')
    assert found.message.startswith("a recipe cannot set CXX")
    assert "titan train … --env CXX=…" in found.hint
    assert "did you mean 'NCCL_DEBUG'?" in problem(f'{BASE}\n[env]\nNCLL_DEBUG = "x"\n').hint


def test_a_value_is_text(problem) -> None:
    found = problem(f"{BASE}\n[env]\nOMP_NUM_THREADS = 4\n")
    assert found.code == "wrong-type" and '"4"' in found.hint


def test_tables_of_variables_merge(load, write) -> None:
    write(f'{BASE}\n[env]\nNCCL_ALGO = "1"\nNCCL_PROTO = "1"\n', "base.toml")
    assert load('extends = "base.toml"\n[env]\nNCCL_PROTO = "2"\n', "env.NCCL_DEBUG=three").recipe.env == {
        "NCCL_ALGO": "1",
        "NCCL_PROTO": "2",
        "NCCL_DEBUG": "three",
    }
