"""Offers two components of one name."""

from titancli import component, hookimpl


@component("loss", "twice", target="duplicate_names:build")
class First:
    """The first."""


@component("loss", "twice", target="duplicate_names:build")
class Second:
    """The second."""


@hookimpl
def titan_components():
    return [First, Second]


def build(config):
    return None
