"""The documentation as a site: every page is in it, and no link leads nowhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_has_a_place(site: ModuleType) -> None:
    here = {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")}
    assert here <= set(site.pages())
    assert len(site.pages()) == len(set(map(site.place, site.pages())))


def test_links_lead_to_where_things_are_in_the_site(site: ModuleType) -> None:
    assembly = site.Assembly()
    texts = {page: assembly.page(page) for page in site.pages()}
    assert "(source/titancli/loops/pretrain.py.md)" in texts["docs/index.md"]
    assert "(checkpoints.md)" in texts["docs/runs.md"] and "(../plugins.md)" not in texts["docs/runs.md"]
    assert "pictures/panel.svg" in "".join(assembly.files)
    assert "docs/" not in "".join(re.findall(r"\]\(([^)]*)\)", texts["CHANGELOG.md"]))


def test_a_link_that_leads_nowhere_is_an_error(site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[gone](gone.md)")
    site.ROOT = tmp_path
    with pytest.raises(site.BrokenLink, match=r"links to gone\.md, which does not exist"):
        site.Assembly().page("docs/index.md")


@pytest.mark.slow
def test_the_site_is_built_fetches_nothing_and_refuses_a_broken_anchor(
    site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With search, both color schemes and the picture; pages ask no other host for a script or style."""
    monkeypatch.setattr(site, "PAGES", tmp_path / "build/pages")
    monkeypatch.setattr(site, "SITE", tmp_path / "build/site")
    monkeypatch.setattr(site, "BUILD", tmp_path / "build")
    assert site.build() == 0
    pages = {file: file.read_text(encoding="utf-8") for file in site.SITE.rglob("*.html")}
    assert len(pages) >= len(site.pages())
    for file, html in pages.items():
        fetched = re.findall(r"<(?:script|img|link)[^>]*?(?:src|href)=\"?(?:https?:)?//[^\s>]*", html)
        assert not [tag for tag in fetched if 'rel="canonical"' not in tag], file
    home = pages[site.SITE / "index.html"]
    assert "pictures/panel.svg" in home and home.count("data-md-color-scheme") > 1
    assert "keep_latest_k" in (site.SITE / "search.json").read_text(encoding="utf-8")
    page = site.Assembly.page
    monkeypatch.setattr(
        site.Assembly, "page", lambda self, name: page(self, name) + "\n[x](#no-such-place)\n"
    )
    assert site.build() != 0
