"""Every writer: where titan writes text that comes from files of others, and how it is tried.

Each format has one function through which such text goes. A row names the function, and the modules that
write; `test_writers.py` feeds each with `HOSTILE` and reads the result with another reader. The rows of a
plugin are in its own tests, `test_*_writers.py`.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.security.test_doors import MODULES

HOSTILE = [
    "plain",
    'two\nlines = 1\n[optimizer]\nlr = 9.0\n[["x"]]',
    "carriage\rreturn = 1\r\n[model]\r\n",
    "separators\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029[model]",
    "quotes ' \" ''' \"\"\" \\ \\n \\u0000",
    "brackets ] ] } ) > --> </script> <b>",
    "controls \x00\x01\x07\x08\x1b[2J\x1b]0;title\x07\x7f\x9b31m",
    "right to left \u202e\u2066\u200f gnp.exe \ufeff",
    "markdown | ` ``` ~~~ # [x](http://x) ![x](x) \n# Title\n```\n",
    "shell $(touch x) `touch x`; touch x & | \n#SBATCH --export=ALL\n",
    "templates {{ 7 * 7 }} {% raw %} %s {0} ${x}",
    "a surrogate \ud800",
    "",
]
"""Texts that a format may take for its own syntax."""
UTF8 = [text for text in HOSTILE if "\ud800" not in text]
"""The texts that a file can hold."""
FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1", "'=1", "''=1"]
"""Texts that a spreadsheet computes, or would if what quotes them were taken off."""


@dataclass(frozen=True)
class Writer:
    """A format, the function that text of others goes through, and the modules that write it."""

    format: str
    function: str
    modules: str


WRITERS = [
    Writer("TOML comment", "titancli.recipe.toml:comment", "cli.config cli.finetune recipe.json_schema"),
    Writer("TOML value", "titancli.recipe.toml:inline", "cli.finetune cli.tokenize recipe.json_schema"),
    Writer(
        "TOML", "titancli.recipe.toml:toml_text", "cli.config recipe.load recipe.toml run.evaluate run.start"
    ),
    Writer("recipe file", "titancli.cli.new_file:write_new", "cli.new_file cli.new_recipe"),
    Writer("JSON", "titancli.files:json_text", "observe.events observe.notes runs"),
    Writer("row of a table", "titancli.data.tables:_line", "data.tables"),
    Writer(
        "terminal", "titancli.terminal:printable", "cli.output cli.removing observe.console observe.panel"
    ),
    Writer("shell", "titancli.terminal:shell_path", "cli.new_file"),
    Writer("log", "titancli.observe.events:EventLog", "observe.events"),
    Writer("output", "titancli.process:OutputLog", "launchers.local launchers.torchrun process"),
    Writer("failure", "titancli.observe.failures:write", "observe.failures"),
    Writer("text for loggers", "titancli.files:utf8", "observe.observers observe.metrics"),
    Writer("CSV", "titancli.files:csv_text", "loggers.csv"),
    Writer("TensorBoard", "titancli.loggers.tensorboard:TensorBoardLogger", "loggers.tensorboard"),
]

OWN = {
    "checkpoint.*": "tensors, and JSON in ASCII by json.dumps or safetensors",
    "cli.sizing": "a recipe of `as_toml`, in a folder that is removed",
    "data.hf_files": "the size and time of a file",
    "data.row_index data.shards.* data.token_cache": "numbers, and JSON in ASCII",
    "data.trial": "marks without content, and a lock",
    "distributed.*": "a trace of PyTorch, addresses of ranks, locks",
    "fingerprint": "checksums and paths, as JSON in ASCII",
    "launchers.agent launchers.rendezvous": "exit codes and an address, as JSON in ASCII",
    "locks": "a host and a process",
    "observe.memory observe.profile_request": "a word for the kernel; a request, as JSON in ASCII",
    "provenance": "git's own: a commit, settings in a folder that is removed, a patch as it is",
    "registry.isolated_load": "the report of a child, as JSON in ASCII",
}
"""Modules that write no text of others, or only by the standard library's `json.dumps`: what they write."""

COMMENTS = {
    "recipe.json_schema": "keys of titan's own schema, with inline values; and #:schema, titan's own path",
    "recipe.load": "the header of a lock file: titan's version",
    "recipe.toml": "the function of comments itself",
}
"""Modules with a comment of TOML, or a heading, that holds a value beside `comment`: what it holds."""


WRITING = {
    *("write_text", "write_bytes", "write_atomically", "write_file", "write_files", "write_new"),
    *("writerow", "writerows", "toml_text", "json_text", "dump", "savez", "save_file"),
    *("add_text", "add_scalar", "add_string", "add_array", "init"),
}
"""Functions that write a file, or the text of one."""


def _writes(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            name = ast.unparse(node.func).rpartition(".")[2]
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            texts = [str(one.value) for one in given if isinstance(one, ast.Constant)]
            modes = [text for text in texts if set(text) & set("wax+") and set(text) <= set("rwaxbt+")]
            if name in WRITING or (name in ("open", "fdopen") and modes):
                return True
    return False


def writing(package: str) -> list[str]:
    """Return the modules of a plugin, or of the core ("") that write files, or the text of one."""
    return sorted(name for name, tree in _of(package).items() if _writes(tree))


def _of(package: str) -> dict[str, ast.Module]:
    """The modules of a plugin, or of the core, whose package is ""."""
    return {
        name: tree
        for name, tree in MODULES.items()
        if (name.partition(".")[0] if name.startswith("titan_") else "") == package
    }


def check_rows(package: str, rows: Iterable[Writer], own: Mapping[str, str] | None = None) -> None:
    """Check that rows name functions and modules of a package ("": the core's) that exist, and that each
    module that writes has a row or a reason."""
    known = _of(package)
    listed = [*" ".join([*(row.modules for row in rows), *(own or {})]).split()]
    for row in rows:
        module, _, name = row.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), row.function
    for pattern in listed:
        assert any(fnmatchcase(name, pattern) for name in known), f"no module is {pattern}"
    left = [name for name in writing(package) if not any(fnmatchcase(name, one) for one in listed)]
    assert not left, f"these write, and have no row: {left}"


def check_comments(package: str, reasons: Mapping[str, str]) -> None:
    """Check that a text with values that begins as a comment is made by `comment`, or that its module is
    listed with a reason."""
    found = set()
    for name, tree in _of(package).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr) and any(
                isinstance(part, ast.Constant)
                and str(part.value).lstrip("\n ").startswith(("# ", "## ", "#:"))
                for part in node.values
            ):
                found.add(name)
    assert found <= reasons.keys(), found - reasons.keys()
