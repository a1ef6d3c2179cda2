"""The scripts by name, for the tests of what holds in each of them."""

import dpo
import grpo
import ppo_rlhf
import rm_bradley_terry
import sft

SCRIPTS = {
    "sft": sft,
    "rm_bradley_terry": rm_bradley_terry,
    "ppo_rlhf": ppo_rlhf,
    "grpo": grpo,
    "dpo": dpo,
}
