"""docs/real.md: SmolLM2-135M-Instruct, which docs/real/unpack.py has put into runs/."""

from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Generator

from docs.experiments.lib import sampling
from docs.experiments.lib.experiment import Experiment, saved_results
from docs.experiments.lib.metrics import Metric, at, last
from docs.experiments.lib.runs import Run, read_jsonl, run_of
from docs.experiments.lib.tables import spread
from docs.rewards.tone import tone

MODEL = "--model runs/SmolLM2-135M-Instruct --chat"
TONE = "docs/rewards/tone.py:tone"
SFT = (
    f"sft.py {MODEL} --dataset docs/real/sums --train-split train[:64] --epochs 2 "
    "--batch-size 16 --micro-batch-size 8 --eval-rows 100 --eval-samples 8 --learning-rate"
)
# --- sums --------------------------------------------------------------------------------------
ON_POLICY = "--num-minibatches 1 --micro-batch-size 8 --prompts-per-rollout 8"
ON_SUMS = "--chat --dataset docs/real/sums --group-size 8 --max-new-tokens 24 --total-rollouts 16"
GRPO_ON_SUMS = f"{ON_SUMS} {ON_POLICY} --beta 0 --eval-every 4 --eval-rows 60 --eval-samples 4"
AFTER_SFT = f"--model {{{SFT} 2e-5}}"
SUMS = {
    "GRPO without SFT": "grpo_variants.py --model runs/SmolLM2-135M-Instruct "
    f"{GRPO_ON_SUMS} --learning-rate 1e-5",
    "GRPO after SFT": f"grpo_variants.py {AFTER_SFT} {GRPO_ON_SUMS} --learning-rate 1e-5",
    "GRPO after SFT, adapters": f"grpo_variants.py {AFTER_SFT} {GRPO_ON_SUMS} --learning-rate 2e-4 "
    "--lora-rank 16",
    "REINFORCE after SFT": f"reinforce.py {AFTER_SFT} {ON_SUMS} --prompts-per-rollout 8 "
    "--micro-batch-size 8 --eval-every 4 --eval-split test[:60] --learning-rate 1e-5",
}
# --- preferences -------------------------------------------------------------------------------
REWARD_MODEL = (
    f"rm_bradley_terry.py {MODEL} --dataset docs/real/pairs --epochs 2 --batch-size 16 "
    "--micro-batch-size 8 --train-layers 10 --learning-rate 5e-5 --eval-every 15"
)
LEARNED = f"--reward-model {{{REWARD_MODEL}}} --eval-reward-fn {TONE}"
FILMS = f"{MODEL} --dataset docs/real/films --max-new-tokens 40 --temperature 0.7 "
FILMS += "--eval-temperature 0.7"
GRPO = f"grpo.py {FILMS} {ON_POLICY} --group-size 6"
PPO = (
    f"ppo_rlhf.py {FILMS} {LEARNED} --prompts-per-rollout 48 --num-minibatches 2 "
    "--update-epochs 1 --micro-batch-size 8 --beta 0.05 --total-rollouts 10 --eval-every 5"
)
OFFLINE = f"--temperature 0.7 --eval-every 100 --warmup-ratio 0 --eval-reward-fn {TONE}"
DPO = (
    f"dpo.py {MODEL} --dataset docs/real/pairs --train-split train[:256] --epochs 1 "
    f"--batch-size 16 --micro-batch-size 8 --beta 0.1 {OFFLINE}"
)
PREFERENCES = {
    "DPO": f"{DPO} --learning-rate 2e-5",
    "DPO, adapters at 4e-4": f"{DPO} --learning-rate 4e-4 --lora-rank 16",
    "KTO": f"kto.py {MODEL} --dataset docs/real/labels --train-split train[:512] --epochs 1 "
    f"--batch-size 32 --micro-batch-size 16 --eval-rows 48 {OFFLINE} --learning-rate 2e-5",
    "PPO at 2e-5": f"{PPO} --learning-rate 2e-5 --critic-learning-rate 2e-5",
    "GRPO": f"{GRPO} {LEARNED} --beta 0.05 --learning-rate 2e-5 --total-rollouts 10 --eval-every 5",
    "GRPO, almost no KL": f"{GRPO} {LEARNED} --beta 1e-9 --learning-rate 5e-5 "
    "--total-rollouts 14 --eval-every 7",
    "GRPO on the rule itself": f"{GRPO} --beta 0 --reward-fn {TONE} --learning-rate 1e-5 "
    "--total-rollouts 10 --eval-every 2",
}
STEPS = (0, 4, 8, 12, 16)
README_SUM = "What is 55 + 92?"  # one that it learns


# --- what is kept of a run ---------------------------------------------------------------------
def texts(run: Run) -> list[list[dict]]:
    """Completions of the first held-out prompts about films, before and after."""
    found = []
    for step in (0, run.samples()[-1]["step"]):
        found.append([])
        for sample in run.samples(step)[:2]:
            question = sample["prompt"][-1]["content"]
            row = {"prompt": question, "text": sample["completion"], "tone": sample["reward"]}
            found[-1].append(row)
    return found


def answers(run: Run) -> list[str]:
    """To the sum that README shows, before and after."""
    found = []
    for step in (0, run.samples()[-1]["step"]):
        shown = [s for s in run.samples(step) if s["prompt"][-1]["content"] == README_SUM]
        found.append(" ".join(shown[0]["completion"].split()))
    return found


def film_prompts(tokenizer: Any) -> list[list[int]]:
    """The held-out prompts about films, as chat messages: token ids."""
    rows = read_jsonl(Path("docs/real/films/test.jsonl"))
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    return sampling.encode_prompts(tokenizer, chats)


def judge(source: str | Path) -> dict[str, float]:
    """Means over eight completions of each held-out prompt about films, at temperature 0.7: the
    tone, the score of the reward model of seed 1, and the tokens."""
    policy = sampling.load_policy(source)
    prompt_ids = 8 * film_prompts(policy.tokenizer)
    rng = Generator().manual_seed(1)
    sequences, texts = sampling.sample(policy, prompt_ids, 40, rng, temperature=0.7)
    reward_model = sampling.load_reward_model(str(run_of(REWARD_MODEL, 1).folder))
    tokens = mean(len(ids) for _, ids in sequences)
    learned = reward_model(sequences).mean().item()
    return {"tone": mean(tone([], texts)), "learned": learned, "tokens": tokens}


def kl(run: Run) -> float | None:
    """To the start, nats per completion: on held-out prompts, or of the last rollout."""
    logged = [name for name in ("eval/kl", "objective/kl") if name in run.metrics]
    return run.values(logged[0]).iloc[-1] if logged else None


START = Metric("start judged", lambda run: judge("runs/SmolLM2-135M-Instruct"))
METRICS = {"reward model": [last("eval/pair_accuracy"), START]}
for label in SUMS:
    METRICS[label] = [at("eval/reward", step) for step in STEPS]
    if label.startswith("GRPO"):
        METRICS[label] += [at("eval/pass_at_4", step) for step in (0, 16)]
for label in ("GRPO without SFT", "GRPO after SFT"):
    METRICS[label] += [Metric("answers", answers)]
for label in PREFERENCES:
    METRICS[label] = [Metric("judged", lambda run: judge(run.folder)), Metric("KL", kl)]
for label in ("DPO", "GRPO, almost no KL"):
    METRICS[label] += [Metric("texts", texts)]


# --- tables ------------------------------------------------------------------------------------
def sums_table(numbers: dict) -> dict:
    rows = []
    for label in SUMS:
        found = numbers[label]
        row = [label, *(spread(found[f"eval/reward at {step}"], 2) for step in STEPS)]
        passes = [found.get(f"eval/pass_at_4 at {step}") for step in (0, 16)]
        rows.append([*row, " → ".join(spread(of_seeds, 2) for of_seeds in passes if of_seeds)])
    return {"columns": ["", *(f"{step} rollouts" for step in STEPS), "pass@4"], "rows": rows}


def preferences_table(numbers: dict) -> dict:
    rows = []
    for label in ("before", *PREFERENCES):
        found = numbers["reward model" if label == "before" else label]
        judged = found["start judged" if label == "before" else "judged"]
        cells = [label]
        for name, digits in (("learned", 2), ("tone", 2), ("tokens", 0)):
            cells.append(spread([of_seed[name] for of_seed in judged], digits))
        has_kl = label != "before" and None not in found["KL"]
        rows.append([*cells, spread(found["KL"], 1) if has_kl else ""])
    return {"columns": ["", "learned reward", "tone", "tokens", "KL"], "rows": rows}


def texts_list(numbers: dict) -> dict:
    """Before training, after DPO, and where the reward model is hacked."""
    rows = []
    for when, label, moment, prompt in (
        ("before", "DPO", 0, 0),
        ("DPO", "DPO", 1, 0),
        ("GRPO, almost no KL", "GRPO, almost no KL", 1, 1),
    ):
        sample = numbers[label]["texts"][0][moment][prompt]
        text = " ".join(sample["text"].split())
        rows.append([f'*{sample["prompt"]}* {when}, tone {sample["tone"]:.2f}: "{text}"'])
    return {"rows": rows}


def dialogue_table(numbers: dict) -> dict:
    """What the run with seed 1 answers before and after, and how often all seeds are right."""
    untrained, trained = numbers["GRPO without SFT"], numbers["GRPO after SFT"]
    rows = []
    for name, found, step in (
        ("as downloaded", untrained, 0),
        ("after `sft.py` on 64 sums", trained, 0),
        ("then after 16 rollouts of GRPO", trained, 16),
    ):
        percent = spread([100 * of_seed for of_seed in found[f"eval/reward at {step}"]], 0)
        answer = found["answers"][0][step > 0]
        is_whole = answer[-1].isdigit()
        rows.append([name, answer if is_whole else f"{answer} (cut off)", f"{percent} %"])
    with_calls = saved_results("real_tools")["numbers"]["SmolLM2"]
    before, after = (
        spread([100 * of_seed for of_seed in with_calls[f"eval/reward at {step}"]], 0)
        for step in (0, 4)
    )
    name = "with a calculator, after 4 rollouts of `grpo_tools.py`"
    rows.append([name, f"(before these: {before} % right)", f"**{after} %**"])
    return {"columns": ["SmolLM2", f"*{README_SUM}*", "right"], "rows": rows}


def tables(results: dict) -> dict[str, dict]:
    made = {
        "sums": sums_table,
        "preferences": preferences_table,
        "texts": texts_list,
        "dialogue": dialogue_table,
    }
    numbers = results["numbers"] | saved_results("real_seeds")["numbers"]
    return {f"real {name}": table(numbers) for name, table in made.items()}


COMMANDS = SUMS | {"reward model": REWARD_MODEL} | PREFERENCES
# A run takes from 3 to 45 minutes beside another, so the rest has one seed.
THREE_SEEDS = ["GRPO after SFT", "GRPO after SFT, adapters", "REINFORCE after SFT"]
THREE_SEEDS += ["DPO", "DPO, adapters at 4e-4", "KTO"]
ONE_SEED = [label for label in COMMANDS if label not in THREE_SEEDS]


def experiment(name: str, labels: Iterable[str], **more: Any) -> Experiment:
    commands = {label: COMMANDS[label] for label in labels}
    return Experiment(name, commands, metrics={label: METRICS[label] for label in labels}, **more)


EXPERIMENTS = (
    experiment("real", ONE_SEED, seeds=(1,), more_tables=tables),
    experiment("real_seeds", THREE_SEEDS, seeds=(1, 2, 3)),
)
