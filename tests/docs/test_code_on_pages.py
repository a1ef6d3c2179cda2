"""The functions that a page prints are those of the script: `<!-- code SCRIPT FUNCTION -->`."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.house
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- code (\S+) (\w+) -->\n```python\n(.*?)```\n<!-- end code -->", re.DOTALL)
FUNCTIONS = {
    "sft": {"negative_log_likelihood", "loss_sequences"},
    "rm_bradley_terry": {"bradley_terry_loss"},
    "reinforce": {"baseline_advantages", "policy_gradient_loss"},
    "ppo_rlhf": {"gae", "policy_loss", "value_loss"},
    "grpo": {"group_advantages", "token_weights", "grpo_loss"},
    "dpo": {"dpo_loss"},
    "dpo_variants": {"ipo_loss", "simpo_loss", "orpo_loss"},
    "kto": {"reference_point", "kto_loss"},
}


@pytest.mark.parametrize("page", FUNCTIONS)
def test_a_printed_function_is_that_of_the_script_without_its_docstring(page):
    blocks = BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert {name for _, name, _ in blocks} == FUNCTIONS[page]
    for script, name, printed in blocks:
        source = (ROOT / script).read_text()
        (function,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == name]
        function.body = function.body[1:]  # without the docstring
        assert ast.unparse(ast.parse(printed)) == ast.unparse(function)
        # Comments and line breaks too: the printed lines occur in the script in their order.
        lines = iter(source.splitlines())
        assert all(line in lines for line in printed.splitlines()), f"{page}: {name}"
