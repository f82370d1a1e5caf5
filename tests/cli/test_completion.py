"""What a shell is told when Tab is pressed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Titan


def asked(line: str) -> dict[str, str]:
    """What click's bash script sets when it asks for the completions of a line's last word."""
    return {
        "_TITAN_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }


def words(answer: str) -> list[str]:
    return [word.partition(",")[2] for word in answer.splitlines()]


Completed = Callable[[str], list[str]]


@pytest.fixture
def completed(titan: Titan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Completed:
    """`completed(line)`: the completions of its last word, by the command in this process."""

    def complete(line: str) -> list[str]:
        with monkeypatch.context() as environment:
            for name, value in asked(line).items():
                environment.setenv(name, value)
            with pytest.raises(SystemExit):  # by which click ends what is no command
                titan()
        out, err = capsys.readouterr()
        assert err == ""
        return words(out)

    return complete


def test_a_shell_asks_the_command(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("titan"))]
    environment = {**os.environ, **asked("titan list-c")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (words(done.stdout), done.stderr) == (["list-components"], "")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("titan list-c", {"list-components"}),
        ("titan show opt", {"optimizer/adamw"}),
        ("titan list-components log", {"logger"}),
        ("titan validate llama3_8", {"llama3_8b"}),
        ("titan train llama3_debug training.st", {"training.steps="}),
        ("titan train llama3_debug optimizer.beta", {"optimizer.beta1=", "optimizer.beta2="}),
        ("titan train llama3_debug model.fl", {"model.flavor="}),
        ("titan train llama3_debug compile.enable=", {"compile.enable=true", "compile.enable=false"}),
        ("titan train llama3_debug loss=cross_entropy_", {"loss=cross_entropy_full"}),
        ("titan train llama3_debug compile.enable = t", {"true"}),
        ("titan plugin show tit", {"titan"}),
        ("titan train -p ./x", {"./x"}),
        ("titan -p ./x", {"./x"}),
        ("titan -q train -v llama3_debug training.st", {"training.steps="}),
        ("titan -p no:titan validate llama3_8", set()),
        ("titan recipe new mine.toml --from llama3_d", {"llama3_debug"}),
        ("titan recipe ", {"list", "new", "show", "diff", "extend", "schema"}),
        ("titan recipe diff llama3_debug llama3_8", {"llama3_8b"}),
        ("titan recipe diff llama3_debug llama3_8b training.st", {"training.steps="}),
        ("titan checkpoint ", {"list", "show", "verify"}),
        ("titan checkpoint show RUN --", {"--layout"}),
    ],
)
def test_words_are_completed(completed: Completed, line: str, expected: set[str]) -> None:
    assert expected <= set(completed(line))


def test_a_recipe_may_be_a_file(completed: Completed) -> None:
    assert "./my" in completed("titan train ./my")


def test_keys_are_those_of_the_components_that_were_chosen(completed: Completed) -> None:
    pytest.importorskip("titan_muon")
    line = "titan recipe show llama3_debug optimizer=muon optimizer.mo"
    assert completed(line) == ["optimizer.momentum="]


def test_a_recipe_that_is_wrong_still_has_the_keys_of_titan(completed: Completed) -> None:
    assert "training.steps=" in completed("titan train nowhere training.ste")


def test_what_a_plugin_file_adds_is_completed_too(completed: Completed, tmp_path: Path) -> None:
    (tmp_path / "cli_lab.py").write_text(
        "from titancli import component, hookimpl\n"
        "@component('loss', 'labelled', target='cli_lab:build')\n"
        "class Labelled:\n    'A loss.'\n"
        "@hookimpl\ndef titan_components():\n    return [Labelled]\n"
    )
    line = "titan train -p ./cli_lab.py llama3_debug loss=lab"
    assert completed(line) == ["loss=labelled"]
    assert "loss=labelled" not in completed(line.replace("-p ./cli_lab.py ", ""))
