"""PPO in TRL 1.12.0, the last version that has it, on the reviews with the values of ppo_rlhf.py.

    python -m venv runs/trl_ppo
    runs/trl_ppo/bin/python -m pip install -e . trl==1.12.0
    runs/trl_ppo/bin/python -m docs.experiments.cost.trl_ppo SEED FOLDER

It saves the policy, and prints the seconds of the processor and the peak in MB. TRL takes no rate
for the critic alone, so it gets our optimiser; it does not clip gradients.
"""

import json
import sys
import time
from functools import partial

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import get_linear_schedule_with_warmup
from trl.experimental.ppo import PPOConfig, PPOTrainer

from docs.experiments.lib.measuring import peak
from ppo_rlhf import Args


def main(seed: int, folder: str) -> None:
    torch.set_num_threads(1)
    args = Args(learning_rate=5e-4, critic_learning_rate=1e-3)  # as by default
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    rows = load_dataset(args.dataset, split=args.train_split)
    rows = rows.map(lambda row: tokenizer(row["prompt"]), remove_columns=rows.column_names)
    load_policy = partial(AutoModelForCausalLM.from_pretrained, args.model, dtype=torch.float32)
    load_reward_model = partial(
        AutoModelForSequenceClassification.from_pretrained, args.reward_model, dtype=torch.float32
    )
    policy, critic = load_policy(), load_reward_model()
    weights = [
        dict(params=policy.parameters(), lr=args.learning_rate),
        dict(params=critic.parameters(), lr=args.critic_learning_rate),
    ]
    optimizer = torch.optim.AdamW(weights, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, args.total_rollouts)
    config = PPOConfig(
        output_dir=folder,
        seed=seed,
        total_episodes=args.total_rollouts * args.prompts_per_rollout,
        per_device_train_batch_size=args.prompts_per_rollout,
        local_rollout_forward_batch_size=args.prompts_per_rollout,
        num_ppo_epochs=args.update_epochs,
        num_mini_batches=args.num_minibatches,
        response_length=args.max_new_tokens,
        stop_token="eos",
        temperature=args.temperature,
        gamma=args.gamma,
        lam=args.gae_lambda,
        kl_coef=args.beta,
        cliprange=args.clip_coef,
        cliprange_value=args.vf_clip_coef,
        vf_coef=args.vf_coef,
        num_sample_generations=0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=load_policy(),
        reward_model=load_reward_model(),
        value_model=critic,
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        optimizers=(optimizer, schedule),
    )
    start = time.process_time()
    trainer.train()
    trainer.save_model(folder)
    print(json.dumps([time.process_time() - start, peak() / 1e6]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
