import pytest
from browser import Browser


@pytest.fixture(scope="module")
def browser():
    started = Browser()
    yield started
    started.close()
