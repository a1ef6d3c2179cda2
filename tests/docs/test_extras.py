"""Modules do with `pip install -e ".[dev]"`; what needs another extra names it."""

import subprocess
import sys

import pytest

from docs.experiments.cost.speed import trl_trainer
from docs.rewards import tone

pytestmark = pytest.mark.docs


def test_docs_and_tests_can_be_imported_with_dev_alone():
    program = [sys.executable, "tests/support/dev_alone.py"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_needs_an_extra_names_it(monkeypatch):
    for module in ("vaderSentiment", "vaderSentiment.vaderSentiment", "trl"):
        monkeypatch.setitem(sys.modules, module, None)
    tone.analyzer.cache_clear()
    with pytest.raises(ImportError, match=r"\.\[real\]"):
        tone.tone(["Review Jaws."], ["It is good."])
    with pytest.raises(ImportError, match=r"\.\[bench\]"):
        trl_trainer("SFT", None, "train", None)
