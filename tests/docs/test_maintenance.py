"""What a maintainer finds at the root: hooks, workflows, forms, and how a release is made."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tomli
import yaml
from packaging.version import Version

import titancli
from tests.docs.markdown import ROOT
from titancli.torch_version import NEWEST, OLDEST

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


def test_the_targets_of_the_makefile_are_found() -> None:
    assert {"train", "test", "lint", "docs", "wheels", "release-check"} <= TARGETS


def test_a_report_can_be_made_right_after_make_train() -> None:
    rule = re.search(r"^\.venv/\.installed:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert rule is not None
    assert "-e . -r plugins/requirements.txt" in rule[1]
    assert "-e ./plugins/titan-report\n" in (ROOT / "plugins" / "requirements.txt").read_text()


def test_pre_commit_runs_the_linters_of_make_lint() -> None:
    hooks = [hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    entries = {hook["entry"].removesuffix(" --force-exclude") for hook in hooks}
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    lines = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    assert entries == {re.sub(r" --check| \.$", "", line) for line in lines}
    assert all(hook["language"] == "system" for hook in hooks), "constraints.txt alone says which version"


@each_workflow
def test_a_workflow_calls_targets_that_are_there(path: Path) -> None:
    commands = "\n".join(step["run"] for step in steps(path) if "run" in step)
    called = set(re.findall(r"\bmake ([a-z-]+)", commands))
    assert called and called <= TARGETS, called - TARGETS


@each_workflow
def test_a_workflow_pins_its_actions_and_its_rights(path: Path) -> None:
    text = path.read_text()
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action}: which version is that?"
    assert read(path)["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in read(path)["jobs"].values())


def test_the_declared_range_is_tested() -> None:
    jobs = read(GITHUB / "workflows" / "ci.yml")["jobs"]
    rows = jobs["versions"]["strategy"]["matrix"]["include"]
    (setup,) = (step["with"] for step in jobs["test"]["steps"] if "with" in step)
    named = "Programming Language :: Python :: "
    rows = [row for row in rows if not row.get("untried")]
    pythons = {setup["python-version"], *(row["python"] for row in rows)}
    assert {f"{named}{python}" for python in pythons} == {c for c in PROJECT["classifiers"] if named in c}
    assert PROJECT["requires-python"] == f">={setup['python-version']}"
    (oldest,) = (found for found in PROJECT["dependencies"] if found.startswith("torch>="))
    pinned = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    torches = sorted({pinned[1], *(row["torch"] for row in rows)}, key=Version)
    minors = [Version(torch).minor for torch in torches]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert f"{oldest}.0" == f"torch>={torches[0]}" == f"torch>={OLDEST}.0"
    assert torches[-1].rpartition(".")[0] == NEWEST
    listed = ["$pinned" if torch == pinned[1] else torch for torch in torches]
    assert f"TORCHES:-{' '.join(listed)}}}" in (ROOT / "tests/versions.sh").read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert ids and len(ids) == len(set(ids))
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]


# ---------------------------------------------------------------------------------------------- releases


def test_the_version_is_written_once() -> None:
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    version = re.escape(titancli.__version__)
    files = [ROOT / "pyproject.toml", *(ROOT / "titancli").rglob("*.py")]
    found = [path for path in files if re.search(rf"""["']{version}["']""", path.read_text())]
    assert found == [ROOT / "titancli" / "version.py"]
    assert metadata.version("titancli") == titancli.__version__, "install titan again: pip install -e ."


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", GITHUB / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notes_of_a_release_are_its_section(release: ModuleType) -> None:
    version = titancli.__version__
    changelog = (
        f"# C\n\n## [Unreleased]\n\n- later\n\n## [{version}] - 2026-12-01\n\n"
        "### Added\n\n- now\n\n## [0.0.1]\n\n- old\n"
    )
    assert release.notes(f"v{version}", changelog) == "### Added\n\n- now\n"


def test_a_tag_that_is_no_release_is_refused(release: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"the tag is v9\.9\.9, and titancli\.__version__ is"):
        release.notes("v9.9.9", "")
    with pytest.raises(ValueError, match="has no section"):
        release.notes(f"v{titancli.__version__}", "## [Unreleased]\n\n- later\n")
