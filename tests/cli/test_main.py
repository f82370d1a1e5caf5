"""The command as a whole: its help, the options that stand anywhere, errors and exit codes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click
import pytest

from tests import absent
from tests.cli.conftest import Titan
from titancli import __version__
from titancli.cli import command_groups, common, failures, group
from titancli.cli.common import Common, split_common
from titancli.cli.output import short_path
from titancli.errors import EnvironmentProblem, PluginError, RecipeError, TitanError, UsageError
from titancli.provenance import entry_points
from titancli.registry import first_party

PLUGIN = """
import click
from titancli import hookimpl

@hookimpl
def titan_commands():
    @click.command("boom")
    @click.argument("what")
    def boom(what):
        {body}
    return [boom]
"""


def plugin(folder: Path, body: str, name: str = "cli_test_plugin") -> Path:
    file = folder / f"{name}.py"
    file.write_text(PLUGIN.format(body=body))
    return file


def titans_own() -> list[metadata.EntryPoint]:
    return [entry for entry in entry_points() if entry.name == "titan"]


def test_help_groups_the_commands(titan: Titan) -> None:
    absent.need("titan-proof")  # which alone is in a group
    done = titan("--help")
    assert done.code == 0
    order = [done.out.index(f"\n{section} ") for section in ("Train", "Look", "Prove", "Recipes", "Plugins")]
    assert order == sorted(order)


@pytest.mark.parametrize("plugins", ["", ",".join({*first_party.COMMANDS.values()})], ids=["none", "own"])
def test_help_fits_one_screen_and_has_every_command(
    monkeypatch: pytest.MonkeyPatch, titan: Titan, plugins: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TITAN_PLUGINS", plugins)
    lines = titan("--help").out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80, "\n".join(lines)
    assert "  titan train llama3_debug " in "\n".join(lines[:6])
    shown = {word.strip(",") for line in lines[6:] for word in line[9:34].split("  ")[0].split()}
    added = {name for name in first_party.COMMANDS if " " not in name}
    assert set(group.PLACES) <= shown
    assert added & shown == (added if plugins else set())
    assert "Plugins'" not in "\n".join(lines), "ROWS has the commands of titan's own plugins"


@pytest.mark.parametrize("name", first_party.COMMANDS)
def test_a_command_whose_plugin_is_not_there_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, titan: Titan, name: str
) -> None:
    plugin = first_party.COMMANDS[name]
    monkeypatch.setattr("titancli.registry.discover.entry_points", lambda: titans_own())
    done = titan(*name.split(), "--help")
    assert (done.code, done.out) == (4, "")
    assert done.err.splitlines() == [
        f"error: titan {name} comes with {plugin}: {first_party.install_command(plugin)}"
    ]


def test_a_recipe_whose_plugin_is_not_there_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, titan: Titan
) -> None:
    monkeypatch.setattr("titancli.registry.discover.entry_points", lambda: titans_own())
    done = titan("validate", "titan-heads:reward_debug")
    assert done.code == 3
    assert "recipe 'titan-heads:reward_debug' comes with titan-heads, which is not installed" in done.err
    assert first_party.install_command("titan-heads") in done.err


def test_a_component_of_a_disabled_plugin_says_so(titan: Titan) -> None:
    for name in ("gae", "titan-ppo/gae"):
        done = titan("validate", "grpo_digit", f"loop.advantage={name}", "-p", "no:titan-ppo")
        assert done.code == 4 and "disabled: blocked by -p no:titan-ppo" in done.err


GROUPED = [(of, name) for of in group.PLACES for name in getattr(group.PLACES[of].load(), "places", {})]


@pytest.mark.parametrize(("of", "name"), GROUPED, ids=" ".join)
def test_the_help_in_the_table_is_the_commands_own(of: str, name: str) -> None:
    place = getattr(command_groups, of).places[name]
    assert place.load().get_short_help_str(200) == place.help


def test_each_command_has_one_name() -> None:
    places = [place for place in group.PLACES.values() if place.module != group.HERE]
    places += [getattr(command_groups, of).places[name] for of, name in GROUPED]
    assert len({id(place.load()) for place in places}) == len(places)


@pytest.mark.parametrize("arguments", [["--version"], ["validate", "--version"], ["--version", "--help"]])
def test_version_stands_anywhere(titan: Titan, arguments: list[str]) -> None:
    assert titan(*arguments) == (0, f"titan {__version__}\n", "")


def test_no_command_at_all_is_a_usage_error(titan: Titan) -> None:
    done = titan()
    assert done.code == 2
    assert "list-components" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["vaildate"], "Did you mean 'validate'?"),
        (["show"], "missing argument"),
        (["validate"], "missing argument"),
        (["plugin", "list", "--jsn"], "--json"),
        (["list-components", "optimiser"], "'optimizer'"),
        (["-p"], "-p no:NAME"),
        (["-p", "no:"], "-p no:NAME"),
        (["-p", "something", "plugin", "list"], "-p no:NAME"),
        (["plugin", "list", "-p", "no:titan"], "built-in"),
        (["plugin", "list", "-p", "./absent.py"], "the file does not exist"),
        (["recipe", "show", "llama3_debug", "llama3_8b"], "one recipe"),
        (["recipe", "lst"], "Did you mean 'list'?"),
        (["validate", "training.steps=3"], "needs a recipe"),
    ],
)
def test_a_usage_error_exits_2_and_says_what_to_do(titan: Titan, arguments: list[str], words: str) -> None:
    done = titan(*arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("before", [True, False])
def test_a_plugin_file_stands_before_or_after_the_command(titan: Titan, tmp_path: Path, before: bool) -> None:
    option = ["-p", str(plugin(tmp_path, "print('ran', what)"))]
    done = titan(*option, "boom", "x") if before else titan("boom", "x", *option)
    assert done[:2] == (0, "ran x\n"), done.err


def test_common_options_are_split_off() -> None:
    words = ["-pno:a", "train", "-p", "b/c.py", "r", "--traceback", "--color", "never", "-q", "--", "-p", "x"]
    rest, found = split_common(words)
    assert rest == ["train", "r", "--", "-p", "x"]
    assert found == Common((Path("b/c.py").absolute(),), ("a",), color="never", verbosity=-1, traceback=True)


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (TitanError("it failed", hint="try again"), 1, "error: it failed\n try again\n"),
        (UsageError("wrong"), 2, "error: wrong\n"),
        (RecipeError("bad recipe"), 3, "error[recipe]: bad recipe\n"),
        (PluginError("no plugin"), 4, "error: no plugin\n"),
        (EnvironmentProblem("no disk"), 5, "error: no disk\n"),
        (ValueError("odd"), 1, "error: unexpected ValueError: odd\n use --traceback to see where\n"),
        (click.ClickException("clicked"), 1, "Error: clicked\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.bin"),
            5,
            "error: No such file or directory: a.bin\n use --traceback to see where\n",
        ),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
    ],
)
def test_an_exception_becomes_words_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], raised: Exception | KeyboardInterrupt, code: int, words: str
) -> None:
    assert failures.report(raised) == code
    assert capsys.readouterr() == ("", words)


def test_an_interrupt_inside_a_command_exits_130(titan: Titan, tmp_path: Path) -> None:
    file = plugin(tmp_path, "raise KeyboardInterrupt")
    assert titan("boom", "x", "-p", str(file)).code == 130


def test_what_a_command_returns_is_the_exit_code(titan: Titan, tmp_path: Path) -> None:
    assert titan("boom", "x", "-p", str(plugin(tmp_path, "return 75"))).code == 75


def test_a_traceback_is_shown_only_on_demand(titan: Titan, tmp_path: Path) -> None:
    file = str(plugin(tmp_path, "raise ValueError('deep inside')"))
    assert "Traceback" not in titan("boom", "x", "-p", file).err
    shown = titan("boom", "x", "-p", file, "--traceback").err
    assert "Traceback" in shown and "cli_test_plugin.py" in shown
    assert shown.endswith("error: unexpected ValueError: deep inside\n")


def test_two_plugins_with_one_command_are_told_apart(titan: Titan, tmp_path: Path) -> None:
    files = [str(plugin(tmp_path, "pass", name)) for name in ("cli_plugin_a", "cli_plugin_b")]
    options = [word for file in files for word in ("-p", file)]
    done = titan("boom", "x", *options)
    assert done.code == 4
    assert "cli_plugin_a, cli_plugin_b" in done.err and "-p no:cli_plugin_b" in done.err
    assert titan("boom", "x", *options, "-p", "no:cli_plugin_b").code == 0
    assert "(cli_plugin_a, cli_plugin_b)" in titan("--help", *options).out


def test_an_unknown_command_names_the_broken_plugins(titan: Titan, tmp_path: Path) -> None:
    file = tmp_path / "cli_broken.py"
    file.write_text("raise RuntimeError")
    assert "cli_broken" in titan("brew", "-p", str(file)).err
    assert titan("--help", "-p", str(file)).code == 0


def test_a_closed_pipe_ends_quietly() -> None:
    script = "import sys; from titancli.cli import main; sys.exit(main(['list-components']))"
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([sys.executable, "-c", script], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("redirect", "code"), [(">/dev/full", 5), ("--json >/dev/full", 5), (">&-", 0), ("2>&-", 0)]
)
def test_a_stream_that_takes_nothing_is_told_without_a_traceback(redirect: str, code: int) -> None:
    command = f"{shlex.quote(sys.executable)} -m titancli list-components {redirect}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    told = "error: No space left on device\n use --traceback to see where\n" if code else ""
    assert (done.returncode, done.stderr) == (code, told)


def test_a_terminal_without_unicode_gets_escapes() -> None:
    script = "from titancli.cli.output import prepare_streams; prepare_streams(); print('\\u2026')"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, b"\\u2026")


def test_the_numbers_of_closed_streams_are_taken(tmp_path: Path) -> None:
    """A file that is opened later would have what libraries print in it."""
    script = (
        "from titancli.cli.output import prepare_streams; prepare_streams(); import os, sys; print('x')\n"
    )
    script += "print('y', file=sys.stderr); print(open(os.devnull).fileno() > 2)"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(script)} 2>&- <&-"
    assert subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout == "x\nTrue\n"


def test_a_path_in_an_advice_is_neither_an_option_nor_an_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [short_path(tmp_path / name) for name in ("a", "-a", "lr=1/step-2", "runs/lr=1")]
    assert shown == ["a", "./-a", "./lr=1/step-2", "runs/lr=1"]


def test_an_override_is_an_argument_with_an_equals_sign() -> None:
    split = common.split_overrides(["a.toml", "training.steps=3", "b", "x=y/z", "runs/lr=3e-4", '"a/b"=1'])
    assert split == (["a.toml", "b", "runs/lr=3e-4"], ["training.steps=3", "x=y/z", '"a/b"=1'])
