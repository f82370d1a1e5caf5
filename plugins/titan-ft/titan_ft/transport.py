"""The state of a replica on its way to another one: HTTP, as JSON and safetensors. Nothing is unpickled."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torchft.checkpointing import CheckpointTransport

from titancli import TitanError

MOST_JSON = 64 << 20
"""Bytes of the state without its tensors, at most."""
PIECE = 1 << 24
"""Bytes that are read at once."""


class Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    daemon_threads = True


class SafeTransport(CheckpointTransport[dict[str, Any]]):
    """torchft's exchange of states, without pickle: other replicas are not known.

    Args:
        timeout: how long a replica may be silent.
        size: returns the bytes of this replica's own tensors, which another's are not more than.
    """

    def __init__(self, timeout: timedelta, size: Callable[[], int]) -> None:
        self._seconds, self._size = timeout.total_seconds(), size
        self._staged: tuple[int, bytes] | None = None
        self._changed = threading.Condition()
        transport = self

        class Handler(BaseHTTPRequestHandler):
            timeout = transport._seconds

            def do_GET(self) -> None:
                data = transport._at(self.path)
                if data is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with suppress(OSError):  # the other one is gone
                    self.wfile.write(data)

            def log_message(self, format: str, *values: Any) -> None:
                """Say nothing: torchft tells of what goes wrong."""

        self._server = Server(("", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="titan-ft-state", daemon=True)
        self._thread.start()

    def _at(self, path: str) -> bytes | None:
        """Return the state of the step in a path, once it is there; None: it does not come."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._staged is not None and path == f"/state/{self._staged[0]}", self._seconds
            )
            return self._staged[1] if there and self._staged is not None else None

    def metadata(self) -> str:
        return f"http://{socket.gethostname()}:{self._server.server_address[1]}/state/"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        data = packed(state_dict)
        with self._changed:
            self._staged = (step, data)
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        with self._changed:
            self._staged = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """
        Raises:
            TitanError: the other replica does not answer, or its state is not one of this training.
        """
        where = urlsplit(f"{metadata}{int(step)}")
        if where.scheme != "http" or not where.hostname:
            raise TitanError(f"{metadata!r} is not the address of a replica")
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=timeout.total_seconds())
        try:
            connection.request("GET", where.path)
            answer = connection.getresponse()
            if answer.status != 200:
                raise TitanError(f"the replica at {where.netloc} has no state of step {step}")
            return unpacked(b"".join(self._pieces(answer)))
        except (OSError, http.client.HTTPException) as error:
            raise TitanError(f"the replica at {where.netloc} sends no state: {error}") from error
        finally:
            connection.close()

    def _pieces(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        most, found = self._size() + MOST_JSON, 0
        while piece := answer.read(PIECE):
            found += len(piece)
            if found > most:
                raise TitanError(f"a replica sends more than the {most:,} bytes that a state here may have")
            yield piece

    def shutdown(self, wait: bool = True) -> None:
        threading.Thread(target=self._close, daemon=not wait).start()

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def packed(state: dict[str, Any]) -> bytes:
    """Return a state of nested tables, whose leaves are tensors and plain JSON, as one text of bytes.

    Eight bytes with the length of the JSON, the JSON, in which a tensor is `{"tensor": N}`, and safetensors.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[str(len(tensors))] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": len(tensors) - 1}
        if isinstance(value, dict):
            return {"table": {str(key): plain(one) for key, one in value.items()}}
        return {"json": value}

    text = json.dumps(plain(state)).encode()
    return len(text).to_bytes(8, "big") + text + save(tensors)


def unpacked(data: bytes) -> dict[str, Any]:
    """Return a state from `packed`.

    Raises:
        TitanError: it is something else.
    """
    try:
        size = int.from_bytes(data[:8], "big")
        if size > MOST_JSON:
            raise ValueError(f"its table has {size} bytes")
        tensors = load(data[8 + size :])

        def whole(value: dict[str, Any]) -> Any:
            [(kind, content)] = value.items()
            if kind == "tensor":
                return tensors[str(int(content))]
            if kind == "table":
                return {key: whole(one) for key, one in content.items()}
            return content

        state = whole(json.loads(data[8 : 8 + size]))
        if not isinstance(state, dict):
            raise ValueError("it is no table")
        return state
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise TitanError(f"a replica sends something else than a state: {error}") from error


def bytes_of(tensors: dict[str, torch.Tensor]) -> int:
    """Return the bytes of these tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())
