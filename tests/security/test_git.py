"""Reading a git repository whose files are a stranger's: nothing that they name is started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from titancli.provenance import git_state, keep_sources, provenance, uncommitted_patch

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        [*GIT, "-C", str(folder), *words], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a change that is not committed."""
    folder = tmp_path / "work"
    (folder / "deep").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "code.py").write_text("x = 1\n")
    (folder / "deep/more.txt").write_text("a\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    (folder / "code.py").write_text("x = 2\n")
    return folder


def started(program: Path) -> str:
    """Return a command that leaves a trace."""
    return f"touch {program}; cat"


def attributes(folder: Path, text: str) -> None:
    (folder / ".gitattributes").write_text(text)
    (folder / ".git/info").mkdir(exist_ok=True)
    (folder / ".git/info/attributes").write_text(text)


TRAPS: dict[str, Callable[[Path, Path], object]] = {
    "fsmonitor": lambda f, trace: git(f, "config", "core.fsmonitor", started(trace)),
    "clean filter": lambda f, trace: (
        git(f, "config", "filter.trap.clean", started(trace)),
        git(f, "config", "filter.trap.required", "true"),
        attributes(f, "* filter=trap\n"),
    ),
    "process filter": lambda f, trace: (
        git(f, "config", "filter.trap.process", started(trace)),
        attributes(f, "* filter=trap\n"),
    ),
    "textconv": lambda f, trace: (
        git(f, "config", "diff.trap.textconv", started(trace)),
        attributes(f, "* diff=trap\n"),
    ),
    "external diff": lambda f, trace: git(f, "config", "diff.external", started(trace)),
    "diff command": lambda f, trace: (
        git(f, "config", "diff.trap.command", started(trace)),
        attributes(f, "* diff=trap\n"),
    ),
    "pager": lambda f, trace: git(f, "config", "core.pager", started(trace)),
    "hooks": lambda f, trace: (
        (f / "hooks").mkdir(),
        (f / "hooks/post-index-change").write_text(f"#!/bin/sh\ntouch {trace}\n"),
        (f / "hooks/post-index-change").chmod(0o755),
        git(f, "config", "core.hooksPath", str(f / "hooks")),
    ),
    "included config": lambda f, trace: (
        (f / ".git/more").write_text(f'[core]\n\tfsmonitor = "{started(trace)}"\n'),
        git(f, "config", "include.path", "more"),
    ),
    "alias": lambda f, trace: git(f, "config", "alias.status", f"!touch {trace}"),
    "a missing object of a partial clone": lambda f, trace: (
        git(f, "config", "remote.origin.url", f"ext::sh -c touch% {trace}"),
        git(f, "config", "remote.origin.promisor", "true"),
        git(f, "config", "extensions.partialClone", "origin"),
        git(f, "config", "core.repositoryformatversion", "1"),
        git(f, "config", "protocol.ext.allow", "always"),
        [path.unlink() for path in (f / ".git/objects").rglob("??/*")],
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_nothing_it_names_is_started(repository: Path, tmp_path: Path, trap: str) -> None:
    trace = tmp_path / "trace"
    TRAPS[trap](repository, trace)
    os.utime(repository / "deep/more.txt")  # so that git reads it again
    found = git_state(repository)
    if found is not None:
        assert found["dirty"] and b"+x = 2" in uncommitted_patch(repository / "deep")
    assert not trace.exists()


def test_the_traps_would_work(repository: Path, tmp_path: Path) -> None:
    TRAPS["fsmonitor"](repository, tmp_path / "trace")
    git(repository, "status")
    assert (tmp_path / "trace").exists()


def test_a_submodule_is_not_looked_into(repository: Path, tmp_path: Path) -> None:
    other, trace = tmp_path / "other", tmp_path / "trace"
    other.mkdir()
    git(other, "init", "-q")
    (other / "a").write_text("a\n")
    git(other, "add", ".")
    git(other, "commit", "-qm", "one")
    git(repository, "submodule", "add", "-q", str(other), "sub")
    git(repository, "commit", "-qam", "two")
    git(repository / "sub", "config", "core.fsmonitor", started(trace))
    (repository / "code.py").write_text("x = 3\n")
    assert git_state(repository) is not None and not trace.exists()


def test_variables_name_nothing(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace"
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", started(trace))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.fsmonitor")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", started(trace))
    found = git_state(repository)
    assert found is not None and found["branch"] == "main" and not trace.exists()


def test_it_is_the_same_as_git_says(repository: Path, tmp_path: Path) -> None:
    found = git_state(repository / "deep")
    assert found is not None
    assert found["commit"] == git(repository, "rev-parse", "HEAD").strip() and found["dirty"]
    assert uncommitted_patch(repository).decode() == git(repository, "diff", "HEAD", "--binary")
    git(repository, "worktree", "add", "-q", str(tmp_path / "tree"), "-b", "side")
    clean = git_state(tmp_path / "tree")
    assert clean is not None and (clean["branch"], clean["dirty"]) == ("side", False)
    git(repository, "commit", "-qam", "two")
    again = git_state(repository)
    assert again is not None and not again["dirty"] and again["patch_sha256"] is None
    index = (repository / ".git/index").read_bytes()
    git_state(repository)
    assert (repository / ".git/index").read_bytes() == index


def test_a_repository_of_another_user(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4242)
    assert git_state(repository) is None


def test_a_work_tree_elsewhere(repository: Path, tmp_path: Path) -> None:
    """An index may name any file below it, whose text would be kept with the run."""
    (tmp_path / "private").mkdir()
    git(repository, "config", "core.worktree", str(tmp_path / "private"))
    assert git_state(repository) is None


@pytest.mark.parametrize(
    "make", [lambda f: None, lambda f: git(f, "init", "-q"), lambda f: (f / ".git").touch()]
)
def test_no_commit_or_no_repository(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path)
    assert git_state(tmp_path) is None


def test_a_setting_leaves_the_changes_out(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    attempt = provenance([])
    for patch in (False, True):
        run = tmp_path / str(patch)
        run.mkdir()
        keep_sources(run, attempt, patch=patch)
        kept = list(run.glob("sources/*.patch"))
        assert bool(kept) == patch
    assert b"+x = 2" in kept[0].read_bytes()
