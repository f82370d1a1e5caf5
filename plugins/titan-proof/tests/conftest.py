from tests.run.conftest import here  # noqa: F401 - a fixture
