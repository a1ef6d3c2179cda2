"""docs/ppo_rlhf.md: the default run, variants of it, and a learned reward that is exploited."""

from docs.experiments.lib.drawing import ALGORITHM_STYLES, RED, Style, draw_band, panel
from docs.experiments.lib.runs import Numbers, experiment_of_runs, variants

COMMANDS = variants(
    "ppo_rlhf.py",
    "",
    "--no-whiten-advantages",
    "--vf-clip-coef None",
    "--critic-init sft",
    "--critic-init scratch",
    "--critic-init policy",
    "--gae-lambda 1",
    "--num-minibatches 1",
    "--ent-coef 0.01",
)


def tables(numbers: Numbers) -> dict:
    columns = {
        "gold": ("eval/reward", 2),
        "KL": ("KL of samples", 1),
        "explained variance": ("value/explained_variance", 2),
    }
    return {"ppo_rlhf": numbers.table(columns)}


# --- reward_hacking ----------------------------------------------------------------------------
HACKING = {
    # At 0 no reference is loaded and no KL measured; 1e-9 subtracts next to nothing.
    "1e-9": "ppo_rlhf.py --eval-every 2 --beta 1e-9",
    "0.05": "ppo_rlhf.py --eval-every 2 --beta 0.05",
    "0.2": "ppo_rlhf.py --eval-every 2",
}


def hacking_tables(numbers: Numbers) -> dict:
    columns = {
        "learned": ("reward/mean", 2),
        "gold": ("eval/reward", 2),
        "KL": ("objective/kl", 1),
    }
    table = numbers.table(columns, heading="`--beta`")
    samples = []
    for beta in HACKING:
        sample = numbers.values(beta, "typical sample")[0]
        samples.append([f"`--beta {beta}`, gold {sample['reward']:.2f}: `{sample['completion']}`"])
    return {"reward_hacking": table, "reward_hacking samples": {"rows": samples}}


def draw_hacking(numbers: Numbers) -> dict:
    figures = {
        "reward_hacking_weak_kl": ("1e-9", "beta 1e-9: the gold reward falls again"),
        "reward_hacking_strong_kl": ("0.2", "beta 0.2: both rewards rise"),
    }
    axes = {}
    for name, (beta, title) in figures.items():
        axis = axes[name] = panel(title, "rollout", "mean reward", ylim=(-1.1, 4.5))
        learned = numbers.metric_curves(beta, "reward/mean", evaluations=True)
        gold = numbers.metric_curves(beta, "eval/reward", evaluations=True)
        draw_band(axis, learned, "learned reward", ALGORITHM_STYLES["reward model"])
        draw_band(axis, gold, "gold reward", Style(RED, "D"))
        axis.legend(loc="center right")
    return axes


EXPERIMENTS = (
    experiment_of_runs("ppo_rlhf", COMMANDS, tables),
    experiment_of_runs("reward_hacking", HACKING, hacking_tables, draw_hacking),
)
