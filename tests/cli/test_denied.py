"""What the system denies: which file, whose it is, and what to do."""

from __future__ import annotations

import errno
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from titancli.files import denied

ME = pwd.getpwuid(os.geteuid()).pw_name
AS_OTHERS = ("setpriv", "--bounding-set", "-all", "--inh-caps", "-all") if os.geteuid() == 0 else ()
"""What has root heed the rights of files."""


def run(folder: Path, *words: str) -> tuple[int, str]:
    command = [*AS_OTHERS, sys.executable, "-m", "titancli", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    folder = tmp_path / "a b"
    (folder / "in").mkdir(parents=True)
    (folder / "recipe.toml").write_text('extends = "titan:llama3_debug"\n')
    (folder / "recipe.toml").chmod(0)
    folder.chmod(0o500)
    return folder


def test_a_folder_that_may_not_be_written(closed: Path) -> None:
    code, err = run(closed.parent, "recipe", "new", "a b/x.toml", "--from", "llama3_debug")
    assert code == 5
    assert err == (
        "error: Permission denied: a b/x.toml\n"
        f" {closed} (dr-x------) belongs to {ME}, who runs this: chmod u+rwX '{closed}'\n"
    )


def test_a_recipe_that_may_not_be_read(closed: Path) -> None:
    code, err = run(closed.parent, "recipe", "show", "a b/recipe.toml")
    assert code == 3
    assert "cannot read a b/recipe.toml: Permission denied\n" in err
    file = closed / "recipe.toml"
    assert f" {file} (----------) belongs to {ME}, who runs this: chmod u+rwX '{file}'\n" in err


def test_a_folder_on_the_way_that_may_not_be_entered(closed: Path) -> None:
    closed.chmod(0)
    _, err = run(closed.parent, "recipe", "show", "a b/in/recipe.toml")
    assert f" {closed} (d---------) belongs to {ME}" in err


def test_others_are_asked_or_another_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4294960000)  # nobody's number
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.X_OK)
    hint = denied(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "no" / "x")))
    assert hint is not None and hint.startswith(f"{tmp_path} (drwx")
    assert hint.endswith(
        f"belongs to {ME}, and user 4294960000 runs this: name another place, or ask for access"
    )


def test_what_was_denied_may_be_the_cause() -> None:
    error = ValueError("x")
    error.__cause__ = OSError(errno.EROFS, "Read-only file system", "/x")
    assert denied(error) == "the file system there can only be read: name another place"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/x"),
        PermissionError(errno.EPERM, "no"),
        ValueError(),
    ],
)
def test_other_errors_have_hints_of_their_own(error: Exception) -> None:
    assert denied(error) is None
