"""Stores: whole objects under their keys, and FileNotFoundError where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from typing import Any

from titan_testing.behaviour.subject import Check, Subject
from titan_testing.protocols import url_of

DATA = bytes(range(256)) * 16


def objects(subject: Subject) -> Iterator[str]:
    """Check what is written, replaced and deleted, as this instance and another one see it."""
    url, key = _place(subject)
    one, other = subject.build(url=url), subject.build(url=url)
    for data in (DATA[:10], DATA):
        one.write(f"{key}/step-1/a", BytesIO(data))
        for store in (one, other):
            if (found := store.read(f"{key}/step-1/a", 0, 2 * len(DATA))) != data:
                yield f"read returns {len(found)} bytes of an object of {len(data)}, or other bytes"
                return
    if one.read(f"{key}/step-1/a", 300, 100) != DATA[300:400]:
        yield "read does not return the 100 bytes from byte 300 on"
    one.write(f"{key}/step-1/b", BytesIO(b""))
    one.write(f"{key}/step-10/c", BytesIO(b"c"))
    yield from _listed(other, f"{key}/step-1", {"a": len(DATA), "b": 0})
    yield from _listed(other, key, {"step-1": None, "step-10": None})
    for name, size in (("step-1", None), ("step-1/a", len(DATA))):
        if (entry := other.stat(f"{key}/{name}")).size != size:
            yield f"stat of {name} returns size {entry.size}, but it is {size}"
    other.delete(f"{key}/step-1/a")
    yield from _listed(one, f"{key}/step-1", {"b": 0})
    yield from _absent(one, f"{key}/step-1/a")


def absent(subject: Subject) -> Iterator[str]:
    """Check that what is not there is a FileNotFoundError and nothing else."""
    url, key = _place(subject)
    store = subject.build(url=url)
    yield from _absent(store, f"{key}/nothing/here")
    with suppress(FileNotFoundError):
        if found := list(store.list(f"{key}/nothing")):
            yield f"list of a folder that is not there returns {found!r}"
    with suppress(FileNotFoundError):
        store.delete(f"{key}/nothing/here")


def _place(subject: Subject) -> tuple[str, str]:
    """Return the URL of an empty folder in the store, and its key."""
    url = url_of(subject.config, subject.folder) if subject.example is None else str(subject.example(0))
    return url, url.partition("://")[2].strip("/")


def _listed(store: Any, key: str, wanted: dict[str, int | None]) -> Iterator[str]:
    if (found := {entry.name: entry.size for entry in store.list(key)}) != wanted:
        yield f"list returns {found}, but there is {wanted}"


def _absent(store: Any, key: str) -> Iterator[str]:
    for method, given in (("stat", ()), ("read", (0, 10))):
        try:
            found = getattr(store, method)(key, *given)
        except FileNotFoundError:
            continue
        yield f"{method} of an object that is not there returns {found!r}: it must raise FileNotFoundError"


CHECKS: dict[str, dict[str, Check]] = {"store": {"objects": objects, "absent": absent}}
