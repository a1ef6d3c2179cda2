"""Makes the numbers that tables and figures of the pages show, those of time aside.

    python -m pip install matplotlib
    python docs/experiments/figures.py                 # all: hours on two cores
    python docs/experiments/figures.py grpo ppo        # some of them

An experiment is a list of commands, each run with several seeds. Its numbers go to
docs/results/NAME.json, its figure to docs/figures/, and its tables onto the pages, between the
comment lines that name them. Runs that runs/figures holds already are read, not repeated: delete
that folder after a change to a script. Runs of one thread each go side by side.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from statistics import mean

import tyro
from drawing import COLOURS, draw_band, panels, save
from paths import RESULTS
from runs import GOLD, GRPO_REVIEWS, QUANTITIES, SEEDS, Experiment, find_run, finished_runs, train
from tables import insert_tables, spread

LAST_NUMBER = "tiny/arithmetic/reward.py:last_number"
# Preference pairs of the sums.
SUMS = f"--dataset tiny/arithmetic/preferences --eval-reward-fn {LAST_NUMBER}"


def variants(script: str, *flags: str) -> dict[str, str]:
    """Commands of a script, by the flags that are added to it."""
    commands = {}
    for added in flags:
        if added:
            commands[f"`{added}`"] = f"{script} {added}"
        else:
            commands["(default)"] = script
    return commands


def draw_metrics(
    experiment: Experiment, figure_name: str, titles: dict[str, str], xlabel: str = "rollout"
) -> None:
    """A panel for each metric of the default run, with its title: mean and range of the seeds."""
    figure, axes = panels(len(titles))
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        curves = experiment.metric_curves("(default)", metric)
        draw_band(axis, curves, label="(default)", colour=COLOURS[0])
        axis.set(title=title, xlabel=xlabel)
    save(figure, figure_name)


# --- the experiments: what becomes of their runs; commands further down ------------------------
# A column of `table_by_seed` is (label, quantity, digits), of `table_by_flags` (quantity, digits).
def sft(experiment: Experiment) -> dict:
    titles = {"eval/loss": "held-out loss, nats per token"}
    draw_metrics(experiment, "sft.svg", titles, xlabel="optimiser step")
    columns = {
        "held-out loss before": ("(default)", "loss before", 3),
        "after": ("(default)", "loss", 3),
    }
    return {"sft": experiment.table_by_seed(columns)}


def reward_model(experiment: Experiment) -> dict:
    titles = {"eval/pair_accuracy": "held-out pair accuracy", "eval/loss": "held-out loss, nats"}
    draw_metrics(experiment, "rm_bradley_terry.svg", titles, xlabel="optimiser step")
    columns = {
        "loss before": ("(default)", "loss before", 3),
        "loss": ("(default)", "loss", 3),
        "pair accuracy before": ("(default)", "pair accuracy before", 3),
        "pair accuracy": ("(default)", "pair accuracy", 3),
        "calibration error": ("(default)", "calibration error", 3),
    }
    layers = {
        "loss": ("loss", 3),
        "pair accuracy": ("pair accuracy", 3),
        "calibration error": ("calibration error", 3),
    }
    return {
        "reward model": experiment.table_by_seed(columns),
        "reward model layers": experiment.table_by_flags(layers),
    }


def reinforce(experiment: Experiment) -> dict:
    columns = {
        "accuracy before": ("reward before", 3),
        "after 20 rollouts": ("reward after 20", 3),
        "after 60": ("reward", 3),
    }
    return {"reinforce": experiment.table_by_flags(columns)}


def grpo(experiment: Experiment) -> dict:
    titles = {
        "eval/accuracy": "held-out accuracy",
        "completions/length_mean": "tokens per completion",
        "policy/entropy": "entropy, nats per token",
    }
    draw_metrics(experiment, "grpo.svg", titles)
    columns = {
        "accuracy before": ("(default)", "accuracy before", 3),
        "after": ("(default)", "accuracy", 3),
        "greedy, after": ("greedy", "accuracy before", 3),
        "tokens before": ("(default)", "tokens before", 1),
        "tokens after": ("(default)", "tokens", 1),
        "KL, nats per completion": ("(default)", "KL, last five rollouts", 1),
    }
    return {"grpo": experiment.table_by_seed(columns)}


def grpo_variants(experiment: Experiment) -> dict:
    columns = {"accuracy": ("accuracy", 3), "tokens": ("tokens", 1)}
    return {"grpo variants": experiment.table_by_flags(columns)}


def ppo(experiment: Experiment) -> dict:
    review_columns = {
        "gold before": ("(default)", "reward before", 2),
        "gold": ("(default)", "reward", 2),
        "learned": ("(default)", "learned reward", 2),
        "grammatical": ("(default)", "grammatical", 2),
        "KL": ("(default)", "KL, last five rollouts", 1),
        "`--beta 0`: gold": ("`--beta 0`", "reward", 2),
        "`--beta 0`: learned": ("`--beta 0`", "learned reward", 2),
        "`--beta 0`: grammatical": ("`--beta 0`", "grammatical", 2),
    }
    sum_columns = {
        "accuracy before": ("sums", "accuracy before", 3),
        "accuracy": ("sums", "accuracy", 3),
        "explained variance": ("sums", "explained variance", 2),
    }
    return {
        "ppo": experiment.table_by_seed(review_columns),
        "ppo sums": experiment.table_by_seed(sum_columns),
    }


def ppo_variants(experiment: Experiment) -> dict:
    columns = {
        "gold": ("reward", 2),
        "KL": ("KL of samples", 1),
        "grammatical": ("grammatical", 2),
        "first `explained_variance`": ("first explained variance", 2),
        "at the end": ("explained variance", 2),
    }
    return {"ppo variants": experiment.table_by_flags(columns)}


def reward_hacking(experiment: Experiment) -> dict:
    titles = {"reward/mean": "learned reward", "eval/reward": "gold reward, held out"}
    colours = (COLOURS[4], COLOURS[1], COLOURS[0])
    figure, axes = panels(2, height=3, sharex=True)
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for label, colour in zip(experiment.runs, colours, strict=True):
            curves = []
            for run in experiment.runs[label]:
                rows = [row for row in run.evaluations if "objective/kl" in row]
                curves.append([(row["objective/kl"], row[metric]) for row in rows])
            experiment.curves.setdefault(label, {})[f"{metric} over objective/kl"] = curves
            for curve in curves:
                axis.plot(*zip(*curve, strict=True), color=colour, lw=0.6, alpha=0.5)
            mean_kls, mean_rewards = [], []
            for points in zip(*curves, strict=True):  # those of one evaluation, of each seed
                mean_kls.append(mean(kl for kl, _ in points))
                mean_rewards.append(mean(reward for _, reward in points))
            axis.plot(mean_kls, mean_rewards, color=colour, lw=2, label=f"beta {label}")
        axis.set(title=title, xlabel="KL to the starting policy, nats per completion")
    axes[0].legend()
    save(figure, "reward_hacking.svg")

    columns = {
        "learned": ("learned reward", 2),
        "gold": ("reward", 2),
        "KL": ("KL, last five rollouts", 1),
    }
    table = experiment.table_by_flags(columns)
    for row, runs in zip(table["rows"], experiment.runs.values(), strict=True):
        samples = runs[0].samples
        mean_reward = mean(sample["reward"] for sample in samples)
        typical = min(samples, key=lambda sample: abs(sample["reward"] - mean_reward))
        row.append(f"`{typical['completion']}` ({typical['reward']:.2f})")
    table["columns"][0] = "`--beta`"
    table["columns"].append("a review near the mean, seed 1 (its gold)")
    return {"reward hacking": table}


@dataclass
class Family:
    """An algorithm, which is run with several beta."""

    command: str  # before the beta
    betas: Sequence[float]


FRONTIER = {
    "PPO, KL in the reward": Family("ppo_rlhf.py --beta", (1e-9, 0.05, 0.1, 0.2, 0.5)),
    "PPO, KL in the loss": Family("ppo_rlhf.py --kl-placement loss --beta", (0.2, 0.5, 1)),
    "GRPO, KL in the reward": Family(
        f"{GRPO_REVIEWS} --kl-placement reward --beta", (0.1, 0.2, 0.5)
    ),
    "GRPO, KL in the loss": Family(f"{GRPO_REVIEWS} --beta", (0.1, 0.2, 0.5, 1)),
    "DPO": Family("dpo.py --beta", (0.1, 0.3, 1)),
}


def frontier_commands() -> dict[str, str]:
    commands = {}
    for name, family in FRONTIER.items():
        for beta in family.betas:
            commands[f"{name}, beta {beta}"] = f"{family.command} {beta}"
    return commands


def frontier(experiment: Experiment) -> dict:
    figure, (axis,) = panels(1, width=6, height=3.6)
    rows = []
    for colour, (name, family) in zip(COLOURS, FRONTIER.items(), strict=False):
        all_kls, all_golds = [], []  # for each beta a list, of each seed
        for beta in family.betas:
            label = f"{name}, beta {beta}"
            kls = experiment.values(label, "KL of samples")
            golds = experiment.values(label, "reward")
            grammatical = experiment.values(label, "grammatical")
            shown_beta = "0" if beta < 1e-6 else str(beta)
            row = [name, shown_beta, spread(golds, 2), spread(kls, 1), spread(grammatical, 2)]
            rows.append(row)
            all_kls.append(kls)
            all_golds.append(golds)
        axis.scatter([*chain(*all_kls)], [*chain(*all_golds)], s=5, color=colour, alpha=0.5, lw=0)
        mean_kls = [mean(kls) for kls in all_kls]
        mean_golds = [mean(golds) for golds in all_golds]
        axis.plot(mean_kls, mean_golds, color=colour, marker="o", ms=5, label=name)
    axis.set(
        xlabel="KL to the starting policy, nats per completion", ylabel="gold reward, held out"
    )
    axis.set(xscale="log", title="gold reward against KL, one point per beta")
    axis.legend(loc="lower left")
    save(figure, "frontier.svg")
    columns = ["algorithm", "`--beta`", "gold", "KL, nats per completion", "grammatical"]
    return {"frontier": {"columns": columns, "rows": rows}}


def dpo(experiment: Experiment) -> dict:
    titles = {
        "eval/pair_accuracy": "held-out pair accuracy",
        "eval/reward": "gold reward",
        "eval/kl": "KL, nats per completion",
    }
    draw_metrics(experiment, "dpo.svg", titles, xlabel="optimiser step")
    review_columns = {
        "pair accuracy": ("(default)", "pair accuracy", 3),
        "loss": ("(default)", "loss", 3),
        "gold before": ("(default)", "reward before", 2),
        "gold": ("(default)", "reward", 2),
        "grammatical": ("(default)", "grammatical", 2),
        "KL": ("(default)", "eval KL", 1),
        "tokens before": ("(default)", "tokens before", 1),
        "tokens": ("(default)", "tokens", 1),
    }
    sum_columns = {
        "accuracy before": ("sums", "accuracy before", 3),
        "accuracy": ("sums", "accuracy", 3),
        "KL": ("sums", "eval KL", 1),
    }
    return {
        "dpo": experiment.table_by_seed(review_columns),
        "dpo sums": experiment.table_by_seed(sum_columns),
    }


def dpo_variants(experiment: Experiment) -> dict:
    columns = {
        "gold": ("reward", 2),
        "KL": ("KL of samples", 1),
        "grammatical": ("grammatical", 2),
        "tokens": ("tokens", 1),
    }
    return {"dpo variants": experiment.table_by_flags(columns)}


def simpo_and_orpo(experiment: Experiment) -> dict:
    """Losses without a reference, so without a KL."""
    columns = {
        "gold": ("reward", 2),
        "grammatical": ("grammatical", 2),
        "pair accuracy": ("pair accuracy", 3),
        "tokens": ("tokens", 1),
    }
    return {"simpo and orpo": experiment.table_by_flags(columns)}


def orpo_commands() -> dict[str, str]:
    from_base = (
        f"dpo.py --loss orpo --beta {{}} --model tiny/arithmetic/base {SUMS} --max-new-tokens 24 "
        "--learning-rate 1e-3 --epochs 12"
    )
    return {
        "SFT on the chosen": from_base.format(1e-9),
        "ORPO, beta 0.5": from_base.format(0.5),
        "ORPO, beta 1": from_base.format(1),
        "that SFT, then DPO": f"dpo.py --model {{SFT on the chosen}} {SUMS} --max-new-tokens 24",
    }


def orpo(experiment: Experiment) -> dict:
    columns = {"accuracy before": ("SFT on the chosen", "accuracy before", 3)}
    for label in experiment.runs:
        columns[label] = (label, "accuracy", 3)
    return {"orpo": experiment.table_by_seed(columns)}


def kto(experiment: Experiment) -> dict:
    tables = {}
    for name, label in {"kto": "(default)", "kto pairs": "pairs"}.items():
        columns = {
            "loss before": (label, "loss before", 3),
            "loss": (label, "loss", 3),
            "gold before": (label, "reward before", 2),
            "gold": (label, "reward", 2),
            "grammatical": (label, "grammatical", 2),
            "KL": (label, "eval KL", 1),
            "highest KL": (label, "highest KL", 1),
            "tokens before": (label, "tokens before", 1),
            "tokens": (label, "tokens", 1),
        }
        tables[name] = experiment.table_by_seed(columns)
    return tables


def kto_variants(experiment: Experiment) -> dict:
    columns = {
        "gold": ("reward", 2),
        "KL": ("KL of samples", 1),
        "grammatical": ("grammatical", 2),
    }
    return {"kto variants": experiment.table_by_flags(columns)}


def gdpo_commands() -> dict[str, str]:
    """GRPO and GDPO of right answers and a second rule, with several weights."""
    reward_flags = {}
    for weight in (1, 2, 4, 8, 16):
        reward_flags[f"brevity {weight} : 1"] = (
            f"{LAST_NUMBER} docs/experiments/rules.py:brevity --reward-weights {weight} 1"
        )
    reward_flags["working 1 : 1"] = (
        f"{LAST_NUMBER} docs/experiments/rules.py:working --reward-weights 1 1"
    )
    reward_flags["none "] = LAST_NUMBER
    commands = {}
    for setting, flags in reward_flags.items():
        base = f"grpo.py --reward-fn {flags} --eval-reward-fn {LAST_NUMBER}"
        base += " --multi-objective-aggregation"
        commands[f"{setting}, GRPO"] = f"{base} sum_then_normalize"
        commands[f"{setting}, GDPO"] = f"{base} normalize_then_sum"
    return commands


def gdpo(experiment: Experiment) -> dict:
    titles = {"reward/last_number": "right answers", "reward/brevity": "minus the characters"}
    figure, axes = panels(2)
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for algorithm, colour in (("GRPO", COLOURS[1]), ("GDPO", COLOURS[0])):
            curves = experiment.metric_curves(f"brevity 4 : 1, {algorithm}", metric)
            draw_band(axis, curves, algorithm, colour)
        axis.set(title=title, xlabel="rollout")
    axes[0].legend()
    save(figure, "gdpo.svg")

    rows = []
    for label in experiment.runs:
        setting, _, algorithm = label.rpartition(", ")
        if algorithm == "GDPO":
            continue  # it stands in the row of its GRPO
        rule, _, weights = setting.partition(" ")
        labels = [f"{setting}, GRPO", f"{setting}, GDPO"]
        row = [rule, weights]
        row += [experiment.spread(label, "accuracy", 2) for label in labels]
        if rule in QUANTITIES:
            row += [experiment.spread(label, rule, 1) for label in labels]
        else:
            row += ["", ""]
        row += [experiment.spread(label, "right in the third rollout", 2) for label in labels]
        rows.append(row)
    columns = ["rule", "weights, right : rule", "right: GRPO", "GDPO", "rule: GRPO", "GDPO"]
    columns += ["right in the third rollout: GRPO", "GDPO"]
    return {"gdpo advantages": gdpo_advantages_table(), "gdpo": {"columns": columns, "rows": rows}}


def gdpo_advantages_table() -> dict:
    """Advantages of the first of two completions, by what sets it apart from the second."""
    import torch

    from grpo import group_advantages

    right_weight, brevity_weight = 4, 1
    cases = {  # right or not, and characters fewer, each less those of the second completion
        "right, and as long": (1, 0),
        "as right, and 9 characters shorter": (0, 9),
        "right, and 9 characters shorter": (1, 9),
        "right, and 9 characters longer": (1, -9),
    }
    rows = []
    for name, (right, shorter) in cases.items():
        right_rewards = torch.tensor([float(right), 0.0])
        brevity_rewards = torch.tensor([float(shorter), 0.0])
        weighted_sum = right_weight * right_rewards + brevity_weight * brevity_rewards
        grpo_advantage = group_advantages(weighted_sum, 2)[0]
        gdpo_advantage = (
            right_weight * group_advantages(right_rewards, 2)[0]
            + brevity_weight * group_advantages(brevity_rewards, 2)[0]
        )
        row = [name, f"{weighted_sum[0]:+.0f}", f"{grpo_advantage:+.2f}", f"{gdpo_advantage:+.2f}"]
        rows.append(row)
    columns = ["the first completion is", "weighted sum, first less second", "GRPO", "GDPO"]
    return {"columns": columns, "rows": rows}


def format_reward(experiment: Experiment) -> dict:
    titles = {"reward/shown": "working shown", "eval/accuracy": "held-out accuracy"}
    draw_metrics(experiment, "rewards.svg", titles)
    columns = {
        "working shown, first rollout": ("(default)", "first shown", 2),
        "last five": ("(default)", "shown", 2),
        "accuracy before": ("(default)", "accuracy before", 3),
        "accuracy": ("(default)", "accuracy", 3),
    }
    return {"format reward": experiment.table_by_seed(columns)}


# --- the experiments: their commands -----------------------------------------------------------
# By label; and the function that makes tables and figures of the runs. A command may name the model
# of another run of the same experiment and seed: {its label}.
EXPERIMENTS: dict[str, tuple[dict[str, str], Callable[[Experiment], dict]]] = {
    "sft": ({"(default)": "sft.py"}, sft),
    "reward_model": (
        variants("rm_bradley_terry.py", "", "--train-layers 1", "--train-layers 0"),
        reward_model,
    ),
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
            f"--reward-model None --reward-fn {LAST_NUMBER} --eval-reward-fn None "
            "--critic-init sft --max-new-tokens 24 --total-rollouts 40 --beta 0.04",
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
            f"--eval-reward-fn ./{GOLD}",
        },
        kto,
    ),
    "reinforce": (
        variants(
            "reinforce.py",
            "--baseline none",
            "--baseline batch_mean",
            "--baseline leave_one_out",
        ),
        reinforce,
    ),
    "reward_hacking": (
        # At 0 no reference is loaded and no KL measured; 1e-9 takes nothing that counts off.
        {
            "0": "ppo_rlhf.py --beta 1e-09 --eval-every 2",
            "0.05": "ppo_rlhf.py --beta 0.05 --eval-every 2",
            "0.2": "ppo_rlhf.py --beta 0.2 --eval-every 2",
        },
        reward_hacking,
    ),
    "frontier": (frontier_commands(), frontier),
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
        grpo_variants,
    ),
    "ppo_variants": (
        variants(
            "ppo_rlhf.py",
            "",
            "--no-whiten-advantages",
            "--vf-clip-coef None",
            "--critic-init sft",
            "--critic-init scratch",
            "--critic-init policy",
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
        dpo_variants,
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
        simpo_and_orpo,
    ),
    "orpo": (orpo_commands(), orpo),
    "format_reward": (
        {
            "(default)": "grpo.py --reward-fn docs/rewards/formats.py:shown "
            f"--eval-reward-fn {LAST_NUMBER}"
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
        kto_variants,
    ),
    "gdpo": (gdpo_commands(), gdpo),
}
MODULES = (
    "theory",
    "choosing",
    "real_size",
    "variance",
    "pitfalls",
)  # those with a function results()


def overview() -> dict:
    """All algorithms on one metric, from the numbers of the other experiments."""

    def saved_spread(experiment: str, label: str, quantity: str, digits: int) -> str:
        numbers = json.loads((RESULTS / f"{experiment}.json").read_text())["numbers"]
        return spread(numbers[label][quantity], digits)

    def gold(experiment: str, label: str) -> str:
        return saved_spread(experiment, label, "reward", digits=2)

    def kl(experiment: str, label: str) -> str:
        return saved_spread(experiment, label, "KL of samples", digits=1)

    def accuracy(experiment: str, label: str, quantity: str = "accuracy") -> str:
        return saved_spread(experiment, label, quantity, digits=3)

    simpo, orpo = "`--loss simpo --beta 5 --gamma 0.5`", "`--loss orpo --beta 5`"
    rows = [
        [
            "[PPO](ppo_rlhf.md)",
            gold("frontier", "PPO, KL in the reward, beta 0.2"),
            kl("frontier", "PPO, KL in the reward, beta 0.2"),
            accuracy("ppo", "sums"),
            "reward model; rule",
        ],
        [
            "[REINFORCE](reinforce.md), leave one out",
            "",
            "",
            accuracy("reinforce", "`--baseline leave_one_out`", "reward"),
            "rule",
        ],
        [
            "[GRPO](grpo.md), KL in the loss",
            gold("frontier", "GRPO, KL in the loss, beta 0.2"),
            kl("frontier", "GRPO, KL in the loss, beta 0.2"),
            accuracy("grpo", "(default)"),
            "reward model; rule",
        ],
        [
            "GRPO, KL in the reward",
            gold("frontier", "GRPO, KL in the reward, beta 0.2"),
            kl("frontier", "GRPO, KL in the reward, beta 0.2"),
            "",
            "reward model",
        ],
        [
            "[DPO](dpo.md)",
            gold("frontier", "DPO, beta 0.3"),
            kl("frontier", "DPO, beta 0.3"),
            accuracy("dpo", "sums"),
            "pairs; right and wrong samples",
        ],
        ["[SimPO](dpo.md#simpo-and-orpo)", gold("simpo_and_orpo", simpo), "", "", "pairs"],
        [
            "[ORPO](dpo.md#simpo-and-orpo)",
            gold("simpo_and_orpo", orpo),
            "",
            f"{accuracy('orpo', 'ORPO, beta 0.5')}, from an untrained model",
            "pairs; right and wrong samples",
        ],
        [
            "[KTO](kto.md)",
            gold("kto_variants", "(default)"),
            kl("kto_variants", "(default)"),
            "",
            "labelled completions",
        ],
    ]
    columns = ["", "reviews: gold reward", "KL, nats per completion", "sums: accuracy"]
    return {"tables": {"overview": {"columns": [*columns, "learns from"], "rows": rows}}}


# --- making them -------------------------------------------------------------------------------
@dataclass
class Args:
    names: tyro.conf.Positional[tuple[str, ...]] = (*EXPERIMENTS, *MODULES, "overview")
    """Experiments; all if none is named."""
    jobs: int = 2
    """Runs side by side."""


def with_models(command: str, seed: int, commands: dict[str, str]) -> str:
    """The command, with the folders of other runs' models in the place of their labels."""
    for label, other_command in commands.items():
        if f"{{{label}}}" in command:
            run = find_run(other_command, seed)
            command = command.replace(f"{{{label}}}", f"{run.folder}/model")
    return command


def make_runs(commands: dict[str, str], jobs: int) -> None:
    """Those runs of an experiment that are not there yet."""
    from_given_model = [command for command in commands.values() if "{" not in command]
    from_another_run = [command for command in commands.values() if "{" in command]
    for stage in (from_given_model, from_another_run):
        with ThreadPoolExecutor(jobs) as pool:
            trainings = []
            for command in stage:
                for seed in SEEDS:
                    full_command = with_models(command, seed, commands)
                    if find_run(full_command, seed) is None:
                        trainings.append(pool.submit(train, full_command, seed))
            for training in trainings:
                training.result()  # raises what the training raised
        finished_runs.cache_clear()


def make(name: str, jobs: int) -> None:
    """Make the runs of an experiment, and of these its results."""
    commands, tables_of = EXPERIMENTS[name]
    make_runs(commands, jobs)
    runs = {}
    for label, command in commands.items():
        runs[label] = [find_run(with_models(command, seed, commands), seed) for seed in SEEDS]
    experiment = Experiment(runs)
    results = {"tables": tables_of(experiment), "commands": commands, "seeds": SEEDS}
    write(name, results | {"numbers": experiment.numbers, "curves": experiment.curves})


def write(name: str, results: dict) -> None:
    """To docs/results/NAME.json, and the tables onto the pages."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    insert_tables()


def main(args: Args) -> None:
    for name in args.names:
        print(name, flush=True)
        if name == "overview":
            write(name, overview())
        elif name in MODULES:
            write(name, import_module(name).results())
        else:
            make(name, args.jobs)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
