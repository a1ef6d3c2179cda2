"""docs/distill.md: distillation, the noise of its gradient, GRPO itself, and SFT on the teacher's
completions.
"""

import tempfile
from itertools import accumulate
from pathlib import Path
from statistics import mean

import torch
from torch import Generator, Tensor

import distill
import grpo
import sft
from common.logprobs import completion_logprobs
from docs.experiments.lib import sampling
from docs.experiments.lib.experiment import Experiment, saved_results
from docs.experiments.lib.metrics import Metric
from docs.experiments.lib.runs import Run, read_jsonl, train, write_jsonl
from docs.experiments.lib.tables import rounded, spread
from tiny.arithmetic.reward import last_number

BY_TOKEN, BY_SUM = "distillation", "distillation, `--discount 1`"
COMMANDS = {BY_TOKEN: "distill.py --eval-every 8", BY_SUM: "distill.py --discount 1 --eval-every 8"}
DIVERGENCES = ("sampled", "reverse", "forward", "jsd")
TEACHER, BY_SFT = "the teacher", "SFT on the teacher's completions"


# --- measuring ---------------------------------------------------------------------------------
def accuracy(samples: list[dict]) -> float:
    """Of completions of held-out prompts."""
    rows = read_jsonl(Path(distill.Args.dataset, "test.jsonl"))
    answers = {row["prompt"]: row["answer"] for row in rows}
    texts = [sample["completion"] for sample in samples]
    prompts = [sample["prompt"].split(",")[-1] for sample in samples]  # what follows a hint
    return mean(last_number([], texts, [answers[prompt] for prompt in prompts]))


def points(run: Run) -> list[tuple[int, float, float]]:
    """Of each evaluation: rollouts so far, thousands of sampled tokens so far, and accuracy."""
    tokens = run.values("completions/length_mean").cumsum() * distill.Args.prompts_per_rollout
    found = []
    for step in run.values("eval/kl").index:
        found.append((int(step), tokens.get(step, 0.0) / 1000, accuracy(run.samples(step))))
    return found


def completed(policy: sampling.Policy, split: str, seed: int) -> tuple[list[dict], int]:
    """The prompts of a split with a completion of each, and the number of sampled tokens."""
    prompts = sampling.load_prompts(grpo.Args(), split, policy.tokenizer)
    prompt_ids = [prompt.ids for prompt in prompts]
    sequences, texts = sampling.sample(policy, prompt_ids, 24, Generator().manual_seed(seed))
    rows = [{"prompt": p.text, "completion": y} for p, y in zip(prompts, texts, strict=True)]
    return rows, sum(len(completion) for _, completion in sequences)


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    """The teacher; SFT on its completion of each training prompt."""
    teacher = sampling.load_policy(distill.Args().teacher)
    held_out, _ = completed(teacher, "test", seed)
    found = {TEACHER: {"accuracy": accuracy(held_out)}}
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(model=distill.Args.model, seed=seed, output_dir=folder, eval_every=1000)
        rows, num_tokens = completed(teacher, "train", seed)
        write_jsonl(Path(folder, "train.jsonl"), rows)
        write_jsonl(Path(folder, "test.jsonl"), held_out)
        run = train(sft, dataset=folder, epochs=1.0, eval_samples=len(held_out), **flags)
        found[BY_SFT] = {"tokens": num_tokens, "accuracy": accuracy(run.samples())}
    return found


def measure_noise(num_rollouts: int = 40) -> dict[str, dict[str, float]]:
    """By --divergence, of the gradient before the first step: the squared norm of its mean over
    rollouts, and the variance of a rollout's, summed over all weights.
    """
    args = distill.Args()
    student, teacher = sampling.load_policy(args.model), sampling.load_policy(args.teacher).model
    prompts = sampling.load_prompts(grpo.Args(), "train", student.tokenizer)
    policy, size = student.model, args.prompts_per_rollout
    inds, gradients = torch.arange(size), {name: [] for name in DIVERGENCES}

    def loss_of(name: str, sequences: list) -> Tensor:
        if name == "sampled":
            rewards, _ = distill.token_rewards(policy, teacher, sequences, sequences, [inds])
            logprobs = completion_logprobs(policy, sequences, inds)
            return distill.distillation_loss(logprobs, rewards, size)
        states, head = distill.states_and_head(teacher, sequences, inds)
        return distill.divergence_loss(policy, sequences, inds, states, head, name, args.jsd_beta)

    for seed in range(num_rollouts):
        rng = Generator().manual_seed(seed)
        chosen = torch.randint(len(prompts), [size], generator=rng)
        prompt_ids = [prompts[i].ids for i in chosen]
        sequences, _ = sampling.sample(student, prompt_ids, args.max_new_tokens, rng)
        for name in DIVERGENCES:
            gradient = torch.autograd.grad(loss_of(name, sequences), [*policy.parameters()])
            gradients[name].append(torch.cat([part.flatten() for part in gradient]).double())
    found = {}
    for name in DIVERGENCES:
        variance, average = torch.var_mean(torch.stack(gradients[name]), dim=0)
        total = variance.sum().item()
        # The squared norm of an average has a share of the variance in it.
        squared = average.square().sum().item() - total / num_rollouts
        found[name] = {"variance": total, "squared norm": squared}
    return rounded(found)


# --- the tables --------------------------------------------------------------------------------
def points_of_grpo() -> list[list[tuple[int, float, float]]]:
    """The same of GRPO's stored runs, by seed."""
    curves, found = saved_results("grpo")["curves"]["(default)"], []
    by_seed = zip(curves["eval/accuracy"], curves["completions/length_mean"], strict=True)
    for accuracies, lengths in by_seed:
        tokens = [0.0, *accumulate(256 * length / 1000 for _, length in lengths)]
        found.append([(rollout, tokens[rollout], value) for rollout, value in accuracies])
    return found


def tables(results: dict) -> dict[str, dict]:
    numbers = results["numbers"]
    teacher = numbers[TEACHER]["accuracy"]
    starts = [points[0][2] for points in numbers[BY_TOKEN]["points"]]

    def row(name: str, tokens: list, reached: list) -> list[str]:
        gains = []
        for value, start, best in zip(reached, starts, teacher, strict=True):
            gains.append((value - start) / (best - start))
        return [name, spread(tokens, 0), spread(reached, 3), spread(gains, 2)]

    rows = []
    for name, by_seed, moments in (
        (BY_TOKEN, numbers[BY_TOKEN]["points"], (80, 160)),
        (BY_SUM, numbers[BY_SUM]["points"], (160,)),
        ("GRPO", points_of_grpo(), (20, 60)),
    ):
        for moment in moments:
            then = [point for points in by_seed for point in points if point[0] == moment]
            tokens = [tokens for _, tokens, _ in then]
            reached = [value for _, _, value in then]
            rows.append(row(f"{name}, {moment} rollouts", tokens, reached))
    of_sft = numbers[BY_SFT]
    tokens = [number / 1000 for number in of_sft["tokens"]]
    rows.append(row(BY_SFT, tokens, of_sft["accuracy"]))
    rows.append([TEACHER, "", spread(teacher, 3), "1"])
    columns = ["", "sampled tokens, thousands", "accuracy"]
    return {"distill": {"columns": [*columns, "of the teacher's gain"], "rows": rows}}


def divergence_tables(results: dict) -> dict[str, dict]:
    """By --divergence the noise of the first gradient, and how many tokens are sampled until nine
    tenths of the teacher's gain."""
    saved, rows = saved_results("distill")["numbers"], []
    noise = saved_results("distill_noise")["numbers"]
    for name, measured in ({"sampled": saved[BY_TOKEN]} | results["numbers"]).items():
        needed = []
        for of_seed, best in zip(measured["points"], saved[TEACHER]["accuracy"], strict=True):
            start = of_seed[0][2]
            goal = start + 0.9 * (best - start)
            needed.append(min(tokens for _, tokens, reached in of_seed if reached >= goal))
        last = [of_seed[-1][2] for of_seed in measured["points"]]
        ratio = f"{noise[name]['variance'] / noise[name]['squared norm']:.2f}"
        rows.append([f"`--divergence {name}`", ratio, spread(needed, 0), spread(last, 3)])
    columns = ["", "noise", "tokens, thousands", "accuracy after 160 rollouts"]
    return {"distill_divergence": {"columns": columns, "rows": rows}}


EXPERIMENTS = (
    Experiment(
        "distill_divergence",
        {name: f"{COMMANDS[BY_TOKEN]} --divergence {name}" for name in DIVERGENCES[1:]},
        metrics={name: [Metric("points", points)] for name in DIVERGENCES[1:]},
        more_tables=divergence_tables,
    ),
    Experiment("distill_noise", measure_all=measure_noise),
    Experiment(
        "distill",
        COMMANDS,
        metrics={label: [Metric("points", points)] for label in COMMANDS},
        measure_seed=measure_seed,
        more_tables=tables,
    ),
)
