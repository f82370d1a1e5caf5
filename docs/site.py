"""Build the documentation as a site, in build/site: `python docs/site.py`. It needs no network.

The pages stay where people read them in the repository. A copy of them, of the README.md of each plugin and
of the few files beside README.md is put together in build/pages; a link to a source file leads to a page with
that file. zensical then builds the site, and fails on a link that leads nowhere.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
PAGES, SITE = BUILD / "pages", BUILD / "site"
NAV: dict[str, dict[str, str]] = {
    "Tutorial": {"First steps": "docs/first-steps.md", "Fine-tune on your text": "docs/finetune.md"},
    "How to": {
        "Prepare data": "docs/data.md",
        "Watch, resume and compare runs": "docs/runs.md",
        "When it goes wrong": "docs/when-it-goes-wrong.md",
        "Train on a cluster": "docs/clusters.md",
        "Reproduce a run": "docs/reproduce.md",
        "Replay a step": "docs/replay.md",
        "Evaluate": "docs/validation.md",
        "Find where the time goes": "docs/profiling.md",
        "Prove a layout": "docs/prove.md",
        "Save, load and convert checkpoints": "docs/checkpoints.md",
        "Generate text": "docs/generate.md",
        "Post-train": "docs/post-training.md",
        "Use models of transformers": "docs/hf-causal-lm.md",
        "Use the engine in Python": "docs/engine.md",
        "Write a plugin": "docs/plugins.md",
        "Write your own model": "docs/your-own-model.md",
        "Come from torchtitan": "docs/coming-from-torchtitan.md",
        "Come from the Hugging Face Trainer": "docs/coming-from-hf-trainer.md",
        "Come from axolotl, LLaMA-Factory, torchtune": "docs/coming-from-other-tools.md",
    },
    "Reference": {
        "Recipes": "docs/recipes.md",
        "Components and sections": "docs/components.md",
        "Commands": "docs/commands.md",
        "Exit codes and JSON": "docs/interfaces.md",
        "Features": "docs/features.md",
        "What has been run": "docs/tested.md",
        "Changes": "CHANGELOG.md",
    },
    "Explanation": {
        "Layouts": "docs/layouts.md",
        "Memory and speed": "docs/plan.md",
        "Test GPU code without a GPU": "docs/null-gpu.md",
        "Architecture": "docs/architecture.md",
        "Benchmarks": "benchmarks/README.md",
        "Contributing": "CONTRIBUTING.md",
        "Security": "SECURITY.md",
    },
}
"""The pages by section and title. Every page of docs/ is in one of them; plugins are added by themselves."""
HOME = "docs/index.md"
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh"}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"^<!-- .*? -->\n", re.MULTILINE)


class BrokenLink(Exception):
    """A page links to something that does not exist."""


def nav() -> dict[str, dict[str, str]]:
    """The sections with their pages, those of the plugins included."""
    readmes = sorted((ROOT / "plugins").glob("*/README.md"))
    return {**NAV, "Plugins": {file.parent.name: file.relative_to(ROOT).as_posix() for file in readmes}}


def pages() -> list[str]:
    """Every page of the site, by its path in the repository."""
    return [HOME, *(page for section in nav().values() for page in section.values())]


def place(page: str) -> str:
    """Where a page of the repository stands in build/pages: `docs/runs.md` is `runs.md`."""
    path = posixpath.relpath(page, "docs") if page.startswith("docs/") else page.lower()
    return re.sub(r"readme\.md$", "index.md", path)


class Assembly:
    """The pages of the site as they are put together, and the source files that they link to."""

    def __init__(self) -> None:
        self.known = {page: place(page) for page in pages()}
        self.sources: dict[str, str] = {}
        self.files: set[str] = set()

    def page(self, page: str) -> str:
        """A page's text, with links that lead to where things are in the site."""
        text = (ROOT / page).read_text(encoding="utf-8")
        fences = iter(_FENCE.findall(text))
        outside = _FENCE.sub("\0", text)
        outside = _COMMENT.sub("", outside)
        outside = _LINK.sub(lambda found: self._target(page, found[1]) + (found[2] or ""), outside)
        return re.sub("\0", lambda _: next(fences), outside)

    def _target(self, page: str, link: str) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        if not (ROOT / path).exists() or path.startswith(".."):
            raise BrokenLink(f"{page} links to {link}, which does not exist")
        if path == "README.md":
            path = HOME
        if path not in self.known:
            if (ROOT / path).suffix in (".svg", ".png"):
                self.files.add(path)
                self.known[path] = place(path)
            else:
                self.known[path] = self.sources[path] = f"source/{path}.md"
        return posixpath.relpath(self.known[path], posixpath.dirname(place(page)) or ".")

    def write(self) -> None:
        """Put all pages into build/pages."""
        shutil.rmtree(PAGES, ignore_errors=True)
        for page in pages():
            self._write(place(page), self.page(page))
        for path, where in self.sources.items():
            file = ROOT / path
            if file.is_dir():
                raise BrokenLink(f"a page links to the folder {path}: link to a file in it")
            language = LANGUAGES.get(file.suffix, "text")
            self._write(where, f"# {path}\n\n````{language}\n{file.read_text(encoding='utf-8')}````\n")
        for path in self.files:
            target = PAGES / place(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, target)

    def _write(self, where: str, text: str) -> None:
        file = PAGES / where
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def settings() -> str:
    """zensical.toml. No font, script or style is fetched from anywhere: `font = false`."""
    sections = [
        f"  {{ {quoted(title)} = [\n"
        + "".join(f"    {{ {quoted(name)} = {quoted(place(page))} }},\n" for name, page in entries.items())
        + "  ] },\n"
        for title, entries in nav().items()
    ]
    return f"""\
[project]
site_name = "titan"
site_description = "Train language models on PyTorch from a recipe: one TOML file."
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
nav = [
  {{ "titan" = "index.md" }},
{"".join(sections)}]

[project.theme]
font = false
language = "en"
features = ["navigation.tabs", "navigation.top", "content.code.copy", "search.highlight"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Switch to dark mode"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Switch to light mode"
"""


def quoted(text: str) -> str:
    return f'"{text}"'


def build() -> int:
    """Build the site; the exit code of zensical, which is not 0 where a link leads nowhere."""
    Assembly().write()
    config = BUILD / "zensical.toml"
    config.write_text(settings(), encoding="utf-8")
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(config)]
    return subprocess.run(command, cwd=BUILD).returncode


if __name__ == "__main__":
    try:
        sys.exit(build())
    except BrokenLink as error:
        sys.exit(f"error: {error}")
