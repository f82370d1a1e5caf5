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
from titancli.cli import main
from titancli.data.hub import Hosted
from titancli.errors import EnvironmentProblem

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


# ------------------------------------------------------------------------------- in the place of a folder


TINY = """\
extends = "titan:llama3_debug"
name = "hosted"
weights = "hf://lab/tiny"
[model]
dim = 32
n_layers = 1
[tokenizer]
type = "hf"
path = "hf://lab/tiny"
[dataset]
type = "text_files"
paths = ["text.txt"]
[training]
steps = 1
seq_len = 16
local_batch_size = 1
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A Hugging Face folder of a tiny model with a tokenizer, as its files."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("exported")
    words = {chr(code): code for code in range(128)} | {"</s>": 128}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text("a text " * 400)
    before = Path.cwd()
    os.chdir(folder)
    try:
        small = ("model.dim=32", "model.n_layers=1", "training.steps=1", "training.seq_len=16")
        data = ("dataset=text_files", 'dataset.paths=["text.txt"]', "training.local_batch_size=1")
        assert main(["train", "llama3_debug", "--run-dir", "r", *small, *data]) == 0
        assert main(["convert-checkpoint", "r/checkpoints/step-1", "out", "--to", "hf"]) == 0
    finally:
        os.chdir(before)
    files = {file.name: file.read_bytes() for file in (folder / "out").iterdir()}
    return files | {
        "tokenizer.json": (folder / "tokenizer.json").read_bytes(),
        "tokenizer_config.json": b'{"eos_token": "</s>"}',
    }


def test_a_run_takes_tokenizer_and_weights_from_a_repository_and_goes_on_from_the_same_commit(
    hub: str, exported: dict[str, bytes], titan: Titan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub)
    template = f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(f"{__name__}.FILES", exported)
    Path("mine.toml").write_text(TINY)
    Path("text.txt").write_text("a text " * 400)
    assert titan("validate", "mine.toml").code == 0 and titan("train", "mine.toml", "--dry-run").code == 0
    assert Hub.asked == []  # nothing is fetched to read a recipe

    monkeypatch.setattr("titancli.engine.first_weights.PROGRESS_SECONDS", 0.0)
    done = titan("train", "mine.toml", "--run-dir", "r")
    assert done.code == 0, done.err
    assert "loading weights: 2 of 12 tensors" in done.err
    assert "training on CPU, 1 rank, 0.0057 epochs of 2,801 tokens" in done.err
    assert f"weights from hf://lab/tiny@{SHA}" in done.err
    lock = Path("r/recipe.lock.toml").read_text()
    assert lock.count(f'"hf://lab/tiny@{SHA}"') == 2
    Hub.asked.clear()
    monkeypatch.setattr(f"{__name__}.SHA", "f" * 40)  # the branch has moved meanwhile
    again = titan("train", "mine.toml", "--run-dir", "r", "--resume", "training.steps=2")
    assert again.code == 0, again.err
    assert lock.count(SHA) == 0 and Hub.asked == []
    assert Path("r/recipe.lock.toml").read_text().count('"hf://lab/tiny@0123456789abcdef') == 2


def test_without_a_network_and_without_a_copy_the_error_is_the_line_that_downloads_it(
    titan: Titan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    Path("mine.toml").write_text(TINY)
    Path("text.txt").write_text("a text")
    done = titan("train", "mine.toml", "--run-dir", "r")
    assert done.code == 5 and "cannot download lab/tiny: " in done.err
    assert "titan download lab/tiny --dir assets/tiny; then give that folder instead" in done.err
    wrong = titan("train", "mine.toml", "weights=hf://tiny")
    assert wrong.code == 5 and "write hf://OWNER/NAME, or hf://OWNER/NAME@REVISION" in wrong.err
    assert not Path("r").exists()
    with pytest.raises(EnvironmentProblem, match="hf://lab/tiny@v1 is not in the cache") as caught:
        Hosted("lab/tiny", "v1").folder  # noqa: B018 - a worker's, on a machine that has not downloaded it
    assert "titan download lab/tiny --revision v1 --dir assets/tiny" in str(caught.value.hint)
