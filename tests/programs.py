"""The programs that tests see: those of the environment that they run in, and what `LISTED` names.

A test that passes because of something else that is installed here would fail on the next machine. What needs
another program says so: `@pytest.mark.needs("sbatch", install="apt install slurm-client")`. It sees that one
as well, and is skipped, with the reason, where there is none.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_LISTED = """
awk basename bash cat chgrp chmod chown cmp comm cp cut date dd df diff dir dirname du echo egrep env expr
false fgrep find fold grep groups gunzip gzip head hostname id install join kill ln ls md5sum mkdir mkfifo
mknod mktemp mv nice nl nohup nproc od paste pathchk pr printenv printf pwd readlink realpath rev rm rmdir sed
seq sh sha256sum shuf sleep sort split stat stdbuf stty sum sync tac tail tar tee test timeout touch tr true
truncate tsort tty uname uniq unlink uptime users wc which who whoami xargs yes
chrt flock ionice ldconfig mount mountpoint nsenter prlimit setpriv setsid taskset umount unshare
ar as c++ cc cpp g++ gcc git ld ld.bfd make nm objcopy objdump ranlib strip
"""
LISTED = _LISTED.split()
"""Of any machine: coreutils, util-linux. And what README asks for: git, make and g++."""
INDUCTOR = pytest.mark.needs("openssl", install="apt install openssl")
"""Marks a test that compiles for a CPU with inductor, which hashes headers with openssl."""
OUTSIDE = "TITAN_TESTS_OUTSIDE"
"""The environment variable with the PATH that the tests were started with."""
HERE = Path(sys.executable).parent


def restrict() -> None:
    """Have this process, and all that it starts, see no other programs. Called again it changes nothing."""
    if OUTSIDE in os.environ:
        return
    outside = os.environ.get("PATH", os.defpath)
    folder = Path(tempfile.mkdtemp(prefix="programs-"))
    link(folder, LISTED, outside)
    own = str(HERE)
    if sys.prefix == sys.base_prefix:  # no environment of its own: its folder has much else
        link(folder, [name for name in os.listdir(HERE) if name.startswith(("python", "titan"))], own)
        own = str(folder)
    os.environ |= {OUTSIDE: outside, "PATH": os.pathsep.join(dict.fromkeys((own, str(folder))))}
    maker = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == maker else None)


def link(folder: Path, names: Iterable[str], outside: str) -> None:
    """Make links to the programs of these names that there are."""
    for name in names:
        if (found := shutil.which(name, path=outside)) and not (folder / name).exists():
            (folder / name).symlink_to(found)


def needed(item: pytest.Item) -> dict[str, str]:
    """Return the programs that a test needs beyond the listed ones, and how to install each."""
    marks = list(item.iter_markers("needs"))
    return {name: str(mark.kwargs["install"]) for mark in marks for name in mark.args}


def missing(wanted: dict[str, str]) -> str | None:
    """Return why a test that needs these cannot run here; None if it can. `a|b` stands for either."""
    outside = os.environ[OUTSIDE]
    absent = {
        name: install
        for name, install in wanted.items()
        if not any(shutil.which(one, path=outside) for one in name.split("|"))
    }
    return f"needs {', '.join(absent)}: {'; '.join(dict.fromkeys(absent.values()))}" if absent else None


@contextmanager
def visible(wanted: Iterable[str]) -> Iterator[None]:
    """Have these programs be seen inside, too."""
    names = [one for name in wanted for one in name.split("|")]
    if not names:
        yield
        return
    before = os.environ["PATH"]
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        link(Path(folder), names, os.environ[OUTSIDE])
        os.environ["PATH"] = os.pathsep.join((before, folder))
        try:
            yield
        finally:
            os.environ["PATH"] = before
