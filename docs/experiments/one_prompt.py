"""One prompt through every script: tables that show what each loss computes from the same
completions.

The prompt and the checkpoints are those of tiny/reviews. There are three policies: `ref`, the
checkpoint; `old`, which sampled the completions; `new`, one optimiser step later. `measure` asks
the models for log-probs, rewards and values, and rounds them to `DIGITS` decimals. `tables`
computes the rest from these rounded numbers with the scripts' own functions, so that a pocket
calculator gives the digits of the page.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor
from torch.optim import AdamW
from transformers import AutoModelForSequenceClassification

import dpo
import grpo
import kto
import ppo_rlhf
from common.logprobs import Sequences, completion_logprobs
from common.tokens import encode, encode_pair
from docs.experiments.lib import sampling
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import read_jsonl
from docs.experiments.lib.tables import fixed, rounded
from reinforce import baseline_advantages, policy_gradient_loss
from rm_bradley_terry import bradley_terry_loss
from tiny.reviews import gold

PROMPT = "review of jaws :"
LABELS = Path("tiny/reviews/labels/train.jsonl")
NAMES = "1234"  # the group's completions, from the highest learned reward to the lowest
BEST, WORST = 0, 3  # their places
FIRST_SEED, FIRST_SIZE = 1, 8  # of the rollout that the first step trains on
SEED, NUM_SAMPLES, MAX_LENGTH = 6, 64, 12  # the group: the first four that are short enough
DIGITS = 4  # decimals of what the models give, and of what the tables show
show = partial(fixed, digits=DIGITS)

# The scripts' flags; those that are not named keep their default.
PPO, DPO, KTO = ppo_rlhf.Args(), dpo.Args(), kto.Args()
GRPO = grpo.Args(
    model=PPO.model, reward_model=PPO.reward_model, beta=0.2, max_new_tokens=PPO.max_new_tokens
)


# --- what the models give ----------------------------------------------------------------------
class Models:
    """The checkpoints of tiny/reviews, and a policy that is trained by steps of GRPO."""

    def __init__(self) -> None:
        self.ref = sampling.load_policy(GRPO.model)
        self.policy = sampling.load_policy(GRPO.model)
        self.tokenizer, self.stop_ids = self.ref.tokenizer, self.ref.stop_ids
        self.reward_fn = sampling.load_reward_model(GRPO.reward_model)
        # The critic is the reward model, read at every token.
        kind = AutoModelForSequenceClassification
        self.critic = kind.from_pretrained(PPO.reward_model, dtype=torch.float32).eval()
        weights = self.policy.model.parameters()
        self.optimizer = AdamW(weights, lr=GRPO.learning_rate, weight_decay=0.0)
        self.prompt = encode(self.tokenizer, PROMPT)

    def sample(self, number: int, seed: int) -> Sequences:
        """Completions of the prompt by the policy as it is now."""
        rng = Generator().manual_seed(seed)
        prompts = [self.prompt] * number
        sequences, _ = sampling.sample(self.policy, prompts, GRPO.max_new_tokens, rng)
        return sequences

    def text(self, sequence: tuple) -> str:
        return self.tokenizer.decode(sequence[1], skip_special_tokens=True)

    def tokens(self, ids: list[int]) -> list[str]:
        return self.tokenizer.convert_ids_to_tokens(ids)

    def rewards(self, sequences: Sequences) -> Tensor:
        """Scores (B,) of the reward model, centred as ppo_rlhf.py and grpo.py do."""
        return self.reward_fn([], sequences, [])

    def logprobs(self, policy: sampling.Policy, sequences: Sequences) -> list[list[float]]:
        """Rounded, without the zeros after a completion's end."""
        with torch.no_grad():
            rows = completion_logprobs(policy.model, sequences, range(len(sequences)))
        return unpadded(rows, sequences)

    def logratios(self, sequences: Sequences) -> list[float]:
        """log(pi(y|x) / pi_ref(y|x)), rounded, of the policy as it is now."""
        rows = range(len(sequences))
        with torch.no_grad():
            logprobs = completion_logprobs(self.policy.model, sequences, rows)
            ref_logprobs = completion_logprobs(self.ref.model, sequences, rows)
        return rounded((logprobs - ref_logprobs).sum(dim=1).tolist(), DIGITS)

    def train(self, sequences: Sequences) -> None:
        """One optimiser step of GRPO on a group."""
        rows = range(len(sequences))
        logprobs = completion_logprobs(self.policy.model, sequences, rows)
        with torch.no_grad():
            ref_logprobs = completion_logprobs(self.ref.model, sequences, rows)
        loss, _ = grpo.grpo_loss(
            logprobs,
            logprobs.detach(),
            ref_logprobs,
            grpo.group_advantages(self.rewards(sequences), len(sequences)),
            grpo.token_weights(mask_of(sequences), GRPO.loss_norm, GRPO.max_new_tokens),
            clip_low=GRPO.clip_coef,
            clip_high=GRPO.clip_coef,
            beta=GRPO.beta,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), GRPO.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure() -> dict:
    """What the checkpoints and two optimiser steps give: token ids, log-probs, rewards, values."""
    torch.set_num_threads(1)
    models = Models()
    models.train(models.sample(FIRST_SIZE, FIRST_SEED))  # the checkpoint becomes `old`
    group = models.sample(NUM_SAMPLES, SEED)
    group = [sequence for sequence in group if len(sequence[1]) <= MAX_LENGTH][: len(NAMES)]
    rewards = models.rewards(group)
    best_first = rewards.argsort(descending=True).tolist()
    group = [group[i] for i in best_first]
    measured = {
        "prompt": models.tokens(models.prompt),
        "prompt ids": models.prompt,
        "completion": [models.text(sequence) for sequence in group],
        "ids": [completion for _, completion in group],
        "tokens": [models.tokens(completion) for _, completion in group],
        "gold": [gold.score(models.text(sequence)) for sequence in group],
        "reward": rounded(rewards[best_first].tolist(), DIGITS),
        "ref": models.logprobs(models.ref, group),
        "old": models.logprobs(models.policy, group),
    }
    with torch.no_grad():
        inds = torch.arange(len(group))
        _, entropy = completion_logprobs(models.policy.model, group, inds, entropy=True)
        values = ppo_rlhf.critic_values(models.critic, models.critic.score, group, inds)
    measured["entropy"] = unpadded(entropy, group)
    measured["values"] = unpadded(values, group)
    models.train(group)  # `old` becomes `new`
    measured["new"] = models.logprobs(models.policy, group)
    measured["kto"] = measure_labelled(models, [group[BEST], group[WORST]])
    return measured


def measure_labelled(models: Models, ours: Sequences) -> dict:
    """A batch for KTO: two completions of the prompt, and the first row of LABELS with each label.

    Log-ratios of `new` to `ref`, summed over tokens: of the two rows, and of the mismatched pairs
    of all four.
    """
    rows = read_jsonl(LABELS)
    liked = next(row for row in rows if row["label"])
    disliked = next(row for row in rows if not row["label"])
    others = []
    for row in (liked, disliked):
        pair = encode_pair(models.tokenizer, row["prompt"], row["completion"], models.stop_ids)
        others.append(pair)
    # In this order no prompt is paired with a completion of its own.
    sequences = [ours[0], others[0], ours[1], others[1]]
    completions = [completion for _, completion in sequences]
    mismatched = kto.mismatch(sequences, KTO.max_length)
    return {
        "prompts": [PROMPT, liked["prompt"], PROMPT, disliked["prompt"]],
        "labels": [True, True, False, False],
        # The row whose completion each prompt is paired with.
        "partners": [completions.index(completion) for _, completion in mismatched],
        "others": models.logratios(others),
        "mismatched": models.logratios(mismatched),
    }


def unpadded(rows: Tensor, sequences: Sequences) -> list[list[float]]:
    """The first |y| numbers of each row (B, T), rounded."""
    pairs = zip(rows, sequences, strict=True)
    return [rounded(row[: len(completion)].tolist(), DIGITS) for row, (_, completion) in pairs]


def mask_of(sequences: Sequences) -> Tensor:
    """True (B, T) at the completions' tokens."""
    lengths = torch.tensor([len(completion) for _, completion in sequences])
    return torch.arange(lengths.max()) < lengths[:, None]


# --- the tables --------------------------------------------------------------------------------
def tables(results: dict) -> dict:
    measured = results["numbers"]
    made = {
        "completions": completions_table(measured),
        "tokens of 1": tokens_table(measured, BEST),
        "reward model": reward_model_table(measured),
        "REINFORCE": reinforce_table(measured),
        "PPO on 1": ppo_table(measured, BEST),
        "PPO whitening": whitening_table(measured),
        "GRPO group": group_table(measured),
        "GRPO on 1": grpo_table(measured, BEST),
        "DPO": dpo_table(measured),
        "KTO": kto_table(measured),
    }
    return {f"one_prompt {name}": table for name, table in made.items()}


def completions_table(measured: dict) -> dict:
    rows = []
    for i, name in enumerate(NAMES):
        tokens = len(measured["ids"][i])
        sums = [show(sum(measured[policy][i])) for policy in ("ref", "old", "new")]
        entropy = show(sum(measured["entropy"][i]) / tokens)
        row = [name, measured["completion"][i], str(tokens), *sums, entropy]
        rows.append([*row, fixed(measured["gold"][i], 1), show(measured["reward"][i])])
    log_probs = ["log π_ref", "log π_old", "log π_new"]
    columns = ["", "completion", "tokens", *log_probs, "entropy", "gold reward", "learned reward"]
    return {"columns": columns, "rows": rows}


def tokens_table(measured: dict, i: int) -> dict:
    columns = {
        "log π_ref": measured["ref"][i],
        "log π_old": measured["old"][i],
        "log π_new": measured["new"][i],
        "entropy of π_old": measured["entropy"][i],
    }
    return by_token(f"completion {NAMES[i]}", measured["tokens"][i], columns)


def reward_model_table(measured: dict) -> dict:
    rows = []
    for chosen, rejected in ((0, 3), (2, 3), (3, 2)):
        r_w, r_l = leaf([measured["reward"][chosen]]), leaf([measured["reward"][rejected]])
        loss = bradley_terry_loss(r_w, r_l, torch.zeros(1), center_coef=0.0)
        slope_w, slope_l = torch.autograd.grad(loss.sum(), (r_w, r_l))
        gap = (r_w - r_l).detach()
        numbers = [r_w, r_l, gap, gap.sigmoid(), loss, slope_w, slope_l]
        label = f"{NAMES[chosen]} beats {NAMES[rejected]}"
        rows.append([label, *(show(number.item()) for number in numbers)])
    columns = [
        "label",
        "r_w",
        "r_l",
        "r_w - r_l",
        "sigmoid",
        "loss",
        "gradient of r_w",
        "gradient of r_l",
    ]
    return {"columns": columns, "rows": rows}


def reinforce_table(measured: dict) -> dict:
    returns = torch.tensor(measured["gold"], dtype=torch.float64)
    advantages = baseline_advantages(returns, len(NAMES), "leave_one_out")
    logprobs = leaf(padded(measured["old"]))
    loss = policy_gradient_loss(logprobs, advantages, num_completions=len(NAMES))
    (slopes,) = torch.autograd.grad(loss, logprobs)
    rows = []
    for i, name in enumerate(NAMES):
        baseline = returns[i] - advantages[i]
        numbers = [baseline.item(), advantages[i].item(), slopes[i, 0].item()]
        texts = [show(number) for number in numbers]
        rows.append([name, fixed(returns[i].item(), 1), *texts, direction(slopes[i, 0].item())])
    columns = ["", "r", "b", "r - b", "gradient of each token", "its tokens are"]
    return {"columns": columns, "rows": rows}


def ppo_advantages(measured: dict) -> dict[str, Tensor]:
    """What PPO computes before its loss, (4, T) each, 0 after a completion's end."""
    old, ref, values = (padded(measured[name]) for name in ("old", "ref", "values"))
    mask = mask_of([([], ids) for ids in measured["ids"]])
    scores = torch.tensor(measured["reward"], dtype=torch.float64)
    k1 = old - ref
    token_rewards = ppo_rlhf.shaped_rewards(scores, k1, mask, PPO.beta)
    advantages, returns = ppo_rlhf.gae(token_rewards, values, PPO.gamma, PPO.gae_lambda)
    return {
        "mask": mask,
        "k1": k1,
        "rewards": token_rewards,
        "values": values,
        # GAE with lambda = 0 is delta itself.
        "deltas": ppo_rlhf.gae(token_rewards, values, PPO.gamma, 0.0)[0],
        "advantages": advantages,
        "returns": returns,
        "whitened": ppo_rlhf.whiten(advantages, mask),
    }


def whitening_table(measured: dict) -> dict:
    """The sums from which mean and variance of all tokens' advantages follow."""
    parts = ppo_advantages(measured)
    advantages, mask = parts["advantages"], parts["mask"]
    rows = []
    for i, name in enumerate(NAMES):
        of_completion = advantages[i][mask[i]]
        sums = [of_completion.sum().item(), of_completion.square().sum().item()]
        rows.append([name, str(len(of_completion)), *(show(number) for number in sums)])
    everything = advantages[mask]
    sums = [everything.sum().item(), everything.square().sum().item()]
    rows.append(["all", str(len(everything)), *(show(number) for number in sums)])
    return {"columns": ["", "tokens", "sum of A", "sum of A²"], "rows": rows}


def ppo_table(measured: dict, i: int) -> dict:
    parts = ppo_advantages(measured)
    mask = parts["mask"]
    old, new = padded(measured["old"]), leaf(padded(measured["new"]))
    loss, _ = ppo_rlhf.policy_loss(
        new,
        old,
        ref_logprobs=None,
        advantages=parts["whitened"],
        entropy=torch.zeros_like(new),
        weights=mask / mask.sum(),
        clip_coef=PPO.clip_coef,
        beta=0.0,  # the KL is in the rewards
        ent_coef=PPO.ent_coef,
    )
    (slopes,) = torch.autograd.grad(loss, new)
    tokens = measured["tokens"][i]
    columns = {
        "k1": parts["k1"][i],
        "reward r": parts["rewards"][i],
        "value V": parts["values"][i],
        "δ": parts["deltas"][i],
        "advantage A": parts["advantages"][i],
        "whitened A": parts["whitened"][i],
        "ratio": (new.detach() - old).exp()[i],
        "gradient": slopes[i],
    }
    columns = {name: column[: len(tokens)] for name, column in columns.items()}
    return by_token(f"completion {NAMES[i]}", tokens, columns)


def group_table(measured: dict) -> dict:
    rewards = torch.tensor(measured["reward"], dtype=torch.float64)
    advantages = grpo.group_advantages(rewards, len(NAMES))
    rows = []
    for i, name in enumerate(NAMES):
        tokens = len(measured["ids"][i])
        numbers = [rewards[i], rewards[i] - rewards.mean(), advantages[i]]
        texts = [show(number.item()) for number in numbers]
        weight = show(1 / (len(NAMES) * tokens))
        rows.append([name, *texts, str(tokens), weight, direction(-advantages[i].item())])
    columns = ["", "r", "r - mean", "A", "tokens", "weight of a token", "its tokens are"]
    return {"columns": columns, "rows": rows}


def grpo_slopes(measured: dict, policy: str) -> Tensor:
    """The gradient (4, T) of GRPO's loss by log-probs of `old`, the first step, or of `new`."""
    logprobs = leaf(padded(measured[policy]))
    mask = mask_of([([], ids) for ids in measured["ids"]])
    rewards = torch.tensor(measured["reward"], dtype=torch.float64)
    loss, _ = grpo.grpo_loss(
        logprobs,
        padded(measured["old"]),
        padded(measured["ref"]),
        grpo.group_advantages(rewards, len(NAMES)),
        grpo.token_weights(mask, GRPO.loss_norm, GRPO.max_new_tokens),
        clip_low=GRPO.clip_coef,
        clip_high=GRPO.clip_coef,
        beta=GRPO.beta,
    )
    (slopes,) = torch.autograd.grad(loss, logprobs)
    return slopes


def grpo_table(measured: dict, i: int) -> dict:
    ref, old, new = (padded(measured[policy]) for policy in ("ref", "old", "new"))
    tokens = measured["tokens"][i]
    columns = {
        "gradient, first step": grpo_slopes(measured, "old")[i],
        "ratio": (new - old).exp()[i],
        "π_ref / π_new": (ref - new).exp()[i],
        "k3": grpo.k3_kl(new, ref)[i],
        "gradient, second step": grpo_slopes(measured, "new")[i],
    }
    columns = {name: column[: len(tokens)] for name, column in columns.items()}
    return by_token(f"completion {NAMES[i]}", tokens, columns)


def logratio(measured: dict, policy: str, i: int) -> float:
    """log(pi(y|x) / pi_ref(y|x)) of completion i."""
    return sum(measured[policy][i]) - sum(measured["ref"][i])


def dpo_table(measured: dict) -> dict:
    rows = []
    for policy in ("ref", "old", "new"):
        logratios = leaf([[logratio(measured, policy, i) for i in (BEST, WORST)]])
        loss = dpo.dpo_loss(logratios, DPO.beta)
        (slopes,) = torch.autograd.grad(loss.sum(), logratios)
        chosen, rejected = logratios[0].tolist()
        h = chosen - rejected
        numbers = [chosen, rejected, h, DPO.beta * h, loss.item(), *slopes[0].tolist()]
        rows.append([f"π_{policy}", *(show(number) for number in numbers)])
    columns = ["policy", "log-ratio of 1", "log-ratio of 4", "h", "β h", "loss"]
    gradients = ["gradient of each token of 1", "of 4"]
    return {"columns": [*columns, *gradients], "rows": rows}


def kto_table(measured: dict) -> dict:
    batch = measured["kto"]
    names = [NAMES[BEST], "5", NAMES[WORST], "6"]
    best, worst = (logratio(measured, "new", i) for i in (BEST, WORST))
    liked, disliked = batch["others"]
    logratios = leaf([best, liked, worst, disliked])
    z0 = kto.reference_point(torch.tensor(batch["mismatched"], dtype=torch.float64))
    losses = kto.kto_loss(
        logratios,
        z0,
        torch.tensor(batch["labels"]),
        beta=KTO.beta,
        desirable_weight=KTO.desirable_weight,
        undesirable_weight=KTO.undesirable_weight,
    )
    (slopes,) = torch.autograd.grad(losses.mean(), logratios)
    rows = []
    for i, name in enumerate(names):
        label = "desirable" if batch["labels"][i] else "undesirable"
        numbers = [logratios[i].item(), losses[i].item(), slopes[i].item()]
        partner, mismatched = names[batch["partners"][i]], show(batch["mismatched"][i])
        texts = [show(number) for number in numbers]
        rows.append([name, batch["prompts"][i], label, partner, mismatched, *texts])
    columns = ["", "prompt", "label", "mismatched with", "r of that pair", "r", "loss"]
    return {"columns": [*columns, "gradient of each token"], "rows": rows}


def leaf(numbers: Any) -> Tensor:
    """A float64 tensor of which gradients are asked."""
    return torch.as_tensor(numbers, dtype=torch.float64).clone().requires_grad_()


def padded(rows: list[list[float]]) -> Tensor:
    """Rows of different lengths as (B, T), with zeros after each end."""
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


def by_token(name: str, tokens: list[str], columns: dict[str, Any]) -> dict:
    """A table with a row for each token of a completion and a column for each quantity."""
    names = [token.replace("<eos>", "`<eos>`") for token in tokens]
    numbers = [[show(float(number)) for number in column] for column in columns.values()]
    rows = [list(row) for row in zip(names, *numbers, strict=True)]
    return {"columns": [name, *columns], "rows": rows}


def direction(slope: float) -> str:
    """What gradient descent does to a token's log-prob that has this gradient."""
    return "raised" if slope < 0 else "lowered"


EXPERIMENTS = (Experiment("one_prompt", tables, lambda: {"numbers": measure()}),)
