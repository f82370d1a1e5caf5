"""`titan new-plugin`: a package that installs, is listed, and passes its own tests."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from string import Template

from titancli.errors import EnvironmentProblem, UsageError
from titancli.registry.kinds import KINDS
from titancli.version import __version__

TEMPLATES = Path(__file__).parent / "templates"
KINDS_WITH_TEMPLATE = tuple(kind for kind in KINDS if (TEMPLATES / f"{kind}.config.txt").is_file())
MANY = ("converter", "logger", "reward")
"""Kinds that a recipe holds lists of: their slot is `[[converters]]`."""
OF_GRPO = ("task", "reward", "advantage")
"""Kinds whose slot is one of the loop grpo."""


def new_plugin(name: str, kind: str, folder: Path) -> list[Path]:
    """Write the package `name` with one component of a kind, and return its files.

    Args:
        name: of the distribution and of the plugin, e.g. `titan-lab`; the component is then `lab`.
        folder: the package's own; it must not exist, or be empty.

    Raises:
        UsageError: the name cannot be one, or there is no template for the kind.
        EnvironmentProblem: the folder is not empty.
    """
    if kind not in KINDS_WITH_TEMPLATE:
        raise UsageError(
            f"there is no template for a {kind}", hint=f"available: {', '.join(KINDS_WITH_TEMPLATE)}"
        )
    words = _words(name, kind)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EnvironmentProblem(f"{folder} already exists", hint="use another name, or --dir FOLDER")
    package = folder / words["package"]
    files = {
        folder / "pyproject.toml": _template("pyproject.toml.txt"),
        folder / "README.md": _template("README.md.txt"),
        package / "__init__.py": _template(f"{kind}.config.txt"),
        package / f"{kind}.py": _template(f"{kind}.code.txt"),
        package / "py.typed": Template(""),
        folder / "tests" / f"test_{words['component']}.py": Template(
            _template("test.txt").template + _template(f"{kind}.test.txt").template
        ),
    }
    for path, template in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(template.substitute(words), encoding="utf-8")
    return list(files)


def _words(name: str, kind: str) -> dict[str, str]:
    """What the templates leave open."""
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
    slot = f"loop.{kind}" if kind in OF_GRPO else kind
    array = f"{slot}s='[{{type = \"{component}\"}}]'"
    helpers = "check_plugin, run_cli" if kind in OF_GRPO else "check_plugin, recipe, run_cli"
    standard = "import json\nfrom pathlib import Path" if kind == "loop" else "from pathlib import Path"
    return {
        "name": name,
        "package": package,
        "component": component,
        "class_": "".join(part.capitalize() for part in component.split("_")),
        "kind": kind,
        "titan": ".".join(__version__.split(".")[:2]),
        "base": "grpo_digit" if kind in OF_GRPO else "llama3_debug",
        "use": array if kind in MANY else f"{slot}={component}",
        "imports": f"\n{standard}\n\nfrom titancli.testing import {helpers}\n",
        "trains": _trains(name, kind, component),
    }


def _trains(name: str, kind: str, component: str) -> str:
    """The lines of the test that trains with the component."""
    if kind in OF_GRPO:
        full = f"{name}/{component}"
        use = f'loop.rewards=[{{type="{full}"}}]' if kind == "reward" else f"loop.{kind}={full}"
        return (
            f"    use = {use!r}\n"
            '    small = ("training.steps=1", "loop.eval_freq=0", "loop.samples=4", use)\n'
            '    done = run_cli("train", "grpo_digit", *small, cwd=tmp_path)'
        )
    table = f"[[{kind}s]]" if kind in MANY else f"[{kind}]"
    return (
        f"    file = recipe(tmp_path, '{table}\\ntype = \"{name}/{component}\"')\n"
        '    done = run_cli("train", file, cwd=tmp_path)'
    )


def _template(name: str) -> Template:
    return Template((TEMPLATES / name).read_text(encoding="utf-8"))
