"""torchrun, as a run needs it: `python -m titancli.launchers.agent REPORT TORCHRUN-ARGUMENTS…`.

The same as `python -m torch.distributed.run`, but for three things. A signal is handed on to the ranks and
the agent keeps waiting for them, without a time limit, since they are saving; torchrun would kill them.
(Ranks that are too young to heed it die; those started in their place find it in their environment.) A second
SIGINT kills them. And how the ranks ended is written to REPORT as JSON, not to the terminal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titancli.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from titancli.process import die_with_parent
from titancli.signals import ASKED_TO_STOP, heeded


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait; 0 when all of them ended in good order."""
    report, rest = Path(arguments[0]), list(arguments[1:])
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        again = number == signal.SIGINT and signal.SIGINT in received
        received.append(number)
        os.environ.setdefault(ASKED_TO_STOP, signal.Signals(number).name)
        ranks = children(os.getpid())
        if not ranks:  # none has been started, so there is nothing to wait for
            os._exit(EXIT_STOPPED)
        for process in ranks:
            signal_group(process, signal.SIGKILL if again else number)
        if again:  # torchrun might start them anew
            os._exit(EXIT_FAILED)

    for number in heeded():
        signal.signal(number, handle)
    die_with_parent()

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # torchrun's own handlers are kept for the one signal that means: kill them all.
    options = parse_args(["--signals-to-handle", "SIGQUIT", *rest])
    try:
        run(options)
    except ChildFailedError as error:
        ends = [
            {"rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        report.write_text(json.dumps(ends))
        return EXIT_FAILED
    return EXIT_OK


def children(parent: int) -> list[int]:
    """The process ids of a process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # pid (command) state parent …; the command may hold spaces and brackets
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def signal_group(process: int, number: int) -> None:
    """Signal a rank and what it started; torchrun makes each rank the leader of a session."""
    try:
        if number == signal.SIGKILL:
            os.killpg(process, number)
        else:
            os.kill(process, number)
    except ProcessLookupError:
        return  # it has ended meanwhile


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
