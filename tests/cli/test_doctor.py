"""`titan doctor` says what it found, what to do, and whether a run is possible."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path

import pytest

from tests.cli.conftest import Titan
from titancli import doctor


@pytest.fixture(autouse=True)
def quick_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other process would say of torch, without starting it."""
    told = {
        "version": "2.13.0",
        "cuda": None,
        "devices": [],
        "backends": ["gloo"],
        "nccl": None,
        "threads": 1,
    }
    monkeypatch.setattr(doctor, "_ask_torch", lambda: (told, ""))


def findings(titan: Titan, *arguments: str) -> tuple[int, dict[str, dict]]:
    done = titan("doctor", "--json", *arguments)
    document = json.loads(done.out)
    assert document["schema"] == "titan.doctor"
    return done.code, {finding["name"]: finding for finding in document["findings"]}


def test_a_machine_that_is_well(titan: Titan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    done = titan("doctor")
    assert done.code == 0, done.out
    assert "torch: 2.13.0 (CPU only), backends gloo, 1 CPU threads" in done.out
    assert "NCCL_DEBUG=INFO" in done.out and "secret" not in done.out
    assert "plugin titan: " in done.out


def install_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    of = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "torch" else of(name))


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0"])
def test_what_the_torch_lacks_is_told(titan: Titan, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install_torch(monkeypatch, version)
    code, found = findings(titan)
    assert code == 0
    if version == "2.13.0":
        assert "torch lacks" not in found
        return
    assert found["torch lacks"]["state"] == "warning" and version in found["torch lacks"]["found"]
    assert "ZBVZeroBubble" in found["torch lacks"]["found"]
    assert found["torch lacks"]["hint"] == "install torch 2.13 or newer"


@pytest.mark.parametrize("version", ["2.10.2+cu128", "1.13.1"])
def test_a_torch_that_is_too_old_is_refused(
    titan: Titan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    install_torch(monkeypatch, version)
    code, found = findings(titan)
    assert code == 5 and found["torch"]["state"] == "error"
    assert found["torch"]["hint"] == "pip install 'torch>=2.11'"
    done = titan("train", "llama3_debug", "--run-dir", str(tmp_path / "run"))
    assert done.code == 5 and f"torch {version} is too old: titan runs on 2.11 to " in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("version", ["2.15.3+cu132", "2.16.0.dev20261120", "3.0.0"])
def test_a_torch_that_is_newer_than_tested_is_named(
    titan: Titan, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install_torch(monkeypatch, version)
    code, found = findings(titan)
    done = titan("train", "llama3_debug", "--dry-run")
    assert code == done.code == 0
    newer = not version.startswith("2.15")
    assert found["torch tested"]["state"] == ("warning" if newer else "ok")
    assert (f"note: torch {version} is newer than 2.15" in done.err) == newer


@pytest.mark.parametrize(("version", "tested"), [("3.11.7", True), ("3.13.0", True), ("3.15.0", False)])
def test_which_python_was_tested_is_told(
    titan: Titan, monkeypatch: pytest.MonkeyPatch, version: str, tested: bool
) -> None:
    monkeypatch.setattr(platform, "python_version_tuple", lambda: tuple(version.split(".")))
    row = findings(titan)[1]["python tested"]
    assert row["state"] == ("ok" if tested else "warning")
    assert version.rpartition(".")[0] in row["found"]
    assert ("never been run on Python 3.15" in row["found"]) != tested


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_gpu_is_told_to_be_the_first(titan: Titan, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: gpus)
    row = findings(titan)[1]["gpus tested"]
    assert row["state"] == ("warning" if gpus else "ok")
    assert ("has not been run on a GPU yet" in row["found"]) == bool(gpus)


@pytest.mark.parametrize("gpus", [0, 8])
def test_compiling_without_openssl(
    titan: Titan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: gpus)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, found = findings(titan)
    assert code == 0 and ("compile" in found) == (gpus == 0)
    if not gpus:
        assert found["compile"]["state"] == "warning" and "openssl" in found["compile"]["found"]
        assert "apt install g++ openssl" in found["compile"]["hint"]


def test_another_titan_on_the_path_is_named(
    titan: Titan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "titan"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    _, found = findings(titan)
    assert found["titan"]["state"] == "warning" and str(other) in found["titan"]["found"]
    monkeypatch.setenv("PATH", "")
    _, found = findings(titan)
    assert "titan is not on the PATH" in found["titan"]["found"] and "-m titancli" in found["titan"]["hint"]


def test_a_broken_plugin_exits_4(titan: Titan, tmp_path: Path) -> None:
    file = tmp_path / "cli_sick.py"
    file.write_text("1 / 0\n")
    code, found = findings(titan, "-p", str(file))
    assert code == 4
    assert found["plugin cli_sick"]["state"] == "error"
    assert "ZeroDivisionError" in found["plugin cli_sick"]["found"]


def test_a_torch_that_cannot_be_imported_exits_5(titan: Titan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ask_torch", lambda: (None, "ImportError: libcudart.so.12"))
    code, found = findings(titan)
    assert code == 5
    assert found["torch"]["state"] == "error" and "libcudart" in found["torch"]["found"]


def test_gpus_that_torch_cannot_use_are_told(titan: Titan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: 2)
    _, found = findings(titan)
    assert found["gpus"]["state"] == "warning" and "2 installed" in found["gpus"]["found"]


def test_a_disk_that_is_nearly_full_is_told(titan: Titan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENOUGH_DISK", 1 << 60)
    _, found = findings(titan)
    assert found["runs"]["state"] == "warning" and "GiB free" in found["runs"]["found"]


def test_a_folder_that_cannot_be_written_exits_5(titan: Titan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    code, found = findings(titan)
    assert code == 5
    assert "cannot be written: Permission denied" in found["runs"]["found"]


def test_what_torch_is_asked_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    told, why = doctor._ask_torch()
    assert why == "" and told is not None
    assert set(told) == {"version", "cuda", "devices", "backends", "nccl", "threads"}


def test_a_torch_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "ASK_TORCH", "import os; os.abort()")
    assert doctor._ask_torch() == (None, "exit code -6")
    monkeypatch.setattr(doctor, "ASK_TORCH", "import no_torch_here")
    assert doctor._ask_torch()[1] == "ModuleNotFoundError: No module named 'no_torch_here'"
