"""Flags: contradictions, --resume, the learning rate's schedule. Ranges: test_every_script.py."""

import json

import pytest
from algorithms import run
from pydantic import ValidationError
from runs import metrics_of, words
from scripts import SPECS, short_flags, with_flag

EACH = pytest.mark.parametrize("name", SPECS)


def refused(name, argv, capsys):
    """What the command line prints about flags that end a script with status 2."""
    with pytest.raises(SystemExit) as end:
        SPECS[name].module.parse_args(argv)
    assert end.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@EACH
def test_a_keyword_that_is_no_flag(name, tmp_path):
    """In Python, and in an args.json that was edited by hand."""
    script = SPECS[name].module
    with pytest.raises(ValidationError, match=r"lr\n.*Unexpected keyword argument"):
        script.Args(lr=1e-4)
    (tmp_path / "args.json").write_text(json.dumps(vars(script.Args()) | {"lr": 1e-4}))
    with pytest.raises(ValueError, match=r"lr\n.*Unexpected keyword argument"):
        script.parse_args(["--resume", str(tmp_path)])


GDPO = dict(multi_objective_aggregation="normalize_then_sum")
CONTRADICTIONS = [
    ("reinforce", dict(group_size=1), "--baseline leave_one_out needs a --group-size of"),
    ("grpo", dict(group_size=1), "should be greater than or equal to 2"),
    (
        "grpo_variants",
        dict(importance_sampling_level="sequence", loss_norm="token", beta=0.0),
        "--loss-norm: sequence ratios need sequence, or constant",
    ),
    (
        "grpo_variants",
        dict(importance_sampling_level="sequence", loss_norm="constant"),
        "or constant at --beta 0",
    ),
    ("grpo_variants", GDPO | dict(kl_placement="reward"), "normalize_then_sum has no place for"),
    ("grpo_variants", GDPO | dict(missing_eos_penalty=1.0), "normalize_then_sum has no place for"),
    ("grpo_variants", GDPO | dict(overlong_buffer=4), "normalize_then_sum has no place for"),
    ("grpo_variants", GDPO | dict(scale_rewards="batch"), "normalize_then_sum has no place for"),
    ("ppo_rlhf", dict(num_minibatches=9, prompts_per_rollout=8), "some would be empty"),
    ("grpo", dict(num_minibatches=9, prompts_per_rollout=4, group_size=2), "some would be empty"),
    ("grpo_variants", dict(num_minibatches=33, prompts_per_rollout=4), "not as many completions"),
    ("grpo", dict(reward_weights=[1.0, 2.0]), "--reward-weights: 1 expected"),
    ("ppo_rlhf", dict(reward_weights=[1.0, 2.0]), "--reward-weights: 1 expected"),
    # tiny's reward model is the default without --reward-fn alone
    ("ppo_rlhf", dict(reward_fn=["a.py:rule"]), "--critic-init reward_model needs --reward-model"),
    ("ppo_rlhf", dict(critic_warmup_rollouts=30), "the policy would never be trained"),
    ("ppo_rlhf", dict(kl_target=3.0, beta=0.0), "--kl-target adapts --beta, which is 0"),
    ("ppo_rlhf", dict(kl_target=1.0, kl_horizon=20.0), "--kl-horizon is so short that beta"),
    ("ppo_rlhf", dict(kl_target=1.0, kl_horizon=128.0, group_size=8), "--kl-horizon is so short"),
    ("reinforce", dict(reference="x"), "--reference needs --beta above 0"),
    ("distill", dict(divergence="jsd", discount=0.5), "--discount belongs to --divergence sampled"),
    ("dpo", dict(label_smoothing=0.1, loss="orpo"), "--label-smoothing belongs to"),
    ("rm_bradley_terry", dict(train_layers=0, lora_rank=4), "and --lora-rank: give one of the two"),
]
# They name the metrics; `reward_model` is that of --reward-model.
for name in with_flag("reward_weights"):
    for specs in (["a.py:same", "b.py:same"], ["a.py:reward_model"]):
        message = "--reward-fn: two rewards have one name"
        flags = dict(reward_fn=specs) | short_flags(name, critic_init="sft")
        CONTRADICTIONS.append((name, flags, message))


@pytest.mark.parametrize(("name", "flags", "message"), CONTRADICTIONS)
def test_flags_that_contradict_each_other(name, flags, message, capsys):
    """Wherever they come from: the command line, Python, or a run's args.json."""
    with pytest.raises(ValueError) as error:
        SPECS[name].module.Args(**flags)
    assert message in str(error.value).splitlines()[-1]
    typed = words({flag: value for flag, value in flags.items() if value is not False})
    typed += [f"--no-{flag.replace('_', '-')}" for flag in flags if flags[flag] is False]
    assert message in refused(name, typed, capsys).replace("│ ", "")


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_a_resumed_run_has_its_own_flags_and_no_others(name, tmp_path):
    script, short = SPECS[name].module, SPECS[name].short_flags
    args = script.parse_args(words(short | {"seed": 7}))
    (tmp_path / "args.json").write_text(json.dumps(vars(args)))
    assert script.parse_args(["--resume", str(tmp_path)]) == script.Args(
        **short | {"seed": 7, "resume": str(tmp_path)}
    )
    for typed in (["--seed", "7"], ["--track"]):
        with pytest.raises(ValueError, match=f"{typed[0]}: .* none beside --resume"):
            script.parse_args(["--resume", str(tmp_path), *typed])


TWICE = [
    ("sft", "--seed 1 --seed 2"),
    ("dpo", "--eval-rows=9 --eval_rows 9"),
    ("kto", "--track --track"),
    ("grpo", "--reward-fn a.py:one --reward-fn b.py:two"),  # of a list, too, the last would count
    ("ppo_rlhf", "--critic-init sft --reward-fn a.py:one --reward-weights 1 --reward-fn b.py:two"),
]


@pytest.mark.parametrize(("name", "typed"), TWICE)
def test_a_flag_given_twice_is_named(name, typed):
    flag = "--reward-fn" if "reward" in typed else typed.split()[0].partition("=")[0]
    with pytest.raises(ValueError, match=f"^{flag}: each flag once"):
        SPECS[name].module.parse_args(typed.split())


SCHEDULES = {  # the learning rate of five steps, of which one is the warm-up
    "linear": [0.5, 1, 0.75, 0.5, 0.25],
    "cosine": [0.5, 1, 0.853553, 0.5, 0.146447],  # (1 + cos(pi / 4)) / 2, ...
    "constant_with_warmup": [0.5, 1, 1, 1, 1],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_of_the_learning_rate(schedule, tmp_path):
    flags = dict(lr_schedule=schedule, warmup_ratio=0.2, learning_rate=1e-3, total_rollouts=5)
    rows = metrics_of(run("grpo_variants", tmp_path, **flags, max_new_tokens=2))[1:]
    rates = [1e3 * row["policy/learning_rate"] for row in rows]
    assert rates == pytest.approx(SCHEDULES[schedule], rel=1e-5)
