"""Ctrl-C while a command starts: it ends without a traceback, at whatever moment it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.docs.markdown import ROOT

pytestmark = pytest.mark.cold

START = """
import os, signal, sys
from titancli.__main__ import main

class Interrupt:
    "Sends SIGINT at the start of the n-th import."
    left = int(sys.argv.pop(1))
    def find_spec(self, name, path=None, target=None):
        Interrupt.left -= 1
        if Interrupt.left == 0:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
code = main()
print("imports", -Interrupt.left)
sys.exit(code)
"""
COMMAND = ("validate", "llama3_debug")
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def started(number: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", START, str(number), *COMMAND]
    return subprocess.Popen(words, **PIPES)


def test_ctrl_c_at_any_import_of_a_start_gives_no_traceback() -> None:
    out, err = started(0).communicate()
    count = int(out.split()[-1])
    assert count > 200, err
    for first in range(2):  # half of them at once
        places = [1 + number * (count - 2) // 7 for number in range(first, 8, 2)]
        for place, process in [(place, started(place)) for place in places]:
            out, err = process.communicate()
            assert "Traceback" not in err and "KeyboardInterrupt" not in err, f"import {place}:\n{err}"
            assert process.returncode == 130, f"import {place}: {err}"


EDGES = {
    "before it runs": "from titancli.__main__ import main\nos.kill(os.getpid(), signal.SIGINT)\nmain()",
    "after it ran": "from titancli.__main__ import main\nmain()\nos.kill(os.getpid(), signal.SIGINT)",
}


@pytest.mark.parametrize("edge", EDGES)
def test_ctrl_c_around_a_command(edge: str) -> None:
    words = [sys.executable, "-c", f"import os, signal\n{EDGES[edge]}", "--version"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


SCRIPT = """
import runpy, sys
from titancli.__main__ import main
print("begun", flush=True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Run the installed script; what comes before titan's first line is up to Python."""
COMMANDS = (("train", "llama3_debug", "--dry-run"), ("plan", "llama3_debug"), COMMAND, ("plugin", "list"))


def test_ctrl_c_at_any_moment(tmp_path: Path) -> None:
    """At 20 moments of the first 2 seconds of the script that users run."""
    script, heard = str(Path(sys.executable).with_name("titan")), 0
    for number in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, script, *COMMANDS[number % len(COMMANDS)]],
            **PIPES,
            cwd=tmp_path,
        )
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        time.sleep(number / 10)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        assert "Traceback" not in err and "KeyboardInterrupt" not in err, f"{number / 10} s: {err}"
        # While Python ends it leaves the signal to the system; a shell shows 130 for this, too.
        assert process.returncode in (0, 130, -signal.SIGINT), f"{number / 10} s: {err}"
        heard += process.returncode != 0
    assert heard >= 4  # on a fast machine the others have ended


IN_ORDER = """
import os, sys, time
from titancli.__main__ import main
import titancli.cli

def run():
    os.environ["TITAN_ATTEMPT"] = "held"
    try:
        import interrupted
        time.sleep(9)
    finally:
        print("in order")

titancli.cli.main = run
sys.exit(main())
"""


def test_a_run_is_put_in_order_after_an_import(tmp_path: Path) -> None:
    module = (
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.3)\nprint('imported')"
    )
    (tmp_path / "interrupted.py").write_text(module)
    done = subprocess.run([sys.executable, "-c", IN_ORDER], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "imported\nin order\n", "")


CALLBACK = """
import os, signal, sys, weakref
from titancli.__main__ import main
import titancli.cli

def run():
    class Gone: pass
    gone = Gone()
    seen = weakref.ref(gone, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del gone
    print("goes on")

titancli.cli.main = run
sys.exit(main())
"""


def test_ctrl_c_in_a_callback_is_heeded() -> None:
    """Where Python prints an exception and passes it over."""
    done = subprocess.run([sys.executable, "-c", CALLBACK], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_who_ignores_ctrl_c_goes_on_to_do_so() -> None:
    script = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{START}"
    words = [sys.executable, "-c", script, "40", "--version"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("titan ")


def test_the_script_begins_where_it_is_heeded() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"titan": "titancli.__main__:main"}
