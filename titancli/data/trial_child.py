"""Use what strangers wrote as its libraries do, within limits: run as a script by `titancli.data.trial`.

Imports nothing of titan, so that it starts at once.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

SECONDS = {"tokenizer": 60, "parquet": 60, "template": 5}
"""CPU-seconds; the largest vocabularies take about 3, a chat template a thousandth."""
BASE, FOLD = 1 << 30, 64
"""Bytes of memory: so many, and so many times the bytes that are parsed."""
TEXT = "The quick brown fox, 1234 + 5 = naïve 東京 😀\n\tif aaaaaaaa: # " + "x" * 64
PANIC, MEMORY = 3, 4
"""Exit codes if the library panics, or runs out of memory."""
TURNS = [
    {"role": "system", "content": "Be brief."},
    *({"role": role, "content": f"{role} says {n}"} for n in range(4) for role in ("user", "assistant")),
]
CALL = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"x": "y"}}}
CALLS = [
    *({"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "z"}),
    {"role": "assistant", "content": "done", "reasoning_content": "hm"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "g", "parameters": {}}}]


def tokenizer(path: str) -> None:
    """Load a tokenizer.json and use it once."""
    _limit("tokenizer", os.path.getsize(path))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for special in (True, False):
        tokenizer.encode_special_tokens = special
        tokenizer.decode(tokenizer.encode(TEXT).ids)


def parquet(path: str) -> None:
    """Read all that the footer of a Parquet file says: pyarrow aborts at columns that contradict their
    types."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        _limit("parquet", int.from_bytes(file.read(4), "little"))
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as opened:
        columns = range(opened.metadata.num_columns)
        for group in map(opened.metadata.row_group, range(opened.metadata.num_row_groups)):
            for number in columns:
                group.column(number)
        for number in columns:
            opened.schema.column(number).logical_type  # noqa: B018 - it is computed
        opened.schema_arrow  # noqa: B018


def template(text: str) -> None:
    """Render conversations by a chat template."""
    made = environment()
    _limit("template", len(text))
    compiled = made.from_string(text)
    for talk in (TURNS[:2], TURNS[1:2], TURNS, TURNS[1:], [*TURNS[:2], *CALLS], [*TURNS[1:2], *CALLS]):
        for tools in (None, TOOLS):
            for prompt in (False, True):
                given = {"messages": talk, "tools": tools, "add_generation_prompt": prompt}
                _survived(compiled.render, **given, bos_token="<s>", eos_token="</s>")


def conversations(given: dict[str, Any]) -> dict[str, Any]:
    """Render conversations by a chat template, and return what is wrong.

    Returns:
        `line` and `message` of a mistake in the syntax; or `undefined`: for each conversation None, or what
            the template uses of it that is not there.
    """
    try:
        import jinja2
    except ImportError:  # who renders says so
        return {}
    made = environment()
    _limit("template", len(given["template"]))
    try:
        compiled = made.from_string(given["template"])
    except jinja2.TemplateSyntaxError as error:
        return {"line": error.lineno, "message": error.message}
    return {"undefined": [_undefined(compiled, one) for one in given["conversations"]]}


def environment() -> Any:
    """Return an environment as transformers has one (utils/chat_template_utils.py)."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _undefined(template: Any, variables: dict[str, Any]) -> str | None:
    import jinja2

    try:
        template.render(**variables)
    except jinja2.UndefinedError as error:
        return str(error)
    except MemoryError:
        raise
    except Exception:  # the template refuses the conversation
        return None
    return None


def _limit(kind: str, size: int) -> None:
    """Limit what parsing so many bytes may take from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + SECONDS[kind]
    for name, value in (("CORE", 0), ("CPU", seconds), ("DATA", BASE + FOLD * size)):
        limit = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(limit)[1]  # of the user, who may not raise it
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _survived(use: Callable[..., object], *given: object, **named: object) -> None:
    """Use something; an error that its library reports itself is for who uses it later."""
    try:
        use(*given, **named)
    except (ImportError, MemoryError):
        raise
    except Exception:
        pass


def main(kind: str) -> int:
    """Use what stdin lists, with a byte on stdout for each that the process survives; or print what is found
    of `conversations`."""
    if kind == "conversations":
        try:
            print(json.dumps(conversations(json.load(sys.stdin))))
        except MemoryError:
            return MEMORY
        return 0
    survived = os.dup(1)
    os.dup2(2, 1)
    for one in json.load(sys.stdin):
        try:
            _survived(globals()[kind], one)
        except MemoryError:
            return MEMORY
        except ImportError:
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            print(error, file=sys.stderr)
            return PANIC
        os.write(survived, b".")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is for who has started this process
    sys.exit(main(sys.argv[1]))
