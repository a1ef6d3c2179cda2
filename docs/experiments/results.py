"""docs/results.md: gold reward against KL by algorithm, and all algorithms in one table."""

from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from docs.experiments.lib.drawing import ALGORITHM_STYLES, GROUND, WIDE, panel
from docs.experiments.lib.experiment import saved_results
from docs.experiments.lib.runs import GRPO_REVIEWS, LAST_NUMBER, Numbers, experiment_of_runs
from docs.experiments.lib.tables import spread


class Family(NamedTuple):
    """An algorithm that is run with several beta."""

    command: str  # with {} for the beta
    betas: Sequence[float]


FAMILIES = {
    "PPO, KL in the reward": Family("ppo_rlhf.py --beta {}", (1e-9, 0.05, 0.1, 0.2, 0.5)),
    "PPO, KL in the loss": Family("ppo_rlhf.py --kl-placement loss --beta {}", (0.2, 0.5, 1)),
    "GRPO, KL in the reward": Family(
        f"{GRPO_REVIEWS} --beta {{}} --kl-placement reward", (0.1, 0.2, 0.5)
    ),
    "GRPO, KL in the loss": Family(f"{GRPO_REVIEWS} --beta {{}}", (0.1, 0.2, 0.5, 1)),
    "DPO": Family("dpo.py --beta {}", (0.1, 0.3, 1)),
}


def frontier_commands() -> dict[str, str]:
    commands = {}
    for name, family in FAMILIES.items():
        for beta in family.betas:
            commands[f"{name}, beta {beta}"] = family.command.format(beta)
    return commands


def shown(beta: float) -> str:
    """1e-9 where Python writes 1e-09."""
    return str(beta).replace("e-0", "e-")


def frontier_tables(numbers: Numbers) -> dict:
    rows = []
    for name, family in FAMILIES.items():
        for beta in family.betas:
            label = f"{name}, beta {beta}"
            row = [name, shown(beta)]
            row.append(numbers.spread(label, "eval/reward", 2))
            row.append(numbers.spread(label, "KL of samples", 1))
            row.append(numbers.spread(label, "grammatical", 2))
            rows.append(row)
    columns = ["algorithm", "`--beta`", "gold", "KL, nats per completion", "grammatical"]
    return {"frontier": {"columns": columns, "rows": rows}}


def draw_frontier(numbers: Numbers) -> dict:
    title = "No algorithm gains gold reward beyond about 5 nats"
    xlabel, ylabel = "KL to the starting policy, nats per completion", "gold reward, held out"
    axis = panel(title, xlabel, ylabel, WIDE, 4, xscale="log", ylim=(0.25, 0.95))
    axis.set(xlim=(0.28, 80))
    for name, family in FAMILIES.items():
        algorithm, _, placement = name.partition(", ")
        colour, marker, line = ALGORITHM_STYLES[algorithm]
        fill = colour
        if placement == "KL in the loss":
            fill, line = GROUND, "--"
        points = []
        for beta in family.betas:
            kls = numbers.values(f"{name}, beta {beta}", "KL of samples")
            golds = numbers.values(f"{name}, beta {beta}", "eval/reward")
            points.append((mean(kls), mean(golds)))
            axis.plot(kls, golds, color=colour, marker=".", ms=3.5, ls="", alpha=0.7)
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, color=colour, marker=marker, ms=7, mfc=fill, ls=line, lw=1.2, label=name)
    label = "PPO, KL in the reward, beta 1e-09"
    kl, gold = (mean(numbers.values(label, name)) for name in ("KL of samples", "eval/reward"))
    outside = f"PPO, beta 1e-9,\nbelow: {gold:.2f}\nat {kl:.0f} nats"
    axis.annotate(outside, (19.5, 0.27), color=ALGORITHM_STYLES["PPO"].colour)
    axis.set_xticks([0.3, 1, 3, 10, 30], labels=["0.3", "1", "3", "10", "30"])
    axis.minorticks_off()
    axis.figure.legend(loc="outside lower center", ncols=2)
    return {"frontier": axis}


# --- overview ----------------------------------------------------------------------------------
SUMS = {  # runs on the arithmetic task that no other page has
    "PPO": "ppo_rlhf.py --model tiny/arithmetic/policy --dataset tiny/arithmetic/prompts "
    f"--reward-model None --reward-fn {LAST_NUMBER} --eval-reward-fn None "
    "--critic-init sft --max-new-tokens 24 --total-rollouts 40 --beta 0.04",
    "DPO": "dpo.py --model tiny/arithmetic/policy --dataset tiny/arithmetic/preferences "
    f"--eval-reward-fn {LAST_NUMBER} --max-new-tokens 24",
}


class Row(NamedTuple):
    """Experiment and label of each number; None leaves the cell empty."""

    algorithm: str
    reviews: tuple[str, str] | None  # gold reward
    kl: tuple[str, str] | None
    sums: tuple[str, str] | None  # accuracy
    learns_from: str


PPO = ("frontier", "PPO, KL in the reward, beta 0.2")
GRPO = ("frontier", "GRPO, KL in the loss, beta 0.2")
GRPO_SHAPED = ("frontier", "GRPO, KL in the reward, beta 0.2")
DPO = ("frontier", "DPO, beta 0.3")
SIMPO = ("simpo_and_orpo", "`--loss simpo --beta 5 --gamma 0.5`")
ORPO = ("simpo_and_orpo", "`--loss orpo --beta 5`")
KTO = ("kto", "(default)")
REINFORCE = ("reinforce", "`--baseline leave_one_out`")
BOTH, SAMPLES = "reward model; rule", "pairs; correct and wrong samples"
OVERVIEW = (
    Row("[PPO](ppo_rlhf.md)", PPO, PPO, ("overview", "PPO"), BOTH),
    Row("[REINFORCE](reinforce.md), leave one out", None, None, REINFORCE, "rule"),
    Row("[GRPO](grpo.md), KL in the loss", GRPO, GRPO, ("grpo", "(default)"), BOTH),
    Row("GRPO, KL in the reward", GRPO_SHAPED, GRPO_SHAPED, None, "reward model"),
    Row("[DPO](dpo.md)", DPO, DPO, ("overview", "DPO"), SAMPLES),
    Row("[SimPO](dpo_variants.md)", SIMPO, None, None, "pairs"),
    Row("[ORPO](dpo_variants.md)", ORPO, None, ("orpo", "ORPO, beta 0.5"), SAMPLES),
    Row("[KTO](kto.md)", KTO, KTO, None, "labelled completions"),
)


def overview_tables(own: Numbers) -> dict:
    """All algorithms on one metric, mostly from the numbers of the other experiments."""
    for label in SUMS:
        own.values(label, "eval/accuracy")

    def cell(source: tuple[str, str] | None, digits: int, *metrics: str) -> str:
        if source is None:
            return ""
        experiment, label = source
        if experiment == "overview":
            numbers = own.numbers[label]
        else:
            numbers = saved_results(experiment)["numbers"][label]
        (values,) = [numbers[metric] for metric in metrics if metric in numbers][:1]
        return spread(values, digits)

    rows = []
    for row in OVERVIEW:
        gold = cell(row.reviews, 2, "eval/reward")
        kl = cell(row.kl, 1, "KL of samples")
        accuracy = cell(row.sums, 3, "eval/accuracy", "eval/reward")  # reinforce.py logs a reward
        if row.algorithm.startswith("[ORPO]"):
            accuracy += ", from an untrained model"
        rows.append([row.algorithm, gold, kl, accuracy, row.learns_from])
    columns = ["", "review task: gold reward", "KL, nats per completion"]
    columns += ["arithmetic task: accuracy", "learns from"]
    return {"overview": {"columns": columns, "rows": rows}}


EXPERIMENTS = (
    experiment_of_runs("frontier", frontier_commands(), frontier_tables, draw_frontier),
    experiment_of_runs("overview", SUMS, overview_tables),
)
