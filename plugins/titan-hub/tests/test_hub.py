"""`titan hub`: pushes to a server on this machine, by the real huggingface_hub."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, serving
from huggingface_hub import ModelCard, constants

from tests.run.conftest import Finished, in_this_process, trained
from titan_hub.card import is_ours, without_paths
from titan_hub.files import collect
from titan_hub.source import base_model_of

SMALL = ("training.steps=2", "checkpoint.interval=2", "model.n_layers=1")
VALIDATION = 'validation={freq=2, steps=1, datasets={held={type="text_files", paths=["text.txt"]}}}'


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the run `run`, and `out`, its exported folder."""
    folder = tmp_path_factory.mktemp("very-private-folder")
    trained(folder, "--run-dir", "run", *SMALL, VALIDATION)
    return folder


@pytest.fixture
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def titan(capfd: pytest.CaptureFixture[str]) -> Any:
    return in_this_process(capfd)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "hf_ada")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a small exported folder, `./model`."""
    import numpy as np
    from safetensors.numpy import save_file

    monkeypatch.chdir(tmp_path)
    folder = Path("model")
    folder.mkdir()
    save_file({"w": np.arange(8, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    return folder


def push(titan: Any, *words: Any) -> Finished:
    done: Finished = titan("hub", "push", *words)
    assert "Traceback" not in done.err and "hf_ada" not in done.out + done.err
    return done


def test_a_run_is_pushed_with_card_and_recipe_and_nothing_of_this_machine(
    here: Path, titan: Any, hub: Hub
) -> None:
    planned = push(titan, "run", "lab/tiny", "--dry-run")
    assert planned.code == 0 and hub.asked == [] and hub.url in planned.out
    done = push(titan, "run", "lab/tiny", "--license", "mit")
    assert done.code == 0, done.err
    files = hub.repos["lab/tiny"].head()[1]
    assert sorted(files) == sorted(
        ["README.md", "config.json", "generation_config.json", "model.safetensors", "recipe.toml"]
    )
    listed = {line.split()[1]: line.split()[0] for line in done.out.splitlines() if line.startswith("  ")}
    assert listed == {name: f"{len(data):,}" for name, data in files.items()}
    assert f"{sum(map(len, files.values())):,} bytes" in done.out and "pushed: " in done.out

    assert titan("convert-checkpoint", "run", "out", "--to", "hf").code == 0
    for name in ("model.safetensors", "config.json"):
        assert files[name] == (here / "out" / name).read_bytes()
    card = ModelCard(files["README.md"].decode())
    assert (card.data.library_name, card.data.license, card.data.tags) == ("transformers", "mit", ["titan"])
    for words in ("| loss | ", "validation/held/loss", "this is step 2", "contents = ", "titan 0.1.0"):
        assert words in card.content, words
    text = files["README.md"].decode() + files["recipe.toml"].decode()
    for private in (str(here), here.name, "/tmp", f"/{getpass.getuser()}", f'"{socket.gethostname()}"'):
        assert private not in text
    assert 'paths = [\n    "./text.txt",\n]' in text  # relative

    (here / "recipe.toml").write_bytes(files["recipe.toml"])
    checked = titan("validate", "recipe.toml")
    assert checked.code == 0, checked.err

    twice = push(titan, "run", "lab/tiny", "--license", "mit")
    assert twice.code == 0 and "nothing has changed" in twice.out
    assert len(hub.repos["lab/tiny"].branches["main"]) == 2
    printed = titan("hub", "card", "run", "--license", "mit")
    assert printed.code == 0 and printed.out.startswith("---\nlibrary_name: transformers\n")


def test_a_damaged_checkpoint_is_named_and_no_repository_is_made(here: Path, titan: Any, hub: Hub) -> None:
    weights = next(Path("run/checkpoints/step-2").glob("rank-*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    for src in ("run", "run/checkpoints/step-2"):
        done = push(titan, src, "ada/tiny")
        assert done.code in (1, 5) and "step-2" in done.err, done.err
    assert hub.repos == {}
    done = push(titan, "text.txt", "ada/tiny")
    assert done.code == 2 and "text.txt is a file" in done.err
    assert push(titan, "nowhere", "ada/tiny").code == 5


def test_where_there_is_no_network_the_plan_and_the_line_for_later_are_printed(
    model: Path, titan: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["titan", "hub", "push", "model", "ada/tiny"])
    expected = push(titan, "model", "ada/tiny", "--dry-run").out
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = push(titan, "model", "ada/tiny")
    assert (done.code, done.out) == (69, expected) and "model.safetensors" in done.out
    assert "HF_HUB_OFFLINE is set" in done.err
    assert "where there is a network: titan hub push model ada/tiny" in done.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = push(titan, "model", "ada/tiny")
    assert done.code == 69 and "cannot be reached" in done.err
    assert done.out == expected.replace(hub.url, "http://127.0.0.1:9")


@pytest.mark.e2e
@pytest.mark.cold
def test_offline_in_a_process_of_its_own(model: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {"HF_HUB_OFFLINE": "1"}
    command = [Path(sys.executable).with_name("titan"), "hub", "push", "model", "ada/tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 69 and "3 files, " in done.stdout and "Traceback" not in done.stderr
    assert "titan hub push model ada/tiny" in done.stderr


def test_a_hub_that_is_silent_is_not_waited_for(
    model: Path, titan: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("titan_hub.push.ANSWER", 0.2)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        done = push(titan, "model", "ada/tiny")
    assert done.code == 69 and "cannot be reached" in done.err


def test_tokens_and_repositories_of_others_are_refused_by_name(
    model: Path, titan: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = push(titan, "model", "bob/tiny")
    assert done.code == 5 and "bob/tiny belongs to bob, and you are ada" in done.err
    for token, words in (("hf_no", "HTTP 401"), ("hf_read", "may only read"), (None, "there is no token")):
        monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
        done = push(titan, "model", "ada/tiny")
        assert done.code == 5 and words in done.err and "hf auth login" in done.err, done.err
    monkeypatch.setenv("HF_TOKEN", "hf_ada")
    hub.refuses = ("/commit/", 403)
    done = push(titan, "model", "lab/tiny")
    assert done.code == 5 and "refuses to push" in done.err and "the server says no" in done.err
    assert len(hub.repos["lab/tiny"].branches["main"]) == 1
    for name, words in (("tiny", "names no owner"), ("a/b/c", "is not a repository")):
        done = push(titan, "model", name)
        assert done.code == 2 and words in done.err
    assert push(titan, "model", "ada/tiny", "--revision", "a" * 40).code == 2


def test_a_connection_that_breaks_leaves_nothing_half_and_the_same_line_goes_on(
    model: Path, titan: Any, hub: Hub
) -> None:
    hub.breaks = "/commit/"
    done = push(titan, "model", "ada/tiny")
    assert done.code == 69 and "the same command again" in done.err
    assert hub.repos["ada/tiny"].head()[1] == {}
    assert push(titan, "model", "ada/tiny").code == 0
    assert sorted(hub.repos["ada/tiny"].head()[1]) == ["README.md", "config.json", "model.safetensors"]
    assert sum(line.startswith("PUT ") for line in hub.asked) == 1  # weights are sent once


def test_of_two_pushes_at_once_one_is_there_and_the_other_says_so(model: Path, titan: Any, hub: Hub) -> None:
    hub.meanwhile = lambda repo: repo.commit({"config.json": b"{}"})
    done = push(titan, "model", "ada/tiny")
    assert done.code == 5 and "somebody else has pushed to ada/tiny meanwhile" in done.err
    assert hub.repos["ada/tiny"].head()[1] == {"config.json": b"{}"}
    assert push(titan, "model", "ada/tiny").code == 0


def test_many_threads_commit_one_after_the_other(model: Path, hub: Hub) -> None:
    from titan_hub.files import File
    from titan_hub.push import push as push_files
    from titan_hub.push import target_of
    from titancli.errors import EnvironmentProblem

    target, refused = target_of("ada/tiny", "main", private=False), []

    def one(number: int) -> None:
        try:
            push_files(target, [File("a.json", b'{"n": %d}' % number)], "m", lambda line: None)
        except EnvironmentProblem as error:
            refused.append(error.message)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    commits = len(hub.repos["ada/tiny"].branches["main"]) - 1
    assert commits >= 1 and commits + len(refused) == 3
    assert all("meanwhile" in message for message in refused)


def test_a_readme_of_somebodys_own_stays(model: Path, titan: Any, hub: Hub) -> None:
    assert push(titan, "model", "ada/tiny").code == 0
    repo = hub.repos["ada/tiny"]
    assert is_ours(repo.head()[1]["README.md"].decode())
    assert push(titan, "model", "ada/tiny", "--license", "mit").code == 0  # titan's own is replaced
    changed = repo.head()[1]["README.md"].replace(b"# tiny", b"# My model")
    repo.commit({"README.md": changed})
    done = push(titan, "model", "ada/tiny", "--license", "apache-2.0")
    assert done.code == 0 and "README.md on the Hub is somebody's own and stays" in done.err
    assert repo.head()[1]["README.md"] == changed
    assert not (model / "README.md").exists()

    (model / "README.md").write_text("mine\n")
    done = push(titan, "model", "ada/tiny")
    assert done.code == 0 and "is pushed as it is" in done.err
    assert repo.head()[1]["README.md"] == b"mine\n" == (model / "README.md").read_bytes()
    done = push(titan, "model", "ada/tiny", "--license", "mit")
    assert done.code == 2 and "write them into it" in done.err


def test_private_branches_and_messages(model: Path, titan: Any, hub: Hub) -> None:
    assert push(titan, "model", "ada/secret", "--private").code == 0
    assert hub.repos["ada/secret"].private
    assert push(titan, "model", "ada/open").code == 0
    (model / "config.json").write_text("{}")
    done = push(titan, "model", "ada/open", "--private")
    assert done.code == 5 and "ada/open is public, and --private was given" in done.err
    assert hub.repos["ada/open"].head()[1]["config.json"] != b"{}"
    assert push(titan, "model", "ada/open", "--revision", "v2").code == 0
    assert hub.repos["ada/open"].head("v2")[1]["config.json"] == b"{}"


def test_only_a_models_files_are_pushed(model: Path, titan: Any, hub: Hub, tmp_path: Path) -> None:
    names = (".env", "run.json", "optimizer.safetensors", "rank-00000.safetensors", "train.log", "pickle.pt")
    for name in names:
        (model / name).write_text("secret")
    (model / ".git").mkdir()
    (model / ".git" / "config.json").write_text("secret")
    (tmp_path / "key.json").write_text("secret")
    (model / "link.json").symlink_to(tmp_path / "key.json")
    done = push(titan, "model", "ada/tiny")
    assert done.code == 0
    assert sorted(hub.repos["ada/tiny"].head()[1]) == ["README.md", "config.json", "model.safetensors"]
    assert all(name in done.err for name in (*names, ".git/", "link.json"))
    assert not any(b"secret" in data for data in hub.repos["ada/tiny"].head()[1].values())


NOT_OF_A_MODEL = ("token.json", "service-account.json", "kaggle.json", "data.json", "notes.jinja", "my.model")


def test_only_known_names_are_pushed(model: Path, titan: Any, hub: Hub) -> None:
    for name in NOT_OF_A_MODEL:
        (model / name).write_text("{}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/rag.jinja").write_text("x")
    done = push(titan, "model", "ada/tiny")
    assert done.code == 0 and all(name in done.err for name in NOT_OF_A_MODEL)
    own = ["README.md", "additional_chat_templates/rag.jinja", "config.json", "model.safetensors"]
    assert sorted(hub.repos["ada/tiny"].head()[1]) == own
    assert push(titan, "model", "ada/tiny", "--include", "data.json", "--include", "*.model").code == 0
    assert {"data.json", "my.model"} < hub.repos["ada/tiny"].head()[1].keys()
    for wrong in ("nothing.json", "run.json"):
        (model / "run.json").write_text("{}")
        done = push(titan, "model", "ada/tiny", "--include", wrong)
        assert done.code == 2 and f"--include {wrong}" in done.err


HF, GITHUB = "hf_" + "a1B2" * 9, "ghp_" + "a1B2" * 9
SECRETS = {
    "config.json": f'{{"auth": "{HF}"}}',
    "generation_config.json": '{"url": "https://ada:s3cret@example.com/x"}',
    "README.md": f"clone with {GITHUB}\n",
    "recipe.toml": '[dataset]\npath = "s3://key:password@bucket/x"\n',
    "chat_template.jinja": "-----BEGIN RSA PRIVATE KEY-----\n",
    "tokenizer_config.json": '{"api_key": "0123456789abcdef0123456789abcdef01234567"}',
    "LICENSE": "see https://x.blob.core.windows.net/a?sv=1&sig=abcdefghijklmnop%3D\n",
    "adapter_config.json": '{"x": "AKIA' + "ABCDEFGH" * 2 + '"}',
}


@pytest.mark.parametrize("name", SECRETS)
def test_credentials_are_refused_and_not_shown(model: Path, titan: Any, hub: Hub, name: str) -> None:
    (model / name).write_text(SECRETS[name])
    done = push(titan, "model", "ada/tiny")
    assert done.code == 5 and f"  {name}:" in done.err and hub.repos == {}
    for secret in (HF, GITHUB, "s3cret", "password@", "abcdefghijklmnop", "0123456789abcdef"):
        assert secret not in done.out + done.err
    assert push(titan, "model", "ada/tiny", "--dry-run").code == 5


def test_a_models_own_files_hold_no_credentials(model: Path, titan: Any, hub: Hub) -> None:
    """Accept what real folders have: names of tokens, addresses, hashes, tokens that look like keys."""
    config = {
        "eos_token": "<|end_of_text|>",
        "pad_token_id": 0,
        "_commit_hash": "0a" * 20,
        "bos_token": "<s>",
    }
    (model / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "LlamaTokenizerFast"})
    )
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {f"password: {HF}": 0}}}))
    readme = (
        "Ask ada@example.com. `export HF_TOKEN=<token>`; https://example.com/a?b=c#d; password: see below\n"
    )
    (model / "README.md").write_text(readme)
    done = push(titan, "model", "ada/tiny")
    assert done.code == 0, done.err


def test_adapters_name_a_repository_and_no_folder(model: Path, titan: Any, hub: Hub) -> None:
    config = {"base_model_name_or_path": "/home/ada/models/Base-1B", "r": 2}
    (model / "config.json").unlink()
    (model / "adapter_config.json").write_text(json.dumps(config))
    assert push(titan, "model", "ada/a", "--base-model", "lab/Base-1B").code == 0
    files = hub.repos["ada/a"].head()[1]
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "lab/Base-1B"
    card = ModelCard(files["README.md"].decode())
    assert (card.data.library_name, card.data.base_model) == ("peft", "lab/Base-1B")
    done = push(titan, "model", "ada/b")
    assert "in place of a local path" in done.err
    assert b"/home" not in b"".join(hub.repos["ada/b"].head()[1].values())


def test_what_is_no_whole_model_is_refused_by_name(model: Path, titan: Any, hub: Hub) -> None:
    Path("empty").mkdir()
    done = push(titan, "empty", "ada/tiny")
    assert done.code == 5 and "empty is empty" in done.err
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-3])
    done = push(titan, "model", "ada/tiny")
    assert done.code == 5 and "model.safetensors is damaged" in done.err
    (model / "model.safetensors").write_bytes(whole)
    index = model / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "model-00002-of-00002.safetensors"}}')
    done = push(titan, "model", "ada/tiny")
    assert done.code == 5 and "lacks model-00002-of-00002.safetensors" in done.err
    index.write_text("[")
    assert push(titan, "model", "ada/tiny").code == 5
    index.unlink()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    done = push(titan, "model", "ada/tiny")
    assert done.code == 5 and "has no weights" in done.err
    assert hub.repos == {}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/ada/data/x.jsonl", "./x.jsonl"),
        ("~/data/x y.jsonl", "./x y.jsonl"),
        ("s3://bucket/a/b?key=1", "s3://…/b"),
        ("https://me:pass@host/a/b?token=1", "https://host/a/b"),
        ("hf://lab/tiny@main", "hf://lab/tiny@main"),
        ("python /home/ada/reward.py --fast", "python ./reward.py --fast"),
        ("text/plain", "text/plain"),
        ("from s3://key:secret@bucket/x", "from s3://bucket/x"),
        ({"a": ["/x/y", 1, None], "b": None}, {"a": ["./y", 1, None], "b": None}),
        (0.5, 0.5),
    ],
)
def test_what_is_left_of_a_path(value: Any, shown: Any) -> None:
    if isinstance(value, dict):
        shown = {"a": ["./y", 1]}
        value = {"a": ["/x/y", 1], "b": None}
    assert without_paths(value) == shown


def test_the_base_model_is_the_one_that_a_recipe_names() -> None:
    assert base_model_of({"weights": "hf://lab/base@abc"}) == "lab/base"
    assert base_model_of({"weights": "/home/a/base", "assets": "lab/base"}) == "lab/base"
    assert base_model_of({"weights": "/home/a/other", "assets": "lab/base"}) is None
    assert base_model_of({"assets": "lab/base"}) is None and base_model_of({}) is None


def test_folders_within_are_kept(model: Path) -> None:
    (model / "unet").mkdir()
    (model / "unet" / "config.json").write_text("{}")
    assert sorted(collect(model)[0]) == ["config.json", "model.safetensors", "unet/config.json"]


def test_adapters_of_a_run_alone_or_merged(here: Path, titan: Any, hub: Hub) -> None:
    lora = 'converters=[{type="lora", rank=2, alpha=4.0}]'
    base = f'weights="{here / "run/checkpoints/step-2"}"'
    assert titan("train", "tiny.toml", "--run-dir", "lora", *SMALL, lora, base).code == 0
    done = push(titan, "lora", "ada/adapters", "--to", "peft")
    assert done.code == 0, done.err
    files = hub.repos["ada/adapters"].head()[1]
    assert sorted(files) == ["README.md", "adapter_config.json", "adapter_model.safetensors", "recipe.toml"]
    text = b"".join(data for name, data in files.items() if not name.endswith(".safetensors"))
    assert b"library_name: peft" in text and b"- lora" in text and str(here).encode() not in text
    done = push(titan, "lora", "ada/merged")
    assert done.code == 0 and "config.json" in hub.repos["ada/merged"].head()[1]
    done = push(titan, "run", "ada/none", "--to", "peft")
    assert done.code == 2 and "contains no adapters" in done.err and "ada/none" not in hub.repos
