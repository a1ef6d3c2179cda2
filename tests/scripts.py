"""The scripts by name, for the tests of what holds in each of them."""

import dpo
import grpo
import kto
import ppo_rlhf
import reinforce
import rm_bradley_terry
import sft

SCRIPTS = {
    "sft": sft,
    "reinforce": reinforce,
    "rm_bradley_terry": rm_bradley_terry,
    "ppo_rlhf": ppo_rlhf,
    "grpo": grpo,
    "dpo": dpo,
    "kto": kto,
}
