"""One prompt through every script: what the models give is asked of them again, the tables are
recomputed in plain Python, and the worked examples of docs/numbers.md are evaluated."""

import math
import re
from pathlib import Path

import pytest

from docs.experiments import one_prompt
from docs.experiments.lib.experiment import saved_results

SAVED = saved_results("one_prompt")
TABLES, MEASURED = one_prompt.tables(SAVED), SAVED["numbers"]
PAGE = Path("docs/numbers.md").read_text()
LENGTHS = [len(tokens) for tokens in MEASURED["tokens"]]
GROUP = range(4)
BETA, LAMBDA, CLIP = 0.2, 0.95, 0.2  # of PPO and GRPO
ROUNDING = 0.501e-4


def rows_of(name):
    """The cells of a table, by the first cell of their row."""
    return {row[0]: row[1:] for row in TABLES[f"one_prompt {name}"]["rows"]}


def columns_of(name):
    """The same by the heading of their column."""
    table = TABLES[f"one_prompt {name}"]
    return dict(zip(table["columns"], zip(*table["rows"], strict=True), strict=True))


def numbers(cells):
    return [float(cell) for cell in cells]


def close(cells, expected, tolerance=ROUNDING):
    assert numbers(cells) == pytest.approx(expected, abs=tolerance)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def mean(values):
    return sum(values) / len(values)


def logprobs_of_the_best():
    """Log-probs of the three policies, from the page's table."""
    columns = columns_of("tokens")
    return [numbers(columns[f"log π_{policy}"]) for policy in ("ref", "old", "new")]


def is_clipped(ratio, advantage):
    return (ratio > 1 + CLIP and advantage > 0) or (ratio < 1 - CLIP and advantage < 0)


# --- what the models give ----------------------------------------------------------------------
@pytest.fixture(scope="module")
def again():
    return one_prompt.measure()


def flat(numbers_of):
    """All numbers of nested lists, in order."""
    if isinstance(numbers_of, list):
        return [number for part in numbers_of for number in flat(part)]
    return [numbers_of]


def test_the_models_sample_the_same_completions(again):
    for key in ("completion", "tokens", "gold"):
        assert again[key] == MEASURED[key]


@pytest.mark.parametrize("key", ["ref", "old", "new", "values", "reward"])
def test_the_models_give_the_same_numbers(again, key):
    """Another processor may round differently: below 1e-4 even with gradients off by 1e-5."""
    assert flat(again[key]) == pytest.approx(flat(MEASURED[key]), abs=3e-4)


# --- the tables, recomputed from the numbers that they show ------------------------------------
def test_completions():
    for i, cells in enumerate(rows_of("completions").values()):
        close(cells[2:5], [sum(MEASURED[policy][i]) for policy in ("ref", "old", "new")])
    for cell, logprobs in zip(
        rows_of("completions")["1"][2:5], logprobs_of_the_best(), strict=True
    ):
        close([cell], [sum(logprobs)])


def test_reinforce():
    rewards = [float(cells[-2]) for cells in rows_of("completions").values()]
    for i, cells in enumerate(rows_of("REINFORCE").values()):
        baseline = mean([rewards[j] for j in GROUP if j != i])
        slope = -(rewards[i] - baseline) / 4
        close(cells[:4], [rewards[i], baseline, rewards[i] - baseline, slope])
        assert cells[4] == ("raised" if slope < 0 else "lowered")


def generalised_advantages(rewards, values, lam):
    advantages, next_value, next_advantage = [], 0.0, 0.0
    for reward, value in reversed([*zip(rewards, values, strict=True)]):
        next_advantage = reward + next_value - value + lam * next_advantage
        next_value = value
        advantages.insert(0, next_advantage)
    return advantages


def ppo_by_hand(i):
    """Token rewards and advantages of completion i."""
    k1 = [old - ref for old, ref in zip(MEASURED["old"][i], MEASURED["ref"][i], strict=True)]
    rewards = [-BETA * log_ratio for log_ratio in k1]
    rewards[-1] += MEASURED["reward"][i]
    values = MEASURED["values"][i]
    deltas = generalised_advantages(rewards, values, 0.0)
    return k1, rewards, deltas, generalised_advantages(rewards, values, LAMBDA)


def whitening():
    advantages = [advantage for i in GROUP for advantage in ppo_by_hand(i)[3]]
    average = mean(advantages)
    return average, math.sqrt(mean([(a - average) ** 2 for a in advantages]))


def test_ppos_whitening():
    ((line,),) = TABLES["one_prompt PPO whitening"]["rows"]
    close(re.findall(r"\d+\.\d+|\d+", line), [sum(LENGTHS), *whitening()])


def test_ppo():
    columns = columns_of("PPO")
    ref, old, new = logprobs_of_the_best()
    k1, rewards, deltas, advantages = ppo_by_hand(0)
    assert k1 == pytest.approx([a - b for a, b in zip(old, ref, strict=True)])
    close(columns["k1"], k1)
    close(columns["reward r"], rewards)
    close(columns["value V"], MEASURED["values"][0])
    close(columns["δ"], deltas)
    close(columns["advantage A"], advantages)
    average, deviation = whitening()
    whitened = [(advantage - average) / deviation for advantage in advantages]
    close(columns["whitened A"], whitened)
    ratios = [math.exp(a - b) for a, b in zip(new, old, strict=True)]
    close(columns["ratio"], ratios)
    slopes = []
    for ratio, advantage in zip(ratios, whitened, strict=True):
        slopes.append(0.0 if is_clipped(ratio, advantage) else -ratio * advantage / sum(LENGTHS))
    close(columns["gradient"], slopes)


def group_by_hand():
    rewards = [float(cells[-1]) for cells in rows_of("completions").values()]
    differences = [reward - mean(rewards) for reward in rewards]
    deviation = math.sqrt(sum(d * d for d in differences) / 3)
    return rewards, differences, [d / (deviation + 1e-4) for d in differences]


def test_grpos_group():
    rewards, differences, advantages = group_by_hand()
    for i, cells in enumerate(rows_of("GRPO group").values()):
        close(cells, [rewards[i], differences[i], advantages[i], 1 / (4 * LENGTHS[i])])


def test_grpo():
    columns = columns_of("GRPO")
    ref, old, new = logprobs_of_the_best()
    ratios = [math.exp(a - b) for a, b in zip(new, old, strict=True)]
    inverse = [math.exp(a - b) for a, b in zip(ref, new, strict=True)]
    advantage = group_by_hand()[2][0]
    slopes = []
    for ratio, ref_to_new in zip(ratios, inverse, strict=True):
        surrogate = 0.0 if is_clipped(ratio, advantage) else ratio * advantage
        slopes.append(-(surrogate - BETA * (1 - ref_to_new)) / (4 * LENGTHS[0]))
    close(columns["ratio"], ratios)
    close(columns["π_ref / π_new"], inverse)
    close(columns["gradient"], slopes)


def test_dpo():
    for policy, cells in zip(("ref", "old", "new"), rows_of("DPO").values(), strict=True):
        totals = [[sum(MEASURED[name][i]) for i in (0, 3)] for name in (policy, "ref")]
        chosen, rejected = (now - ref for now, ref in zip(*totals, strict=True))
        h = chosen - rejected
        slope = 0.3 * (1 - sigmoid(0.3 * h))
        loss = -math.log(sigmoid(0.3 * h))
        close(cells, [chosen, rejected, h, 0.3 * h, loss, -slope, slope])


# --- the text ----------------------------------------------------------------------------------
def worked_examples():
    """Pairs of an expression and the number behind the equals sign, from the code on the page."""
    found = re.findall(r"`([^`]+) = (-?[\d.]+)`", PAGE)
    return [(expression.replace("\n", " "), result) for expression, result in found]


@pytest.mark.house
@pytest.mark.parametrize("expression, result", worked_examples())
def test_a_worked_example_is_correct(expression, result):
    functions = {"exp": math.exp, "ln": math.log, "sqrt": math.sqrt}
    assert re.fullmatch(r"(exp|ln|sqrt|[\d.+*/() -])+", expression)
    digits = len(result.partition(".")[2])
    computed = eval(expression, {"__builtins__": {}}, functions)
    assert computed == pytest.approx(float(result), abs=0.51 * 10**-digits)


@pytest.mark.house
def test_worked_examples_use_numbers_of_the_tables():
    """Or constants, or results of examples before."""
    known = {"0.0001"}
    for table in TABLES.values():
        known |= {*re.findall(r"\d+\.\d+", str(table["rows"]))}
    for expression, result in worked_examples():
        for number in re.findall(r"\d+\.\d{3,}", expression):
            assert number in known, f"{number} in {expression}"
        known.add(result.lstrip("-"))
