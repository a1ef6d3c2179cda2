"""One thread, so that runs are the same to the bit, and no test is slowed by spinning threads."""

import os
from threading import Thread

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


LONG = ("test_gpu_path", "test_learning", "test_resume", "test_torchrun")


def pytest_collection_modifyitems(items):
    """What is made in the background is asked for last."""
    items.sort(key=lambda item: item.module.__name__ in LONG)


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    """Default flags name folders relative to the root of the repository."""
    monkeypatch.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(scope="session", autouse=True)
def background(request, tmp_path_factory):
    """Long runs take one core, in the order in which they are asked for, the tests the other."""
    modules = {item.module.__name__: item.module for item in request.session.items}
    names = [name for name in LONG if name in modules]
    if len(modules) > 5:
        jobs = [modules[name].begin(tmp_path_factory.mktemp(name)) for name in names]
        Thread(target=lambda: [job() for job in jobs], daemon=True).start()
