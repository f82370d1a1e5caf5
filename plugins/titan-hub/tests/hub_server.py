"""A Hub on this machine: what huggingface_hub asks of it to push a model, over HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKENS = {
    "hf_ada": {"name": "ada", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}},
    "hf_read": {"name": "ada", "orgs": [], "auth": {"accessToken": {"role": "read"}}},
}


class Repo:
    def __init__(self, *, private: bool) -> None:
        self.private = private
        self.branches: dict[str, list[tuple[str, dict[str, bytes]]]] = {"main": [(_sha("begin"), {})]}
        """Commits of each branch: id and files."""

    def head(self, branch: str = "main") -> tuple[str, dict[str, bytes]]:
        return self.branches[branch][-1]

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        commits = self.branches[branch]
        commits.append((_sha(f"{branch} {len(commits)}"), {**commits[-1][1], **files}))
        return commits[-1][0]


class Hub(ThreadingHTTPServer):
    """Repositories, objects of LFS, and what was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.breaks: str | None = None
        """Part of a path at which the connection ends, once."""
        self.refuses: tuple[str, int] | None = None
        """Part of a path, and the status that answers it."""
        self.meanwhile: Any = None
        """Called once before a commit."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None: ...


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        hub, path = self.server, unquote(self.path.partition("?")[0])
        hub.asked.append(f"{self.command} {path}")
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if hub.breaks and hub.breaks in path:
            hub.breaks = None
            self.close_connection = True
            self.connection.close()
            return None
        if hub.refuses and hub.refuses[0] in path:
            return self._send(hub.refuses[1], {"error": "the server says no"})
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if self.command == "PUT":
            hub.objects[path.rpartition("/")[2]] = data
            return self._send(200, {})
        user = TOKENS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))
        if user is None:
            return self._send(401, {"error": "Invalid credentials"})
        if path == "/api/whoami-v2":
            return self._send(200, {"type": "user", **user})
        return self._of_repository(path, data)

    do_GET = do_POST = do_PUT = do_HEAD = _answer

    def _of_repository(self, path: str, data: bytes) -> None:
        hub = self.server
        if path == "/api/repos/create":
            asked = json.loads(data)
            name = f"{asked['organization']}/{asked['name']}"
            there = name in hub.repos
            hub.repos.setdefault(name, Repo(private=asked.get("visibility") == "private"))
            return self._send(409 if there else 200, {"url": f"{hub.url}/{name}"})
        if path.endswith(".git/info/lfs/objects/batch"):
            found = []
            for one in json.loads(data)["objects"]:
                upload = {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}
                found.append({**one, **({} if one["oid"] in hub.objects else {"actions": upload})})
            return self._send(200, {"transfer": "basic", "objects": found})
        owner, repository, verb, *rest = [*path.removeprefix("/api/models/").strip("/").split("/"), ""]
        name = f"{owner}/{repository}"
        return self._do(hub.repos[name], verb, "/".join(rest).rstrip("/"), data, name)

    def _do(self, repo: Repo, verb: str, rest: str, data: bytes, name: str) -> None:
        if verb == "resolve":
            file = repo.head()[1][rest.partition("/")[2]]
            return self._bytes(file, {"ETag": f'"{_sha(str(file))}"', "X-Repo-Commit": repo.head()[0]})
        if verb == "branch":
            repo.branches[rest] = list(repo.branches["main"])
            return self._send(200, {})
        branch = rest or "main"
        if branch not in repo.branches:
            return self._send(404, {"error": "Invalid rev"}, {"X-Error-Code": "RevisionNotFound"})
        sha, files = repo.head(branch)
        if verb == "preupload":
            return self._send(200, {"files": [_mode(one, files) for one in json.loads(data)["files"]]})
        if verb == "commit":
            return self._commit(repo, branch, data, name)
        siblings = [{"rfilename": file} for file in files]
        return self._send(200, {"id": name, "sha": sha, "private": repo.private, "siblings": siblings})

    def _commit(self, repo: Repo, branch: str, data: bytes, name: str) -> None:
        hub = self.server
        if hub.meanwhile:
            then, hub.meanwhile = hub.meanwhile, None
            then(repo)
        made: dict[str, bytes] = {}
        with hub.lock:
            for line in map(json.loads, data.splitlines()):
                value = line["value"]
                if line["key"] == "header" and value.get("parentCommit") not in (None, repo.head(branch)[0]):
                    return self._send(412, {"error": "A commit has happened since."})
                if line["key"] == "file":
                    made[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    made[value["path"]] = hub.objects[value["oid"]]
            sha = repo.commit(made, branch)
        return self._send(200, {"commitUrl": f"{hub.url}/{name}/commit/{sha}", "commitOid": sha})

    def _send(self, code: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        self._bytes(
            json.dumps(answer).encode(), {"Content-Type": "application/json", **(headers or {})}, code
        )

    def _bytes(self, data: bytes, headers: dict[str, str], code: int = 200) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


def _sha(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def _mode(asked: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    """Return how a file shall be uploaded, and what is there of it."""
    name = asked["path"]
    lfs = name.endswith((".safetensors", ".gguf"))
    found = {"path": name, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
    if (data := files.get(name)) is not None:
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        found["oid"] = hashlib.sha256(data).hexdigest() if lfs else blob
    return found


@contextmanager
def serving() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
