"""Names code that is not there."""

from titancli import component, hookimpl


@component("loss", "absent", target="bad_target_code.loss:build")
class Absent:
    """Its module does not exist."""


@hookimpl
def titan_components():
    return [Absent]
