"""What a reader must hold in mind: functions and files of a step and of a start, what plugins import.

python benchmarks/house.py     a table; about a minute of CPU. Counts do not depend on the machine.

tests/test_architecture.py uses `circles` and `plugin_circles`, too.
"""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CORE = str(ROOT / "titancli")
PLUGINS = sorted(file.parent for file in (ROOT / "plugins").glob("*/pyproject.toml"))


class Traced:
    """The functions of titan that run inside a `with` block, by their code."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()

    def __enter__(self) -> Traced:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(CORE):
            self.functions.add(code)

    def __str__(self) -> str:
        return f"{len(self.functions)} / {len({code.co_filename for code in self.functions})}"


def one_step() -> Traced:
    """Trace the second step of llama3_debug on one CPU rank: forward, backward, optimizer."""
    import torch

    from titancli import Batch, Engine

    with Engine.build("llama3_debug", ["model.dim=32", "model.n_layers=1"], device="cpu") as engine:
        rows = torch.randint(256, (2, 33))
        batch = Batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]})
        engine.forward_backward(batch)
        engine.optim_step()
        with Traced() as traced:
            engine.forward_backward(batch)
            engine.optim_step()
    return traced


def to_first_forward() -> str:
    """Trace `titan train` in a process of its own, up to the first forward; return functions / files."""
    done = subprocess.run(
        [sys.executable, __file__, "--train"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else done.stderr


def _train() -> None:
    from titancli.cli import main
    from titancli.models.blocks.decoder import Decoder

    traced = Traced()

    def forward(*_: Any, **__: Any) -> None:
        sys.setprofile(None)
        print(traced, flush=True)
        os._exit(0)

    Decoder.forward = forward  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, traced:
        main(["train", "llama3_debug", "model.dim=32", "model.n_layers=1", "--run-dir", f"{folder}/run"])


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each import of a file; the name is empty for a module as a whole."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def plugin_imports() -> set[tuple[str, str]]:
    """Return the names that plugins, without their tests, import from titan: pairs of module and name."""
    files = (file for plugin in PLUGINS for file in plugin.glob("titan_*/**/*.py"))
    return {pair for file in files for pair in imports(file) if pair[0].split(".")[0] == "titancli"}


def modules(folder: Path) -> dict[str, Path]:
    """Return the modules below a folder by their dotted names."""
    names = ((file.relative_to(folder.parent).with_suffix(""), file) for file in sorted(folder.rglob("*.py")))
    return {".".join(name.parts).removesuffix(".__init__"): file for name, file in names}


def imported_modules(found: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return which of these modules each imports, at its top or later."""
    return {
        here: {
            module
            for name, attribute in imports(file)
            for module in [f"{name}.{attribute}" if f"{name}.{attribute}" in found else name]
            if module in found and module != here
        }
        for here, file in found.items()
    }


def circles(imported: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan, 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for other in sorted(imported[module]):
            if other not in index:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == index[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in imported:
        if module not in index:
            visit(module)
    return found


def plugin_circles() -> list[list[str]]:
    """Return the circles of imports inside plugins."""
    folders = [folder for plugin in PLUGINS for folder in plugin.glob("titan_*") if folder.is_dir()]
    return [circle for folder in folders for circle in circles(imported_modules(modules(folder)))]


def named_outside() -> str:
    """Return how many files outside of a plugin's folder name it: smallest to largest number."""
    counts = []
    for plugin in PLUGINS:
        words = f"{plugin.name}|{plugin.name.replace('-', '_')}"
        asides = (
            "CHANGELOG.md",
            "docs",
            "tests/durations.json",
            "tests/nightly.txt",
            f"plugins/{plugin.name}",
        )
        command = ["git", "grep", "-lE", words, "--", ".", *(f":!{aside}" for aside in asides)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        counts.append(len(done.stdout.split()))
    return f"{min(counts)} to {max(counts)}"


def cpu_of(*words: str) -> float:
    """Return the least CPU-seconds of seven runs of a command of this environment."""
    command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=env, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def cpu_of_commands() -> str:
    """Return the CPU of three commands, as multiples of that of `pytest --version`."""
    commands = ("--help",), ("list-components",), ("validate", "llama3_debug", "--recipe-only")
    yardstick = cpu_of("pytest", "--version")
    return " / ".join(f"{cpu_of('titan', *words) / yardstick:.1f}" for words in commands)


def lines(*folders: str) -> int:
    """Return the lines of Python below folders."""
    return sum(
        len(file.read_bytes().splitlines())
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        if ".venv" not in file.parts
    )


def main() -> None:
    found = plugin_imports()
    rows = {
        "functions / files of one training step, one CPU rank": one_step(),
        "functions / files from the command to the first forward": to_first_forward(),
        "names / modules that plugins import from the core": f"{len(found)} / {len({m for m, _ in found})}",
        "circles inside plugins": len(plugin_circles()),
        "files outside a plugin's folder, docs aside, that name it": named_outside(),
        "lines of core, plugins and tests": f"{lines('titancli', 'plugins', 'tests'):,}",
        "CPU of `--help` / `list-components` / `validate`, times `pytest --version`": cpu_of_commands(),
        "words of README.md": len((ROOT / "README.md").read_text(encoding="utf-8").split()),
    }
    print("| measure | value |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    _train() if sys.argv[1:] == ["--train"] else main()
