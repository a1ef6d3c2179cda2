"""The mathematics of distill.py against enumerations, a step against plain transformers."""

import json
import math
import shutil
from functools import partial

import algorithms
import pytest
import spies
import torch
from algorithms import set_weights
from models import VOCAB, some_wide, tiny_model
from plain import plain_logprobs
from reviews import plain_model
from runs import metrics_of, read
from spies import watch_steps
from transformers import AutoTokenizer, GenerationConfig

import common.logprobs
import distill
from runtime.adapters import add_adapters
from distill import Args, discounted_sums, distillation_loss, divergence, divergence_loss
from distill import states_and_head

run = partial(algorithms.run, "distill", prompts_per_rollout=6, micro_batch_size=4)
spy_on = partial(spies.spy_on, distill)


# --- the gradient, by enumeration -----------------------------------------------------------------
# Tokens 0, 1, 2; a token depends on the one before it, the first on 0. 0 ends, and so do 3 tokens.
COMPLETIONS = [[0], [1, 0], [2, 0]]
COMPLETIONS += [[a, b, c] for a in (1, 2) for b in (1, 2) for c in (0, 1, 2)]


def table(seed):
    """Logits of the next token (3, 3), a row for each token before it, and their log-probs."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(dim=1)


def token_logprobs(tables, completion):
    """Those of a completion's tokens (3,), 0 after its end, with a table for each position."""
    before = [0, *completion]
    found = [tables[t][before[t], token] for t, token in enumerate(completion)]
    return torch.stack([*found, *[torch.zeros(()).double()] * (3 - len(found))])


TEACHER = 3 * [table(2)[1].detach()]


def expected_estimate(discount, teacher=TEACHER):
    """E of the gradient of -distillation_loss over all completions."""
    logits, policy = table(1)
    mean = torch.zeros_like(logits)
    for y in COMPLETIONS:
        logprobs, teacher_logprobs = (token_logprobs(p, y)[None] for p in (3 * [policy], teacher))
        advantages = discounted_sums((teacher_logprobs - logprobs).detach(), discount)
        loss = distillation_loss(logprobs, advantages, num_completions=1)
        (gradient,) = torch.autograd.grad(-loss, logits, retain_graph=True)
        mean += logprobs.sum().exp().detach() * gradient
    return mean


def next_token_kl(tables, t):
    """E over prefixes of t tokens of KL(pi || T) of the next token; no KL after the end."""
    (_, teacher), total = table(2), 0.0
    for prefix in {tuple(y[:t]) for y in COMPLETIONS if len(y) > t}:
        reached = token_logprobs(tables, prefix).sum().exp()
        log_pi, log_teacher = (rows[[0, *prefix][-1]] for rows in (tables[t], teacher))
        total = total + reached * (log_pi.exp() * (log_pi - log_teacher)).sum()
    return total


@pytest.mark.parametrize("hint", [False, True])
def test_discount_1_is_the_gradient_of_the_kl_over_completions(hint):
    """To a teacher, or to one's start that reads a hint: another token before the first, with which
    pi_0 is another row of the same table.
    """
    logits, policy = table(1)
    teacher, kl = TEACHER, 0.0
    if hint:
        start = policy.detach()
        teacher = [start.roll(1, dims=0), start, start]  # row 0 is that of token 2
    for y in COMPLETIONS:
        log_pi, log_teacher = (token_logprobs(p, y).sum() for p in (3 * [policy], teacher))
        kl = kl + log_pi.exp() * (log_pi - log_teacher)
    (exact,) = torch.autograd.grad(-kl, logits)
    assert exact.abs().max() > 0.1  # a hint pulls although policy and start are one
    torch.testing.assert_close(expected_estimate(1.0, teacher), exact)


def test_discount_0_is_that_of_the_next_tokens_kl_with_the_prefix_held_fixed():
    logits, policy = table(1)
    kl = 0.0
    for t in range(3):
        kl = kl + next_token_kl(t * [policy.detach()] + [policy], t)
    (exact,) = torch.autograd.grad(-kl, logits)
    assert (exact - expected_estimate(1.0)).abs().max() > 0.01
    torch.testing.assert_close(expected_estimate(0.0), exact)


# --- a run ---------------------------------------------------------------------------------------
def hints_by_prompt():
    """The token ids of each prompt's answer, as a hint, by those of the prompt."""
    encode = AutoTokenizer.from_pretrained(Args.model)
    rows = read("tiny/arithmetic/prompts/train.jsonl") + read("tiny/arithmetic/prompts/test.jsonl")
    return {tuple(encode(row["prompt"]).input_ids): encode(row["answer"]).input_ids for row in rows}


HINT = dict(teacher_prompt_column="answer")
ADAPTERS = HINT | dict(lora_rank=2, learning_rate=1e-2)  # the policy without them reads the hint


def student_and_teacher(teacher_prompt_column=None, lora_rank=0, **flags):
    """Models as a run with these flags has them, and the student's weights that are trained."""
    student = plain_model(Args.model)
    add_adapters(student, lora_rank, seed=1)
    teacher = plain_model(Args.model if teacher_prompt_column else Args().teacher)
    return student, teacher, [weight for weight in student.parameters() if weight.requires_grad]


@pytest.mark.parametrize(
    ("discount", "flags"), [(0.0, {}), (0.5, {}), (0.0, HINT), (0.0, ADAPTERS)]
)
def test_each_step_is_that_of_plain_transformers(discount, flags, tmp_path, monkeypatch):
    """In micro-batches of 4 and 2, without a rest of the step before; the teacher never moves."""
    sampled, steps = spy_on(monkeypatch, "generate"), watch_steps(monkeypatch)
    loaded, hint = spy_on(monkeypatch, "load_model"), flags != {}
    run_dir = run(tmp_path, total_rollouts=2, discount=discount, max_grad_norm=3.0, **flags)
    assert len(loaded) == (1 if flags == ADAPTERS else 2)
    policy, teacher, trained = student_and_teacher(**flags)
    rows, rollouts = metrics_of(run_dir), read(run_dir / "rollouts.jsonl")
    hints = hints_by_prompt()

    def token_rewards(prompt, completion):
        logprobs = plain_logprobs(policy, prompt, completion)[0]
        of_teacher = hints[tuple(prompt)] if hint else prompt
        of_teacher = plain_logprobs(teacher, of_teacher, completion)[0]
        return logprobs, (of_teacher - logprobs).detach()

    for step, (weights, gradient, clipped_to) in enumerate(steps, start=1):
        set_weights(policy, weights)
        _, (sequences, _) = sampled[step]  # the first is an evaluation
        advantages, kl = [], 0.0
        for pair in sequences:
            logprobs, rewards = token_rewards(*pair)
            later = [rewards[t:] for t in range(len(rewards))]
            advantages.append([(discount ** torch.arange(len(r)) * r).sum() for r in later])
            (-(torch.stack(advantages[-1]) * logprobs).sum() / 6).backward()
            kl -= rewards.sum().item() / 6
        for row, expected in zip(rollouts[step - 1]["completions"], advantages[:4], strict=True):
            assert row["advantage"] == pytest.approx([*map(float, expected)], abs=1e-3)
        assert clipped_to == 3.0 and max(g.abs().max() for g in gradient) > 0.01
        for found, parameter in zip(gradient, trained, strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-5)
        assert rows[step]["objective/kl"] == pytest.approx(kl, rel=1e-4)
        cut_off = sum(completion[-1] != 2 for _, completion in sequences) / 6
        assert rows[step]["completions/truncated_fraction"] == pytest.approx(cut_off)

    # The evaluation, after the last step.
    policy, (_, (sequences, _)) = plain_model(run_dir), sampled[-1]
    samples, totals = read(run_dir / "samples.jsonl")[-4:], []
    for (prompt, completion), sample in zip(sequences, samples, strict=True):
        totals.append(token_rewards(prompt, completion)[1].sum().item())
        assert sample["reward"] == pytest.approx(totals[-1], rel=1e-4, abs=1e-5)
        assert sample["length"] == len(completion)
    assert rows[-1]["eval/kl"] == pytest.approx(-sum(totals) / 4, rel=1e-4)


def test_what_ends_the_teachers_completions_ends_the_students(tmp_path, monkeypatch):
    shutil.copytree(Args().teacher, tmp_path / "teacher")
    config = json.dumps({"eos_token_id": [2, 7]})
    (tmp_path / "teacher/generation_config.json").write_text(config)
    calls = spies.spy_by_name(distill, monkeypatch, "generate")
    run_dir = run(tmp_path / "runs", teacher=str(tmp_path / "teacher"))
    assert [call["stop_ids"] for call in calls] == 3 * [[2, 7]]
    assert GenerationConfig.from_pretrained(run_dir).eos_token_id == [2, 7]


# --- over the whole vocabulary --------------------------------------------------------------------
KINDS = [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.2)]
every_kind = pytest.mark.parametrize(("kind", "beta"), KINDS)


def by_hand(kind, beta, pi, teacher):
    """D of two lists of probabilities, and its derivative by each logit of pi."""
    mixture = [beta * t + (1 - beta) * p for p, t in zip(pi, teacher, strict=True)]
    value, slopes = 0.0, []  # slopes: the derivative by each probability
    for p, t, m in zip(pi, teacher, mixture, strict=True):
        value += {
            "reverse": p * math.log(p / t),
            "forward": t * math.log(t / p),
            "jsd": beta * t * math.log(t / m) + (1 - beta) * p * math.log(p / m),
        }[kind]
        slope = {
            "reverse": math.log(p / t),
            "forward": -t / p,
            "jsd": (1 - beta) * math.log(p / m),
        }
        slopes.append(slope[kind])
    mean = sum(p * slope for p, slope in zip(pi, slopes, strict=True))
    return value, [p * (slope - mean) for p, slope in zip(pi, slopes, strict=True)]


@every_kind
def test_divergences_and_their_gradients_are_sums_by_hand(kind, beta):
    (logits, policy), (_, teacher) = table(1), table(2)
    found = divergence(policy, teacher.detach(), kind, beta)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    for row in range(3):
        value, slopes = by_hand(kind, beta, policy[row].exp().tolist(), teacher[row].exp().tolist())
        assert found[row].item() == pytest.approx(value, rel=1e-8)
        assert gradient[row].tolist() == pytest.approx(slopes, rel=1e-8)
    assert found.max() > 0.05 and divergence(policy, policy, kind, beta).abs().max() < 1e-12


def plain_divergence(policy, teacher, sequences, teacher_sequences, kind, beta):
    """The sum over all completion tokens, in float64, from the models' own logits."""
    total = 0.0
    for (prompt, completion), (of_teacher, _) in zip(sequences, teacher_sequences, strict=True):
        log_p = []
        for model, before in ((policy, prompt), (teacher, of_teacher)):
            logits = model(torch.tensor([before + completion])).logits[0, len(before) - 1 : -1]
            log_p.append(logits[:, : policy.config.vocab_size].double().log_softmax(dim=1))
        total = total + divergence(log_p[0], log_p[1].detach(), kind, beta).sum()
    return total


def tokens_of(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def pairs():
    """Sequences of the student, and of a teacher whose prompts are others: 13 completion tokens."""
    completions = tokens_of((4, 6, 1, 2), 3)
    prompts, of_teacher = tokens_of((3, 1, 5, 2), 1), tokens_of((2, 7, 1, 4), 2)
    return [list(zip(rows, completions, strict=True)) for rows in (prompts, of_teacher)]


def chunked_divergence(policy, teacher, pairs, inds, kind, beta):
    sequences, teacher_sequences = pairs
    states, head = states_and_head(teacher, teacher_sequences, inds)
    return divergence_loss(policy, sequences, inds, states, head, kind, beta)


@every_kind
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "granite"])
def test_chunks_of_the_vocabulary_are_the_whole(architecture, kind, beta, pairs, monkeypatch):
    """Also in micro-batches; the heads scale, cap and have a bias, T's embedding has more rows."""
    monkeypatch.setattr(common.logprobs, "MAX_LOGITS", 3 * VOCAB + 1)
    flags = {"gemma2": {"final_logit_softcapping": 5.0}, "granite": {"logits_scaling": 3.0}}
    policy = tiny_model(architecture, **flags.get(architecture, {}))
    teacher = tiny_model("llama", vocab_size=VOCAB + 3, initializer_range=0.3)
    for model in (policy, teacher):
        head = model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.randn(len(head.weight)))
    teacher.requires_grad_(False)
    named = dict(policy.named_parameters())
    expected = plain_divergence(policy, teacher, *pairs, kind, beta) / 4
    expected_gradients = torch.autograd.grad(expected, named.values())
    for batches in ([[0, 1, 2, 3]], [[2, 0], [3], [], [1]]):
        policy.zero_grad()
        losses = [chunked_divergence(policy, teacher, pairs, i, kind, beta) for i in batches]
        sum(losses).backward()
        assert sum(losses).item() == pytest.approx(expected.item(), rel=1e-5)
        for (name, parameter), gradient in zip(named.items(), expected_gradients, strict=True):
            scale = gradient.abs().max()
            assert scale > 0 and (parameter.grad - gradient).abs().max() < 1e-4 * scale, name
    assert all(parameter.grad is None for parameter in teacher.parameters())


@every_kind
@pytest.mark.parametrize("case", some_wide(["plain", "hint", "adapters"], ["hint", "adapters"]))
def test_each_step_over_the_vocabulary_is_that_of_plain_transformers(
    kind, beta, case, tmp_path, monkeypatch
):
    """With adapters also layers that are computed once more."""
    sampled, steps = spy_on(monkeypatch, "generate"), watch_steps(monkeypatch)
    losses, hints = spy_on(monkeypatch, "divergence_loss"), hints_by_prompt()
    cases = {"plain": {}, "hint": HINT, "adapters": ADAPTERS | dict(activation_checkpointing=True)}
    flags = cases[case] | dict(divergence=kind, jsd_beta=beta)
    run(tmp_path, total_rollouts=3, max_grad_norm=3.0, **flags)
    policy, teacher, trained = student_and_teacher(**flags)
    for step, (weights, gradient, _) in enumerate(steps, start=1):
        set_weights(policy, weights)
        _, (sequences, _) = sampled[step]
        of_teacher = [(x if case == "plain" else hints[tuple(x)], y) for x, y in sequences]
        loss = plain_divergence(policy, teacher, sequences, of_teacher, kind, beta) / 6
        found = sum(part.item() for _, part in losses[2 * step - 2 : 2 * step])  # micro-batches
        assert found == pytest.approx(loss.item(), rel=1e-4)
        loss.backward()
        assert max(g.abs().max() for g in gradient) > 0.005
        for found, parameter in zip(gradient, trained, strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-5)


def test_many_chunks_of_a_trained_head_in_bfloat16_add_up(monkeypatch):
    """As sharded on a GPU: its gradient is summed in float32, and rounded once."""
    completion, found = tokens_of((300,), 4)[0], []
    for size in (1, 300):
        monkeypatch.setattr(common.logprobs, "MAX_LOGITS", size * VOCAB)
        policy = tiny_model("llama", tie_word_embeddings=False, max_position_embeddings=512)
        teacher = tiny_model("llama", initializer_range=0.3, max_position_embeddings=512)
        head = policy.get_output_embeddings().weight
        head.data = head.data.bfloat16()
        sequences = [([3], completion)]
        teacher.requires_grad_(False)
        chunked_divergence(policy, teacher, [sequences] * 2, [0], "reverse", 0.5).backward()
        found.append(head.grad.float())
    assert (found[0] - found[1]).norm() < 0.004 * found[1].norm()
