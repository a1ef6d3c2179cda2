"""Makes the numbers that tables and figures of the pages show, those of time aside.

    python -m pip install matplotlib
    python docs/experiments/figures.py                 # all: hours on two cores
    python docs/experiments/figures.py grpo ppo        # some of them

An experiment is a list of commands, each run with several seeds. Its numbers go to
docs/results/NAME.json, its figure beside the pages, and its tables onto the pages, between the
comment lines that name them. Runs that runs/figures holds already are read, not repeated: delete
that folder after a change to a script. Runs of one thread each go side by side.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import tyro
from drawing import COLOURS, band, panels, save
from runs import QUANTITIES, SEEDS, Found, find, finished, spread, train
from tables import insert_tables

RESULTS, DOCS = Path("docs/results"), Path("docs")
GOLD = "--eval-reward-fn tiny/reviews/gold.py:sentiment"
REVIEWS = "--model tiny/reviews/policy --dataset tiny/reviews/prompts --max-new-tokens 40"
GRPO_REVIEWS = (
    f"grpo.py {REVIEWS} --reward-model tiny/reviews/reward_model {GOLD} "
    "--prompts-per-rollout 16 --total-rollouts 30"
)
SUMS = "--dataset tiny/arithmetic/preferences --eval-reward-fn grpo.py:last_number"


def code(flags: str) -> str:
    return f"`{flags}`" if flags else "(default)"


def variants(base: str, *flags: str) -> dict[str, str]:
    """Commands by what they add to the base."""
    return {code(some): f"{base} {some}".strip() for some in flags}


def curves_over(found: Found, out: str, x: str, titles: dict[str, str], labels: Any = None) -> None:
    """A panel for each metric: mean and range of the seeds."""
    offline = ("sft.svg", "rm_bradley_terry.svg", "dpo.svg")
    words = {"step": "optimiser step" if out in offline else "rollout"}
    figure, axes = panels(len(titles))
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for colour, label in zip(COLOURS, labels or found.runs, strict=False):
            band(axis, found.curve(label, x, metric), label.replace("`", ""), colour)
        axis.set(title=title, xlabel=words.get(x, x))
    if len(labels or found.runs) > 1:
        axes[0].legend(fontsize=8, framealpha=0)
    save(figure, DOCS / out)


# --- the experiments: commands, and what becomes of their runs ----------------------------------
def sft(found: Found) -> dict:
    curves_over(found, "sft.svg", "step", {"eval/loss": "held-out loss, nats per token"})
    columns = {"held-out loss before": ("(default)", "loss before", 3)}
    return {"sft": found.by_seed(columns | {"after": ("(default)", "loss", 3)})}


def reward_model(found: Found) -> dict:
    titles = {"eval/pair_accuracy": "held-out pair accuracy", "eval/loss": "held-out loss, nats"}
    curves_over(found, "rm_bradley_terry.svg", "step", titles)
    names = ["loss before", "loss", "pair accuracy before", "pair accuracy", "calibration error"]
    return {"reward model": found.by_seed({name: ("(default)", name, 3) for name in names})}


def reinforce(found: Found) -> dict:
    columns = {"accuracy before": ("reward before", 3), "after 20 rollouts": ("reward after 20", 3)}
    return {"reinforce": found.by_label(columns | {"after 60": ("reward", 3)})}


def grpo(found: Found) -> dict:
    titles = {
        "eval/accuracy": "held-out accuracy",
        "completions/length_mean": "tokens per completion",
        "policy/entropy": "entropy, nats per token",
    }
    curves_over(found, "grpo.svg", "step", titles, ["(default)"])
    columns = {
        "accuracy before": ("(default)", "accuracy before", 3),
        "after": ("(default)", "accuracy", 3),
        "greedy, after": ("greedy", "accuracy before", 3),
        "tokens before": ("(default)", "tokens before", 1),
        "tokens after": ("(default)", "tokens", 1),
        "KL, nats per completion": ("(default)", "KL, last five rollouts", 1),
    }
    return {"grpo": found.by_seed(columns)}


def of_sums(found: Found) -> dict:
    """Accuracy and length by flags."""
    return found.by_label({"accuracy": ("accuracy", 3), "tokens": ("tokens", 1)})


REVIEW_COLUMNS = {
    "gold": ("reward", 2),
    "KL": ("KL of samples", 1),
    "grammatical": ("grammatical", 2),
}


def of_reviews(found: Found, **columns: tuple) -> dict:
    """Gold reward, KL and grammar by flags."""
    return found.by_label(REVIEW_COLUMNS | columns)


def ppo(found: Found) -> dict:
    columns = {"gold before": ("(default)", "reward before", 2)}
    quantities = {"gold": "reward", "learned": "learned reward", "grammatical": "grammatical"}
    columns |= {name: ("(default)", quantity, 2) for name, quantity in quantities.items()}
    columns |= {"KL": ("(default)", "KL, last five rollouts", 1)}
    for name, quantity in quantities.items():
        columns[f"`--beta 0`: {name}"] = ("`--beta 0`", quantity, 2)
    sums = {name: ("sums", name, 3) for name in ("accuracy before", "accuracy")}
    sums |= {"explained variance": ("sums", "explained variance", 2)}
    return {"ppo": found.by_seed(columns), "ppo sums": found.by_seed(sums)}


def ppo_variants(found: Found) -> dict:
    first = ("first explained variance", 2)
    columns = {"first `explained_variance`": first, "at the end": ("explained variance", 2)}
    return {"ppo variants": of_reviews(found, **columns)}


def reward_hacking(found: Found) -> dict:
    titles = {"reward/mean": "learned reward", "eval/reward": "gold reward, held out"}
    figure, axes = panels(2, height=3, sharex=True)
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for colour, label in zip((COLOURS[4], COLOURS[1], COLOURS[0]), found.runs, strict=True):
            runs = [
                [r for r in run.rows if "eval/reward" in r and "objective/kl" in r]
                for run in found.runs[label]
            ]
            points = [[(r["objective/kl"], r[metric]) for r in rows] for rows in runs]
            found.curves.setdefault(label, {})[f"{metric} over objective/kl"] = points
            for line in points:
                axis.plot(*zip(*line, strict=True), color=colour, lw=0.6, alpha=0.5)
            means = [
                [mean(v) for v in zip(*some, strict=True)] for some in zip(*points, strict=True)
            ]
            axis.plot(*zip(*means, strict=True), color=colour, lw=2, label=f"beta {label}")
        axis.set(title=title, xlabel="KL to the starting policy, nats per completion")
    axes[0].legend(fontsize=8, framealpha=0)
    save(figure, DOCS / "reward_hacking.svg")
    columns = {"learned": ("learned reward", 2), "gold": ("reward", 2)}
    table = found.by_label(columns | {"KL": ("KL, last five rollouts", 1)})
    table["columns"] = [
        "`--beta`",
        *table["columns"][1:],
        "a review near the mean, seed 1 (its gold)",
    ]
    for row in table["rows"]:
        samples = found.runs[row[0]][0].samples
        middle = mean(sample["reward"] for sample in samples)
        typical = min(samples, key=lambda sample: abs(sample["reward"] - middle))
        row.append(f"`{typical['completion']}` ({typical['reward']:.2f})")
    return {"reward hacking": table}


FRONTIER = {
    "PPO, KL in the reward": ("ppo_rlhf.py", (1e-9, 0.05, 0.1, 0.2, 0.5), "--beta {}"),
    "PPO, KL in the loss": ("ppo_rlhf.py", (0.2, 0.5, 1), "--kl-placement loss --beta {}"),
    "GRPO, KL in the reward": (GRPO_REVIEWS, (0.1, 0.2, 0.5), "--kl-placement reward --beta {}"),
    "GRPO, KL in the loss": (GRPO_REVIEWS, (0.1, 0.2, 0.5, 1), "--beta {}"),
    "DPO": ("dpo.py", (0.1, 0.3, 1), "--beta {}"),
}


def frontier(found: Found) -> dict:
    figure, (axis,) = panels(1, width=6, height=3.6)
    rows = []
    for colour, (name, (_, betas, _)) in zip(COLOURS, FRONTIER.items(), strict=False):
        labels = [f"{name}, beta {beta}" for beta in betas]
        kls, golds = ([found.of(label, q) for label in labels] for q in ("KL of samples", "reward"))
        axis.scatter([*chain(*kls)], [*chain(*golds)], s=5, color=colour, alpha=0.5, lw=0)
        middle = [[mean(v) for v in some] for some in (kls, golds)]
        axis.plot(*middle, color=colour, marker="o", ms=5, label=name)
        for beta, kl, gold, label in zip(betas, kls, golds, labels, strict=True):
            told = "0" if beta < 1e-6 else str(beta)
            cells = [spread(gold, 2), spread(kl, 1), spread(found.of(label, "grammatical"), 2)]
            rows.append([name, told, *cells])
    axis.set(
        xlabel="KL to the starting policy, nats per completion", ylabel="gold reward, held out"
    )
    axis.set(xscale="log", title="gold reward against KL, one point per beta")
    axis.legend(fontsize=8, framealpha=0, loc="lower left")
    save(figure, DOCS / "frontier.svg")
    columns = ["algorithm", "`--beta`", "gold", "KL, nats per completion", "grammatical"]
    return {"frontier": dict(columns=columns, rows=rows)}


def dpo(found: Found) -> dict:
    titles = {
        "eval/pair_accuracy": "held-out pair accuracy",
        "eval/reward": "gold reward",
        "eval/kl": "KL, nats per completion",
    }
    curves_over(found, "dpo.svg", "step", titles, ["(default)"])
    digits = {"pair accuracy": 3, "loss": 3, "reward before": 2, "reward": 2, "grammatical": 2}
    digits |= {"eval KL": 1, "tokens before": 1, "tokens": 1}
    words = {"reward before": "gold before", "reward": "gold", "eval KL": "KL"}
    columns = {words.get(n, n): ("(default)", n, d) for n, d in digits.items()}
    sums = {"accuracy before": 3, "accuracy": 3, "eval KL": 1}
    sums = {words.get(name, name): ("sums", name, digits) for name, digits in sums.items()}
    return {"dpo": found.by_seed(columns), "dpo sums": found.by_seed(sums)}


def with_tokens(found: Found) -> dict:
    return of_reviews(found, tokens=("tokens", 1))


def without_kl(found: Found) -> dict:
    """Of losses without a reference."""
    columns = {name: REVIEW_COLUMNS[name] for name in ("gold", "grammatical")}
    columns |= {"pair accuracy": ("pair accuracy", 3), "tokens": ("tokens", 1)}
    return {"simpo and orpo": found.by_label(columns)}


def orpo(found: Found) -> dict:
    columns = {"accuracy before": ("SFT on the chosen", "accuracy before", 3)}
    columns |= {label: (label, "accuracy", 3) for label in found.runs}
    return {"orpo": found.by_seed(columns)}


def kto(found: Found) -> dict:
    digits = {"loss before": 3, "loss": 3, "reward before": 2, "reward": 2, "grammatical": 2}
    digits |= {"eval KL": 1, "highest KL": 1, "tokens before": 1, "tokens": 1}
    words = {"reward before": "gold before", "reward": "gold", "eval KL": "KL"}
    tables = {}
    for name, label in {"kto": "(default)", "kto pairs": "pairs"}.items():
        columns = {words.get(n, n): (label, n, d) for n, d in digits.items()}
        tables[name] = found.by_seed(columns)
    return tables


def gdpo(found: Found) -> dict:
    import torch

    from grpo import group_advantages

    figure, axes = panels(2)
    titles = {"reward/last_number": "right answers", "reward/brevity": "minus the characters"}
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for colour, way in zip((COLOURS[1], COLOURS[0]), ("GRPO", "GDPO"), strict=True):
            band(axis, found.curve(f"brevity 4 : 1, {way}", "step", metric), way, colour)
        axis.set(title=title, xlabel="rollout")
    axes[0].legend(fontsize=8, framealpha=0)
    save(figure, DOCS / "gdpo.svg")
    rows = []
    for setting in dict.fromkeys(label.rpartition(",")[0] for label in found.runs):
        rule = setting.split()[0]
        ways = [f"{setting}, {way}" for way in ("GRPO", "GDPO")]
        cells = [spread(found.of(way, "accuracy"), 2) for way in ways]
        cells += [spread(found.of(way, rule), 1) if rule in QUANTITIES else "" for way in ways]
        cells += [spread(found.of(way, "right in the third rollout"), 2) for way in ways]
        rows.append([*setting.partition(" ")[::2], *cells])
    columns = ["rule", "weights, right : rule", "right: GRPO", "GDPO", "rule: GRPO", "GDPO"]
    columns += ["right in the third rollout: GRPO", "GDPO"]
    pairs = {
        "right, and as long": (1, 0),
        "as right, and 9 characters shorter": (0, 9),
        "right, and 9 characters shorter": (1, 9),
        "right, and 9 characters longer": (1, -9),
    }
    advantages = []
    for told, (right, shorter) in pairs.items():
        each = [torch.tensor([w * more, 0.0]) for w, more in ((4.0, right), (1.0, shorter))]
        summed = group_advantages(sum(each), 2)[0]
        apart = 4 * group_advantages(each[0], 2)[0] + group_advantages(each[1], 2)[0]
        cells = (f"{4 * right + shorter:+d}", f"{summed:+.2f}", f"{apart:+.2f}")
        advantages.append([told, *cells])
    heads = ["the first completion is", "weighted sum, first less second", "GRPO", "GDPO"]
    tables = {"gdpo advantages": dict(columns=heads, rows=advantages)}
    return tables | {"gdpo": dict(columns=columns, rows=rows)}


def format_reward(found: Found) -> dict:
    titles = {"reward/shown": "working shown", "eval/accuracy": "held-out accuracy"}
    curves_over(found, "rewards.svg", "step", titles)
    columns = {"working shown, first rollout": ("(default)", "first shown", 2)}
    columns |= {"last five": ("(default)", "shown", 2)}
    columns |= {name: ("(default)", name, 3) for name in ("accuracy before", "accuracy")}
    return {"format reward": found.by_seed(columns)}


def two_rewards(rule: str | None, weight: int) -> dict[str, str]:
    """GRPO and GDPO with right answers and a rule beside them."""
    rules = "--reward-fn last_number"
    if rule:
        rules += f" docs/experiments/rules.py:{rule} --reward-weights {weight} 1"
    name = f"{rule} {weight} : 1" if rule else "none "
    base = f"grpo.py {rules} --eval-reward-fn last_number --multi-objective-aggregation"
    ways = {"GRPO": "sum_then_normalize", "GDPO": "normalize_then_sum"}
    return {f"{name}, {way}": f"{base} {flag}" for way, flag in ways.items()}


# Commands by label, and the function that makes tables and figures of their runs. A command may
# name the model of another run of the same experiment and seed: {its label}.
EXPERIMENTS: dict[str, tuple[dict[str, str], Callable]] = {
    "sft": (variants("sft.py", ""), sft),
    "reward_model": (variants("rm_bradley_terry.py", ""), reward_model),
    "grpo": (
        {
            "(default)": "grpo.py",
            "greedy": "grpo.py --model {(default)} --eval-temperature 0 --total-rollouts 1",
        },
        grpo,
    ),
    "ppo": (
        {
            "(default)": "ppo_rlhf.py",
            "`--beta 0`": "ppo_rlhf.py --beta 0",
            "sums": "ppo_rlhf.py --model tiny/arithmetic/policy --dataset tiny/arithmetic/prompts "
            "--reward-model None --reward-fn last_number --eval-reward-fn None --critic-init sft "
            "--max-new-tokens 24 --total-rollouts 40 --beta 0.04",
        },
        ppo,
    ),
    "dpo": (
        {
            "(default)": "dpo.py",
            "sums": f"dpo.py --model tiny/arithmetic/policy {SUMS} --max-new-tokens 24",
        },
        dpo,
    ),
    "kto": (
        {
            "(default)": "kto.py --eval-every 100",
            "pairs": "kto.py --eval-every 100 --dataset tiny/reviews/preferences "
            "--eval-reward-fn ./tiny/reviews/gold.py:sentiment",
        },
        kto,
    ),
    "reinforce": (
        variants(
            "reinforce.py",
            *(f"--baseline {name}" for name in ("none", "batch_mean", "leave_one_out")),
        ),
        reinforce,
    ),
    "reward_hacking": (
        # At 0 no reference is loaded and no KL measured; 1e-9 takes nothing that counts off.
        {
            told: f"ppo_rlhf.py --beta {beta} --eval-every 2"
            for told, beta in (("0", 1e-9), ("0.05", 0.05), ("0.2", 0.2))
        },
        reward_hacking,
    ),
    "frontier": (
        {
            f"{name}, beta {beta}": f"{base} {flags.format(beta)}"
            for name, (base, betas, flags) in FRONTIER.items()
            for beta in betas
        },
        frontier,
    ),
    "grpo_variants": (
        variants(
            "grpo.py",
            "",
            "--beta 0",
            "--no-scale-rewards",
            "--loss-norm token",
            "--loss-norm constant",
            "--group-size 2 --prompts-per-rollout 128",
            "--group-size 4 --prompts-per-rollout 64",
            "--group-size 16 --prompts-per-rollout 16",
            "--group-size 32 --prompts-per-rollout 8",
            "--num-minibatches 1 --learning-rate 1e-3",
            "--num-minibatches 8",
            "--beta 0 --clip-coef-high 0.28 --loss-norm token --mask-truncated",
            "--beta 0 --loss-norm constant --no-scale-rewards",
        ),
        lambda found: {"grpo variants": of_sums(found)},
    ),
    "ppo_variants": (
        variants(
            "ppo_rlhf.py",
            "",
            "--no-whiten-advantages",
            "--vf-clip-coef None",
            "--critic-init sft",
            "--critic-init scratch",
            "--gae-lambda 1",
            "--num-minibatches 1",
        ),
        ppo_variants,
    ),
    "dpo_variants": (
        variants(
            "dpo.py",
            "",
            "--loss ipo --beta 1",
            "--nll-coef 0.2",
            "--label-smoothing 0.1",
        ),
        lambda found: {"dpo variants": with_tokens(found)},
    ),
    "simpo_and_orpo": (
        variants(
            "dpo.py",
            "--loss simpo --beta 5 --gamma 0.5",
            "--loss simpo --beta 5 --gamma 0",
            "--loss simpo --beta 5 --gamma 2",
            "--loss simpo --beta 2 --gamma 0.5",
            "--loss simpo --beta 5 --gamma 0.5 --nll-coef 0.2",
            "--loss orpo --beta 5",
            "--loss orpo --beta 1",
            "--loss orpo --beta 1e-9",
        ),
        without_kl,
    ),
    "orpo": (
        {
            label: f"dpo.py --loss orpo --beta {beta} --model tiny/arithmetic/base {SUMS} "
            "--max-new-tokens 24 --learning-rate 1e-3 --epochs 12"
            for label, beta in (
                ("SFT on the chosen", 1e-9),
                ("ORPO, beta 0.5", 0.5),
                ("ORPO, beta 1", 1),
            )
        }
        | {
            "that SFT, then DPO": f"dpo.py --model {{SFT on the chosen}} {SUMS} --max-new-tokens 24"
        },
        orpo,
    ),
    "format_reward": (
        {
            "(default)": "grpo.py --reward-fn docs/rewards/formats.py:shown "
            "--eval-reward-fn last_number"
        },
        format_reward,
    ),
    "kto_variants": (
        variants(
            "kto.py",
            "",
            "--desirable-weight 1",
            "--desirable-weight 1 --beta 0.3",
        ),
        lambda found: {"kto variants": of_reviews(found)},
    ),
    "gdpo": (
        {
            label: command
            for rule, weight in (
                *(("brevity", weight) for weight in (1, 2, 4, 8, 16)),
                ("working", 1),
                (None, 1),
            )
            for label, command in two_rewards(rule, weight).items()
        },
        gdpo,
    ),
}
COMPUTED = ("theory", "choosing", "variance", "pitfalls")  # modules with a function results()


def overview() -> dict:
    """All algorithms on one metric, from the numbers of the other experiments."""

    def told(name: str, label: str, quantity: str, digits: int) -> str:
        numbers = json.loads((RESULTS / f"{name}.json").read_text())["numbers"]
        return spread(numbers[label][quantity], digits)

    def gold(name: str, label: str, has_kl: bool = True) -> list[str]:
        kl = told(name, label, "KL of samples", 1) if has_kl else ""
        return [told(name, label, "reward", 2), kl]

    def right(name: str, label: str, quantity: str = "accuracy") -> str:
        return told(name, label, quantity, 3)

    simpo, orpo = "`--loss simpo --beta 5 --gamma 0.5`", "`--loss orpo --beta 5`"
    leave_one_out = right("reinforce", "`--baseline leave_one_out`", "reward")
    pages = {
        "[PPO](ppo_rlhf.md)": [
            *gold("frontier", "PPO, KL in the reward, beta 0.2"),
            right("ppo", "sums"),
            "reward model; rule",
        ],
        "[REINFORCE](reinforce.md), leave one out": ["", "", leave_one_out, "rule"],
        "[GRPO](grpo.md), KL in the loss": [
            *gold("frontier", "GRPO, KL in the loss, beta 0.2"),
            right("grpo", "(default)"),
            "reward model; rule",
        ],
        "GRPO, KL in the reward": [
            *gold("frontier", "GRPO, KL in the reward, beta 0.2"),
            "",
            "reward model",
        ],
        "[DPO](dpo.md)": [
            *gold("frontier", "DPO, beta 0.3"),
            right("dpo", "sums"),
            "pairs; right and wrong samples",
        ],
        "[SimPO](dpo.md#simpo-and-orpo)": [*gold("simpo_and_orpo", simpo, False), "", "pairs"],
        "[ORPO](dpo.md#simpo-and-orpo)": [
            *gold("simpo_and_orpo", orpo, False),
            f"{right('orpo', 'ORPO, beta 0.5')}, from an untrained model",
            "pairs; right and wrong samples",
        ],
        "[KTO](kto.md)": [*gold("kto_variants", "(default)"), "", "labelled completions"],
    }
    columns = ["", "reviews: gold reward", "KL, nats per completion", "sums: accuracy"]
    rows = [[name, *cells] for name, cells in pages.items()]
    return dict(tables={"overview": dict(columns=[*columns, "learns from"], rows=rows)})


@dataclass
class Args:
    names: tyro.conf.Positional[tuple[str, ...]] = (*EXPERIMENTS, *COMPUTED, "overview")
    """Experiments; all if none is named."""
    jobs: int = 2
    """Runs side by side."""


def wanted(command: str, seed: int, commands: dict[str, str]) -> str:
    """The command, with the folders of other runs' models."""
    for label, other in commands.items():
        if f"{{{label}}}" in command:
            run = find(other, seed)
            command = command.replace(f"{{{label}}}", f"{run.folder}/model" if run else "?")
    return command


def make(name: str, jobs: int) -> None:
    commands, finish = EXPERIMENTS[name]
    for later in (False, True):  # those that start from another's model come second
        todo = [
            (wanted(command, seed, commands), seed)
            for command in commands.values()
            for seed in SEEDS
            if ("{" in command) == later
        ]
        todo = [pair for pair in todo if not find(*pair)]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda pair: train(*pair), todo))
        finished.cache_clear()
    runs = {
        label: [find(wanted(command, seed, commands), seed) for seed in SEEDS]
        for label, command in commands.items()
    }
    found = Found(runs)
    made = dict(tables=finish(found), commands=commands, seeds=SEEDS)
    write(name, made | dict(numbers=found.numbers, curves=found.curves))


def write(name: str, made: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")
    insert_tables()


def main(args: Args) -> None:
    for name in args.names:
        print(name, flush=True)
        if name == "overview":
            write(name, overview())
        elif name in COMPUTED:
            write(name, import_module(name).results())
        else:
            make(name, args.jobs)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
