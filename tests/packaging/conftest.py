"""Virtual environments with titan's own wheel in them, outside of the checkout. No network."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PLUGINS = CHECKOUT / "tests" / "plugins"

Titan = Callable[..., "subprocess.CompletedProcess[str]"]


def run(
    *command: str | Path, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    ours = ("PYTHON", "PYTEST", "TITAN_")  # what is meant for these tests is not for those that they run
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=200,
    )


def checked(*command: str | Path, cwd: Path) -> None:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def wheel_of(project: Path, out: Path) -> Path:
    """Build a wheel; the folder `out` is new, so that what is in it is what was built."""
    checked(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, project, cwd=out.parent
    )
    (wheel,) = out.glob("*.whl")
    return wheel


class Environment:
    """A virtual environment that sees this one's dependencies, but not its editable titan and plugins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        checked(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        site = run(
            self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
        ).stdout.strip()
        # Links to all but ours: the metadata of an editable plugin would make it one that is broken here.
        dependencies = folder / "dependencies"
        dependencies.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith("titan") and entry.suffix != ".pth":
                (dependencies / entry.name).symlink_to(entry)
        (dependencies / "bin").symlink_to(Path(sys.executable).parent)  # ruff looks for its program there
        (Path(site) / "dependencies.pth").write_text(f"{dependencies}\n")
        self.cwd = folder / "elsewhere"
        self.cwd.mkdir()

    def install(self, *wheels: Path, build_isolation: bool = True) -> None:
        """Install wheels; or, without build isolation, source folders too."""
        options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
        options += [] if build_isolation else ["--no-build-isolation"]
        checked(
            sys.executable, "-m", "pip", "--python", self.python, "install", *options, *wheels, cwd=self.cwd
        )

    def titan(self, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the installed script in a folder of its own."""
        return run(self.folder / "bin" / "titan", *arguments, cwd=self.cwd, env=env)


@pytest.fixture(scope="session")
def titan_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(CHECKOUT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def plain(titan_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """titan alone."""
    environment = Environment(tmp_path_factory.mktemp("plain") / "venv")
    environment.install(titan_wheel)
    return environment


@pytest.fixture(scope="session")
def plugged(titan_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """titan with titan-fixture and titan-broken."""
    environment = Environment(tmp_path_factory.mktemp("plugged") / "venv")
    projects = ("titan-fixture", "titan-broken")
    wheels = [wheel_of(PLUGINS / name, tmp_path_factory.mktemp(name)) for name in projects]
    environment.install(titan_wheel, *wheels)
    return environment
