"""One thread of a CPU: runs are the same to the bit, and no test is slowed by spinning threads."""

import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # of the tests that take several
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what a GPU is asked to do is simulated

import pytest
import torch
from transformers import AutoTokenizer

pytest.register_assert_rewrite("reviews", "runs", "by_hand")  # or they would not say what failed

torch.set_num_threads(1)
ROOT = Path(__file__).parents[1]
# These files take the longest. Each is run by one of two processes, so they are begun first.
LONGEST = "learning site processes memory_model gpu_path resume explorer exercises".split()
LONGEST = [f"test_{name}.py" for name in LONGEST]


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: [*LONGEST, item.path.name].index(item.path.name))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Default flags name folders relative to the root of the repository."""
    os.chdir(ROOT)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained("tiny/arithmetic/policy")
