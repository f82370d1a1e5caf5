from pathlib import Path

import pytest

from tests.registry.distributions import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.delenv("TITAN_PLUGINS", raising=False)
    return Site(tmp_path / "site", monkeypatch)
