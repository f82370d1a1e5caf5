"""A plugin's store that misbehaves, `shelf://`: a folder on a disk without fsspec. Given to `titan -p`.

`SHELF=METHOD:FAULT`, several with blanks between, says what goes wrong; `METHOD` may be `*`, and `FAULT` is

- `raise`, or `raise-N`: the first N of these calls in a process
- `half`: after half of the bytes were written
- `hang`: the call never returns
- `junk`: it returns something else than it must
- `nothing`: it finds nothing, on the ranks in `SHELF_RANKS` (none given: everywhere)
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from titancli import component, hookimpl
from titancli.protocols import Entry

CALLS: Counter[str] = Counter()


@component("store", "shelf", target="shelf:Shelf")
class Config:
    """Files of a folder."""

    label: str = ""
    """Part of the names of its files."""


class Shelf:
    def __init__(self, config: Config, *, url: str) -> None:
        if (label := config.label) == "broken":
            raise ValueError("no such shelf")
        self.end = f".{label}" if label else ""

    def path(self, key: str) -> Path:
        return Path(f"/{key}{self.end}")

    def stat(self, key: str) -> Entry:
        return faulty("stat", lambda: self._entry(key))

    def _entry(self, key: str) -> Entry:
        name = key.rpartition("/")[2]
        if Path(f"/{key}").is_dir():
            return Entry(name, None)
        return Entry(name, self.path(key).stat().st_size)

    def list(self, key: str) -> Any:
        def listed() -> list[Entry]:
            names = [path.name.removesuffix(self.end) for path in Path(f"/{key}").iterdir()]
            return [self._entry(f"{key}/{name}") for name in names]

        return faulty("list", listed)

    def read(self, key: str, start: int, size: int) -> bytes:
        return faulty("read", lambda: self.path(key).read_bytes()[start : start + size])

    def write(self, key: str, source: IO[bytes]) -> None:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{threading.get_ident()}")
        if not isinstance(source, BytesIO) and fault_of("upload") == "half":
            part.write_bytes(source.read(100))
            raise OSError("the shelf has fallen down")
        faulty(
            "upload" if not isinstance(source, BytesIO) else "write", lambda: part.write_bytes(source.read())
        )
        part.rename(path)

    def delete(self, key: str) -> None:
        faulty("delete", lambda: self.path(key).unlink())


def faulty(method: str, call: Callable[[], Any]) -> Any:
    fault = fault_of(method)
    if fault == "raise":
        raise OSError("the shelf is locked")
    if fault == "hang":
        threading.Event().wait()
    if fault == "junk":
        return ["junk"]
    if fault == "nothing":
        raise FileNotFoundError(method)
    return call()


def fault_of(method: str) -> str | None:
    for part in os.environ.get("SHELF", "").split():
        of, _, fault = part.partition(":")
        kind, _, count = fault.partition("-")
        if of not in ("*", method):
            continue
        CALLS[part] += 1
        ranks = os.environ.get("SHELF_RANKS")
        elsewhere = ranks is not None and os.environ.get("RANK") not in ranks.split(",")
        if not (elsewhere or (count and CALLS[part] > int(count))):
            return kind
    return None


titan_components = hookimpl(lambda: [Config], specname="titan_components")
