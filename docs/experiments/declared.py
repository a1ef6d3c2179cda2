"""The experiments that are nothing but commands, columns and curves, in the order of the pages.

A default run is evaluated more often than by default where a figure shows it. This changes no
number: evaluations have a random generator of their own.
"""

from pathlib import Path
from statistics import mean
from typing import Any

from docs.experiments.lib.drawing import ALGORITHM_STYLES, GOLD, HEALTHY, THIRD, Lines, Series
from docs.experiments.lib.experiment import Experiment, Table, variants
from docs.experiments.lib.metrics import GRAMMATICAL, KL_OF_SAMPLES, TYPICAL_SAMPLE, last, late
from docs.experiments.lib.runs import read_jsonl
from tiny.reviews import gold

LAST_NUMBER = "tiny/arithmetic/reward.py:last_number"
# Preference pairs of the sums.
SUMS = f"--dataset tiny/arithmetic/preferences --eval-reward-fn {LAST_NUMBER} --max-new-tokens 24"
# GRPO on the reviews, with the learned reward, and evaluated by the gold reward.
GRPO_REVIEWS = (
    "--model tiny/reviews/policy --dataset tiny/reviews/prompts --max-new-tokens 40 "
    "--reward-model tiny/reviews/reward_model --eval-reward-fn tiny/reviews/gold.py:sentiment "
    "--prompts-per-rollout 16 --total-rollouts 30"
)
# Default runs that several experiments read.
GRPO, PPO, DPO = "grpo.py --eval-every 1", "ppo_rlhf.py --eval-every 2", "dpo.py --eval-every 10"
FROM_BASE = (
    f"dpo.py --loss orpo --model tiny/arithmetic/base {SUMS} --learning-rate 1e-3 --epochs 12 "
    "--beta 0.5"
)
# At 0 no reference is loaded and no KL measured; 1e-9 subtracts next to nothing.
HACKING = {"1e-9": f"{PPO} --beta 1e-9", "0.05": f"{PPO} --beta 0.05", "0.2": PPO}

ACCURACY, GOLD_REWARD, REWARD = last("eval/accuracy"), last("eval/reward"), late("reward/mean")
TOKENS = last("eval/length_mean")
REVIEW_COLUMNS = {  # of the runs on the reviews that have a reference
    "gold": (GOLD_REWARD, 2),
    "KL": (KL_OF_SAMPLES, 1),
    "grammatical": (GRAMMATICAL, 2),
    "tokens": (TOKENS, 1),
}
# The loss of a model that can only guess. Which of the two forms: ln 2 = 0.69 nats. Which digit is
# an immediate answer: ln 10 = 2.30. Whether and how each of five digits of the working is
# wrong: 2.72. So 0.69 + (2.30 + 2.72) / 2 = 3.21 for 7.5 tokens on average.
LOWEST_SFT_LOSS = 0.43


def default_run(algorithm: str, metric: str, title: str, ylabel: str, **more: Any) -> Lines:
    """A figure of one metric of the default run."""
    series = {("(default)", metric): Series(algorithm, ALGORITHM_STYLES[algorithm])}
    return Lines(title, ylabel, series, **more)


def judges_accuracy() -> float:
    """Of the gold reward, on pairs that a judge with some errors has labelled."""
    pairs = read_jsonl(Path("tiny/reviews/preferences/test.jsonl"))
    return mean(gold.score(pair["chosen"]) > gold.score(pair["rejected"]) for pair in pairs)


def learned_and_gold(beta: str, title: str) -> Lines:
    series = {
        (beta, "reward/mean"): Series("learned reward", ALGORITHM_STYLES["reward model"]),
        (beta, "eval/reward"): Series("gold reward", GOLD),
    }
    return Lines(title, "mean reward", series, limits=(-1.1, 4.5))


def hacking_samples(results: dict) -> dict:
    samples = []
    for beta, numbers in results["numbers"].items():
        sample = numbers["typical sample"][0]
        samples.append([f"`--beta {beta}`, gold {sample['reward']:.2f}: `{sample['completion']}`"])
    return {"reward_hacking samples": {"rows": samples}}


EXPERIMENTS = (
    Experiment(
        "sft",
        {"(default)": "sft.py --eval-every 40"},
        metrics={"(default)": [last("eval/loss")]},
        figures={
            "sft": default_run(
                "SFT",
                "eval/loss",
                "The loss ends near that of a model that guesses",
                "held-out loss, nats per token",
                xlabel="optimiser step",
                limits=(0, None),
                best=LOWEST_SFT_LOSS,
            )
        },
    ),
    Experiment(
        "rm_bradley_terry",
        {"(default)": "rm_bradley_terry.py --eval-every 10"},
        metrics={"(default)": [last("eval/pair_accuracy")]},
        figures={
            "rm_bradley_terry_accuracy": default_run(
                "reward model",
                "eval/pair_accuracy",
                "It nears the judge's own accuracy",
                "held-out pair accuracy",
                xlabel="optimiser step",
                limits=(0.4, 1),
                best=judges_accuracy(),
            )
        },
    ),
    Experiment(
        "reinforce",
        variants("reinforce.py", "--baseline leave_one_out"),
        metrics={"`--baseline leave_one_out`": [GOLD_REWARD]},
    ),
    Experiment(
        "grpo",
        {"(default)": GRPO}
        | variants(
            "grpo.py",
            "--beta 0",
            "--scale-rewards none",
            "--loss-norm token",
            "--loss-norm constant",
            "--group-size 2 --prompts-per-rollout 128",
            "--group-size 32 --prompts-per-rollout 8",
            "--num-minibatches 1 --learning-rate 1e-3",
            "--num-minibatches 8",
        ),
        {"grpo": Table({"accuracy": (ACCURACY, 3), "tokens": (TOKENS, 1)})},
        {
            name: default_run("GRPO", metric, title, ylabel, width=THIRD, limits=limits)
            for name, metric, title, ylabel, limits in (
                ("grpo_accuracy", "eval/accuracy", "Accuracy above 0.9", "held out", (0, 1)),
                ("grpo_length", "completions/length_mean", "Length grows to 12", "tokens", None),
                ("grpo_entropy", "policy/entropy", "Entropy falls", "nats per token", None),
            )
        },
    ),
    Experiment(
        "rewards",
        {
            "(default)": "grpo.py --reward-fn docs/rewards/formats.py:shown "
            f"--eval-reward-fn {LAST_NUMBER} --eval-every 3"
        },
        figures={
            "rewards": Lines(
                "The form at once, the sum later",
                "fraction of completions",
                {
                    ("(default)", "rewards/shown"): Series(
                        "working shown", ALGORITHM_STYLES["GRPO"]
                    ),
                    ("(default)", "eval/accuracy"): Series("correct, held out", HEALTHY),
                },
                limits=(0, 1.03),
            )
        },
    ),
    Experiment(
        "ppo_rlhf",
        {"(default)": PPO}
        | variants(
            "ppo_rlhf.py",
            "--no-whiten-advantages",
            "--vf-clip-coef None",
            "--critic-init sft",
            "--critic-init policy",
            "--gae-lambda 1",
            "--num-minibatches 1",
        ),
        {
            "ppo_rlhf": Table(
                {
                    "gold": (GOLD_REWARD, 2),
                    "KL": (KL_OF_SAMPLES, 1),
                    "explained variance": (late("value/explained_variance"), 2),
                }
            )
        },
    ),
    Experiment(
        "reward_hacking",
        HACKING,
        {
            "reward_hacking": Table(
                {"learned": (REWARD, 2), "gold": (GOLD_REWARD, 2)},
                heading=("`--beta`",),
            )
        },
        {
            "reward_hacking_weak_kl": learned_and_gold("1e-9", "beta 1e-9: gold falls again"),
            "reward_hacking_strong_kl": learned_and_gold("0.2", "beta 0.2: both rewards rise"),
        },
        metrics={beta: [TYPICAL_SAMPLE] for beta in HACKING},
        more_tables=hacking_samples,
    ),
    Experiment(
        "dpo",
        {"(default)": DPO}
        | variants("dpo.py", "--loss ipo --beta 1", "--nll-coef 0.2", "--label-smoothing 0.1"),
        {"dpo": Table(REVIEW_COLUMNS)},
        {
            name: default_run("DPO", metric, title, ylabel, xlabel="optimiser step", width=THIRD)
            for name, metric, title, ylabel in (
                ("dpo_accuracy", "eval/pair_accuracy", "Pairs are told apart", "pair accuracy"),
                ("dpo_gold", "eval/reward", "Gold reward rises", "gold reward"),
                ("dpo_kl", "eval/kl", "Policy moves away", "KL, nats per completion"),
            )
        },
    ),
    Experiment(
        "simpo_and_orpo",
        variants(
            "dpo.py",
            "--loss apo_zero",
            "--loss sigmoid_norm --beta 5",
            "--loss simpo --beta 5 --gamma 0.5",
            "--loss simpo --beta 5 --gamma 0.5 --nll-coef 0.2",
            "--loss orpo --beta 5",
            "--loss orpo --beta 1e-9",
        ),
        {
            "simpo_and_orpo": Table(  # without a reference, so without a KL
                {
                    "gold": (GOLD_REWARD, 2),
                    "grammatical": (GRAMMATICAL, 2),
                    "pair accuracy": (last("eval/pair_accuracy"), 3),
                    "tokens": (TOKENS, 1),
                }
            )
        },
    ),
    Experiment(
        "orpo",
        {"ORPO, beta 0.5": FROM_BASE},
        metrics={"ORPO, beta 0.5": [GOLD_REWARD]},
    ),
    Experiment(
        "kto",
        {"(default)": "kto.py"} | variants("kto.py", "--desirable-weight 1"),
        {"kto": Table(REVIEW_COLUMNS)},
    ),
)
