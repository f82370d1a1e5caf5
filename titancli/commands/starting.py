"""The way from a request to a started run, as in `titan train`, for commands that start runs."""

from titancli.cli.train import Nodes, check_flags, environment_of, one_recipe, start_options
from titancli.launch import LaunchRequest
from titancli.run.drift import changes
from titancli.run.fit import check_world, check_worlds
from titancli.run.prepare import Plan, make_plan
from titancli.run.request import Request
from titancli.run.start import count_processes, launch, launch_request, prepared

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
    "launch",
    "launch_request",
    "make_plan",
    "one_recipe",
    "prepared",
    "start_options",
]
