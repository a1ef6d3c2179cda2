"""docs/reinforce.md: the variance of the gradient under each baseline, along training."""

import tempfile
from statistics import median

import torch
from torch import Generator, Tensor

import reinforce
from common.logprobs import completion_logprobs
from docs.experiments.lib import sampling
from docs.experiments.lib.drawing import ALGORITHM_STYLES, TEXT, WIDE, Style, panel, plain_log_scale
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import train
from tiny.arithmetic.reward import last_number


CASES = {  # what is added to each reward, and the baseline
    "none": (0, "none"),
    "none, rewards 1 and 2": (1, "none"),
    "batch mean": (0, "batch_mean"),
    "leave one out": (0, "leave_one_out"),
}
NUM_ROLLOUTS = 64  # that are sampled from each policy
MOMENTS = (0, 5, 10, 20, 40, 60)  # rollouts trained, after which the variance is measured


def variances(model: str, seed: int) -> dict[str, float]:
    """E |g - E g|^2 of the gradient g of one rollout, in each case."""
    args = reinforce.Args(model=model)
    rng = Generator().manual_seed(seed)
    policy = sampling.load_policy(model)
    train_prompts = sampling.load_prompts(args, args.train_split, policy.tokenizer)

    gradient_sums = dict.fromkeys(CASES, 0.0)
    squared_norms = dict.fromkeys(CASES, 0.0)
    for _ in range(NUM_ROLLOUTS):
        # 1. Sample a rollout, as reinforce.py does.
        prompt_inds = torch.randint(len(train_prompts), [args.prompts_per_rollout], generator=rng)
        prompts = [train_prompts[i] for i in prompt_inds for _ in range(args.group_size)]
        prompt_ids = [prompt.ids for prompt in prompts]
        sequences, texts = sampling.sample(policy, prompt_ids, args.max_new_tokens, rng)
        answers = [prompt.columns["answer"] for prompt in prompts]
        rewards = torch.tensor(last_number([], texts, answers))

        # 2. Its gradient under each baseline.
        logprobs = completion_logprobs(policy.model, sequences, range(len(sequences)))
        for name, (shift, baseline) in CASES.items():
            advantages = reinforce.baseline_advantages(rewards + shift, args.group_size, baseline)
            loss = reinforce.policy_gradient_loss(logprobs, advantages, len(sequences))
            gradient = flat_gradient(loss, policy.model)
            gradient_sums[name] = gradient_sums[name] + gradient
            squared_norms[name] += gradient.square().sum().item()

    found = {}
    for name in CASES:
        squared_mean = (gradient_sums[name] / NUM_ROLLOUTS).square().sum().item()
        found[name] = (squared_norms[name] - NUM_ROLLOUTS * squared_mean) / (NUM_ROLLOUTS - 1)
    return found


def flat_gradient(loss: Tensor, model: torch.nn.Module) -> Tensor:
    """The gradient by all parameters as one vector, in float64."""
    gradients = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients]).double()


def along_training(seed: int) -> dict[str, dict[str, float]]:
    """By case, the variance at each of MOMENTS."""
    measured = {name: {} for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for moment in MOMENTS:
            model = reinforce.Args.model
            if moment > 0:
                flags = dict(total_rollouts=moment, eval_split="test[:8]", eval_every=1000)
                model = str(train(reinforce, seed=seed, output_dir=folder, **flags).folder)
            for name, variance in variances(model, seed).items():
                measured[name][f"after {moment} rollouts"] = variance
    return measured


def draw(results: dict) -> dict:
    """The median in each case at each moment, and the seeds. The mean of the batch as a baseline
    would cover leave one out."""
    colour = ALGORITHM_STYLES["REINFORCE"].colour
    styles = {
        "none, rewards 1 and 2": Style(colour, "x"),
        "none": Style(colour, "p"),
        "leave one out": Style(TEXT, "s"),
    }
    labels = (
        "no baseline, rewards 1 and 2",
        "no baseline, rewards 0 and 1",
        "leave one out, either",
    )
    title = "Adding 1 to all rewards raises the variance\nonly where there is no baseline"
    axis = panel(title, "rollouts trained", "variance of the gradient", WIDE, 3.6)
    for (case, (colour, marker)), label in zip(styles.items(), labels, strict=True):
        values = [results["numbers"][case][f"after {moment} rollouts"] for moment in MOMENTS]
        places = range(len(MOMENTS))
        axis.plot(places, values, ".", color=colour, ms=3, alpha=0.5)
        line = ":" if case == "none" else "-"
        axis.plot(places, [*map(median, values)], line, color=colour, marker=marker, label=label)
    axis.set_xticks(range(len(MOMENTS)), labels=map(str, MOMENTS))
    plain_log_scale(axis)
    axis.figure.legend(loc="outside lower center")
    return {"variance": axis}


EXPERIMENTS = (Experiment("variance", measure_seed=along_training, draw=draw),)
