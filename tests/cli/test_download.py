"""`titan download`: from a server that answers as the Hub does, and the lines that lead to it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Titan

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"eos_token": "</s>"}',
    "config.json": b'{"model_type": "llama"}',
    "README.md": b"# not needed",
    "model.safetensors": b"w" * 4096,
    "pytorch_model.bin": b"never",
    "original/consolidated.00.safetensors": b"never",
}


class Hub(BaseHTTPRequestHandler):
    """One repository, `lab/tiny`; `lab/gated` is gated, and there is no other."""

    asked: list[str]

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/lab/gated"):
            return self._send(403, b"", body, {"X-Error-Code": "GatedRepo"})
        if path.startswith("/api/models/lab/tiny/revision/"):
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": "lab/tiny", "sha": SHA, "siblings": siblings}
            return self._send(200, json.dumps(info).encode(), body)
        if path.startswith("/api/models/lab/tiny/tree/"):
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            return self._send(200, json.dumps(rows).encode(), body)
        _, _, name = path.partition(f"/resolve/{SHA}/")
        if name in FILES:
            data = FILES[name]
            if body:
                type(self).asked.append(name)
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": SHA}
            return self._send(200, data, body, headers)
        return self._send(404, b"", body, {"X-Error-Code": "RepoNotFound"})

    def _send(self, code: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def download(hub: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: huggingface_hub reads HF_ENDPOINT as it is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "home"), "NO_PROXY": "127.0.0.1"}
    titan = Path(sys.executable).with_name("titan")
    return subprocess.run(
        [titan, "download", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.e2e
@pytest.mark.cold
def test_what_is_needed_is_downloaded_once_and_where_a_recipe_reads_it(hub: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'assets = "lab/tiny"\nweights = "./my assets"\n[tokenizer]\ntype = "hf"\npath = "./my assets"\n'
    )
    done = download(hub, tmp_path, "lab/tiny")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "assets/tiny"
    assert sorted(Hub.asked) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert all((folder / name).read_bytes() == FILES[name] for name in Hub.asked)
    assert done.stdout.splitlines() == [str(Path("assets/tiny") / name) for name in sorted(Hub.asked)]

    Hub.asked.clear()
    assert download(hub, tmp_path, "lab/tiny", "--weights").returncode == 0
    assert Hub.asked == ["model.safetensors"]

    Hub.asked.clear()
    assert download(hub, tmp_path, "mine.toml").returncode == 0  # with its weights, since it starts from them
    assert (tmp_path / "my assets/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "original/consolidated.00.safetensors" not in Hub.asked

    for repository, said in (("lab/gone", "there is no repository lab/gone"), ("lab/gated", "is gated")):
        refused = download(hub, tmp_path, repository)
        assert refused.returncode == 5
        assert said in refused.stderr and "hf auth login" in refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.e2e
@pytest.mark.cold
def test_a_hub_that_cannot_be_reached_is_said_in_words(tmp_path: Path) -> None:
    done = download("http://127.0.0.1:9", tmp_path, "lab/tiny")
    assert done.returncode == 5
    assert "cannot download lab/tiny: " in done.stderr and "Traceback" not in done.stderr


def test_the_error_of_a_bundled_recipe_is_the_line_that_downloads_its_assets(titan: Titan) -> None:
    done = titan("train", "llama3_8b")
    assert done.code == 5
    line = "titan download meta-llama/Llama-3.1-8B --dir assets/Llama-3.1-8B"
    assert done.err.splitlines()[-1].strip() == f"download it: {line}"
    with_weights = titan("train", "llama3_8b", "weights=./assets/Llama-3.1-8B")
    assert "titan download meta-llama/Llama-3.1-8B --weights --dir" in with_weights.err


def test_so_is_that_of_a_recipe_whose_model_is_that_of_its_weights(titan: Titan, tmp_path: Path) -> None:
    Path("mine.toml").write_text(
        'assets = "lab/tiny"\nweights = "~/m"\ndataset = "python_stdlib"\n'
        '[tokenizer]\ntype = "hf"\npath = "~/m"\n[training]\nsteps = 1\n'
    )
    done = titan("train", "mine.toml")
    assert "download it: titan download lab/tiny --weights --dir " in done.err


def test_a_recipe_without_a_repository_says_what_to_write(titan: Titan) -> None:
    done = titan("download", "llama3_debug")
    assert done.code == 2
    assert 'assets = "OWNER/NAME"' in done.err


def test_assets_are_the_name_of_a_repository(titan: Titan) -> None:
    done = titan("validate", "llama3_debug", "assets=https://x.y/z/w")
    assert done.code == 3 and "is not the name of a repository" in done.err
