"""Its hook for commands raises."""

from titancli import hookimpl


@hookimpl
def titan_commands():
    raise ValueError("the commands of command_raises")
