"""What is forked from a process that has imported torch is the program that an interpreter would have run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import conftest
from tests import warm

FACTS = """
import json, os, signal, sys
from pathlib import Path
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path[:2],
    "folder": os.getcwd(),
    "name": __name__,
    "environment": {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
    "cmdline": Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode(),
    "mine": b"MINE=7" in Path("/proc/self/environ").read_bytes().split(b"\\0"),
    "leads": os.getsid(0) == os.getpid(),
    "parent": os.getppid(),
    "open": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
    "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
    "torch": "torch" in sys.modules,
    "read": sys.stdin.read(),
}))
"""
ENDS = {
    "pass": 0,
    "raise SystemExit(3)": 3,
    "raise SystemExit('in words')": 1,
    "1 / 0": 1,
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)": -signal.SIGINT,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "import atexit; atexit.register(print, 'at the end')": 0,
}


@pytest.fixture(params=["forked", "in earnest"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    conftest.WARM.cold = request.param == "in earnest"
    yield request.param
    conftest.WARM.cold = False


def program(folder: Path, text: str) -> list[str]:
    (folder / "program.py").write_text(text)
    return [sys.executable, str(folder / "program.py"), "--word", "another word"]


def facts(folder: Path, safe_path: str, **options: Any) -> dict[str, Any]:
    environment = {**os.environ, "MINE": "7", "PYTHONSAFEPATH": safe_path}
    done = subprocess.run(
        program(folder, FACTS), cwd=folder, env=environment, text=True, capture_output=True, **options
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_a_fork_is_what_the_command_would_have_been(tmp_path: Path, safe_path: str) -> None:
    options = {"input": "some words", "start_new_session": True}
    forked = facts(tmp_path, safe_path, **options)
    conftest.WARM.cold = True
    try:
        earnest = facts(tmp_path, safe_path, **options)
    finally:
        conftest.WARM.cold = False
    assert (forked.pop("torch"), earnest.pop("torch")) == (True, False)
    assert forked["cmdline"] == earnest["cmdline"].replace("\0\0", "\0")
    assert forked == earnest
    assert forked["parent"] == os.getpid() and forked["leads"] and forked["mine"]


@pytest.mark.parametrize("text", ENDS)
def test_it_ends_as_the_command_would(way: str, tmp_path: Path, text: str) -> None:
    done = subprocess.run(program(tmp_path, text), text=True, capture_output=True)
    assert done.returncode == ENDS[text]
    last = done.stderr.strip().splitlines()[-1:]
    assert last == {
        "raise SystemExit('in words')": ["in words"],
        "1 / 0": ["ZeroDivisionError: division by zero"],
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)": ["KeyboardInterrupt"],
    }.get(text, [])
    assert done.stdout == ("at the end\n" if "atexit" in text else "")


def test_a_fork_ends_with_its_own_finalizers_alone(tmp_path: Path) -> None:
    text = "import weakref\nclass Kept: ...\nkept = Kept()\nweakref.finalize(kept, print, 'at the end')"
    with subprocess.Popen(program(tmp_path, text), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read() == b"at the end\n"
        _, process.returncode, usage = os.wait4(process.pid, 0)
    assert process.returncode == 0
    # 2,500 are seen; 11,500 where torch's libraries take back each kernel that they have registered.
    assert usage.ru_minflt < 7000


def test_what_it_starts_is_forked_too(way: str, tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("import sys; print('torch' in sys.modules); raise SystemExit(5)")
    text = (
        "import subprocess, sys\n"
        "done = subprocess.run([sys.executable, 'inner.py'], stdout=subprocess.PIPE, text=True)\n"
        "print(done.stdout.strip(), done.returncode)"
    )
    done = subprocess.run(program(tmp_path, text), cwd=tmp_path, text=True, capture_output=True)
    assert done.stdout == f"{way == 'forked'} 5\n"


IN_THE_MIDDLE = """
import atexit, subprocess, sys, tempfile
from pathlib import Path
atexit.register(print, "at the end")
with tempfile.TemporaryDirectory() as folder:
    print("before")
    done = subprocess.run([sys.executable, sys.argv[1]], stdout=subprocess.PIPE, text=True)
    print(repr(done.stdout), Path(folder).is_dir())
"""


def test_what_is_started_in_the_middle_of_a_program_ends_nothing_of_it(way: str, tmp_path: Path) -> None:
    """Its temporary folders stay, and what it has printed and registered is its own."""
    (tmp_path / "other.py").write_text(
        "import tempfile; other = tempfile.TemporaryDirectory(); print('other')"
    )
    (tmp_path / "program.py").write_text(IN_THE_MIDDLE)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "other.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "before\n'other\\n' True\nat the end\n", done.stderr
    assert done.returncode == 0


IN_A_THREAD = """
import subprocess, sys
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor() as pool:
    run = pool.submit(subprocess.run, [sys.executable, sys.argv[1]])
print(run.result().returncode)
"""


def test_what_it_starts_in_a_thread_ends_as_it_should(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("print('other')")
    (tmp_path / "program.py").write_text(IN_A_THREAD)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "other.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["other", "0"], "", 0)


@pytest.mark.slow  # a server of its own
def test_an_answer_that_nobody_waited_for_is_not_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a test's time limit comes while a process is started."""
    asked = warm.Warm._asked

    def interrupted(*given: Any) -> int:
        asked(*given)
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(warm.Warm, "_asked", staticmethod(interrupted))
        with pytest.raises(TimeoutError):
            subprocess.run(program(tmp_path, "raise SystemExit(3)"))
    assert subprocess.run(program(tmp_path, "raise SystemExit(4)")).returncode == 4


def test_two_at_once_and_a_signal_to_one(tmp_path: Path) -> None:
    command = program(tmp_path, "print('up', flush=True); import time; time.sleep(60)")
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
    both[0].terminate()
    assert both[0].wait(10) == -signal.SIGTERM
    assert both[1].poll() is None
    both[1].kill()
    assert both[1].wait(10) == -signal.SIGKILL
    for process in both:
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {**os.environ, "PYTHONHASHSEED": "3"}},
        {"env": {**os.environ, "OMP_NUM_THREADS": "7"}},
        {"umask": 0o77},
        {"preexec_fn": int},
        {"close_fds": False},
    ],
    ids=["PYTHONHASHSEED", "OMP_NUM_THREADS", "umask", "preexec_fn", "close_fds"],
)
def test_what_a_fork_cannot_be_is_started_in_earnest(tmp_path: Path, changes: dict[str, Any]) -> None:
    text = "import sys; print('torch' in sys.modules)"
    done = subprocess.run(program(tmp_path, text), text=True, capture_output=True, **changes)
    assert (done.returncode, done.stdout) == (0, "False\n")


@pytest.mark.parametrize("words", [["-c", "pass"], ["-I", "-m", "this"], ["-m", "pytest"], []])
def test_flags_and_code_are_the_interpreters(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    asked = []
    monkeypatch.setattr(warm.Forks, "_in_earnest", lambda popen, *given: asked.append(given) or stop())
    with pytest.raises(InterruptedError):
        subprocess.Popen([sys.executable, *words])
    assert len(asked) == 1


def stop() -> None:
    raise InterruptedError
