"""Every command and snippet of README.md and docs/ does what the page says: all of them are run.

What is too long or needs what a test has not is left out by a comment in the page, with its reason.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import tomli

from tests.docs.markdown import PAGES, Block, blocks, commands
from tests.docs.small_model import write_small_model
from titancli.cli.group import PLACES, titan
from titancli.cli.plugin_commands import offered
from titancli.recipe import load_recipe
from titancli.registry.first_party import COMMANDS

BASE = 'extends = "titan:llama3_debug"\n'
COMMON = {"-p", "-v", "-q", "--verbose", "--quiet", "--traceback", "--version", "--color", "--help"}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def of(page: Path, *languages: str) -> list[Block]:
    return [block for block in blocks(page) if block.language in languages and block.mark != "not run"]


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[Path, str, list[Block]], None]:
    """For the summary of the tests: what is done with these blocks of a page."""

    def record(page: Path, what: str, tried: list[Block]) -> None:
        if tried:
            record_property("snippet", {"page": page.name, "what": what, "count": len(tried)})

    return record


@each_page
def test_a_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        known = ("sh", "console", "toml", "python", "json", "yaml", "")
        assert block.language in known, f"{page.name}:{block.line}"
        if block.language == "":
            commands = [line for line in block.text.splitlines() if line.startswith("titan ")]
            assert commands == [], f"{page.name}:{block.line}: a block of commands begins with ```sh"
        if block.mark == "not run":
            assert len(block.value.split()) >= 3, f"{page.name}:{block.line}: say why it is not run"


@each_page
def test_a_recipe_is_a_good_one(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Callable[..., None]
) -> None:
    tell(page, "recipes checked", of(page, "toml"))
    monkeypatch.chdir(tmp_path)
    for name in ("base.toml", "data.toml"):  # what samples of `extends` name
        Path(name).write_text(BASE)
    for block in blocks(page):
        if block.mark == "file" and block.language == "toml":
            Path(block.value).write_text(block.text)
    for block in of(page, "toml"):
        whole = block.mark != "one line at a time"
        for text in [block.text] if whole else [line for line in block.text.splitlines() if line.strip()]:
            if "[project" in text or "[job]" in text:  # a pyproject.toml, a job config of torchtitan
                tomli.loads(text)
                continue
            data = tomli.loads(text)
            full = "extends" in data or {"model", "tokenizer", "dataset"} <= set(data)
            Path("snippet.toml").write_text(text if full else BASE + text)
            load_recipe("./snippet.toml")


@pytest.mark.parametrize("name", ["finetune", "post-training"])
def test_a_recipe_of_these_pages_is_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = next(page for page in PAGES if page.stem == name)
    found = [block for block in blocks(page) if block.language == "toml"]
    assert len(found) == page.read_text(encoding="utf-8").count("toml\n") > 0  # none is out of sight
    for block in found:
        Path("copied.toml").write_text(block.text)
        load_recipe("./copied.toml")


@each_page
def test_python_compiles_and_json_is_json(page: Path, tell: Callable[..., None]) -> None:
    tell(page, "blocks of Python compiled", of(page, "python"))
    for block in of(page, "python"):
        compile(block.text, f"{page.name}:{block.line}", "exec")
    for block in of(page, "json"):
        json.loads(block.text)


@each_page
def test_a_command_and_its_options_are_there(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command.partition("  #")[0].replace("…", "").replace("'", ""), comments=True)
        name = words[1] if len(words) > 1 else ""
        if name.startswith("-") or not re.fullmatch(r"[a-z][a-z-]*", name):
            continue  # titan's own options, or a word in capitals
        if name == "mycommand":
            continue
        assert name in {*PLACES, *COMMANDS}, f"{page.name}: {command}"  # and no other name for it
        found = titan.get_command(click.Context(titan), name)
        if isinstance(found, click.Group):
            if len(words) == 2:  # the group's own help
                continue
            found = found.get_command(click.Context(found), words[2])
        if (form := re.search(r" --to (\w+)", command)) and f"{name} --to {form[1]}" in COMMANDS:
            found = offered(f"{name} --to {form[1]}")  # what a plugin adds has options of its own
            words = [word for word in words if word != "--to"]
        assert found is not None, f"{page.name}: {command}"
        options = {option for parameter in found.params for option in parameter.opts} | COMMON
        for word in words[2:]:
            if re.match(r"-[-a-z]", word):
                assert word.partition("=")[0] in options, f"{page.name}: {command}: no {word}"


@each_page
def test_a_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.e2e
@each_page
def test_every_command_runs(page: Path, tmp_path: Path, tell: Callable[..., None]) -> None:
    run = [block for block in of(page, "sh", "console") if block.mark != "file"]
    tell(page, "blocks of commands run", run)
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for block in blocks(page):
        if block.mark == "small model":
            write_small_model(tmp_path / block.value)
        if block.mark == "file":
            (tmp_path / block.value).write_text(block.text)
        elif block in run:
            code, said = 0, ""
            for words in _starts(_script(block)):
                done = subprocess.run(
                    words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
                )
                code, said = done.returncode, said + done.stderr
                if code != 0:
                    break
            expected = int(block.value) if block.mark == "fails" else 0
            assert code == expected, f"{page.name}:{block.line}\n{block.text}\n{said}"


def _script(block: Block) -> str:
    if block.language == "sh":
        return block.text
    return "\n".join(line[2:] for line in block.text.splitlines() if line.startswith("$ "))


def _starts(script: str) -> list[list[str]]:
    """The commands of a script: what is plain words to titan by itself, and bash for all between.

    Both come to the same; but only what Python starts can be forked from a process that has imported torch.
    """
    found: list[list[str]] = []
    for line in script.splitlines():
        command = line.partition("  #")[0]
        outside = re.sub(r"""'[^']*'|"[^"$`\\]*\"""", "", command)
        if line.startswith("titan ") and not re.search(r"[^-\w\s./=:,]", outside):
            found.append(shlex.split(command))
        elif found and found[-1][0] == "bash":
            found[-1][-1] += "\n" + line
        else:
            found.append(["bash", "-euo", "pipefail", "-c", line])
    return found
