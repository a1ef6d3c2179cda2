"""docs/results.md: the tiny tasks in TRL, beside the default runs of our scripts.

    pip install -e ".[bench]"
    python -m docs.experiments beside_trl    # PPO: after the commands of cost/trl_ppo.py

Our scripts evaluate the models that TRL has saved. Our own results are those in docs/results. The
cost of a run is measured for both with the first seed, in processes of their own, with evaluations
of eight rows.
"""

import json
import time
from collections.abc import Iterable
from importlib import import_module
from itertools import product
from pathlib import Path
from subprocess import check_output
from typing import Any

from datasets import load_dataset

from docs.experiments.declared import ACCURACY, GOLD_REWARD
from docs.experiments.lib.experiment import Experiment, saved_numbers
from docs.experiments.lib.measuring import in_own_process, peak
from docs.experiments.lib.metrics import Metric, kl_of_samples, last
from docs.experiments.lib.runs import RUNS, Run, train
from docs.experiments.lib.tables import spread
from docs.experiments.studies.distill import points
from docs.experiments.studies.recipes import difference
from tiny.arithmetic.reward import last_number

SEEDS = (1, 2, 3)
KL = Metric("KL of samples", lambda run: kl_of_samples(run, "tiny/reviews/policy"))
REVIEWS = {"gold reward": (GOLD_REWARD, 2), "KL": (KL, 1)}
PAIRS = {"pair accuracy": (last("eval/pair_accuracy"), 3)}
POINTS = {"accuracy": (Metric("points", points), 3)}  # of a run's curve
DEFAULT, RLOO = "(default)", "`--baseline leave_one_out`"
UNBIASED = {"accuracy, the KL times the ratio": (ACCURACY, 3)}
WORKS = {  # by our script: TRL's trainer; our experiment and label; metrics with their digits
    "sft": ("SFT", "sft", DEFAULT, {"held-out loss": (last("eval/loss"), 3)}),
    "rm_bradley_terry": ("Reward", "rm_bradley_terry", DEFAULT, PAIRS),
    "ppo_rlhf": ("PPO", "ppo_rlhf", DEFAULT, REVIEWS),
    "dpo": ("DPO", "dpo", DEFAULT, REVIEWS),
    "kto": ("KTO", "kto", DEFAULT, REVIEWS),
    "grpo": ("GRPO", "grpo", DEFAULT, {"accuracy": (ACCURACY, 3)}),
    "grpo_unbiased": ("GRPO", "recipes", "unbiased KL", UNBIASED),
    "reinforce": ("RLOO", "reinforce", RLOO, {"accuracy": (GOLD_REWARD, 3)}),
    "distill": ("Distillation", "distill_divergence", "reverse", POINTS),
}
NAMES_IN_TRL = {  # of our flags that have another one there
    "clip_coef": "epsilon",
    "epochs": "num_train_epochs",
    "generation_batch_size": "",  # there all completions of a rollout
    "group_size": "num_generations",
    "max_new_tokens": "max_completion_length",
    "warmup_ratio": "warmup_steps",  # below 1 a fraction of the steps
}


# --- runs ----------------------------------------------------------------------------------------
def trl_trainer(kind: str, args: Any) -> Any:
    """A trainer of TRL with the values of our script's flags, where both have them, and its own
    defaults elsewhere; in float32, without checkpointing."""
    import trl  # of the extra `bench`

    flags = vars(args)
    config = getattr(trl, f"{kind}Config")
    shared = {NAMES_IN_TRL.get(flag, flag): value for flag, value in flags.items()}
    shared = {name: shared[name] for name in shared if name in config.__dataclass_fields__}
    shared |= dict(use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no")
    shared |= dict(report_to="none", model_init_kwargs={"dtype": "float32"})
    shared.setdefault("max_grad_norm", 0.0)  # reinforce.py does not clip gradients
    data = load_dataset(args.dataset, split="train").shuffle(seed=args.seed)
    inputs = dict(model=args.model, train_dataset=data)
    sequences_per_step = flags.get("batch_size")
    if sequences_per_step is None:
        sequences_per_rollout = args.prompts_per_rollout * flags.get("group_size", 1)
        sequences_per_step = sequences_per_rollout // flags.get("num_minibatches", 1)
        shared["max_steps"] = args.total_rollouts * flags.get("num_minibatches", 1)
    if "group_size" in flags:
        inputs["reward_funcs"] = last_number
        shared |= dict(generation_batch_size=sequences_per_rollout)
    if kind == "GRPO":
        is_unbiased = flags.get("kl_placement") == "unbiased"
        shared |= dict(loss_type="grpo", use_bias_correction_kl=is_unbiased)
    if kind == "Distillation":
        inputs["teacher_model"] = args.teacher
        shared["teacher_model_init_kwargs"] = {"dtype": "float32"}
    size = min(args.micro_batch_size, sequences_per_step)
    shared["per_device_train_batch_size"] = size
    shared["gradient_accumulation_steps"] = sequences_per_step // size
    trainer = getattr(trl, f"{kind}Trainer")
    return trainer(**inputs, args=config(**shared))


def module_of(script: str) -> Any:
    return import_module("grpo_variants" if script == "grpo_unbiased" else script)


def cost(side: str, script: str, seed: int, folder: str) -> tuple[float, float]:
    """Train; seconds of the processor, and the peak of this process in MB."""
    module, start = module_of(script), time.process_time()
    flags = dict(kl_placement="unbiased") if script == "grpo_unbiased" else {}
    flags |= dict(seed=seed, output_dir=folder, eval_split="test[:8]", eval_every=10**9)
    args = module.Args(**flags)
    if side == "ours":
        module.main(args)
    elif script == "ppo_rlhf":
        python, program = RUNS.parent / "trl_ppo/bin/python", "docs.experiments.cost.trl_ppo"
        printed = check_output([python, "-m", program, str(seed), folder])
        return json.loads(printed.splitlines()[-1])
    else:
        trainer = trl_trainer(WORKS[script][0], args)
        trainer.train()
        trainer.save_model(folder)
    return time.process_time() - start, peak() / 1e6


def evaluated(script: str, seed: int, model: Path) -> Run:
    """A run of our script that evaluates a model: its step is too small to change a weight."""
    module = module_of(script)
    is_online = hasattr(module.Args, "total_rollouts")
    short = dict(total_rollouts=1, prompts_per_rollout=4) if is_online else dict(epochs=1e-3)
    flags = dict(model=str(model), seed=seed, output_dir=str(model), learning_rate=1e-30)
    return train(module, **flags, **short)


def trl_runs(scripts: Iterable[str]) -> dict[str, list[Run]]:
    """By script its evaluations of TRL's models, which are trained if there are none yet."""
    runs = {}
    for script, seed in product(scripts or WORKS, SEEDS):
        folder = RUNS / f"trl_{script}_{seed}"
        if not (folder / "costs.json").exists():
            sides = ("ours", "TRL") if seed == 1 else ("TRL",)
            costs = [in_own_process(cost, side, script, seed, str(folder)) for side in sides]
            (folder / "costs.json").write_text(json.dumps(costs))
        runs.setdefault(script, []).append(evaluated(script, seed, folder))
    return runs


# --- the table -----------------------------------------------------------------------------------
def tables(results: dict) -> dict[str, dict]:
    rows = []
    for script, (kind, experiment, label, metrics) in WORKS.items():
        numbers, costs = results["numbers"][script], ["", ""]
        if "costs" in numbers:
            ours, trl = numbers["costs"][0]  # of seed 1: seconds and MB
            costs = [f"{a:,.0f} / {b:,.0f}" for a, b in zip(ours, trl, strict=True)]
        for heading, (metric, digits) in metrics.items():
            sides = [saved_numbers(experiment, label, metric.name), numbers[metric.name]]
            if metric.name == "points":  # the accuracy at the last one
                sides = [[points[-1][2] for points in side] for side in sides]
            cells = [f"`{kind}Trainer`: {heading}", *(spread(side, digits) for side in sides)]
            rows.append([*cells, difference(*reversed(sides)), *costs])
            costs = ["", ""]
    columns = ["", "ours", "TRL", "TRL's minus ours", "CPU seconds", "peak MB"]
    return {"beside_trl": {"columns": columns, "rows": rows}}


COSTS = Metric("costs", lambda run: json.loads((run.folder.parent / "costs.json").read_text()))
KEPT = {script: [COSTS, *(metric for metric, _ in WORKS[script][-1].values())] for script in WORKS}
KEPT["distill"].remove(COSTS)  # of --divergence sampled, where the accuracy is that of reverse
MAKES = dict(find_runs=trl_runs, more_tables=tables, seeds=SEEDS)
CLIPPING = {  # with the gradients as TRL has them
    "PPO": "ppo_rlhf.py --eval-every 2 --max-grad-norm 1e6",
    "distillation": "distill.py --eval-every 8 --divergence reverse --max-grad-norm 12",
}
EXPERIMENTS = (
    Experiment("beside_trl", metrics=KEPT, **MAKES),
    Experiment(
        "beside_trl_clipping",
        CLIPPING,
        metrics={"PPO": [KL], "distillation": [*(metric for metric, _ in POINTS.values())]},
        seeds=SEEDS,
    ),
)
