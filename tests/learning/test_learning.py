"""The scripts learn what the README and the pages say, run as these say.

A case is a script, its flags, and the least and the most that numbers may be. They are those of the
last evaluation; under "first" of the first one, under "recent" the means over the last five
rollouts, and "grammatical" is the mean over the last samples.
"""

import math

import pytest
from runs import metrics_of, read
from scripts import SCRIPTS

from tiny.reviews.gold import grammatical

ANY, ALL = -math.inf, math.inf
LN2 = (math.log(2) - 1e-6, math.log(2) + 1e-6)
# The judge that labelled the pairs agrees with the gold reward in 0.88 of them.
REWARD_MODEL = {"eval/pair_accuracy": (0.82, 0.9), "eval/calibration_error": (0, 0.1)}

# By default: the first part of a run, in which it has left the start by far. In the comments is
# what several seeds gave.
SUMS = {"first eval/accuracy": (0.2, 0.45), "first eval/length_mean": (0, 8.5)}
NEUTRAL = {"first eval/reward": (-0.2, 0.2)}  # the gold reward, which training does not see
TIE = {"first eval/loss": LN2, "first eval/pair_accuracy": (0.5, 0.5)}
HALF_WEIGHT = {"first eval/margin": (0, 0), "first eval/loss": (0.53, 0.63)}  # 0.58
QUICK = [
    (
        "rm_bradley_terry.py",
        "--epochs 1 --eval-every 99 --eval-rows 200",
        {"first eval/pair_accuracy": (0.4, 0.6), "eval/pair_accuracy": (0.63, 0.9)},  # 0.71
    ),
    (
        "sft.py",
        "--epochs 0.4 --eval-rows 100",
        {"first eval/loss": (2.5, 3.5), "eval/loss": (0, 1.35)},  # 1.21
    ),
    (
        "grpo.py",
        "--total-rollouts 12 --eval-rows 200",
        SUMS | {"eval/accuracy": (0.75, 1), "eval/length_mean": (11, 12.5)},  # 0.9, 11.9
    ),
    (
        "grpo_variants.py",
        "--total-rollouts 12 --eval-rows 200 --beta 0 --loss sapo",
        SUMS | {"eval/accuracy": (0.75, 1), "eval/length_mean": (11, 12.5)},
    ),
    (
        "grpo_tools.py",
        "--total-rollouts 8 --eval-rows 200",
        {"first eval/reward": (0, 0.12), "eval/reward": (0.6, 1), "eval/called_fraction": (0.8, 1)},
    ),
    (
        "reinforce.py",
        "--total-rollouts 15 --eval-rows 200",
        {"first eval/reward": (0.2, 0.45), "eval/reward": (0.75, 1)},  # 0.9
    ),
    (
        "distill.py",
        "--total-rollouts 20 --eval-rows 200",
        {"first eval/kl": (1.8, 3.2), "eval/kl": (0, 0.8)},  # 0.19 to 0.46
    ),
    (
        "ppo_rlhf.py",
        "--total-rollouts 8 --eval-rows 100",
        NEUTRAL
        | {"eval/reward": (0.35, 1), "recent objective/kl": (ANY, 6)}  # 0.51 to 0.56, 1.1 to 3.2
        | {"recent value/explained_variance": (0.08, 1)},  # 0.16 to 0.19
    ),
    # 0.71 to 0.78, 0.26 to 0.35, 0.8 to 2.5
    (
        "dpo.py",
        "--epochs 0.5 --eval-rows 100",
        TIE | {"eval/pair_accuracy": (0.64, 1), "eval/reward": (0.18, 1), "eval/kl": (ANY, 5)},
    ),
    # 0.22 to 0.29, 0.31 to 0.65, 2.4 to 7.9; a run of 0.3 epochs fell apart with one of three seeds
    (
        "kto.py",
        "--epochs 0.5 --eval-rows 100",
        HALF_WEIGHT | {"eval/margin": (0.15, ALL), "eval/reward": (0.2, 1), "eval/kl": (ANY, 10)},
    ),
]

# Slow: the default runs with five seeds, and other losses.
REVIEWS = (
    "--model tiny/reviews/policy --dataset tiny/reviews/prompts --max-new-tokens 40 "
    "--reward-model tiny/reviews/reward_model --eval-reward-fn tiny/reviews/gold.py:sentiment "
    "--prompts-per-rollout 16 --total-rollouts 30 --beta 0.2"
)
SLOW = [
    ("rm_bradley_terry.py", "", REWARD_MODEL),
    # A model that follows the working and guesses immediate answers has 0.43, see docs/sft.md.
    ("sft.py", "", {"eval/loss": (0, 0.5)}),
    ("grpo.py", "", {"eval/accuracy": (0.9, 1), "eval/length_mean": (11.5, 13)}),
    ("grpo_tools.py", "", {"eval/reward": (0.88, 1), "eval/called_fraction": (0.95, 1)}),
    ("reinforce.py", "", {"eval/reward": (0.9, 1)}),
    ("distill.py", "", {"eval/kl": (0, 0.1), "eval/length_mean": (11.5, 12.5)}),
    (
        "ppo_rlhf.py",
        "",
        {"eval/reward": (0.85, 1), "grammatical": (0.93, 1), "recent objective/kl": (ANY, 10)}
        | {"recent value/explained_variance": (0.5, 1)},
    ),
    (
        "dpo.py",
        "",
        {"eval/pair_accuracy": (0.75, 0.9), "eval/reward": (0.6, 1), "eval/kl": (ANY, 10)}
        | {"grammatical": (0.9, 1)},
    ),
    (
        "kto.py",
        "",
        {"eval/margin": (0.3, ALL), "eval/reward": (0.6, 1), "eval/kl": (ANY, 6)}
        | {"eval/loss": (0, 0.55), "grammatical": (0.9, 1)},
    ),
    (
        "dpo.py",
        "--loss simpo --beta 5 --gamma 0.5",
        {"eval/pair_accuracy": (0.75, 1), "eval/reward": (0.7, 1), "grammatical": (0.85, 1)},
    ),
    (
        "dpo.py",
        "--loss orpo --beta 5",
        {"eval/pair_accuracy": (0.62, 1), "eval/reward": (0.7, 1), "grammatical": (0.85, 1)},
    ),
    # Without a KL it hacks the reward model, whose mean with one is lower; the gold reward is below
    # the start on nine of ten that we have seen, and on the other a third of what a KL keeps.
    ("ppo_rlhf.py", "--beta 0", {"recent reward/mean": (2.5, ALL), "eval/reward": (ANY, 0.5)}),
    ("grpo_variants.py", f"{REVIEWS} --kl-placement loss", {"eval/reward": (0.5, 1)}),
    ("grpo_variants.py", f"{REVIEWS} --kl-placement reward", {"eval/reward": (0.5, 1)}),
]
CASES = [pytest.param(1, *case, id=" ".join(case[:2])) for case in QUICK]
for seed in (1, 2, 3, 4, 5):
    for case in SLOW:
        name = f"{' '.join(case[:2])} {seed}"
        CASES.append(pytest.param(seed, *case, id=name, marks=pytest.mark.slow))


@pytest.mark.parametrize(("seed", "script", "flags", "bounds"), CASES)
def test_a_run_learns(seed, script, flags, bounds, tmp_path, capsys):
    module = SCRIPTS[script.removesuffix(".py")]
    words = ["--output-dir", str(tmp_path), "--seed", str(seed), *flags.split()]
    run_dir = module.main(module.parse_args(words))
    printed, rows = capsys.readouterr().out, metrics_of(run_dir)
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    found = evaluations[-1] | {f"first {name}": x for name, x in evaluations[0].items()}
    for name in rows[-1]:
        found[f"recent {name}"] = sum(row.get(name, math.nan) for row in rows[-5:]) / 5
    if "grammatical" in bounds:
        samples = read(run_dir / "samples.jsonl")
        last = [s["completion"] for s in samples if s["step"] == samples[-1]["step"]]
        found["grammatical"] = sum(grammatical([], last)) / len(last)
    for name, (least, most) in bounds.items():
        assert least <= found[name] <= most, f"{name} is {found[name]}"
    for row in evaluations[0], evaluations[-1]:
        numbers = [f"{name[5:]} {row[name]:.3f}" for name in row if name.startswith("eval/")]
        assert f"step {row['step']}: held-out {', '.join(numbers)}" in printed
