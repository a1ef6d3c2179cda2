"""The scripts by name: the one list that tests across scripts and docs/experiments/ use."""

from typing import Any

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


def short_flags(name: str, **flags: Any) -> dict[str, Any]:
    """Those of the flags that the script has; so one set of flags serves all scripts."""
    fields = SCRIPTS[name].Args.__dataclass_fields__
    return {flag: value for flag, value in flags.items() if flag in fields}
