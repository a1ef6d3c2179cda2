"""docs/numbers.md, and the bridge in docs/grpo.md: what four losses compute from the same
completions of one prompt.

The prompt and the checkpoints are those of tiny/reviews. There are three policies: `ref`, the
checkpoint; `old`, which sampled the completions; `new`, one optimiser step later. `measure` asks
the models for log-probs, rewards and values, rounded to `DIGITS` decimals. `tables` computes the
rest from these rounded numbers with the scripts' own functions, so that a pocket calculator gives
the digits of the page.
"""

from typing import Any

import torch
from torch import Generator, Tensor
from torch.optim import AdamW
from transformers import AutoModelForSequenceClassification

import dpo
import grpo
import ppo_rlhf
from common.logprobs import Sequences, completion_logprobs
from docs.experiments.lib import sampling
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.tables import fixed
from reinforce import baseline_advantages, policy_gradient_loss

PROMPT = "review of jaws :"
NAMES = "1234"  # the group's completions, from the highest learned reward to the lowest
BEST, WORST = 0, 3  # their places
FIRST_SEED, FIRST_SIZE = 1, 8  # of the rollout that the first step trains on
SEED, NUM_SAMPLES, MAX_LENGTH = 6, 64, 12  # the group: the first four that are short enough
DIGITS = 4  # decimals of what the models give; `fixed` shows as many

# The scripts' flags; those that are not named keep their default.
PPO, DPO = ppo_rlhf.Args(), dpo.Args()
GRPO = grpo.Args(
    model=PPO.model,
    reward_model=PPO.reward_model,
    beta=0.2,
    max_new_tokens=PPO.max_new_tokens,
    learning_rate=5e-4,
)


# --- what the models give ----------------------------------------------------------------------
def measure() -> dict:
    """What the checkpoints and two optimiser steps give: log-probs, rewards and values."""
    torch.set_num_threads(1)
    ref, policy = sampling.load_policy(GRPO.model), sampling.load_policy(GRPO.model)
    optimizer = AdamW(policy.model.parameters(), lr=GRPO.learning_rate, weight_decay=0.0)
    reward_fn = sampling.load_reward_model(GRPO.reward_model)
    critic = AutoModelForSequenceClassification.from_pretrained(
        PPO.reward_model, dtype=torch.float32
    ).eval()

    first = sample(policy, FIRST_SIZE, FIRST_SEED)
    take_step(policy, ref, optimizer, first, reward_fn(first))  # `ref` becomes `old`
    group = sample(policy, NUM_SAMPLES, SEED)
    group = [sequence for sequence in group if len(sequence[1]) <= MAX_LENGTH][: len(NAMES)]
    rewards = reward_fn(group)
    best_first = rewards.argsort(descending=True).tolist()
    group, rewards = [group[i] for i in best_first], rewards[best_first]

    completions = [ids for _, ids in group]
    texts = [ref.tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    measured = {
        "completion": texts,
        "tokens": [ref.tokenizer.convert_ids_to_tokens(ids) for ids in completions],
        "reward": to_digits(rewards),
        "ref": logprobs_of(ref, group),
        "old": logprobs_of(policy, group),
    }
    with torch.no_grad():
        critic = ppo_rlhf.Critic(critic, critic.score, trained=critic)
        values = ppo_rlhf.critic_values(critic, group, torch.arange(len(group)))
    measured["values"] = unpadded(values, group)
    take_step(policy, ref, optimizer, group, rewards)  # `old` becomes `new`
    measured["new"] = logprobs_of(policy, group)
    return measured


def sample(policy: sampling.Policy, number: int, seed: int) -> Sequences:
    """Completions of the prompt."""
    rng = Generator().manual_seed(seed)
    prompts = sampling.encode_prompts(policy.tokenizer, [PROMPT] * number)
    sequences, _ = sampling.sample(policy, prompts, GRPO.max_new_tokens, rng)
    return sequences


def take_step(
    policy: sampling.Policy,
    ref: sampling.Policy,
    optimizer: AdamW,
    sequences: Sequences,
    rewards: Tensor,
) -> None:
    """One optimiser step of GRPO on a group."""
    rows = range(len(sequences))
    logprobs = completion_logprobs(policy.model, sequences, rows)
    with torch.no_grad():
        ref_logprobs = completion_logprobs(ref.model, sequences, rows)
    mask = mask_of([ids for _, ids in sequences])
    loss = grpo_loss(logprobs, logprobs.detach(), ref_logprobs, rewards, mask)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), GRPO.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


def grpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, mask: Tensor
) -> Tensor:
    losses, _ = grpo.grpo_loss(
        logprobs,
        old_logprobs,
        ref_logprobs,
        grpo.group_advantages(rewards, len(rewards)),
        clip_low=GRPO.clip_coef,
        clip_high=GRPO.clip_coef,
        beta=GRPO.beta,
    )
    rest = (mask.sum(dim=1), GRPO.loss_norm, GRPO.max_new_tokens)
    return (grpo.token_weights(mask, *rest) * losses).sum()


def logprobs_of(policy: sampling.Policy, sequences: Sequences) -> list[list[float]]:
    with torch.no_grad():
        rows = completion_logprobs(policy.model, sequences, range(len(sequences)))
    return unpadded(rows, sequences)


def unpadded(rows: Tensor, sequences: Sequences) -> list[list[float]]:
    """The first |y| numbers of each row (B, T), rounded."""
    pairs = zip(rows, sequences, strict=True)
    return [to_digits(row[: len(completion)]) for row, (_, completion) in pairs]


def to_digits(numbers: Tensor) -> list[float]:
    return [round(number, DIGITS) for number in numbers.tolist()]


# --- the tables --------------------------------------------------------------------------------
def tables(results: dict) -> dict:
    measured = results["numbers"]
    made = {
        "completions": completions_table(measured),
        "group": group_table(measured),
        "PPO": ppo_table(measured),
        "step": step_table(measured),
        "DPO": dpo_table(measured),
    }
    return {f"one_prompt {name}": table for name, table in made.items()}


def completions_table(measured: dict) -> dict:
    rows = []
    for i, name in enumerate(NAMES):
        sums = [fixed(sum(measured[policy][i])) for policy in ("ref", "old", "new")]
        row = [name, measured["completion"][i], str(len(measured["tokens"][i])), *sums]
        rows.append([*row, fixed(measured["reward"][i])])
    log_probs = ["log π_ref", "log π_old", "log π_new"]
    columns = ["", "completion", "tokens", *log_probs, "reward r"]
    return {"columns": columns, "rows": rows}


def group_table(measured: dict) -> dict:
    """The weights of whole completions: REINFORCE's, with their gradient, and GRPO's."""
    rewards = torch.tensor(measured["reward"], dtype=torch.float64)
    of_reinforce = baseline_advantages(rewards, len(NAMES), "leave_one_out")
    logprobs = leaf(padded(measured["old"]))
    loss = policy_gradient_loss(logprobs, of_reinforce, num_completions=len(NAMES))
    (slopes,) = torch.autograd.grad(loss, logprobs)
    of_grpo = grpo.group_advantages(rewards, len(NAMES))
    columns = {
        "r": rewards,
        "b": rewards - of_reinforce,
        "r - b": of_reinforce,
        "gradient of each token": slopes[:, 0],
        "r - mean": rewards - rewards.mean(),
        "A": of_grpo,
    }
    rows = []
    for i, name in enumerate(NAMES):
        rows.append([name, *(fixed(float(numbers[i])) for numbers in columns.values())])
    return {"columns": ["", *columns], "rows": rows}


def ppo_advantages(measured: dict) -> dict[str, Tensor]:
    """What PPO computes before its loss, (4, T) each, 0 after a completion's end."""
    old, ref, values = (padded(measured[name]) for name in ("old", "ref", "values"))
    mask = mask_of(measured["tokens"])
    scores = torch.tensor(measured["reward"], dtype=torch.float64)
    token_rewards = ppo_rlhf.shaped_rewards(scores, old - ref, mask, PPO.beta)
    # GAE with lambda = 0 is delta itself.
    deltas, _ = ppo_rlhf.gae(token_rewards, values, PPO.gamma, 0.0)
    advantages, _ = ppo_rlhf.gae(token_rewards, values, PPO.gamma, PPO.gae_lambda)
    return {
        "k1": old - ref,
        "r": token_rewards,
        "V": values,
        "δ": deltas,
        "A": advantages,
        "whitened A": ppo_rlhf.whiten(advantages, mask),
    }


def ppo_table(measured: dict) -> dict:
    mask, columns = mask_of(measured["tokens"]), ppo_advantages(measured)
    old, new = padded(measured["old"]), leaf(padded(measured["new"]))
    losses, _ = ppo_rlhf.policy_loss(new, old, columns["whitened A"], PPO.clip_coef)
    loss = losses.sum() / mask.sum()
    (columns["gradient"],) = torch.autograd.grad(loss, new)
    columns["ratio"] = (new.detach() - old).exp()
    order = ("k1", "r", "V", "δ", "A", "whitened A", "ratio", "gradient")
    logprobs = {f"log π_{policy}": measured[policy][BEST] for policy in ("ref", "old", "new")}
    columns = logprobs | {name: columns[name][BEST] for name in order}
    rows = []
    for i, token in enumerate(measured["tokens"][BEST]):
        if token == "brilliant" or i >= len(measured["tokens"][BEST]) - 3:
            cells = [fixed(float(numbers[i])) for numbers in columns.values()]
            rows.append([f"`{token}`", *cells])
    return {"columns": [f"token of {NAMES[BEST]}", *columns], "rows": rows}


def step_table(measured: dict) -> dict:
    """Step 4 of grpo.py line by line, with the numbers of two tokens of the best completion."""
    old, ref, new = padded(measured["old"]), padded(measured["ref"]), leaf(padded(measured["new"]))
    rewards = torch.tensor(measured["reward"], dtype=torch.float64)
    advantages = grpo.group_advantages(rewards, len(NAMES))
    mask = mask_of(measured["tokens"])
    weights = grpo.token_weights(mask, mask.sum(dim=1), GRPO.loss_norm, GRPO.max_new_tokens)
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - GRPO.clip_coef, 1 + GRPO.clip_coef)
    objective = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    (slopes,) = torch.autograd.grad(grpo_loss(new, old, ref, rewards, mask), new)
    kl = grpo.k3_kl(new, ref)
    losses = GRPO.beta * kl - objective
    lines = [
        (
            "token_weights(mask, lengths[minibatch], args.loss_norm, args.max_new_tokens)",
            r"$1 / (n \lvert y_i \rvert)$",
            "(B, T)",
            weights,
        ),
        (
            "completion_logprobs(policy, sequences, inds, args.temperature, entropy=True)",
            r"$\log \pi_\theta(y_{it} \mid x, y_{i,\lt t})$",
            "(b, T)",
            new,
        ),
        ("old_logprobs[device_inds]", r"$\log \pi_{old}$", "(b, T)", old),
        ("ref_logprobs[device_inds]", r"$\log \pi_{ref}$", "(b, T)", ref),
        ("advantages[device_inds]", "$A_i$", "(b,)", advantages[:, None].expand(old.shape)),
        ("ratio = (logprobs - old_logprobs).exp()", r"$\rho_{it}$", "(b, T)", ratio),
        (
            "clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)",
            r"$\mathrm{clip}(\rho_{it})$",
            "(b, T)",
            clipped,
        ),
        (
            "objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)",
            r"$\min(\dots)$",
            "(b, T)",
            objective,
        ),
        ("kl = k3_kl(logprobs, ref_logprobs)", "$k_{3,it}$", "(b, T)", kl),
        ("beta * kl - objective", r"$\beta k_{3,it} - \min(\dots)$", "(b, T)", losses),
        (
            "loss = (weights[device_inds] * losses).sum()",
            "the token's share of $-J$",
            "()",
            weights * losses,
        ),
        (
            "loss.backward()",
            r"$-\partial J / \partial \log \pi_\theta(y_{it})$",
            "(b, T)",
            slopes,
        ),
    ]
    tokens = [measured["tokens"][BEST].index(token) for token in ("brilliant", "<eos>")]
    rows = []
    for code, formula, shape, numbers in lines:
        cells = [fixed(numbers[BEST, token].item()) for token in tokens]
        rows.append([f"`{code}`", formula, shape, *cells])
    return {"columns": ["line", "in the formula", "shape", "`brilliant`", "`<eos>`"], "rows": rows}


def dpo_table(measured: dict) -> dict:
    rows = []
    for policy in ("ref", "old", "new"):
        pair = [sum(measured[policy][i]) - sum(measured["ref"][i]) for i in (BEST, WORST)]
        logratios = leaf([pair])
        loss = dpo.dpo_loss(logratios, DPO.beta)
        (slopes,) = torch.autograd.grad(loss.sum(), logratios)
        h = pair[0] - pair[1]
        numbers = [*pair, h, DPO.beta * h, loss.item(), *slopes[0].tolist()]
        rows.append([f"π_{policy}", *(fixed(number) for number in numbers)])
    columns = ["policy", "log-ratio of 1", "log-ratio of 4", "h", "β h", "loss"]
    return {"columns": [*columns, "gradient of each token of 1", "of 4"], "rows": rows}


def leaf(numbers: Any) -> Tensor:
    """A float64 tensor of which gradients are asked."""
    return torch.as_tensor(numbers, dtype=torch.float64).clone().requires_grad_()


def padded(rows: list[list[float]]) -> Tensor:
    """Rows of different lengths as (B, T), with zeros after each end."""
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


def mask_of(completions: list[list]) -> Tensor:
    """True (B, T) at the completions' tokens."""
    lengths = torch.tensor([len(completion) for completion in completions])
    return torch.arange(lengths.max()) < lengths[:, None]


EXPERIMENTS = (Experiment("one_prompt", measure_all=measure, more_tables=tables),)
