"""docs/pitfalls.md and its experiment name what exists, and the page tells what the runs gave."""

import json
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
from scripts import SCRIPTS

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "experiments"))
import pitfalls

PAGE = Path("docs/pitfalls.md")
RESULTS = Path("docs/results/pitfalls.json")
COMMANDS = [
    (name, way, getattr(symptom, way))
    for name, symptom in pitfalls.RUNS.items()
    for way in ("sick", "healthy")
] + [("nan", *pair) for pair in zip(("sick", "healthy"), pitfalls.NAN, strict=True)]


@pytest.mark.parametrize(("name", "way", "command"), COMMANDS)
def test_commands_parse(name, way, command):
    script, *flags = shlex.split(command)
    args = SCRIPTS[script.removesuffix(".py")].parse_args(flags)
    default = SCRIPTS[script.removesuffix(".py")].Args()
    assert args != default or way == "healthy"
    for spec in args.reward_fn if hasattr(args, "reward_fn") else []:
        assert Path(spec.rpartition(":")[0]).is_file()


def test_metrics_are_those_of_the_scripts_pages():
    for name, symptom in pitfalls.RUNS.items():
        page = Path(f"docs/{symptom.sick.split('.py')[0]}.md").read_text()
        panels = [metric for panel, metric, *_ in pitfalls.PANELS if panel == name]
        for metric in (*symptom.metrics, *panels):
            metric = metric.removeprefix("highest ")
            assert f"| `{metric}`" in page or f", `{metric}`" in page, f"{name}: {metric}"


def test_the_page_has_a_section_with_both_commands_for_each_symptom():
    text = PAGE.read_text()
    names = list(dict.fromkeys(name for name, *_ in COMMANDS))
    assert re.findall(r"<!-- table pitfalls (\w+) -->", text) == names
    anchors = re.findall(r"\]\(#([\w-]+)\)", text)
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert anchors == [heading.lower().replace(" ", "-") for heading in headings]
    lines = re.sub(r"\\\n\s*", "", text)
    (reviews,) = re.findall(r'^    REVIEWS="(.*)"$', lines, re.MULTILINE)
    lines = lines.replace("$REVIEWS", reviews)
    found = re.findall(r"^    python (\w+\.py.*?) +# (sick|healthy)$", lines, re.MULTILINE)
    assert found == [(command, way) for _, way, command in COMMANDS]


def test_the_tables_follow_from_the_numbers():
    """By hand: each cell is the numbers of the seeds, rounded."""
    made = json.loads(RESULTS.read_text())
    assert made["numbers"].keys() == pitfalls.RUNS.keys()
    for name, commands in made["numbers"].items():
        symptom, table = pitfalls.RUNS[name], made["tables"][f"pitfalls {name}"]
        assert [*commands] == [symptom.sick, symptom.healthy]
        assert [column.replace("`", "") for column in table["columns"]] == ["", *symptom.metrics]
        assert [way for way, *_ in table["rows"]] == ["sick", "healthy"]
        for metrics, (_, *cells) in zip(commands.values(), table["rows"], strict=True):
            assert tuple(metrics) == symptom.metrics
            for numbers, cell in zip(metrics.values(), cells, strict=True):
                assert len(numbers) == len(pitfalls.SEEDS)
                for number, shown in zip(numbers, cell.split(", "), strict=True):
                    near = 0.5 if abs(number) >= 100 else 0.05 if abs(number) >= 10 else 0.005
                    assert math.isclose(float(shown), number, abs_tol=near + 1e-4)


def test_what_the_page_says_of_the_runs_holds():
    """Each sick run is sick, and each healthy one is not, on every seed."""
    numbers = json.loads(RESULTS.read_text())["numbers"]

    def compare(name, metric):
        return (commands[metric] for commands in numbers[name].values())

    for name, metric, least in (
        ("hacking", "reward/mean", 0.2),
        ("kl", "objective/kl", 20),
        ("length", "eval/length_mean", 4),
        ("zero", "reward/zero_variance_groups", 0.3),
        ("critic", "value/loss", 2),
    ):
        sick, healthy = compare(name, metric)
        assert min(sick) - max(healthy) > least, name
    for name, metric, least in (
        ("hacking", "eval/reward", 0.5),
        ("kl", "eval/reward", 0.5),
        ("entropy", "policy/entropy", 0.5),
        ("entropy", "eval/reward", 0.5),
        ("length", "eval/reward", 0),
        ("critic", "value/explained_variance", 1),
        ("chosen", "policy/logprob_chosen", 10),
        ("chosen", "eval/reward", 0.15),
    ):
        sick, healthy = compare(name, metric)
        assert min(healthy) - max(sick) > least, name


def test_value_is_of_the_last_five_steps_or_the_last_evaluation():
    rows = [
        {"eval/reward": 9.0},
        *({"reward/mean": float(i)} for i in range(6)),
        {"eval/reward": 2},
    ]
    assert pitfalls.value(rows, "reward/mean") == (1 + 2 + 3 + 4 + 5) / 5
    assert pitfalls.value(rows, "eval/reward") == 2
    assert pitfalls.value(rows, "highest eval/reward") == 9


def test_chances_of_equal_groups_on_the_page():
    text = PAGE.read_text()
    for size, told in ((2, "0.94"), (8, "0.78")):
        equal = sum(0.03**right * 0.97 ** (size - right) for right in (0, size))
        assert f"{equal:.2f}" == told
        assert re.search(rf"\$G = {size}\$ (?:that|it) is {told}", text)
