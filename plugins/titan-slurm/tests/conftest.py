from tests.cli.conftest import titan  # noqa: F401 - a fixture
