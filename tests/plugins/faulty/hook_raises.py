"""Its hook for components raises."""

from titancli import hookimpl


@hookimpl
def titan_components():
    raise ValueError("the hook of hook_raises")
