import pytest
from browser import Browser


@pytest.fixture(scope="session")
def browser():
    started = Browser()
    yield started
    started.close()
