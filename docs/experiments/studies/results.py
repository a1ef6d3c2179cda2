"""docs/results.md: gold reward against KL by algorithm, and all algorithms in one table."""

from statistics import mean
from typing import NamedTuple

from docs.experiments.declared import DPO, GRPO_REVIEWS, HACKING, LAST_NUMBER, SUMS
from docs.experiments.lib.drawing import ALGORITHM_STYLES, WIDE, panel
from docs.experiments.lib.experiment import Experiment, saved_results
from docs.experiments.lib.metrics import KL_OF_SAMPLES, last
from docs.experiments.lib.tables import spread

FAMILIES = {  # an algorithm's command by its values of beta
    "PPO, KL in the reward": HACKING
    | {beta: f"ppo_rlhf.py --beta {beta}" for beta in ("0.1", "0.5")},
    "PPO, KL in the loss": {
        beta: f"ppo_rlhf.py --kl-placement loss --beta {beta}" for beta in ("0.2", "0.5", "1")
    },
    "GRPO, KL in the reward": {
        beta: f"grpo_variants.py {GRPO_REVIEWS} --beta {beta} --kl-placement reward"
        for beta in ("0.1", "0.2", "0.5")
    },
    "GRPO, KL in the loss": {
        beta: f"grpo.py {GRPO_REVIEWS} --beta {beta}" for beta in ("0.1", "0.2", "0.5", "1")
    },
    "DPO": {"0.1": "dpo.py --beta 0.1", "0.3": DPO, "1": "dpo.py --beta 1"},
}
CASES = {  # label, its family and its beta, from the weakest KL to the strongest
    f"{name}, beta {beta}": (name, beta)
    for name, commands in FAMILIES.items()
    for beta in sorted(commands, key=float)
}
FRONTIER = [last("eval/reward"), KL_OF_SAMPLES]


def draw_frontier(results: dict) -> dict:
    title = "A larger KL is not more gold reward"
    xlabel, ylabel = "KL to the starting policy, nats per completion", "gold reward, held out"
    axis = panel(title, xlabel, ylabel, WIDE, 3.8, xscale="log", ylim=(-0.2, 1))
    for name in FAMILIES:
        algorithm, _, placement = name.partition(", ")
        colour, marker = ALGORITHM_STYLES[algorithm]
        line, fill = ("--", "none") if placement == "KL in the loss" else ("-", colour)
        points = []
        for label, (family, _) in CASES.items():
            numbers = results["numbers"][label]
            if family == name:
                points.append((mean(numbers["KL of samples"]), mean(numbers["eval/reward"])))
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, color=colour, marker=marker, ms=6, mfc=fill, ls=line, label=name)
    axis.set_xticks([0.3, 1, 3, 10, 30], labels=["0.3", "1", "3", "10", "30"])
    axis.minorticks_off()
    axis.figure.legend(loc="outside lower center", ncols=2)
    return {"frontier": axis}


# --- overview ----------------------------------------------------------------------------------
ON_SUMS = {  # runs on the arithmetic task that no other page has
    "PPO": "ppo_rlhf.py --model tiny/arithmetic/policy --dataset tiny/arithmetic/prompts "
    f"--reward-model None --reward-fn {LAST_NUMBER} --eval-reward-fn None "
    "--critic-init sft --max-new-tokens 24 --total-rollouts 40 --beta 0.04",
    "DPO": f"dpo.py --model tiny/arithmetic/policy {SUMS}",
}


class Row(NamedTuple):
    """Experiment and label of each number; None leaves the cell empty."""

    algorithm: str
    reviews: tuple[str, str] | None  # gold reward
    sums: tuple[str, str] | None  # accuracy
    learns_from: str


BOTH, SAMPLES = "reward model; rule", "pairs; correct and wrong samples"
PPO_ROW = ("frontier", "PPO, KL in the reward, beta 0.2")
REINFORCE = ("reinforce", "`--baseline leave_one_out`")
GRPO_LOSS = ("frontier", "GRPO, KL in the loss, beta 0.2")
GRPO_ON_SUMS = ("grpo", "(default)")
GRPO_REWARD = ("frontier", "GRPO, KL in the reward, beta 0.2")
SIMPO = ("simpo_and_orpo", "`--loss simpo --beta 5 --gamma 0.5`")
ORPO = ("simpo_and_orpo", "`--loss orpo --beta 5`")
OVERVIEW = (
    Row("[PPO](ppo_rlhf.md)", PPO_ROW, ("overview", "PPO"), BOTH),
    Row("[REINFORCE](reinforce.md), leave one out", None, REINFORCE, "rule"),
    Row("[GRPO](grpo.md), KL in the loss", GRPO_LOSS, GRPO_ON_SUMS, BOTH),
    Row("GRPO, KL in the reward", GRPO_REWARD, None, "reward model"),
    Row("[DPO](dpo.md)", ("frontier", "DPO, beta 0.3"), ("overview", "DPO"), SAMPLES),
    Row("[SimPO](dpo_variants.md)", SIMPO, None, "pairs"),
    Row("[ORPO](dpo_variants.md)", ORPO, ("orpo", "ORPO, beta 0.5"), SAMPLES),
    Row("[KTO](kto.md)", ("kto", "(default)"), None, "labelled completions"),
)


def overview_tables(results: dict) -> dict:
    """All algorithms on one metric, mostly from the numbers of the other experiments."""

    def cell(source: tuple[str, str] | None, metric: str, digits: int) -> str:
        if source is None:
            return ""
        experiment, label = source
        saved = results if experiment == "overview" else saved_results(experiment)
        numbers = saved["numbers"][label]
        return spread(numbers[metric], digits) if metric in numbers else ""

    rows = []
    for row in OVERVIEW:
        metric = "eval/accuracy" if row.sums == GRPO_ON_SUMS else "eval/reward"
        accuracy = cell(row.sums, metric, 3)
        if row.reviews == ORPO:
            accuracy += ", from an untrained model"
        judged = [cell(row.reviews, "eval/reward", 2), cell(row.reviews, "KL of samples", 1)]
        rows.append([row.algorithm, *judged, accuracy, row.learns_from])
    columns = ["", "review task: gold reward", "KL, nats per completion"]
    columns += ["arithmetic task: accuracy", "learns from"]
    return {"overview": {"columns": columns, "rows": rows}}


EXPERIMENTS = (
    Experiment(
        "frontier",
        {label: FAMILIES[name][beta] for label, (name, beta) in CASES.items()},
        metrics=dict.fromkeys(CASES, FRONTIER),
        draw=draw_frontier,
    ),
    Experiment(
        "overview",
        ON_SUMS,
        metrics={label: [last("eval/reward")] for label in ON_SUMS},
        more_tables=overview_tables,
    ),
)
