"""The working folder and the commands of the tests of runs."""

from __future__ import annotations

from tests.run.conftest import here, train  # noqa: F401 - fixtures
