"""`titan doctor`: whether this machine and this installation can train."""

from __future__ import annotations

import click

from titancli.cli.output import mark, print_json
from titancli.terminal import pasteable


@click.command("doctor", short_help="Check the installation, the machine and the plugins.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool) -> int:
    """Check the installation, the machine and the plugins.

    Reports versions, which titan is on the PATH, torch, GPUs, environment variables that affect a run,
    memory, disk, and every plugin. Exits with 5 if no run is possible, with 4 if a plugin is broken.
    """
    from titancli.doctor import findings

    found = []
    for finding in findings():
        found.append(finding)
        if not as_json:
            print(f"{mark(finding.state)}  {finding.name}: {finding.found}")
            if finding.hint:
                print(f"         {pasteable(finding.hint)}")
    if as_json:
        documents = [{"name": f.name, "state": f.state, "found": f.found, "hint": f.hint} for f in found]
        print_json("doctor", {"findings": documents})
    return max((finding.exit_code for finding in found), default=0)
