"""Flags: contradictions, --resume, learning rates and schedules. Ranges: test_every_script.py."""

import itertools
import json
from functools import cache

import pytest
import torch
from algorithms import run
from models import save_model
from pydantic import ValidationError
from runs import metrics_of, words
from scripts import SPECS, short_flags, with_flag
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoTokenizer, get_scheduler

from runtime.model import find_rate
from sft import lr_factor

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
    ("grpo_variants", dict(loss="ipo", importance_cap=2.0), "--loss ipo is to the sampler already"),
    ("grpo_variants", GDPO | dict(scale_rewards="batch"), "normalize_then_sum has no place for"),
    ("ppo_rlhf", dict(num_minibatches=9, prompts_per_rollout=8), "some would be empty"),
    ("grpo", dict(num_minibatches=9, prompts_per_rollout=4, group_size=2), "some would be empty"),
    ("grpo_variants", dict(num_minibatches=33, prompts_per_rollout=4), "not as many completions"),
    ("grpo", dict(reward_weights=[1.0, 2.0]), "--reward-weights: 1 expected"),
    ("ppo_rlhf", dict(reward_weights=[1.0, 2.0]), "--reward-weights: 1 expected"),
    # tiny's reward model is the default without --reward-fn alone
    ("ppo_rlhf", dict(reward_fn=["a.py:rule"]), "--critic-init reward_model needs --reward-model"),
    ("ppo_rlhf", dict(critic_warmup_rollouts=30), "the policy would never be trained"),
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
    # The same doubles as transformers', whose steps count from 0, where the rate is 0.
    for warmup, total in itertools.product((0, 1, 7), (8, 100)):
        step_0 = AdamW([torch.zeros(1)])
        theirs = get_scheduler(schedule, step_0, warmup + 1, total + 1).lr_lambdas[0]
        for step in range(1, total + 1):
            assert lr_factor(step, warmup, total, schedule) == theirs(step)


# The default rate of a tiny model, with adapters or without; of a real one; of its adapters.
RATES = {
    "sft": (1e-3, 2e-5, 2e-4),
    "rm_bradley_terry": (1e-3, 1e-5, 1e-4),
    "reinforce": (1e-3, 1e-6, 1e-5),
    "ppo_rlhf": (5e-4, 1e-6, 1e-5),
    "grpo": (5e-4, 1e-6, 1e-5),
    "grpo_variants": (5e-4, 1e-6, 1e-5),
    "grpo_tools": (3e-4, 1e-6, 1e-5),
    "dpo": (5e-4, 1e-6, 1e-5),
    "kto": (1e-3, 1e-6, 1e-5),
    "distill": (5e-4, 1e-5, 1e-4),
}
CRITIC = (1e-3, 1e-5, 1e-4)
ORPO = (5e-4, 8e-6, 8e-5)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The folder of a model of one layer whose embedding alone, 80,000 x 128, is above 10M."""

    @cache
    def real(source, kind=AutoModelForCausalLM):
        folder = tmp_path_factory.mktemp("real")
        config = AutoConfig.from_pretrained(source, vocab_size=80_000, num_hidden_layers=1)
        save_model(folder, kind.from_config(config), AutoTokenizer.from_pretrained(source))
        return str(folder)

    return real


def args_of(name, folder, monkeypatch, **flags):
    """Those of the args.json of a new run, and those that --resume reads."""
    script = SPECS[name].module

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "log", stop)
    flags = SPECS[name].short_flags | dict(output_dir=str(folder), max_new_tokens=9) | flags
    flags = short_flags(name, **flags)
    with pytest.raises(KeyboardInterrupt):
        script.main(script.Args(**flags))
    (run_dir,) = folder.iterdir()
    saved = json.loads((run_dir / "args.json").read_text())
    resumed = script.parse_args(["--resume", str(run_dir)])
    assert vars(resumed) == saved | {"resume": str(run_dir)}
    return resumed


@EACH
def test_default_rates(name, real, tmp_path, monkeypatch, capsys):
    of_tiny, of_real, of_adapters = RATES[name]
    source = SPECS[name].module.Args.model
    large = dict(model=real(source), teacher=real(source), teacher_prompt_column=None)
    cases = {
        "tiny": (dict(), of_tiny),
        "tiny's adapters": (dict(lora_rank=2), of_tiny),
        "real": (large, of_real),
        "its adapters": (large | dict(lora_rank=2), of_adapters),
    }
    for case, (flags, expected) in cases.items():
        (tmp_path / case).mkdir()
        args = args_of(name, tmp_path / case, monkeypatch, **flags)
        assert args.learning_rate == expected, case
        printed = capsys.readouterr().out
        assert f"{args.model}: learning rate {expected}, the default for " in printed
    (tmp_path / "given").mkdir()
    given = dict(learning_rate=3e-7, critic_learning_rate=3e-7)
    assert args_of(name, tmp_path / "given", monkeypatch, **large | given).learning_rate == 3e-7
    assert "the default for" not in capsys.readouterr().out


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo", "orpo"])
def test_the_default_rate_of_a_loss(loss, real, tmp_path, monkeypatch):
    model = real("tiny/reviews/policy")
    expected = ORPO if loss == "orpo" else RATES["dpo"]
    cases = dict(loss=loss), dict(loss=loss, model=model), dict(loss=loss, model=model, lora_rank=2)
    for number, (flags, rate) in enumerate(zip(cases, expected, strict=True)):
        (tmp_path / str(number)).mkdir()
        args = args_of("dpo", tmp_path / str(number), monkeypatch, **flags)
        assert args.learning_rate == rate


@pytest.mark.parametrize("start", ["sft", "policy", "reward_model"])
def test_the_default_rate_of_a_critic(start, real, tmp_path, monkeypatch):
    """By the size of its own backbone, which is the policy if it is only a head on it."""
    source = "tiny/reviews/policy"
    classifier = real("tiny/reviews/reward_model", AutoModelForSequenceClassification)
    cases = dict(), dict(reward_model=classifier), dict(reward_model=classifier, lora_rank=2)
    if start != "reward_model":
        cases = dict(), dict(model=real(source)), dict(model=real(source), lora_rank=2)
    for number, (flags, rate) in enumerate(zip(cases, CRITIC, strict=True)):
        (tmp_path / str(number)).mkdir()
        args = args_of("ppo_rlhf", tmp_path / str(number), monkeypatch, critic_init=start, **flags)
        assert args.critic_learning_rate == rate
        assert args.learning_rate == RATES["ppo_rlhf"][number if "model" in flags else 0]


@pytest.mark.parametrize(("size", "rate"), [(9_999_999, 1e-3), (10_000_000, 2e-5)])
def test_models_below_10_million_parameters_are_tiny(size, rate):
    model = AutoModelForCausalLM.from_pretrained("tiny/arithmetic/base")
    model.num_parameters = lambda: size
    assert find_rate(model, None, lora_rank=0, tiny=1e-3, real=2e-5) == rate
