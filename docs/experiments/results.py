"""docs/results.md: gold reward against KL by algorithm, and all algorithms in one table."""

from statistics import mean
from typing import NamedTuple

from docs.experiments.lib.drawing import ALGORITHM_STYLES, GROUND, WIDE, panel
from docs.experiments.lib.experiment import saved_results
from docs.experiments.lib.runs import GRPO_REVIEWS, LAST_NUMBER, Numbers, experiment_of_runs
from docs.experiments.lib.tables import spread

FAMILIES = {  # an algorithm's command, and its values of beta
    "PPO, KL in the reward": ("ppo_rlhf.py --beta {}", ("1e-9", "0.05", "0.1", "0.2", "0.5")),
    "PPO, KL in the loss": ("ppo_rlhf.py --kl-placement loss --beta {}", ("0.2", "0.5", "1")),
    "GRPO, KL in the reward": (
        f"{GRPO_REVIEWS} --beta {{}} --kl-placement reward",
        ("0.1", "0.2", "0.5"),
    ),
    "GRPO, KL in the loss": (f"{GRPO_REVIEWS} --beta {{}}", ("0.1", "0.2", "0.5", "1")),
    "DPO": ("dpo.py --beta {}", ("0.1", "0.3", "1")),
}
FRONTIER = {
    f"{name}, beta {beta}": command.format(beta)
    for name, (command, betas) in FAMILIES.items()
    for beta in betas
}


def frontier_tables(numbers: Numbers) -> dict:
    digits = {"eval/reward": 2, "KL of samples": 1, "grammatical": 2}
    rows = []
    for name, (_, betas) in FAMILIES.items():
        for beta in betas:
            rows.append([name, beta, *numbers.spreads(f"{name}, beta {beta}", digits)])
    columns = ["algorithm", "`--beta`", "gold", "KL, nats per completion", "grammatical"]
    return {"frontier": {"columns": columns, "rows": rows}}


def draw_frontier(numbers: Numbers) -> dict:
    title = "No algorithm gains gold reward beyond about 5 nats"
    xlabel, ylabel = "KL to the starting policy, nats per completion", "gold reward, held out"
    axis = panel(title, xlabel, ylabel, WIDE, 4, xscale="log", ylim=(0.25, 0.95))
    axis.set(xlim=(0.28, 80))
    for name, (_, betas) in FAMILIES.items():
        algorithm, _, placement = name.partition(", ")
        colour, marker = ALGORITHM_STYLES[algorithm]
        fill, line = colour, "-"
        if placement == "KL in the loss":
            fill, line = GROUND, "--"
        points = []
        for beta in betas:
            kls = numbers.values(f"{name}, beta {beta}", "KL of samples")
            golds = numbers.values(f"{name}, beta {beta}", "eval/reward")
            points.append((mean(kls), mean(golds)))
            axis.plot(kls, golds, color=colour, marker=".", ms=3.5, ls="", alpha=0.7)
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, color=colour, marker=marker, ms=7, mfc=fill, ls=line, lw=1.2, label=name)
    label = "PPO, KL in the reward, beta 1e-9"
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
    sums: tuple[str, str] | None  # accuracy
    learns_from: str


BOTH, SAMPLES = "reward model; rule", "pairs; correct and wrong samples"
PPO = ("frontier", "PPO, KL in the reward, beta 0.2")
REINFORCE = ("reinforce", "`--baseline leave_one_out`")
GRPO_LOSS = ("frontier", "GRPO, KL in the loss, beta 0.2")
GRPO_REWARD = ("frontier", "GRPO, KL in the reward, beta 0.2")
SIMPO = ("simpo_and_orpo", "`--loss simpo --beta 5 --gamma 0.5`")
ORPO = ("simpo_and_orpo", "`--loss orpo --beta 5`")
OVERVIEW = (
    Row("[PPO](ppo_rlhf.md)", PPO, ("overview", "PPO"), BOTH),
    Row("[REINFORCE](reinforce.md), leave one out", None, REINFORCE, "rule"),
    Row("[GRPO](grpo.md), KL in the loss", GRPO_LOSS, ("grpo", "(default)"), BOTH),
    Row("GRPO, KL in the reward", GRPO_REWARD, None, "reward model"),
    Row("[DPO](dpo.md)", ("frontier", "DPO, beta 0.3"), ("overview", "DPO"), SAMPLES),
    Row("[SimPO](dpo_variants.md)", SIMPO, None, "pairs"),
    Row("[ORPO](dpo_variants.md)", ORPO, ("orpo", "ORPO, beta 0.5"), SAMPLES),
    Row("[KTO](kto.md)", ("kto", "(default)"), None, "labelled completions"),
)


def overview_tables(own: Numbers) -> dict:
    """All algorithms on one metric, mostly from the numbers of the other experiments."""
    for label in SUMS:
        own.values(label, "eval/accuracy")

    def numbers_of(source: tuple[str, str]) -> dict:
        experiment, label = source
        numbers = own.numbers if experiment == "overview" else saved_results(experiment)["numbers"]
        return numbers[label]

    rows = []
    for row in OVERVIEW:
        gold = kl = accuracy = ""
        if row.reviews:
            gold = spread(numbers_of(row.reviews)["eval/reward"], 2)
            if "KL of samples" in numbers_of(row.reviews):
                kl = spread(numbers_of(row.reviews)["KL of samples"], 1)
        if row.sums:
            # reinforce.py logs a reward.
            metric = "eval/reward" if row.sums == REINFORCE else "eval/accuracy"
            accuracy = spread(numbers_of(row.sums)[metric], 3)
        if row.reviews == ORPO:
            accuracy += ", from an untrained model"
        rows.append([row.algorithm, gold, kl, accuracy, row.learns_from])
    columns = ["", "review task: gold reward", "KL, nats per completion"]
    columns += ["arithmetic task: accuracy", "learns from"]
    return {"overview": {"columns": columns, "rows": rows}}


EXPERIMENTS = (
    experiment_of_runs("frontier", FRONTIER, frontier_tables, draw_frontier),
    experiment_of_runs("overview", SUMS, overview_tables),
)
