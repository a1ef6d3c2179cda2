"""The repository's folders. Importing this lets the programs here import the scripts, which lie in
the root, and their list in tests/helpers/scripts.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
FIGURES = DOCS / "figures"

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
