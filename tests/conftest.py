"""One thread, so that runs are the same to the bit, and no test is slowed by spinning threads."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    """Default flags name folders relative to the root of the repository."""
    monkeypatch.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(scope="session", autouse=True)
def learning(request, tmp_path_factory):
    """The runs of test_learning.py take one core, the other tests the other."""
    modules = {item.module.__name__: item.module for item in request.session.items}
    if "test_learning" in modules and len(modules) > 5:
        modules["test_learning"].begin(tmp_path_factory.mktemp("learning"))
