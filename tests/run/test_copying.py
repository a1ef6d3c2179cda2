"""What docs/copying.md says of copying a script into another project."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from runs import start

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/copying.md").read_text()
REWARD = """
from common.helpers import is_short

def short(prompts, completions, answer, **columns):
    assert {*zip(prompts, answer)} <= {("1+2+3+4+5=", "5"), ("2+2+2+2+2=", "0")}
    return [float(is_short(text)) for text in completions]
"""
TRAIN = """
def my_rows(split):
    return [("1+2+3+4+5=", "5"), ("2+2+2+2+2=", "0")]

{loader}
grpo.main(grpo.Args(
    model="{root}/tiny/arithmetic/policy", reward_fn=["{folder}/rewards.py:short"],
    total_rollouts=1, prompts_per_rollout=2, group_size=2, output_dir="{folder}/runs",
))
"""


def test_a_script_in_a_package_beside_a_package_common_of_the_project(tmp_path):
    package = tmp_path / "rlhf"
    for folder in ("common", "runtime"):
        shutil.copytree(ROOT / folder, package / folder)
    shutil.copy(ROOT / "grpo.py", package)
    (command,) = re.findall(r"^ *(sed -Ei .*)", PAGE, re.MULTILINE)
    (loader,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    (tmp_path / "common").mkdir()  # the project's own
    (tmp_path / "common" / "helpers.py").write_text("def is_short(text): return len(text) < 4\n")
    (tmp_path / "rewards.py").write_text(REWARD)
    train = tmp_path / "train.py"
    train.write_text(TRAIN.format(loader=loader, root=ROOT, folder=tmp_path))
    process = start([str(train)], tmp_path / "output")
    process.join()
    assert process.exitcode == 0, (tmp_path / "output").read_text()
    assert [*tmp_path.glob("runs/grpo__1__*/model.safetensors")]
