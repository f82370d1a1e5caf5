"""`titan plugin new`: a package that installs, is listed, and passes its own tests."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template

from titancli import __version__
from titancli.errors import EnvironmentProblem, UsageError

TEMPLATES = Path(__file__).parent / "templates"
MANY = ("converter", "logger", "callback", "reward")
"""Kinds whose slot is a list: `[[converters]]`."""
OF_GRPO = ("task", "generator", "reward", "advantage")
"""Kinds whose slot is in the loop grpo."""
BASES = {"dispatcher": "qwen3_moe_debug", **dict.fromkeys(OF_GRPO, "grpo_digit")}
"""Recipes of kinds that llama3_debug has no use for."""
SECTIONS = {
    "schedule": "lr_scheduler",
    "copies": "checkpoint.copies",
    "dispatcher": "parallelize.expert_dispatch",
}
"""Kinds whose section has another name."""
NOUNS = {"parallelize": "parallelize plan", "copies": "keeper of copies"}
"""Kinds whose name is not what one of them is called."""
STANDARD = {
    "loop": ("json",),
    "dispatcher": ("json",),
    "parallelize": ("json",),
    "launcher": ("fcntl", "threading"),
}
"""Standard modules that the tests of a kind import, besides pathlib."""
WITH_PYTEST = ("launcher", "parallelize", "dispatcher")
"""Kinds whose tests import pytest."""
HOOK = "\n\n@hookimpl\ndef titan_components() -> list[type]:\n    return [${class_}]\n"
SOUND = """
def test_the_plugin_is_sound() -> None:
    check_plugin("${name}")

"""


def new_plugin(name: str, kinds: Sequence[str], folder: Path) -> list[Path]:
    """Write the package `name` with one component of each kind, and return its files.

    With a single kind, the config is in the package itself; with several, each kind has a folder.

    Args:
        name: name of the distribution and of the plugin, e.g. `titan-lab`; its components are then named
            `lab`.
        folder: the package's folder; it must not exist, or be empty.

    Raises:
        UsageError: the name is invalid, or a kind is given twice.
        EnvironmentProblem: the folder is not empty.
    """
    if twice := [kind for number, kind in enumerate(kinds) if kind in kinds[:number]]:
        raise UsageError(f"--kind {twice[0]} is given twice", hint="a new plugin has one of each kind")
    words = _words(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EnvironmentProblem(f"{folder} already exists", hint="use another name, or --dir FOLDER")
    package, several = folder / words["package"], len(kinds) > 1
    of_kinds = {kind: words | _words_of(kind, words, several=several) for kind in kinds}
    files = {
        folder / "pyproject.toml": _template("pyproject.toml.txt", words | _about(of_kinds)),
        folder / "README.md": _template("README.md.txt", words | _about(of_kinds)),
        package / "py.typed": "",
    }
    for kind, own in of_kinds.items():
        room, test = (package / kind, kind) if several else (package, words["component"])
        files[room / "__init__.py"] = _template(f"{kind}.config.txt", own)
        files[room / f"{kind}.py"] = _template(f"{kind}.code.txt", own)
        tests = _template("test.txt", own) + _template(f"{kind}.test.txt", own)
        files[folder / "tests" / f"test_{test}.py"] = tests
        if several:  # the hook is the package's
            hook = Template(HOOK).substitute(own)
            config = files[room / "__init__.py"].removesuffix(hook)
            files[room / "__init__.py"] = config.replace("import component, hookimpl", "import component")
    if several:
        files[package / "__init__.py"] = _package(of_kinds)
        imports = "from __future__ import annotations\n\nfrom titan_testing import check_plugin\n\n"
        files[folder / "tests" / "test_plugin.py"] = (
            f'"""The plugin keeps to titan\'s rules."""\n\n{imports}'
            f"{Template(SOUND).substitute(words).rstrip()}\n"
        )
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def _package(of_kinds: dict[str, dict[str, str]]) -> str:
    """Return the `__init__.py` of a plugin with several kinds."""
    kinds = sorted(of_kinds)
    names = {kind: f"{own['class_']}{kind.capitalize()}" for kind, own in of_kinds.items()}
    imports = "".join(f"from .{kind} import {of_kinds[kind]['class_']} as {names[kind]}\n" for kind in kinds)
    listed = "".join(f"        {names[kind]},\n" for kind in kinds)
    return (
        '"""Each folder has a component: its config, which imports no torch, and its code."""\n\n'
        f"from __future__ import annotations\n\nfrom titancli import hookimpl\n\n{imports}\n\n"
        "@hookimpl\ndef titan_components() -> list[type]:\n"
        f"    return [\n{listed}    ]\n"
    )


def _words(name: str) -> dict[str, str]:
    """Return the words of the templates that do not depend on the kind.

    Raises:
        UsageError: the name is invalid.
    """
    package = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or keyword.iskeyword(package):
        raise UsageError(
            f"{name!r} is not a valid plugin name",
            hint="use lower-case letters, digits and -, as in titan-lab",
        )
    if package == "titan" or package == "titancli":
        raise UsageError(f"{name!r} is the name of titan itself", hint="for example titan-lab")
    if find_spec(package) is not None:
        raise UsageError(
            f"{name!r} would hide the installed package {package!r}", hint="use another name: titan-lab"
        )
    component = package.removeprefix("titan_")
    if component[0].isdigit() or keyword.iskeyword(component):
        raise UsageError(f"{component!r} is not a valid component name", hint="for example titan-lab")
    return {
        "name": name,
        "package": package,
        "component": component,
        "class_": "".join(part.capitalize() for part in component.split("_")),
        "titan": ".".join(__version__.split(".")[:2]),
    }


def _words_of(kind: str, words: dict[str, str], *, several: bool) -> dict[str, str]:
    """Return the words of a kind's templates."""
    name, component = words["name"], words["component"]
    helpers = [*([] if several else ["check_plugin"]), *([] if kind in OF_GRPO else ["recipe"]), "run_cli"]
    standard = "".join(f"import {module}\n" for module in STANDARD.get(kind, ()))
    standard += "from pathlib import Path\n\n" + ("import pytest\n" if kind in WITH_PYTEST else "")
    return {
        "kind": kind,
        "package": f"{words['package']}.{kind}" if several else words["package"],
        "base": BASES.get(kind, "llama3_debug"),
        "use": _use(kind, component),
        "imports": f"\n{standard}from titan_testing import {', '.join(helpers)}\n",
        "sound": "" if several else Template(SOUND).substitute(words),
        "trains": _trains(name, kind, component),
    }


def _use(kind: str, component: str) -> str:
    """Return the override by which a recipe uses the component."""
    if kind == "store":  # by the scheme of the URL
        return f"checkpoint.remote={component}://$PWD/checkpoints"
    slot = f"loop.{kind}" if kind in OF_GRPO else SECTIONS.get(kind, kind)
    return f"{slot}s='[{{type = \"{component}\"}}]'" if kind in MANY else f"{slot}={component}"


def _about(of_kinds: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the words of README.md and pyproject.toml about all kinds."""
    nouns = [NOUNS.get(kind, kind) for kind in of_kinds]
    phrases = [f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}" for noun in nouns]
    what = phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"
    rooms = [(own["package"].replace(".", "/"), kind) for kind, own in of_kinds.items()]
    return {
        "what": what[0].upper() + what[1:],
        "loop": ', "titan-rl"' if any(kind in OF_GRPO for kind in of_kinds) else "",
        "labels": ", ".join(f"`{kind}/{own['component']}`" for kind, own in of_kinds.items()),
        "commands": "\n".join(
            f"titan show {kind}/{own['component']}\ntitan train {own['base']} {own['use']}"
            for kind, own in of_kinds.items()
        ),
        "files": "\n".join(
            f"`{room}/__init__.py` has the config: what a recipe can say. It imports no torch.\n"
            f"`{room}/{kind}.py` has the code: what a run does. It is imported when a run needs it."
            for room, kind in rooms
        ),
    }


def _trains(name: str, kind: str, component: str) -> str:
    """Return the lines of the test that trains with the component."""
    if kind in OF_GRPO:
        full = f"{name}/{component}"
        use = f'loop.rewards=[{{type="{full}"}}]' if kind == "reward" else f"loop.{kind}={full}"
        quote = "'" if kind == "reward" else '"'
        return (
            f"    use = {quote}{use}{quote}\n"
            '    small = ("training.steps=1", "loop.eval_freq=0", "loop.samples=4", use)\n'
            '    done = run_cli("train", "grpo_digit", *small, cwd=tmp_path)'
        )
    if kind == "store":
        return (
            f"    section = f'checkpoint.enable = true\\ncheckpoint.remote = \"{component}://{{tmp_path}}/store\"'\n"
            '    done = run_cli("train", recipe(tmp_path, section), "--run-dir", "r", cwd=tmp_path)\n'
            '    assert list((tmp_path / "store/r").glob("step-*")), done.stderr'
        )
    table = f"[[{kind}s]]" if kind in MANY else f"[{SECTIONS.get(kind, kind)}]"
    return (
        f"    file = recipe(tmp_path, '{table}\\ntype = \"{name}/{component}\"')\n"
        '    done = run_cli("train", file, cwd=tmp_path)'
    )


def _template(name: str, words: dict[str, str]) -> str:
    return Template((TEMPLATES / name).read_text(encoding="utf-8")).substitute(words)
