"""Implements a hook that this version of titan does not have."""

from titancli import hookimpl


@hookimpl
def titan_schedulers():
    return []
