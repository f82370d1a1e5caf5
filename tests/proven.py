"""What a run of the tests has proven, one line each, out of what the tests themselves reported.

A test says `record_property(KEY, value)`, which reaches pytest's main process from any worker; each KEY below
makes a line of all its values, and some a table as well. What no test reported has no line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

WORST = 3
"""Rows of layouts that are shown however long the table is."""


class Fact(NamedTuple):
    value: Any
    passed: bool
    """Whether the test did that reported it."""


Facts = list[Fact]
Outcomes = dict[str, str]
"""By test."""


def of(facts: Facts) -> str:
    """`8` where all passed, else `7 of 8`."""
    passed = sum(fact.passed for fact in facts)
    return f"{passed}" if passed == len(facts) else f"{passed} of {len(facts)}"


def names(facts: Facts, passed: bool = True) -> list[str]:
    """Each value once, of the tests that passed or of those that did not."""
    return list(dict.fromkeys(str(fact.value) for fact in facts if fact.passed == passed))


# ------------------------------------------------------------------------------------------------- layouts


def largest(row: dict[str, Any]) -> float:
    return max(row[kind] for kind in ("loss", "norm", "gradient", "weight"))


def layouts(facts: Facts) -> list[str]:
    rows = [fact.value for fact in facts]
    rows.sort(key=lambda row: largest(row) / row["tolerance"], reverse=True)
    found = [f"{of(facts)} agree with one rank; the largest relative differences, by what is allowed:"]
    for row in rows[:WORST]:
        where = f"{row['layout']} ({row['optimizer']}): {row['worst']}" + (", a tie" if row["tie"] else "")
        found.append(f"{largest(row):.1e} of {row['tolerance']:.0e}  {where}")
    return found


def layouts_table(facts: Facts) -> list[str]:
    rows = [fact.value for fact in facts]
    width = max(len(row["layout"]) for row in rows)
    lines = [f"{'layout':<{width}}  ranks  optim  loss     norm     gradient weight   allowed  seconds"]
    for row in rows:
        numbers = (row[kind] for kind in ("loss", "norm", "gradient", "weight", "tolerance"))
        shown = "  ".join(f"{number:.1e}" for number in numbers)
        begins = f"{row['layout']:<{width}}  {row['ranks']:>5}  {row['optimizer']:<5}"
        lines.append(f"{begins}  {shown}  {row['seconds']:>7.1f}" + ("  a tie" if row["tie"] else ""))
    return lines


# -------------------------------------------------------------------------------------- raise, then go on


def raised(facts: Facts) -> list[str]:
    counts = Counter(found for fact in facts for _, _, found in fact.value["rows"])
    equal, refuses, absent = (counts.pop(name, 0) for name in ("equal", "refuses", "-"))
    tried = equal + refuses + counts.total()
    found = (
        f"{tried} errors in the middle of verbs, on {of(facts)} layouts: {equal} leave no trace in the next"
    )
    found += f" step, {refuses} an engine that refuses all verbs until it is loaded"
    found += f", {counts.total()} are WRONG" if counts else ""
    return [found + (f" ({absent} verbs do not exist there)" if absent else "")]


def raised_table(facts: Facts) -> list[str]:
    """Verbs downward, layouts across."""
    by_layout = {fact.value["layout"]: fact.value["rows"] for fact in facts}
    rows = list(dict.fromkeys((verb, what) for found in by_layout.values() for verb, what, _ in found))
    width = max(len(f"{verb}: {what}") for verb, what in rows)
    lines = [f"{number}: {name}" for number, name in enumerate(by_layout, start=1)]
    lines.append(" " * width + "".join(f"{number:>9}" for number in range(1, len(by_layout) + 1)))
    for row in rows:
        cells = [
            next((text for *key, text in found if tuple(key) == row), "") for found in by_layout.values()
        ]
        shown = "".join(f"{text if len(text) < 9 else 'WRONG':>9}" for text in cells)
        lines.append(f"{f'{row[0]}: {row[1]}':<{width}}{shown}")
    return lines


# -------------------------------------------------------------------------------------------------- others


def faults(facts: Facts, outcomes: Outcomes) -> list[str]:
    """Of the matrix in tests/faults, by what its tests did in this run."""
    ran: dict[str, set[str]] = {}
    for nodeid, outcome in outcomes.items():
        ran.setdefault(nodeid.partition("[")[0], set()).add(outcome)
    survived, partly, broken, tests = 0, 0, [], set()
    for fact in facts:
        proofs = [ran.get(f"tests/{name}", set()) for name in fact.value["tests"]]
        if any("failed" in proof for proof in proofs):
            broken.append(fact.value["fault"])
        elif all("passed" in proof for proof in proofs):
            survived += 1
            tests.update(fact.value["tests"])
        else:
            partly += 1
    tried = survived + len(broken)
    found = (
        f"{survived} of {tried} survived, by {len(tests)} tests" if tried else f"none of {len(facts)} tried"
    )
    if tried and partly:
        found += f"; {partly} others are not tried here, or by a part of their tests"
    return [found + "".join(f"; FAILED: {fault}" for fault in broken)]


def faults_table(facts: Facts) -> list[str]:
    return [f"{fact.value['fault']}: {fact.value['holds']}" for fact in facts]


def snippets(facts: Facts) -> list[str]:
    pages = {fact.value["page"] for fact in facts}
    counts: Counter[str] = Counter()
    for fact in facts:
        if fact.passed:
            counts[fact.value["what"]] += fact.value["count"]
    found = ", ".join(f"{count} {what}" for what, count in counts.items())
    failed = "".join(f"; FAILED {fact.value['page']}" for fact in facts if not fact.passed)
    return [f"{found or 'nothing'}, of {len(pages)} pages{failed}"]


def killed_saves(facts: Facts) -> list[str]:
    kills = sum(fact.value for fact in facts if fact.passed)
    failed = "" if all(fact.passed for fact in facts) else f"; {of(facts)} ways, the others FAILED"
    return [f"{kills} kills -9 of a process that saves: the newest good checkpoint loads each time{failed}"]


def kills(facts: Facts) -> list[str]:
    passed: Counter[str] = Counter()
    for fact in facts:
        if fact.passed:
            passed[fact.value["when"]] += fact.value["kills"]
    found = "; ".join(f"{count} {when}" for when, count in passed.items())
    failed = "".join(f"; FAILED {fact.value['when']}" for fact in facts if not fact.passed)
    return [f"{passed.total()} kills -9, each run then bit for bit the one without: {found}{failed}"]


def relayout(facts: Facts) -> list[str]:
    return [
        " -> ".join(fact.value["chain"])
        + (
            f": the losses of one rank within {fact.value['within']:g} throughout"
            if fact.passed
            else ": FAILED"
        )
        for fact in facts
    ]


def plain(template: str) -> Callable[[Facts], list[str]]:
    def line(facts: Facts) -> list[str]:
        found = template.format(count=of(facts), names=", ".join(names(facts)) or "none")
        return [found + "".join(f"; FAILED {name}" for name in names(facts, passed=False))]

    return line


LINES: dict[str, tuple[str, Callable[..., list[str]]]] = {
    "layout": ("layouts", layouts),
    "raised": ("raise, then go on", raised),
    "fault": ("faults", faults),
    "killed saves": ("kills: checkpoints", killed_saves),
    "kills": ("kills: runs", kills),
    "relayout": ("from layout to layout", relayout),
    "logits": ("families: logits", plain("those of the reference implementation for {names}")),
    "family": ("families: whole runs", plain("{names} learn, go on bit for bit, and are exported")),
    "snippet": ("documentation", snippets),
    "exit code": ("errors", plain("{count} exit codes are reached by commands: {names}")),
}
TABLES: dict[str, tuple[str, Callable[[Facts], list[str]]]] = {
    "layout": ("same answer: largest relative differences from one rank", layouts_table),
    "raised": ("raise, then go on: the clean step after it, against an engine unharmed", raised_table),
    "fault": ("faults, and what holds", faults_table),
}


def lines_of(facts: dict[str, Facts], outcomes: Outcomes) -> list[tuple[str, bool]]:
    """The lines, and whether each is of something that failed."""
    width = max(len(title) for title, _ in LINES.values())
    shown = []
    for key, (title, line) in LINES.items():
        if found := facts.get(key):
            first, *others = line(found, outcomes) if key == "fault" else line(found)
            wrong = not all(fact.passed for fact in found) or "FAILED" in first
            shown.append((f"{title:<{width}}  {first}", wrong))
            shown += [(" " * (width + 2) + other, wrong) for other in others]
    return shown


def tables_of(facts: dict[str, Facts]) -> list[tuple[str, list[str]]]:
    return [(title, table(facts[key])) for key, (title, table) in TABLES.items() if key in facts]
