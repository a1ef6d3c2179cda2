"""ppo_rlhf.py --critic-init policy: a value head on the policy's own backbone."""

import torch
from safetensors.torch import load_file
from spies import spy_on, watch_steps
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_rlhf
from common.logprobs import plain_logprobs
from ppo_rlhf import Args, load_critic

CPU = torch.device("cpu")
SMALL = dict(
    critic_init="policy",
    total_rollouts=2,
    prompts_per_rollout=8,
    max_new_tokens=12,
    num_minibatches=1,
    update_epochs=1,
    eval_rows=2,
    eval_every=9,
    micro_batch_size=3,
    max_grad_norm=1e9,
    vf_coef=0.7,
)


def run(tmp_path, **flags):
    return ppo_rlhf.main(Args(output_dir=str(tmp_path), **{**SMALL, **flags}))


def head_of(seed):
    args = Args(critic_init="policy", seed=seed)
    return load_critic(args, AutoTokenizer.from_pretrained(args.model), 104, CPU)


def test_one_step_has_the_gradient_of_one_joint_loss(tmp_path, monkeypatch):
    """- mean_t A_t log pi_t + vf_coef mean_t 1/2 (V_t - R_t)^2, in plain loops over one model.

    In the first step all ratios are 1 and V_t is V_old: nothing is clipped.
    """
    steps = watch_steps(monkeypatch)
    sampled, estimated = (spy_on(ppo_rlhf, monkeypatch, name) for name in ("generate", "gae"))
    run(tmp_path, total_rollouts=1, whiten_advantages=False, beta=0.0)

    model = AutoModelForCausalLM.from_pretrained(Args().model, dtype=torch.float32).eval()
    head = head_of(seed=1)
    _, (arguments, completions), _ = sampled  # evaluation, rollout, evaluation
    sequences = list(zip(arguments[1], completions, strict=True))
    ((_, (advantages, returns)),) = estimated
    num_tokens = sum(len(completion) for _, completion in sequences)
    for row, (prompt, completion) in enumerate(sequences):
        ids = torch.tensor([prompt + completion])
        logprobs, _ = plain_logprobs(model, prompt, completion)
        hidden = model.base_model(ids).last_hidden_state[0]
        loss = 0.0
        for t in range(len(completion)):
            value = hidden[len(prompt) + t - 1] @ head.weight[0]
            loss = loss - advantages[row, t] * logprobs[t]
            loss = loss + SMALL["vf_coef"] * 0.5 * (value - returns[row, t]).square()
        (loss / num_tokens).backward()
    (_, of_policy, _), (_, of_head, _) = steps
    for found, parameter in zip(of_policy, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, atol=2e-6, rtol=1e-3)
    torch.testing.assert_close(of_head[0], head.weight.grad, atol=2e-6, rtol=1e-3)


def test_the_value_loss_trains_the_policys_backbone(tmp_path):
    """In one step its weights are others with vf_coef 0: the head is not on frozen features."""
    one_step = dict(total_rollouts=1)  # in a second one the head alone would make them others
    with_loss = load_file(run(tmp_path, **one_step) / "model.safetensors")
    without = load_file(run(tmp_path, vf_coef=0.0, **one_step) / "model.safetensors")
    assert not any(torch.equal(with_loss[key], without[key]) for key in with_loss)


def test_the_saved_model_is_the_policy_alone(tmp_path):
    run_dir = run(tmp_path, total_rollouts=1)
    weights, _ = torch.load(max(run_dir.glob("checkpoint_*.pt")), weights_only=True)["critic"]
    assert [*weights] == ["weight"]
    _, info = AutoModelForCausalLM.from_pretrained(run_dir, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
