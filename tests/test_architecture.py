"""Check the architecture: imports run downward, and component configs are torch-free."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import titancli

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from house import circles, plugin_circles

PACKAGE = Path(titancli.__file__).parent
FLOORS = [
    {"errors", "version", "torch_version", "tested_systems", "checksum", "files", "object_store", "terminal"}
    | {"signals", "locks", "closing", "runs", "provenance", "process", "fingerprint", "launch"},
    {"registry", "layout"},
    {"distributed", "recipe"},
    {"protocols", "observe"},
    {"data", "losses", "optimizers", "loggers"},
    {"models", "rl"},
    {"parallel", "converters"},
    {"checkpoint"},
    {"planning"},
    {"engine"},
    {"generate", "loops", "callbacks"},
    {"worker"},
    {"launchers", "run", "doctor"},
    {"cli", "commands"},
    {"builtin", "__init__", "__main__"},
]
"""From the ground up: the rooms of each floor, and the files that are in none."""


def floor(module: str) -> int:
    """The floor of a module, by the room that it is in."""
    room = module.split(".")[1] if "." in module else "__init__"
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def module_of(path: Path) -> str:
    parts = ("titancli", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module of titan that a file imports, at its top, late, or for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "titancli":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in FILES else node.module
        elif isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "titancli"
            )


def lazy_imports() -> dict[str, set[str]]:
    """What modules import by name when it is first asked for, as their tables say. (Commands are
    named by one, too, as components are by the registry, which need not know them.)"""
    from titancli import _WHERE, checkpoint

    return {
        "titancli": set(_WHERE.values()),
        "titancli.checkpoint": {f"titancli.checkpoint.{module}" for module in checkpoint._HOME.values()},
    }


def test_no_file_is_longer_than_500_lines():
    long = {path.name: len(path.read_text().splitlines()) for path in FILES.values()}
    assert {name for name, lines in long.items() if lines > 500} <= {"engine.py"}
    assert long["engine.py"] <= 600


def test_modules_are_imported_by_name_only_where_a_table_says_which():
    """Elsewhere it would hide an import from the tests of floors and circles."""
    registry = {
        "titancli.registry.component",
        "titancli.cli.command_groups",
    }  # targets of components; commands
    names = ("import_module", "__import__")
    found = {
        module
        for module, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in names
    }
    assert found - registry == lazy_imports().keys()


@pytest.mark.parametrize("here", [module for module in FILES if module != "titancli"])
def test_imports_run_downward(here):
    for line, module in imports(FILES[here]):
        assert floor(module) <= floor(here), f"{here}:{line} imports {module} from above"


def test_no_module_hides_a_name_of_the_package():
    """Once imported, a folder `titancli/report/` would be `titancli.report`, in place of the function."""
    import titancli

    rooms = {module.split(".")[1] for module in FILES if module.count(".") == 1}
    assert not rooms & set(titancli.__all__)


def test_what_finds_circles_finds_them():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert circles(graph) == [["a", "b", "c"], ["f", "g"]]


def test_no_file_imports_itself_by_way_of_others():
    lazy = lazy_imports()
    imported = {
        here: ({module for _, module in imports(path) if module in FILES} | lazy.get(here, set())) - {here}
        for here, path in FILES.items()
    }
    found = circles(imported)
    assert not found, "\n".join(" <-> ".join(circle) for circle in found)


def test_no_file_of_a_plugin_imports_itself() -> None:
    assert not plugin_circles()


PLUGINS = PACKAGE.parent / "plugins"
OF_ENGINES = re.compile(r"(^|[._])engine$")


@pytest.mark.parametrize("path", [*FILES.values(), *sorted(PLUGINS.glob("*/titan_*/**/*.py"))], ids=str)
def test_only_the_engine_looks_into_engines(path: Path) -> None:
    """Features take part in steps as hooks (`titancli.engine.step`): elsewhere nothing reads an engine's
    names that begin with an underscore, and no class is made of it."""
    if path.is_relative_to(PACKAGE / "engine"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert not OF_ENGINES.search(ast.unparse(node.value)), (
                f"{path}:{node.lineno}: {ast.unparse(node)}"
            )
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            assert not bases & {"Engine", "EngineCore"}, f"{path}:{node.lineno}: a subclass of Engine"


THEIR_TYPES = {
    "titancli.checkpoint.hf.peft_names": {"llama4", "llama4_text"},
    "titancli.checkpoint.hf.quantise": {"gpt_oss"},
}
"""What other libraries do with a model_type of theirs."""
EXAMPLES = {"titancli.models", "titancli.registry.first_party"}
"""The lists of families."""


def test_no_shared_room_names_a_family():
    """What is peculiar to a family is a value of its specs: nothing asks which one it is."""
    from titan_families import FAMILIES
    from titancli.models import COMPONENTS
    from titancli.registry.component import component_info

    own = tuple(cls.__module__ for cls in COMPONENTS)
    families = [*COMPONENTS, *FAMILIES]
    names = {cls.__name__ for cls in families} | {component_info(cls).name for cls in families}
    names |= {model_type for cls in families for model_type in getattr(cls, "model_types", ())}
    for here, path in FILES.items():
        if here in EXAMPLES or here.startswith(own):
            continue
        assert not {module for _, module in imports(path) if module.startswith(own)}, here
        found = {
            word
            for node in ast.walk(ast.parse(path.read_text()))
            for word in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "value", None))
            if isinstance(word, str) and word in names
        }
        assert found == THEIR_TYPES.get(here, set()), here


CONFIGS = [
    "titancli",
    "titancli.builtin",
    "titancli.recipe",
    "titancli.registry.kinds",
    "titancli.cli",
    "titancli.cli.plan",
    "titancli.planning.text",
    "titancli.runs",
]
HEAVY = {"torch", "transformers", "datasets", "numpy", "rich", "pydantic", "safetensors", "tokenizers"}


def test_configs_import_nothing_heavy():
    code = (
        f"import sys, {', '.join(CONFIGS)}\n"
        "titancli.builtin.titan_components()\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
