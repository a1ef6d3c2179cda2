"""What the loops of several scripts have in common, once for all of them."""

import math
import re
from dataclasses import fields
from statistics import mean

import pytest
import torch
from algorithms import run
from models import save_model, some_wide
from pydantic import ValidationError
from plain import plain_logprobs
from reviews import dataset, plain_model
from runs import metrics_of, read
from scripts import SPECS, WITH_ROLLOUTS, short_flags, with_flag
from spies import spy_by_name, spy_on, watch_steps
from torch.optim import AdamW
from transformers import AutoTokenizer

import ppo_rlhf
import rm_bradley_terry

EACH = pytest.mark.parametrize("name", SPECS)


# --- flags --------------------------------------------------------------------------------------
TINY = math.ulp(0.0)  # the smallest number above 0
FROM_0 = (0.0, -TINY)
# At each end of a range, the last number that is allowed and the next one, which is not. A flag
# has one range in all scripts, unless it stands elsewhere with a script's name before it.
RANGES = {
    ((1, 0),): "save_every max_length max_prompt_length batch_size micro_batch_size eval_every "
    "generation_batch_size eval_rows eval_samples max_new_tokens total_rollouts group_size "
    "prompts_per_rollout update_epochs num_minibatches max_sampling_rounds max_turns",
    ((2, 1),): "grpo.group_size grpo_variants.group_size grpo_tools.group_size kto.batch_size "
    "kto.eval_rows",
    ((0, -1),): "seed lora_rank log_rollouts_every train_layers overlong_buffer "
    "critic_warmup_rollouts",
    ((TINY, 0.0),): "epochs learning_rate critic_learning_rate max_grad_norm temperature dpo.beta "
    "kto.beta clip_coef clip_coef_high vf_clip_coef desirable_weight "
    "undesirable_weight",
    (FROM_0,): "weight_decay beta dpo.gamma sft.temperature eval_temperature missing_eos_penalty "
    "importance_cap ent_coef vf_coef center_coef nll_coef",
    (FROM_0, (1.0, math.nextafter(1, 2))): "gamma gae_lambda discount",
    (FROM_0, (math.nextafter(1, 0), 1.0)): "warmup_ratio",
    (FROM_0, (math.nextafter(0.5, 0), 0.5)): "label_smoothing",
    ((TINY, 0.0), (math.nextafter(1, 0), 1.0)): "jsd_beta",
}
EDGES = {flag: edges for edges, flags in RANGES.items() for flag in flags.split()}


@EACH
def test_every_number_has_a_range_and_its_edges_are_as_intended(name):
    args = SPECS[name].module.Args
    types = {field.name: str(field.type) for field in fields(args)}
    numbers = [flag for flag in types if re.search(r"\b(int|float)\b", types[flag])]
    numbers = [flag for flag in numbers if "list" not in types[flag]]
    assert {*numbers} == {*types} & {*EDGES}
    beside = short_flags(name, num_minibatches=1, baseline="none")  # what one completion needs
    for flag in numbers:
        for allowed, refused in EDGES.get(f"{name}.{flag}", EDGES[flag]):
            args(**beside | {flag: allowed})
            with pytest.raises(ValidationError, match=rf"^1 validation error for Args\n{flag}\n"):
                args(**{flag: refused})


@pytest.mark.parametrize("name", ["ppo_rlhf", "dpo", "kto"])
def test_the_gold_reward_is_for_the_default_dataset_alone(name):
    args = SPECS[name].module.Args
    assert args().eval_reward_fn == "tiny/reviews/gold.py:sentiment"
    assert args(eval_reward_fn="x.py:f").eval_reward_fn == "x.py:f"
    assert args(dataset="tiny/arithmetic/prompts").eval_reward_fn is None


# --- the step -----------------------------------------------------------------------------------
ANNEALED = [*((name, True) for name in SPECS), *((name, False) for name in with_flag("anneal_lr"))]


@pytest.mark.parametrize(("name", "anneal_lr"), ANNEALED)
def test_the_rate_and_the_largest_norm_of_each_step(name, anneal_lr, tmp_path, monkeypatch):
    """As AdamW has them when it steps."""
    rates, settings, step, steps = [], set(), AdamW.step, watch_steps(monkeypatch)

    def spy(optimizer, *arguments):
        (group,) = optimizer.param_groups
        rates.append(group["lr"])
        settings.add((group["weight_decay"], *group["betas"]))
        return step(optimizer, *arguments)

    monkeypatch.setattr(AdamW, "step", spy)
    decay = 0.1 if SPECS[name].kind == "rows" else 0
    flags = dict(epochs=1.0, warmup_ratio=0.5, max_grad_norm=0.3)
    flags |= short_flags(name, weight_decay=0.1)
    factors, largest = [1 / 3, 2 / 3, 1, 1 / 2], 0.3  # int(0.5 x 4) steps of warm-up
    if SPECS[name].kind == "rollouts":
        flags |= dict(total_rollouts=4, max_new_tokens=6)
        del flags["epochs"]
    if not hasattr(SPECS[name].module.Args, "warmup_ratio"):
        del flags["warmup_ratio"]
        factors = [1, 3 / 4, 1 / 2, 1 / 4]
    if not anneal_lr:
        flags["anneal_lr"] = False
        factors = [1, 1, 1, 1]
    if name == "reinforce":
        del flags["max_grad_norm"]
        largest = math.inf
    of_critic = dict(critic_learning_rate=7e-4) if name == "ppo_rlhf" else {}
    rows = metrics_of(run(name, tmp_path, learning_rate=2e-4, **flags, **of_critic))[1:]
    number = len(SPECS[name].models)  # each has an optimiser
    assert rates[::number] == pytest.approx([2e-4 * factor for factor in factors])
    if of_critic:
        assert rates[1::2] == pytest.approx([7e-4 * factor for factor in factors])
    if "warmup_ratio" in flags:
        (metric,) = (metric for metric in rows[0] if metric.endswith("/learning_rate"))
        assert [row[metric] for row in rows] == rates[::number]
    assert settings == {(decay, 0.9, 0.95 if name == "sft" else 0.999)}  # as for language models
    assert {max_norm for *_, max_norm in steps} == {largest} and len(steps) == 4 * number


EPOCHS = ["sft", "rm_bradley_terry", "dpo", "grpo", "grpo_variants", "ppo_rlhf"]


@pytest.mark.parametrize("name", some_wide(EPOCHS, fast=["sft", "grpo"]))
def test_each_epoch_has_an_order_of_its_own_and_no_row_twice(name, tmp_path, monkeypatch):
    """Batches go on into the next epoch, so that each has as many rows: three hold two epochs."""
    script, is_rollout = SPECS[name].module, SPECS[name].kind == "rollouts"
    calls = spy_on(script, monkeypatch, "generate" if is_rollout else "micro_batches")
    flags = dict(train_split="train[:6]", eval_split="test[:2]", max_new_tokens=2)
    if is_rollout:
        flags |= dict(total_rollouts=6, prompts_per_rollout=4)
    else:
        flags |= dict(epochs=4.0, batch_size=4)
    orders = []
    for seed in (1, 1, 2):
        calls.clear()
        run(name, tmp_path, seed=seed, **short_flags(name, **flags))
        steps = [arguments[1] if is_rollout else arguments[0] for arguments, _ in calls]
        steps = [[str(row) for row in step[:: len(step) // 4]] for step in steps if len(step) >= 4]
        assert len(steps) == 6
        drawn = [row for step in steps for row in step]
        epochs = [drawn[start : start + 6] for start in (0, 6, 12, 18)]
        assert all(sorted(epoch) == sorted({*drawn}) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]
        orders.append(drawn)
    assert orders[0] == orders[1] != orders[2]


# --- models -------------------------------------------------------------------------------------
def new_head(kind, seed):
    tokenizer, cpu = AutoTokenizer.from_pretrained("tiny/reviews/policy"), torch.device("cpu")
    if kind == "reward model":
        args = rm_bradley_terry.Args(seed=seed)
        return rm_bradley_terry.load_classifier(args, tokenizer, [2], cpu).score
    args = ppo_rlhf.Args(critic_init=kind, seed=seed)
    return ppo_rlhf.load_critic(args, plain_model(), tokenizer, 104, cpu).head


@pytest.mark.parametrize("kind", ["reward model", "sft", "policy"])
def test_a_new_head_is_drawn_with_variance_one_over_d_plus_one(kind, monkeypatch):
    drawn = spy_by_name(torch.nn.init, monkeypatch, "normal_")
    head = new_head(kind, seed=1)
    assert head.weight.shape == (1, 128) and head.bias is None
    assert drawn[-1]["std"] == pytest.approx(129**-0.5, rel=1e-12)
    assert torch.equal(drawn[-1]["result"], head.weight)
    torch.randn(3)  # the state of the generator does not matter
    assert torch.equal(new_head(kind, seed=1).weight, head.weight)
    assert not torch.allclose(new_head(kind, seed=2).weight, head.weight)


# --- the reference ------------------------------------------------------------------------------
@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("name", with_flag("reference"))
def test_the_kl_to_a_reference_that_is_not_the_model(name, lora_rank, tmp_path, monkeypatch):
    """k1 before anything is trained: by plain forward passes over what was sampled."""
    script = SPECS[name].module
    policy, reference = plain_model(script.Args.model), plain_model(script.Args.model)
    torch.manual_seed(1)
    for weight in reference.parameters():
        weight.data += 0.01 * torch.randn_like(weight)
    folder = save_model(tmp_path / "reference", reference, script.Args.model)
    sampled = spy_on(script, monkeypatch, "generate")
    flags = dict(reference=folder, lora_rank=lora_rank)
    rows = metrics_of(run(name, tmp_path / "runs", **flags))
    is_rollout = name in WITH_ROLLOUTS
    _, (sequences, _) = sampled[int(is_rollout)]  # the first is an evaluation
    with torch.no_grad():
        k1 = [
            sum(plain_logprobs(policy, prompt, completion)[0])
            - sum(plain_logprobs(reference, prompt, completion)[0])
            for prompt, completion in sequences
        ]
    logged = rows[1]["objective/kl"] if is_rollout else rows[0]["eval/kl"]
    expected = torch.stack(k1).mean().item()
    assert abs(expected) > 0.01
    assert logged == pytest.approx(expected, rel=1e-3)


# --- what is sampled ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "flags", "temperatures"),
    [
        ("sft", dict(temperature=0.5), [0.5, 0.5]),
        ("dpo", dict(temperature=0.5), [0.5, 0.5]),
        ("kto", dict(temperature=0.5), [0.5, 0.5]),
        ("reinforce", {}, [1.0, 1.0, 1.0, 1.0]),
        ("distill", {}, [1.0, 1.0, 1.0, 1.0]),
        ("grpo", dict(temperature=0.6, eval_temperature=0.3), [0.3, 0.6, 0.6, 0.3]),
        ("grpo_variants", dict(temperature=0.6, eval_temperature=0.3), [0.3, 0.6, 0.6, 0.3]),
        ("ppo_rlhf", dict(temperature=0.6, eval_temperature=0.3), [0.3, 0.6, 0.6, 0.3]),
    ],
)
def test_evaluations_and_rollouts_are_sampled_as_the_flags_say(
    name, flags, temperatures, tmp_path, monkeypatch
):
    """Each rollout draws numbers of its own, and each evaluation the same."""
    calls = spy_by_name(SPECS[name].module, monkeypatch, "generate")
    flags = flags | short_flags(name, total_rollouts=2)
    run(name, tmp_path, max_new_tokens=5, generation_batch_size=3, seed=4, **flags)
    assert [call["temperature"] for call in calls] == temperatures
    for call in calls:
        settings = (call["max_new_tokens"], call["batch_size"], call["stop_ids"])
        assert settings == (5, 3, [2])
    of_the_seed = torch.rand(3, generator=torch.Generator().manual_seed(4)).tolist()
    first, *rollouts, last = (torch.rand(3, generator=call["rng"]).tolist() for call in calls)
    assert first == last == of_the_seed
    assert of_the_seed not in rollouts and all(rollouts.count(drawn) == 1 for drawn in rollouts)


REWARDS = """
def rate(prompts, completions, answer, note, **columns):
    assert [prompt.split()[-1] for prompt in prompts] == note
    assert not any("<" in completion for completion in completions)  # no special tokens
    return [a + len(completion) / 1000 for a, completion in zip(answer, completions)]

def right(completions, answer, **columns):
    return [a >= 1 for a in answer]
"""


@pytest.mark.parametrize("name", ["reinforce", "ppo_rlhf", "grpo", "grpo_variants", "dpo", "kto"])
def test_a_reward_function_gets_the_columns_and_rates_the_samples(name, tmp_path):
    (tmp_path / f"rewards_of_{name}.py").write_text(REWARDS)
    script, flag = SPECS[name].module, "reward_fn" if name == "reinforce" else "eval_reward_fn"
    rows = [
        row | dict(answer=i / 2, note=row["prompt"].split()[-1])
        for i, row in enumerate(read(f"{script.Args.dataset}/test.jsonl")[:10])
    ]
    flags = dict(dataset=dataset(tmp_path, rows), train_split="train", eval_split="test")
    if name.startswith("grpo"):
        flags["reward_fn"] = [f"{tmp_path}/rewards_of_{name}.py:right"]
    last = {}
    for function in ("rate", "right"):
        flags[flag] = f"{tmp_path}/rewards_of_{name}.py:{function}"
        run_dir = run(name, tmp_path / "runs", max_new_tokens=9, **flags)
        last[function] = metrics_of(run_dir)[-1]
        samples = read(run_dir / "samples.jsonl")[-10:]
        assert [sample["prompt"] for sample in samples] == [row["prompt"] for row in rows]
        rewards = [i / 2 + len(s["completion"]) / 1000 for i, s in enumerate(samples)]
        if function == "right":  # of 0, 0.5, 1, ... all but the first two
            rewards = [0, 0, *8 * [1]]
        assert [sample["reward"] for sample in samples] == pytest.approx(rewards)
        assert last[function]["eval/reward"] == pytest.approx(mean(rewards))
        assert last[function]["eval/length_mean"] == mean(s["length"] for s in samples)
    assert "eval/accuracy" not in last["rate"]
    if name.startswith("grpo"):  # where each is right or wrong
        assert last["right"]["eval/accuracy"] == 0.8


@pytest.mark.parametrize(
    ("name", "names"),
    [("dpo", "loss pair_accuracy margin kl length_mean"), ("kto", "loss margin kl length_mean")],
)
def test_without_a_reward_function_there_is_no_reward(name, names, tmp_path):
    rows = read(f"{SPECS[name].module.Args.dataset}/test.jsonl")[:10]
    run_dir = run(name, tmp_path, dataset=dataset(tmp_path, rows), train_split="train")
    for row in metrics_of(run_dir):
        found = {key for key in row if key.startswith("eval/")}
        assert found == {f"eval/{key}" for key in names.split()}
    assert all("reward" not in sample for sample in read(run_dir / "samples.jsonl"))


@pytest.mark.parametrize("name", ["reinforce", "ppo_rlhf", "grpo", "grpo_variants", "grpo_tools"])
def test_rewards_that_are_equal_are_told_once(name, tmp_path):
    path = tmp_path / f"zero_{name}.py"
    path.write_text("def zero(prompts, **columns): return [0] * len(prompts)\n")
    has_list = name in with_flag("reward_weights")
    flags = short_flags(name, reward_fn=[f"{path}:zero"] if has_list else f"{path}:zero")
    flags |= short_flags(name, critic_init="sft", kl_placement="loss", max_new_tokens=5)
    with pytest.warns(UserWarning, match="a rollout('s rewards are all equal| has no advantages)"):
        run(name, tmp_path / "runs", total_rollouts=1, **flags)
