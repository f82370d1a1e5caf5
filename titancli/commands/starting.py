"""The way from a request to a started run, as in `titan train`, for commands that start runs."""

from titancli.cli.train import Nodes, check_flags, environment_of, one_recipe, start_options
from titancli.launch import LaunchRequest
from titancli.run.fit import check_world, check_worlds
from titancli.run.prepare import Plan, Request, changes, make_plan
from titancli.run.start import count_processes, start

__all__ = [
    "LaunchRequest",
    "Nodes",
    "Plan",
    "Request",
    "changes",
    "check_flags",
    "check_world",
    "check_worlds",
    "count_processes",
    "environment_of",
    "make_plan",
    "one_recipe",
    "start",
    "start_options",
]
