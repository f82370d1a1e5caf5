"""Its check of recipes raises."""

from titancli import component, hookimpl


@component("loss", "unchecked", target="check_raises:build")
class Unchecked:
    """Good in itself."""


@hookimpl
def titan_components():
    return [Unchecked]


@hookimpl
def titan_checks(recipe):
    raise ValueError("the check of check_raises")


def build(config):
    return None
