"""docs/real.md: SmolLM2-135M-Instruct, which docs/real/unpack.py has put into runs/."""

from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.metrics import Metric, at, first, last
from docs.experiments.lib.runs import Run
from docs.experiments.lib.tables import spread

MODEL = "--model runs/SmolLM2-135M-Instruct --chat"
ON_POLICY = "--num-minibatches 1 --micro-batch-size 8 --prompts-per-rollout 8"
TONE = "docs/rewards/tone.py:tone"
SFT = (
    f"sft.py {MODEL} --dataset docs/real/sums --train-split train[:64] --epochs 2 "
    "--batch-size 16 --micro-batch-size 8 --eval-rows 100 --eval-samples 8 --learning-rate"
)
AFTER_SFT = f"--model {{{SFT} 2e-5}} --chat --dataset docs/real/sums --group-size 8 "
AFTER_SFT += "--max-new-tokens 24 --total-rollouts 16 --eval-every 4"
SUMS = f"{ON_POLICY} --beta 0 --eval-rows 60 --eval-samples 4"
FILMS = f"{MODEL} --dataset docs/real/films --max-new-tokens 40 --temperature 0.7 "
FILMS += "--eval-temperature 0.7"
GROUPS = f"grpo.py {FILMS} {ON_POLICY} --group-size 6"
REWARD_MODEL = (
    f"rm_bradley_terry.py {MODEL} --dataset docs/real/pairs --epochs 2 --batch-size 16 "
    "--micro-batch-size 8 --train-layers 10 --learning-rate 5e-5 --eval-every 15"
)
DPO = (
    f"dpo.py {MODEL} --dataset docs/real/pairs --train-split train[:256] --epochs 1 "
    f"--batch-size 16 --micro-batch-size 8 --beta 0.1 --learning-rate 2e-5 --warmup-ratio 0 "
    f"--temperature 0.7 --eval-every 100 --eval-reward-fn {TONE}"
)
COMMANDS = {
    "GRPO after SFT": f"grpo.py {AFTER_SFT} {SUMS} --learning-rate 1e-5",
    "GRPO after SFT, adapters": f"grpo.py {AFTER_SFT} {SUMS} --learning-rate 2e-4 --lora-rank 16",
    "REINFORCE after SFT": f"reinforce.py {AFTER_SFT} --prompts-per-rollout 8 "
    "--micro-batch-size 8 --eval-split test[:60] --learning-rate 1e-5",
    "GRPO without SFT": f"grpo.py {MODEL} --dataset docs/real/sums --group-size 8 "
    f"--max-new-tokens 24 --total-rollouts 16 --eval-every 4 {SUMS} --learning-rate 1e-5",
    "reward model": REWARD_MODEL,
    "DPO": DPO,
    "KTO": f"kto.py {MODEL} --dataset docs/real/labels --train-split train[:512] --epochs 1 "
    "--batch-size 32 --micro-batch-size 16 --eval-rows 48 --learning-rate 2e-5 --warmup-ratio 0 "
    f"--temperature 0.7 --eval-every 100 --eval-reward-fn {TONE}",
    "GRPO on the rule itself": f"{GROUPS} --beta 0 --reward-fn {TONE} --learning-rate 1e-5 "
    "--total-rollouts 10 --eval-every 2",
}
RATES = {"": ("2e-5", "5e-5", "1e-4"), " --lora-rank 16": ("2e-4", "5e-4", "1e-3")}
COMMANDS |= {f"SFT{lora}, {r}": f"{SFT} {r}{lora}" for lora in RATES for r in RATES[lora]}
PREFERENCES = ("DPO", "KTO", "GRPO on the rule itself")
STEPS = (0, 4, 8, 12, 16)
README_SUM = "What is 55 + 92?"  # one that it learns


def texts(run: Run) -> list[dict]:
    """Of the first held-out prompts about films, the completions before and after."""
    found = []
    for step in (0, run.samples()[-1]["step"]):
        for sample in run.samples(step)[:4]:
            prompt = sample["prompt"]
            shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            found.append({"prompt": shown, "text": sample["completion"], "tone": sample["reward"]})
    return found


def answers(run: Run) -> list[str]:
    """To the sum that README shows, before and after."""
    found = []
    for step in (0, run.samples()[-1]["step"]):
        shown = [s for s in run.samples(step) if s["prompt"][-1]["content"] == README_SUM]
        found.append(" ".join(shown[0]["completion"].split()))
    return found


METRICS = {
    "reward model": [last("eval/pair_accuracy"), last("eval/loss")],
    "REINFORCE after SFT": [at("eval/reward", step) for step in STEPS],
}
for label in COMMANDS:
    if label.startswith("SFT"):
        METRICS[label] = [first("eval/loss"), last("eval/loss")]
    elif label.startswith("GRPO ") and "SFT" in label:
        METRICS[label] = [at("eval/accuracy", step) for step in STEPS]
        METRICS[label] += [at("eval/pass_at_4", step) for step in (0, 16)]
        METRICS[label] += [Metric("answers", answers)]
    elif label in PREFERENCES:
        METRICS[label] = [first("eval/reward"), last("eval/reward"), last("eval/length_mean")]
        METRICS[label] += [Metric("texts", texts)]
for label in ("DPO", "KTO"):
    METRICS[label] += [last("eval/kl")]


def tables(results: dict) -> dict[str, dict]:
    numbers, sums, preferences, rates, shown = results["numbers"], [], [], [], []
    for label in ("GRPO without SFT", "GRPO after SFT", "GRPO after SFT, adapters"):
        found = numbers[label]
        accuracies = [spread(found[f"eval/accuracy at {step}"], 2) for step in STEPS]
        passes = [spread(found[f"eval/pass_at_4 at {step}"], 2) for step in (0, 16)]
        sums.append([label, *accuracies, " → ".join(passes)])
    found = numbers["REINFORCE after SFT"]
    accuracies = [spread(found[f"eval/reward at {step}"], 2) for step in STEPS]
    sums.append(["REINFORCE after SFT", *accuracies, ""])
    for label in PREFERENCES:
        found = numbers[label]
        rewards = [spread(found[name], 2) for name in ("first eval/reward", "eval/reward")]
        kl = spread(found["eval/kl"], 1) if "eval/kl" in found else ""
        length = spread(found["eval/length_mean"], 0)
        preferences.append([label, " → ".join(rewards), kl, length])
    for lora, tried in RATES.items():
        losses = [
            f"{rate}: {spread(numbers[f'SFT{lora}, {rate}']['eval/loss'], 3)}" for rate in tried
        ]
        rates.append([f"`{lora.strip()}`" if lora else "all weights", *losses])
    of_seed = numbers["DPO"]["texts"][0]
    for before, after in zip(
        of_seed[: len(of_seed) // 2], of_seed[len(of_seed) // 2 :], strict=True
    ):
        for when, sample in (("before", before), ("after", after)):
            text = " ".join(sample["text"].split())
            shown.append([f'*{sample["prompt"]}* {when}, {sample["tone"]:.2f}: "{text}"'])
    readme = []
    untrained, trained = numbers["GRPO without SFT"], numbers["GRPO after SFT"]
    for name, found, step in (
        ("before", untrained, 0),
        ("after `sft.py` on 64 sums", trained, 0),
        ("after 16 rollouts of `grpo.py`", trained, 16),
    ):
        accuracy = spread(found[f"eval/accuracy at {step}"], 2)
        readme.append([f'{name} (right: {accuracy}): "{found["answers"][0][step > 0]}"'])
    columns = ["", "tone", "KL", "tokens"]
    return {
        "real sums": {"columns": ["", *(f"{n} rollouts" for n in STEPS), "pass@4"], "rows": sums},
        "real preferences": {"columns": columns, "rows": preferences},
        "real rates": {"columns": ["", "", "", ""], "rows": rates},
        "real texts": {"rows": shown},
        "real readme": {"rows": readme},
    }


EXPERIMENTS = (Experiment("real", COMMANDS, seeds=(1,), metrics=METRICS, more_tables=tables),)
