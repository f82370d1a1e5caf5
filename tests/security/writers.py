"""Every writer: where titan writes text that comes from files of others, and how it is tried.

Each format has one function through which such text goes. A row names the function, and the modules that
write; `test_writers.py` feeds each with `HOSTILE` and reads the result again.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Writer:
    """A format, the function that text of others goes through, and the modules that write it."""

    format: str
    function: str
    modules: str


WRITERS = [
    Writer(
        "TOML comment",
        "titancli.recipe.toml:comment",
        "cli.config cli.finetune recipe.editor titan_migrate.account titan_torchtitan.translate",
    ),
    Writer("TOML value", "titancli.recipe.toml:inline", "cli.finetune recipe.editor"),
    Writer("a line of Markdown", "titan_hub.card:_line", "titan_hub.card"),
    Writer("a block of Markdown", "titan_hub.card:_fenced", "titan_hub.card"),
    Writer("terminal", "titancli.terminal:printable", "cli.output cli.removing observe.console"),
    Writer("option of sbatch", "titan_slurm.jobs:_quoted", "titan_slurm.jobs"),
    Writer("HTML", "titan_report.page:html", "titan_report.page"),
    Writer("log", "titancli.observe.events:EventLog", "observe.events"),
]

COMMENTS = {
    "recipe.editor": "keys of titan's own schema, with inline values; and #:schema, titan's own path",
    "recipe.load": "the header of a lock file: titan's version",
    "titan_hub.card": "a heading of Markdown; the header of a lock file",
}
"""Modules with a comment of TOML, or a heading, that holds a value beside `comment`: what it holds."""
