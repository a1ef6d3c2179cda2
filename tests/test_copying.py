"""What README says of copying a script into another project."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

REWARD = """
from common.helpers import is_short

def short(prompts, completions, **columns):
    return [float(is_short(text)) for text in completions]
"""


def test_a_script_in_a_package_beside_a_package_common_of_the_project(tmp_path):
    """The folder is renamed, and the name `common` in the import lines, as README says."""
    package = tmp_path / "rlhf"
    (package / "token_helpers").mkdir(parents=True)
    for name in ("grpo.py", "common/generation.py", "common/logprobs.py"):
        source = (ROOT / name).read_text()
        renamed = re.sub(r"^from common\.", "from rlhf.token_helpers.", source, flags=re.MULTILINE)
        assert renamed != source or name == "common/generation.py"
        (package / name.replace("common", "token_helpers")).write_text(renamed)
    (tmp_path / "common").mkdir()  # the project's own
    (tmp_path / "common" / "helpers.py").write_text(
        "def is_short(text):\n    return len(text) < 4\n"
    )
    (tmp_path / "rewards.py").write_text(REWARD)
    tiny = ROOT / "tiny" / "arithmetic"
    command = (
        f"import rlhf.grpo as grpo; grpo.main(grpo.Args(model={str(tiny / 'policy')!r}, "
        f"dataset={str(tiny / 'prompts')!r}, reward_fn=['rewards.py:short'], total_rollouts=1, "
        "prompts_per_rollout=2, group_size=2, num_minibatches=1, eval_rows=2))"
    )
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.glob("runs/grpo__1__*/model/model.safetensors"))
