"""What the tests across scripts know of each script: a new one is one entry here."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import distill
import dpo
import grpo
import grpo_tools
import grpo_variants
import kto
import ppo_rlhf
import reinforce
import rm_bradley_terry
import sft


class ScriptSpec(NamedTuple):
    module: ModuleType
    short_flags: dict[str, Any]  # a run of half a second: about seven steps, into a second epoch
    # what it trains on: completions that it samples, or those of a data set
    kind: Literal["rollouts", "rows"] = "rollouts"
    loader: str = "load_prompts"  # its function that reads a split
    models: tuple[str, ...] = ("policy",)  # that it trains, as a checkpoint names them
    saved: type = AutoModelForCausalLM  # which loads the model of a run
    row_tokens: Callable[[Any], int] | None = None  # rows: how many tokens a step reads of one
    advantages: str = ""  # rollouts: its function whose result is logged as advantages


# No number can be divided evenly by 2 or by 4, and of four processes some get no row at all.
SHORT = dict(eval_split="test[:5]", eval_every=3, save_every=2, micro_batch_size=2)
SHORT_ROWS = SHORT | dict(train_split="train[:13]", epochs=1.7, batch_size=3)
SHORT_ROLLOUTS = SHORT | dict(train_split="train[:19]", total_rollouts=7, prompts_per_rollout=3)
# All completions of tiny/calculator have several turns.
TURNS = dict(environment="tests/support/turns.py:echo", call_end="#", max_turns=3)
TURNS |= dict(reward_fn="tests/support/turns.py:checksums", max_prompt_length=64, max_new_tokens=32)

SPECS = {
    "sft": ScriptSpec(
        module=sft,
        kind="rows",
        loader="load_demonstrations",
        short_flags=SHORT_ROWS,
        row_tokens=lambda texts: sum(len(text.ids) for text in texts),
    ),
    "reinforce": ScriptSpec(
        module=reinforce,
        short_flags=SHORT_ROLLOUTS | dict(group_size=3),
        advantages="baseline_advantages",
    ),
    "rm_bradley_terry": ScriptSpec(
        module=rm_bradley_terry,
        kind="rows",
        loader="load_comparisons",
        models=("model",),
        saved=AutoModelForSequenceClassification,
        short_flags=SHORT_ROWS | dict(center_coef=0.01),
        row_tokens=lambda row: len(2 * row.prompt_ids + row.chosen_ids + row.rejected_ids),
    ),
    "ppo_rlhf": ScriptSpec(
        module=ppo_rlhf,
        models=("policy", "critic"),
        short_flags=SHORT_ROLLOUTS | dict(max_new_tokens=16),
        advantages="whiten",
    ),
    "grpo": ScriptSpec(
        module=grpo,
        short_flags=SHORT_ROLLOUTS | dict(group_size=3, update_epochs=2, num_minibatches=2),
        advantages="group_advantages",
    ),
    "grpo_variants": ScriptSpec(
        module=grpo_variants,
        short_flags=SHORT_ROLLOUTS | dict(group_size=3, update_epochs=2, num_minibatches=2),
        advantages="scaled_advantages",
    ),
    "grpo_tools": ScriptSpec(
        module=grpo_tools,
        short_flags=SHORT_ROLLOUTS | TURNS | dict(group_size=3, num_minibatches=2),
        advantages="group_advantages",
    ),
    "dpo": ScriptSpec(
        module=dpo,
        kind="rows",
        loader="load_preference_pairs",
        short_flags=SHORT_ROWS | dict(max_new_tokens=16, nll_coef=0.1),
        row_tokens=lambda row: len(2 * row.prompt.ids + row.chosen_ids + row.rejected_ids),
    ),
    "kto": ScriptSpec(
        module=kto,
        kind="rows",
        loader="load_labelled",
        short_flags=SHORT_ROWS | dict(max_new_tokens=16),
        # Its prompt meets another row's completion too.
        row_tokens=lambda row: 2 * len(row.prompt.ids + row.completion_ids),
    ),
    "distill": ScriptSpec(
        module=distill,
        loader="load_student_prompts",
        short_flags=SHORT_ROLLOUTS | dict(discount=0.5, teacher_prompt_column="answer"),
        advantages="discounted_sums",
    ),
}
# For grpo.py, whose own task has no reward model.
REVIEWS = dict(model="tiny/reviews/policy", dataset="tiny/reviews/prompts")
REVIEWS |= dict(reward_model="tiny/reviews/reward_model")
SCRIPTS = {name: spec.module for name, spec in SPECS.items()}
# Of scripts that share a loader, one: its source is the same in all.
ONE_PER_LOADER = [*{spec.loader: name for name, spec in SPECS.items()}.values()]
WITH_ROLLOUTS = [name for name, spec in SPECS.items() if spec.kind == "rollouts"]


def with_flag(flag: str) -> list[str]:
    """The scripts that have it."""
    return [name for name in SCRIPTS if flag in SCRIPTS[name].Args.__dataclass_fields__]


def short_flags(name: str, **flags: Any) -> dict[str, Any]:
    """Those of the flags that the script has; so one set of flags serves all scripts."""
    fields = SCRIPTS[name].Args.__dataclass_fields__
    return {flag: value for flag, value in flags.items() if flag in fields}
