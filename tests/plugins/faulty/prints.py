"""Writes to stdout, which is for data."""

from titancli import hookimpl

print("a banner")


@hookimpl
def titan_components():
    print("and another")
    return []
