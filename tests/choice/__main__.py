"""`python -m tests.choice record|choose|changed|mutants`: see `tests/choice/__init__.py`."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.choice import START, changed, choose, costs, mutants
from tests.choice.reading import ROOT, read

FOLDER = ROOT / ".tests"
"""Where by default is kept what was measured: in `last` what the last run left, and in `ran.sqlite` which
functions each test ran when it was measured last."""
SETTINGS = """\
[run]
branch = true
parallel = true
relative_files = true
core = ctrace
patch = _exit
context = ${PYTEST_CURRENT_TEST-}
data_file = %(last)s/data/c
source =
    %(root)s/titancli
    %(root)s/plugins
    %(root)s/tests
"""


def record(folder: Path, words: Sequence[str], workers: int) -> int:
    """Run tests measured, and write down what they ran. Returns pytest's exit code."""
    last = folder / "last"
    shutil.rmtree(last, ignore_errors=True)
    for name in ("data", "costs"):
        (last / name).mkdir(parents=True)
    (last / "settings").write_text(SETTINGS % {"root": ROOT, "last": last})
    command = [sys.executable, "-m", "pytest", "-p", "tests.choice.costs", "-n", str(workers)]
    command += ["--dist", "loadfile", "--max-worker-restart", "0", *words]
    measured = {START: str(last / "settings"), costs.FOLDER: str(last / "costs")}
    code = subprocess.run(command, cwd=ROOT, env=os.environ | measured).returncode
    changed.remember(folder / "ran.sqlite", read(last).values())
    return code


def run_changed(folder: Path, words: Sequence[str], workers: int) -> int:
    """Run the tests that what was edited can break, and measure them anew."""
    if not (ran := folder / "ran.sqlite").exists():
        print(
            "no test has been measured here yet: make record (all tests once, which takes a while)",
            file=sys.stderr,
        )
        return 2
    tests, unknown = changed.affected(ran)
    if unknown:
        print(
            f"what depends on these is not known, `make test` runs all: {' '.join(unknown)}", file=sys.stderr
        )
    if not tests:
        print("no test ran what was edited", file=sys.stderr)
        return 0
    names = folder / "changed.txt"
    names.write_text("\n".join(tests))
    return record(folder, [f"@{names}", *words], workers)


def write_choice(folder: Path) -> int:
    """Write `tests/nightly.txt` from the last measured run, and print what that keeps and saves."""
    tests = read(folder / "last")
    stay = choose.choose(tests, choose.questions(tests))
    left_out = [test for name, test in tests.items() if name not in stay]
    choose.write(test.name for test in left_out if not test.slow)
    needed = sorted(name for name in stay if tests[name].slow)
    cpu = sum(test.cpu for test in tests.values() if not test.slow)
    saved = sum(test.cpu for test in left_out if not test.slow)
    print(f"{len(stay)} of {len(tests)} tests stay; {saved:.0f} of {cpu:.0f} CPU-seconds are saved")
    for name in needed:
        print(f"marked slow, and needed: {name} ({tests[name].cpu:.0f} CPU-seconds)")
    return 1 if needed else 0


def run_mutants(folder: Path, count: int, seed: int, copies: Sequence[Path]) -> int:
    """Put faults into copies of the repository, and print whether the tests that stay notice each."""
    tests = {name: test for name, test in read(folder / "last").items() if test.passed}
    left_out = choose.nightly() | {name for name, test in tests.items() if test.slow}
    lines = mutants.lines_of(tests.values())
    print(f"seed {seed}, {count} faults")
    rows = mutants.run(mutants.drawn(ROOT, lines, count, seed), tests, left_out, copies)
    noticed = {"make test": 0, "make test-all": 0, "no test": 0}
    for row in rows:
        noticed[row.by] += 1
        print(json.dumps(row._asdict()), flush=True)
    print(noticed)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.choice", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where measurements are kept")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "changed"):
        command = commands.add_parser(name)
        command.add_argument("--workers", type=int, default=2)
    commands.add_parser("choose")
    command = commands.add_parser("mutants")
    command.add_argument("--count", type=int, default=80)
    command.add_argument("--seed", type=int, default=random.randrange(2**32))
    command.add_argument(
        "copies", nargs="+", type=Path, help="copies of the repository with a .venv of their own"
    )
    given, words = parser.parse_known_args()
    if given.command in ("record", "changed"):
        run = record if given.command == "record" else run_changed
        return run(given.folder.resolve(), words, given.workers)
    if words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    if given.command == "choose":
        return write_choice(given.folder)
    return run_mutants(given.folder, given.count, given.seed, given.copies)


if __name__ == "__main__":
    sys.exit(main())
