"""An object store that misbehaves: a real file system for fsspec, under `odd://`, whose objects are files of
a folder on a disk. What goes wrong says the environment, so that processes of their own can be told, too:

`ODD=CALLS:FAULT`, several with blanks between; `CALLS` is one of `GROUPS`, or `name|name`, and `FAULT` one of

- `raise`, `raise-N` (the first N of these calls in a process), `raise-N%` (at random, by a fixed seed)
- `flip-N`, `truncate-N`: so many times other bytes are stored, or handed out, than there are
- `hang`: never answers, in a thread of asyncio's executor, as the look-up of a host name does
- `stale`: a listing is the first one that was made of this folder

Given to `titan -p`, it is a plugin file that makes `odd://` known.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.asyn import get_loop, sync

ODD = "ODD"
GROUPS = {
    "*": "info|ls|cat_file|get_file|put_file|pipe_file|rm_file",
    "looks": "info|ls",
    "reads": "cat_file|get_file",
    "writes": "put_file|pipe_file|rm_file",
}


class Odd(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Objects by their keys; like a store it has no folders but what is in the names."""

    protocol = "odd"
    cachable = False
    calls: ClassVar[dict[str, int]] = {}
    """How often each was made in this process."""
    listings: ClassVar[dict[str, list[dict[str, Any]]]] = {}
    chance = random.Random(0)
    release = threading.Event()
    """Set it, and what hangs ends."""

    # ------------------------------------------------------------------------------ what goes wrong

    def _now(self, call: str) -> str | None:
        """Let a call fail or hang; return which fault is left to it."""
        for part in os.environ.get(ODD, "").split():
            calls, _, fault = part.partition(":")
            if call not in GROUPS.get(calls, calls).split("|"):
                continue
            kind, _, count = fault.partition("-")
            if count.endswith("%"):
                if self.chance.random() * 100 >= float(count[:-1]):
                    continue
            elif count:
                done = self.calls[part] = self.calls.get(part, 0) + 1
                if done > int(count):
                    continue
            if kind == "raise":
                raise OSError(f"503 Slow Down ({call})")
            if kind == "hang":
                sync(get_loop(), self._hang)
                raise OSError("the process is gone")
            return kind
        return None

    async def _hang(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.release.wait)

    @staticmethod
    def _harmed(data: bytes, fault: str | None) -> bytes:
        if fault == "truncate":
            return data[: len(data) // 2]
        return data[:-1] + bytes([data[-1] ^ 1]) if fault == "flip" and data else data

    # --------------------------------------------------------------------------------------- the store

    @classmethod
    def forget(cls) -> None:
        """Begin anew: what hangs ends, and nothing is remembered."""
        cls.release.set()
        cls.release = threading.Event()
        cls.calls.clear()
        cls.listings.clear()
        cls.chance.seed(0)

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        self._now("info")
        file = Path(self._strip_protocol(path))
        if file.is_file():
            return {"name": str(file), "size": file.stat().st_size, "type": "file"}
        if any(self._below(file)):
            return {"name": str(file), "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **more: Any) -> list[Any]:
        fault, folder = self._now("ls"), Path(self._strip_protocol(path))
        if fault != "stale" or str(folder) not in self.listings:
            rows = []
            for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
                if entry.is_file() or any(self._below(entry)):
                    kind = "file" if entry.is_file() else "directory"
                    size = entry.stat().st_size if kind == "file" else 0
                    rows.append({"name": str(entry), "size": size, "type": kind})
            self.listings[str(folder)] = rows
        if not (rows := self.listings[str(folder)]):
            raise FileNotFoundError(path)
        return rows if detail else [row["name"] for row in rows]

    @staticmethod
    def _below(folder: Path) -> Iterator[Path]:
        return (path for path in folder.rglob("*") if path.is_file())

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        data = Path(self._strip_protocol(path)).read_bytes()[start:end]
        return self._harmed(data, self._now("cat_file"))

    def get_file(self, path: str, target: str, **more: Any) -> None:
        data = Path(self._strip_protocol(path)).read_bytes()
        Path(target).write_bytes(self._harmed(data, self._now("get_file")))

    def put_file(self, source: str, path: str, **more: Any) -> None:
        self._put("put_file", path, Path(source).read_bytes())

    def pipe_file(self, path: str, data: bytes, **more: Any) -> None:
        self._put("pipe_file", path, data)

    def _put(self, call: str, path: str, data: bytes) -> None:
        fault, file = self._now(call), Path(self._strip_protocol(path))
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{threading.get_ident()}")
        new.write_bytes(self._harmed(data, fault))
        new.rename(file)  # an object is the old one, or the new one

    def rm_file(self, path: str) -> None:
        self._now("rm_file")
        Path(self._strip_protocol(path)).unlink()


fsspec.register_implementation("odd", Odd, clobber=True)
