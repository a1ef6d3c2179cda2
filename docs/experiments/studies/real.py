"""docs/real.md: SmolLM2-135M-Instruct, which docs/real/unpack.py has put into runs/."""

from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.metrics import Metric, at, first, last
from docs.experiments.lib.runs import Run
from docs.experiments.lib.tables import spread

MODEL = "--model runs/SmolLM2-135M-Instruct"
ON_POLICY = "--chat --beta 0 --num-minibatches 1 --micro-batch-size 8 --prompts-per-rollout 8"
TONE = (
    f"grpo.py {MODEL} {ON_POLICY} --dataset docs/real/films --group-size 6 --max-new-tokens 40 "
    "--reward-fn docs/rewards/tone.py:tone --learning-rate 2e-5 --total-rollouts 10 --eval-every 2"
)
SFT = (
    f"sft.py {MODEL} --chat --dataset docs/real/sums --train-split train[:64] --epochs 2 "
    "--batch-size 16 --micro-batch-size 8 --learning-rate 2e-5 --eval-rows 100 --eval-samples 8"
)
ON_SUMS = (
    f"{ON_POLICY} --dataset docs/real/sums --group-size 8 --max-new-tokens 24 --eval-rows 60 "
    "--learning-rate 1e-5 --total-rollouts 16 --eval-every 4 --eval-samples 4"
)
COMMANDS = {
    "tone": TONE,
    "SFT": SFT,
    "GRPO after SFT": f"grpo.py --model {{{SFT}}} {ON_SUMS}",
    "GRPO without SFT": f"grpo.py {MODEL} {ON_SUMS}",
}


def conversation(run: Run) -> list[dict]:
    """Of the first held-out prompts, the completions before and after."""
    last_step = run.samples()[-1]["step"]
    found = []
    for step in (0, last_step):
        for sample in run.samples(step)[:3]:
            kept = {name: sample[name] for name in ("step", "completion", "reward")}
            found.append(kept | {"prompt": sample["prompt"][-1]["content"]})
    return found


def answers(run: Run) -> list[str]:
    """To the sum that README shows, before and after."""
    found = []
    for step in (0, run.samples()[-1]["step"]):
        shown = [s for s in run.samples(step) if s["prompt"][-1]["content"] == README_SUM]
        found.append(" ".join(shown[0]["completion"].split()))
    return found


def minutes(run: Run) -> float:
    """Of the rollouts: sampling, scoring and the update."""
    seconds = run.values("time/rollout_seconds").sum() + run.values("time/update_seconds").sum()
    return seconds / 60


README_SUM = "What is 55 + 92?"  # one that it learns
ROLLOUTS = {"tone": (0, 2, 4, 6, 8, 10), "sums": (0, 4, 8, 12, 16)}
ON_POLICY_METRICS = [
    Metric("minutes", minutes),
    last("policy/entropy"),
    last("eval/length_mean"),
    last("completions/truncated_fraction"),
]
METRICS = {
    "tone": [
        *(at("eval/reward", step) for step in ROLLOUTS["tone"]),
        Metric("conversation", conversation),
        *ON_POLICY_METRICS,
    ],
    "SFT": [first("eval/loss"), last("eval/loss")],
}
for label in ("GRPO after SFT", "GRPO without SFT"):
    METRICS[label] = [at("eval/accuracy", step) for step in ROLLOUTS["sums"]]
    METRICS[label] += [at("eval/pass_at_4", step) for step in (0, 16)] + ON_POLICY_METRICS
    METRICS[label] += [Metric("answers", answers)]


def tables(results: dict) -> dict[str, dict]:
    numbers = results["numbers"]
    rows = []
    for label in ("GRPO without SFT", "GRPO after SFT"):
        found = numbers[label]
        accuracies = [spread(found[f"eval/accuracy at {step}"], 2) for step in ROLLOUTS["sums"]]
        passes = [spread(found[f"eval/pass_at_4 at {step}"], 2) for step in (0, 16)]
        rows.append([label, *accuracies, " → ".join(passes), spread(found["minutes"], 0)])
    tone = [spread(numbers["tone"][f"eval/reward at {step}"], 2) for step in ROLLOUTS["tone"]]
    texts = []
    shown = numbers["tone"]["conversation"][0]
    for before, after in zip(shown[: len(shown) // 2], shown[len(shown) // 2 :], strict=True):
        for name, sample in (("before", before), ("after", after)):
            text = " ".join(sample["completion"].split())
            texts.append([f'*{sample["prompt"]}* {name}, {sample["reward"]:.2f}: "{text}"'])
    untrained, trained = numbers["GRPO without SFT"], numbers["GRPO after SFT"]
    readme = []
    for name, found, step in (
        ("before", untrained, 0),
        ("after `sft.py` on 64 sums", trained, 0),
        ("after 16 rollouts of `grpo.py`", trained, 16),
    ):
        text = found["answers"][0][step > 0]
        accuracy = spread(found[f"eval/accuracy at {step}"], 2)
        readme.append([f'{name} (right: {accuracy}): "{text}"'])
    steps = [f"{step} rollouts" for step in ROLLOUTS["sums"]]
    return {
        "real sums": {"columns": ["", *steps, "pass@4", "minutes"], "rows": rows},
        "real tone": {"columns": [f"{n} rollouts" for n in ROLLOUTS["tone"]], "rows": [tone]},
        "real texts": {"rows": texts},
        "real readme": {"rows": readme},
    }


EXPERIMENTS = (Experiment("real", COMMANDS, seeds=(1,), metrics=METRICS, more_tables=tables),)
