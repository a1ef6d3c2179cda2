"""docs/pitfalls.md and its experiment name what exists, and the page tells what the runs gave."""

import json
import math
import re
import shlex
import sys
from pathlib import Path
from statistics import mean

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
        ("zero", "reward/zero_variance_groups", 0.2),
        ("critic", "value/loss", 2),
    ):
        sick, healthy = compare(name, metric)
        assert min(sick) - max(healthy) > least, name
    for name, metric, least in (
        ("hacking", "eval/reward", 0.5),
        ("kl", "eval/reward", 0.5),
        ("entropy", "policy/entropy", 0.5),
        ("entropy", "eval/reward", 0.5),
        ("critic", "value/explained_variance", 1),
        ("chosen", "policy/logprob_chosen", 10),
        ("chosen", "eval/reward", 0.05),
    ):
        sick, healthy = compare(name, metric)
        assert min(healthy) - max(sick) > least, name


def section(heading):
    """The text of a section of the page, in one line."""
    text = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return " ".join(text.split())


def sick_values(name, metric):
    """Values of rollouts 1, 2, ... for each seed of the sick runs."""
    rollouts = json.loads(RESULTS.read_text())["rollouts"][name]
    assert [*rollouts] == [pitfalls.RUNS[name].sick, pitfalls.RUNS[name].healthy]
    return rollouts[pitfalls.RUNS[name].sick][metric]


def test_commands_that_differ_in_more_than_one_flag_are_pointed_out():
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    symptoms = list(dict.fromkeys(name for name, *_ in COMMANDS))
    for symptom, heading in zip(symptoms, headings, strict=True):
        sick, healthy = (command for name, _, command in COMMANDS if name == symptom)
        script = SCRIPTS[sick.split(".py")[0]]
        ways = [vars(script.parse_args(command.split()[1:])) for command in (sick, healthy)]
        different = [flag for flag in ways[0] if ways[0][flag] != ways[1][flag]]
        told = re.search(r"runs below differ in|commands differ in|runs combine", section(heading))
        assert bool(told) == (len(different) > 1), f"{heading}: {different}"


def test_where_the_page_says_that_the_gold_reward_peaks():
    of_symptom = json.loads(RESULTS.read_text())["curves"]["hacking"]["sick"]
    gold = dict(zip(of_symptom["x"], of_symptom["mean"], strict=True))
    peak = max(gold, key=gold.get)
    told = f"peaks after {peak} of {max(gold)} rollouts, at {gold[peak]:.2f}"
    assert told in section("The reward rises and the text gets worse")


def test_how_the_page_says_that_the_entropy_falls():
    entropy = sick_values("entropy", "policy/entropy")
    means = [mean(of_rollout) for of_rollout in zip(*entropy, strict=True)]
    at_20 = [of_seed[19] for of_seed in entropy]
    peak = means.index(max(means))
    told = (
        f"from {means[peak]:.1f} nats in rollout {peak + 1} to {means[19]:.1f} in "
        f"rollout 20 ({min(at_20):.2f} to {max(at_20):.2f} over the seeds) and {means[29]:.1f} in "
        "rollout 30"
    )
    assert told in section("The entropy is 0")


def test_when_the_page_says_that_an_update_breaks_the_policy():
    rewards = sick_values("entropy", "reward/mean")
    breaks = [next(i for i in range(10, 30) if of_seed[i] < 0) for of_seed in rewards]
    peaks = [max(of_seed[:i]) for of_seed, i in zip(rewards, breaks, strict=True)]
    ends_below_0 = [seed + 1 for seed, of_seed in enumerate(rewards) if of_seed[-1] < 0]
    text = section("The entropy is 0")
    assert f"Between rollouts {min(breaks) + 1} and {max(breaks) + 1} an update breaks" in text
    assert f"had risen to between {min(peaks):.1f} and {max(peaks):.1f}, falls below 0" in text
    assert "on three seeds, but seeds {} and {} end below 0".format(*ends_below_0) in text


def test_how_the_page_says_that_the_kl_explodes():
    kl = sick_values("kl", "objective/kl")
    text = section("The KL explodes")
    first = mean(of_seed[0] for of_seed in kl)
    assert f"{round(first, -2):,.0f} nats in the first rollout" in text
    bound, since = map(int, re.search(r"above (\d+) nats from rollout (\d+) on", text).groups())
    lowest = [min(of_rollout) for of_rollout in zip(*kl, strict=True)]
    assert min(lowest[since - 1 :]) > bound > min(lowest[since - 2 :])
    last = mean(mean(of_seed[-5:]) for of_seed in kl)
    assert f"to about {5 * round(last / 5)} nats at the end" in text


def test_what_the_page_says_of_approx_kl():
    approx_kl = sick_values("kl", "policy/approx_kl")
    counts = [sum(value > 0.05 for value in of_seed[:10]) for of_seed in approx_kl]
    healthy = json.loads(RESULTS.read_text())["rollouts"]["kl"][pitfalls.RUNS["kl"].healthy]
    highest = max(max(of_seed) for of_seed in healthy["policy/approx_kl"])
    text = section("The KL explodes")
    assert f"in {min(counts)} to {max(counts)} of the first ten rollouts" in text
    assert f"while no healthy run exceeds {math.ceil(100 * highest) / 100}." in text


def test_what_ppos_page_says_of_the_clip_fractions():
    page = Path("docs/ppo_rlhf.md").read_text()
    text = page.partition("### Clip fractions\n")[2].partition("\n## ")[0]
    items = [" ".join(item.split()) for item in text.split("\n* ")[1:]]
    fractions = json.loads(RESULTS.read_text())["clip fractions"]
    assert [*fractions] == [*pitfalls.CLIPPED]
    for item, (label, numbers) in zip(items, fractions.items(), strict=True):
        first = numbers["first"]
        assert f": {min(first):.2f} to {max(first):.2f} in the first rollout" in item, label
    for item, numbers in zip(items[:3], [*fractions.values()][:3], strict=True):
        assert f"Later the mean is {mean(numbers['mean later']):.3f}," in item
        assert f"no rollout is above {max(numbers['highest later']):.2f}" in item
    sick = fractions["GRPO, reviews, rate 2e-3"]
    assert f"Later the mean is {mean(sick['mean later']):.2f}," in items[3]
    highest = sick["highest later"]
    assert f"single rollouts reach {min(highest):.2f} to {max(highest):.2f}" in items[3]
    healthy = [fractions[label] for label in fractions if "2e-3" not in label]
    assert max(max(numbers["highest later"]) for numbers in healthy) < 0.1 < min(highest)


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
    text = section("All advantages are 0")
    for size, told in ((2, "0.94"), (8, "0.78")):
        equal = sum(0.03**right * 0.97 ** (size - right) for right in (0, size))
        assert f"{equal:.2f}" == told
        assert f"{told} with $G = {size}$" in text
    numbers = json.loads(RESULTS.read_text())["numbers"]["zero"]
    assert max(numbers[pitfalls.RUNS["zero"].sick]["eval/accuracy"]) < 0.08
    assert "after 15 rollouts it still answers fewer than 8 %" in text
