"""Names its code in a form that means nothing."""

from titancli import component, hookimpl


@component("loss", "malformed", target="some.module.build")
class Malformed:
    """Its target has no colon."""


@hookimpl
def titan_components():
    return [Malformed]
