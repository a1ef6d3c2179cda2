"""One prompt through every script: what the models give is asked of them again, and the worked
examples of docs/numbers.md and docs/grpo.md are evaluated."""

import math
import re
from pathlib import Path

import pytest

from docs.experiments.studies import one_prompt
from docs.experiments.lib.experiment import saved_results

SAVED = saved_results("one_prompt")
TABLES, MEASURED = one_prompt.tables(SAVED), SAVED["numbers"]
PAGE = "".join(Path(f"docs/{name}.md").read_text() for name in ("grpo", "numbers"))


# --- what the models give ----------------------------------------------------------------------
def test_the_models_give_the_same_completions_and_numbers():
    """Another processor may round differently: below 1e-4 even with gradients off by 1e-5."""
    again = one_prompt.measure()
    for key in ("completion", "tokens"):
        assert again[key] == MEASURED[key]
    assert again["reward"] == pytest.approx(MEASURED["reward"], abs=3e-4)
    for key in ("ref", "old", "new", "values"):
        for numbers, expected in zip(again[key], MEASURED[key], strict=True):
            assert numbers == pytest.approx(expected, abs=3e-4)


# --- the text, beside tables that the scripts' own functions compute ----------------------------
def worked_examples():
    """Pairs of an expression and the number behind the equals sign, from the code on the page."""
    found = re.findall(r"`([^`]+) = (-?[\d.]+)`", PAGE)
    return [(expression.replace("\n", " "), result) for expression, result in found]


@pytest.mark.docs
@pytest.mark.parametrize("expression, result", worked_examples())
def test_a_worked_example_is_correct(expression, result):
    functions = {"exp": math.exp, "ln": math.log, "sqrt": math.sqrt}
    assert re.fullmatch(r"(exp|ln|sqrt|[\d.+*/() -])+", expression)
    digits = len(result.partition(".")[2])
    computed = eval(expression, {"__builtins__": {}}, functions)
    assert computed == pytest.approx(float(result), abs=0.51 * 10**-digits)


@pytest.mark.docs
def test_the_lines_of_the_bridge_stand_in_grpo():
    script = "".join(Path("grpo.py").read_text().split())
    for code, *_ in TABLES["one_prompt step"]["rows"]:
        assert "".join(code.strip("`").split()) in script
