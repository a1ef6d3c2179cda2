"""What docs/copying.md says of copying a script into another project."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/copying.md").read_text()
REWARD = """
from common.helpers import is_short

def short(prompts, completions, answer, **columns):
    assert {*zip(prompts, answer)} <= {("1+2+3+4+5=", "5"), ("2+2+2+2+2=", "0")}
    return [float(is_short(text)) for text in completions]
"""
ROWS = """
def my_rows(split):
    return [("1+2+3+4+5=", "5"), ("2+2+2+2+2=", "0"), ("", "1"), ("1+" * 99, "9")]

"""


def test_a_script_in_a_package_beside_a_package_common_of_the_project(tmp_path):
    package = tmp_path / "rlhf"
    for folder in ("common", "runtime"):
        shutil.copytree(ROOT / folder, package / folder)
    shutil.copy(ROOT / "grpo.py", package)
    (command,) = re.findall(r"^ *(sed -Ei .*)", PAGE, re.MULTILINE)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    (tmp_path / "common").mkdir()  # the project's own
    (tmp_path / "common" / "helpers.py").write_text("def is_short(text): return len(text) < 4\n")
    (tmp_path / "rewards.py").write_text(REWARD)
    (package / "train.py").write_text(ROWS + program)
    flags = f"--model {ROOT}/tiny/arithmetic/policy --reward-fn rewards.py:short --group-size 2"
    flags += " --total-rollouts 1 --prompts-per-rollout 2"
    subprocess.run([sys.executable, "-m", "rlhf.train", *flags.split()], cwd=tmp_path, check=True)
    assert [*tmp_path.glob("runs/grpo__1__*/model.safetensors")]
