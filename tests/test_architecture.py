"""The house's rules that a machine can check: imports run downward, and the menu is torch-free."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import titancli

PACKAGE = Path(titancli.__file__).parent
FLOORS = [
    {"errors", "__init__"},
    {"registry"},
    {"recipe"},
    {"runs", "provenance", "process", "stop"},
    {"models", "losses", "optimizers", "converters", "data", "parallel", "checkpoint", "observe", "loggers"},
    {"planning"},
    {"rl"},
    {"engine"},
    {"generate"},
    {"loops"},
    {"worker"},
    {"launchers"},
    {"doctor"},
    {"cli", "testing"},
    {"__main__", "builtin"},
]


def floor(module: str) -> int:
    room = module.split(".")[1] if "." in module else "__init__"
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def imports(path: Path) -> list[tuple[int, str]]:
    """Imports of titancli modules at run time: those under `if TYPE_CHECKING` do not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("titancli"):
            modules = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "titancli" else []
            )
            found += [(node.lineno, module) for module in modules or [node.module]]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name.startswith("titancli")]
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path):
    here = "titancli." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for line, module in imports(path):
        if module.split(".")[-1][0].isupper() or module == "titancli.__version__":
            continue
        assert floor(module) <= floor(here), f"{path}:{line}: {here} imports {module}, which stands above it"


MENUS = [
    "titancli",
    "titancli.builtin",
    "titancli.recipe",
    "titancli.registry.kinds",
    "titancli.cli",
    "titancli.cli.plan",
    "titancli.planning.estimate",
    "titancli.planning.verdict",
    "titancli.planning.drawing",
    "titancli.runs",
]
HEAVY = {"torch", "transformers", "datasets", "numpy", "rich", "pydantic", "safetensors", "tokenizers"}


def test_the_menu_imports_nothing_heavy():
    code = (
        f"import sys, {', '.join(MENUS)}\n"
        "titancli.builtin.titan_components()\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
