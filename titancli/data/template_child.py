"""Compile and render a chat template, within limits: run as a script by `titancli.data.template_trial`.

Imports nothing of titan, and no transformers, so that it starts at once.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any

SECONDS = 10
"""CPU-seconds; a conversation takes milliseconds."""
MEMORY = 1 << 30
"""Bytes."""


def main() -> None:
    """Print what is wrong, as JSON: `line` and `message` of a mistake in the syntax; or `undefined`, for each
    conversation None or what the template uses of it that is not there."""
    given = json.load(sys.stdin)
    for limit, value in (("CORE", 0), ("CPU", given["seconds"]), ("DATA", MEMORY)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (value, value))
    try:
        import jinja2
    except ImportError:  # who renders says so
        print("{}")
        return
    try:
        template = _environment().from_string(given["template"])
    except jinja2.TemplateSyntaxError as error:
        print(json.dumps({"line": error.lineno, "message": error.message}))
        return
    print(json.dumps({"undefined": [_undefined(template, one) for one in given["conversations"]]}))


def _environment() -> Any:
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


if __name__ == "__main__":
    main()
