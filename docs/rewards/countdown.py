"""Countdown: an expression of the given numbers, each used once, whose value is the target.

    python docs/rewards/countdown.py FOLDER
    python grpo.py --reward-fn docs/rewards/countdown.py:solves --dataset FOLDER ...

The task of TinyZero (github.com/Jiayi-Pan/TinyZero), which also pays 0.1 for any <answer>.
"""

import ast
import json
import operator
import random
import re
import sys
from fractions import Fraction
from pathlib import Path

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def solves(
    prompts: list, completions: list[str], numbers: list, target: list, **columns: list
) -> list[float]:
    """1 where the last <answer>, or without one the completion, is such an expression, else 0."""
    rewards = []
    for completion, given, goal in zip(completions, numbers, target, strict=True):
        text = (re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL) or [completion])[-1]
        used = []
        try:
            value = evaluate(ast.parse(text.strip(), mode="eval").body, used)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            value = None
        rewards.append(float(value == goal and sorted(used) == sorted(given)))
    return rewards


def evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """The value of an expression without calling `eval`; its numbers are appended to `used`."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = evaluate(node.left, used), evaluate(node.right, used)
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand, used)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")


def make_row(rng: random.Random) -> dict:
    """Three or four numbers up to 99, and a target of 10 to 100 that they reach."""
    target = 0
    while not 10 <= target <= 100:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice([3, 4]))]
        target = numbers[0]
        for number in numbers[1:]:
            target = rng.choice([operator.add, operator.sub, operator.mul])(target, number)
    rng.shuffle(numbers)
    asked = f"Make {target} from {numbers} with + - * /. Use each number once."
    prompt = f"{asked} Put the expression between <answer> and </answer>."
    return {"prompt": prompt, "numbers": numbers, "target": target}


if __name__ == "__main__":
    rng = random.Random(0)
    for split, size in (("train", 10_000), ("test", 500)):
        rows = [json.dumps(make_row(rng)) + "\n" for _ in range(size)]
        Path(sys.argv[1]).mkdir(exist_ok=True)
        Path(sys.argv[1], f"{split}.jsonl").write_text("".join(rows))
