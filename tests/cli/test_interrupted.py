"""Ctrl-C while a command starts: it ends without a traceback, at whatever moment it comes."""

from __future__ import annotations

import subprocess
import sys

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


def started(number: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", START, str(number), *COMMAND]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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
