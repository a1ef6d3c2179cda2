"""Write a copy of the scripts with a silent bug in it, and train with it: docs/exercises.md.

    python docs/exercises/add_bug.py 1             # with bug 1
    python docs/exercises/add_bug.py 1 --healthy   # the same command without the bug
    python docs/exercises/add_bug.py 1 --solution  # what the bug is

A bug is a list of text replacements, below. Whoever reads on learns the solutions.
"""

import difflib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import tyro

ROOT = Path(__file__).resolve().parents[2]
COPIED_FOLDERS = ("common", "runtime", "tiny", "tests")


class Edit(NamedTuple):
    file: str  # path in the copy
    old: str  # must occur exactly once
    new: str


class Exercise(NamedTuple):
    commands: tuple[str, ...]  # a script and its flags
    metrics: tuple[str, ...]  # shown after a run
    bug: tuple[Edit, ...]
    test: str  # file::function in tests/; passes in the healthy copy, fails in that with the bug
    setup: tuple[Edit, ...] = ()  # in the healthy copy too


GRPO_REVIEWS = (
    "grpo.py --model tiny/reviews/policy --dataset tiny/reviews/prompts --max-new-tokens 40 "
    "--reward-model tiny/reviews/reward_model --eval-reward-fn tiny/reviews/gold.py:sentiment "
    "--prompts-per-rollout 16"
)
# The tokenizer and the model's config name the EOS as padding, as many released models do.
PAD_IS_EOS = (
    Edit(
        "tiny/arithmetic/base/tokenizer_config.json",
        '"pad_token": "<pad>"',
        '"pad_token": "<eos>"',
    ),
    Edit("tiny/arithmetic/base/config.json", '"pad_token_id": 0', '"pad_token_id": 2'),
)

EXERCISES = {
    1: Exercise(
        commands=("sft.py --epochs 1 --eval-every 50 --eval-samples 64",),
        metrics=("objective/loss", "eval/loss", "eval/length_mean", "eval/truncated_fraction"),
        setup=PAD_IS_EOS,
        bug=(
            Edit(
                "common/logprobs.py",
                "    zeros = torch.zeros(len(batch), width, device=model.device)\n",
                "    mask = tokens != model.config.pad_token_id\n"
                "    values = [value * mask for value in values]\n"
                "    zeros = torch.zeros(len(batch), width, device=model.device)\n",
            ),
        ),
        test="test_sft.py::test_losses_are_the_token_means_of_plain_cross_entropy",
    ),
    2: Exercise(
        commands=(
            "sft.py --epochs 0.5 --eval-every 50 --micro-batch-size 32",
            "sft.py --epochs 0.5 --eval-every 50 --micro-batch-size 4",
        ),
        metrics=("objective/loss", "policy/grad_norm", "eval/loss"),
        bug=(
            Edit("sft.py", "; N is the whole step's, so micro-batches add up.", "."),
            Edit(
                "sft.py",
                "        num_tokens = sum(map(sum, is_learned))  # N, over all ranks\n",
                "",
            ),
            Edit(
                "sft.py",
                "            loss = negative_log_likelihood(logprobs, num_tokens)\n",
                "            num_tokens = sum(sum(is_learned[i]) for i in inds)\n"
                "            loss = negative_log_likelihood(logprobs, num_tokens)\n"
                "            loss = loss * len(inds) / len(sequences)\n",
            ),
        ),
        test="test_sft.py::test_losses_are_the_token_means_of_plain_cross_entropy",
    ),
    3: Exercise(
        commands=("reinforce.py --total-rollouts 20 --eval-every 10",),
        metrics=("reward/mean", "reward/std", "policy/grad_norm", "eval/reward"),
        bug=(
            Edit(
                "reinforce.py",
                "b = (groups.sum(dim=1, keepdim=True) - groups)",
                "b = (groups.sum(dim=0, keepdim=True) - groups)",
            ),
        ),
        test="test_reinforce.py::test_advantages_equal_plain_loops",
    ),
    4: Exercise(
        commands=("grpo.py --temperature 0.7 --total-rollouts 12 --eval-every 6",),
        metrics=(
            "reward/mean",
            "policy/approx_kl",
            "policy/clip_fraction_low",
            "policy/clip_fraction_high",
        ),
        bug=(
            Edit(
                "grpo.py",
                "sequences, inds, args.temperature, entropy=True",
                "sequences, inds, 1.0, entropy=True",
            ),
        ),
        test="test_grpo.py::"
        "test_ratio_is_one_before_any_update_and_log_probs_are_those_sampled_from",
    ),
    5: Exercise(
        commands=(f"{GRPO_REVIEWS} --beta 0.2 --total-rollouts 12 --eval-every 6",),
        metrics=("reward/mean", "objective/loss", "objective/kl", "policy/grad_norm"),
        bug=(
            Edit(
                "grpo.py",
                "    log_ratio = log_q - log_p\n",
                "    log_ratio = log_p - log_q\n",
            ),
        ),
        test="test_grpo.py::test_k3_value_sign_and_gradient_by_enumeration",
    ),
    6: Exercise(
        commands=("rm_bradley_terry.py --epochs 1.5 --eval-every 25",),
        metrics=("objective/loss", "reward/accuracy", "eval/pair_accuracy", "eval/margin"),
        bug=(
            Edit(
                "rm_bradley_terry.py",
                "    return scores.view(2, len(pair_inds))\n",
                "    return scores.view(len(pair_inds), 2).T\n",
            ),
        ),
        test="test_rm_bradley_terry.py::"
        "test_losses_and_metrics_against_scores_of_plain_transformers",
    ),
    7: Exercise(
        commands=("ppo_rlhf.py --total-rollouts 16 --eval-every 8",),
        metrics=("reward/mean", "eval/reward", "objective/kl", "policy/entropy"),
        bug=(
            Edit(
                "ppo_rlhf.py",
                "        shard(freeze(ref_model, merged=not args.reference), device)\n",
                "        shard(freeze(ref_model, merged=not args.reference), device)\n"
                "        ref_model.load_state_dict(policy.state_dict(), assign=True)\n",
            ),
        ),
        test="test_ppo_rlhf.py::"
        "test_gradients_and_metrics_of_a_rollout_are_those_of_one_completion_at_a_time",
    ),
    8: Exercise(
        commands=("ppo_rlhf.py --total-rollouts 16 --eval-every 8",),
        metrics=("reward/mean", "eval/reward", "value/explained_variance", "value/loss"),
        bug=(
            Edit(
                "ppo_rlhf.py",
                "    states, row, t = completion_states(critic.backbone, batch)\n",
                "    rows = [(x + y[:1], y[1:] + y[-1:]) for x, y in batch]\n"
                "    states, row, t = completion_states(critic.backbone, rows)\n",
            ),
        ),
        test="test_ppo_rlhf.py::test_critic_values_are_the_head_on_the_token_before",
    ),
    9: Exercise(
        commands=("dpo.py --epochs 0.5 --eval-every 16",),
        metrics=("objective/loss", "reward/accuracy", "eval/pair_accuracy", "eval/reward"),
        bug=(
            Edit(
                "dpo.py",
                "                ref_logprobs = pair_logprobs(ref_model, sequences, pair_inds) if",
                "                in_order, _ = pair_inds.sort()\n"
                "                ref_logprobs = pair_logprobs(ref_model, sequences, in_order) if",
            ),
        ),
        test="test_dpo.py::"
        "test_loss_gradient_and_metrics_of_each_step_are_those_of_plain_transformers",
    ),
    10: Exercise(
        commands=("kto.py --epochs 0.3 --eval-every 19",),
        metrics=("objective/loss", "reward/margin", "eval/loss", "eval/kl", "eval/reward"),
        bug=(
            Edit(
                "kto.py",
                "(B,): w_D sigmoid(-beta (u - z0)) if desirable, "
                "and if not w_U sigmoid(beta (u - z0)).\n",
                "(B,) of the completions.\n",
            ),
            Edit(
                "kto.py",
                "gains = torch.where(labels, logratios - z0, z0 - logratios)",
                "gains = logratios - z0",
            ),
        ),
        test="test_kto.py::test_loss_and_gradient_by_hand",
    ),
}
SOLUTIONS = {
    1: """\
The loss masks every token with the padding's id. Here the tokenizer's padding is its EOS,
so the EOS at the end of each completion leaves the loss too, and nothing teaches the
policy to stop. `eval/truncated_fraction` stays near 1, and `eval/length_mean` near
`--max-new-tokens`. The loss looks normal. A mask must come from lengths:

    mask = torch.arange(L) < lengths[:, None]""",
    2: """\
The loss of a step is a mean of micro-batch means. With micro-batches of n_m rows and N_m
completion tokens, n rows and N tokens in all, it is

    - sum_m (n_m / n) (1 / N_m) sum_(i in m) log pi_i    instead of    - (1 / N) sum_i log pi_i.

The two are equal only where all micro-batches have the same number of tokens per row.
Rows are sorted by length, so tokens of short completions count more. `objective/loss`
shows it: `--micro-batch-size` must not change it, apart from rounding.""",
    3: """\
The baseline is a sum along the wrong dimension. `groups` has a row for each of the 32
prompts and a column for each of its G = 8 completions; dim=0 adds up the prompts. So

    b = (the rewards of 31 other prompts' completions) / (G - 1) = 31/7 of a mean reward.

It contains nothing of the completion's own prompt, so the expected gradient is still that
of E[r]. But b is far from the reward that one may expect: it is larger than r, nearly all
advantages are negative, and the variance grows with (r - b)^2. `policy/grad_norm` is
several times as large as in a healthy run, and `reward/mean` rises slowly and unevenly. An
estimate can be unbiased and useless.""",
    4: """\
The log-probs of the update lack the temperature. Tokens are drawn from
softmax(logits / 0.7), and log pi_old is taken there; log pi_theta is taken at
temperature 1. So the ratio

    rho_t = pi_theta(y_t) / pi_old(y_t)

is not 1 before the first step, and never becomes 1 when the policy stops moving.
`policy/approx_kl` shows it: in a healthy run it falls to almost 0 as the learning rate
decays, here it stays. With `--learning-rate 1e-12`, so that the policy stands still, it
must be 0. At temperature 1 the bug has no effect.""",
    5: """\
k3 is upside down. It must be

    pi_ref / pi - log(pi_ref / pi) - 1,

and here it is

    pi / pi_ref - log(pi / pi_ref) - 1.

Both are never negative, and 0 where the policies agree. But on tokens of pi the second
has another mean, E_pi[pi / pi_ref] - 1 - KL(pi || pi_ref), and pi samples just those
tokens whose pi / pi_ref is large. One token that the reference finds very improbable
dominates `objective/loss` and `policy/grad_norm`: both jump by orders of magnitude, while
`objective/kl`, which is k1, does not. As the gradient is clipped, such a step trains on
little else than this token.""",
    6: """\
The scores are paired wrongly. The forward pass has the b chosen completions and then the b
rejected ones:

    scores = (w_1, ..., w_b, l_1, ..., l_b).

`view(2, b)` makes these two rows. `view(b, 2)` makes pairs of neighbours, and its transpose
has the same shape. With b = 32 each pair is now two chosen or two rejected completions of
different prompts. No label says which of these is better, so the loss stays near ln 2 and
`eval/pair_accuracy` near 0.5. A wrong shape raises an error, a wrong order does not.""",
    7: """\
The reference shares the policy's weights. `assign=True` puts the tensors of the state dict
into the reference instead of copying their values, and the optimiser changes these in
place. So pi_ref is pi_old in every rollout,

    k1_t = (log pi_old - log pi_ref)_t = 0,    r_t = 1[t = last] score,

and there is no KL penalty at any beta. `objective/kl` shows it: exactly 0 in every
rollout. In a healthy run it is 0 only in the first one. `reward/mean` then rises faster
than it should, and `eval/reward` falls behind: the reward model is being exploited.""",
    8: """\
V_t is read one position too late, at token t instead of the token before it. It should
predict the return from x and y_<t; here it has seen y_t too. In

    delta_t = r_t + gamma V_(t+1) - V_t

V_t then depends on the action that it is a baseline for, and subtracts from A_t what
token t has earned. The gradient is biased. The critic has an easier task, so
`value/explained_variance` is higher than in a healthy run, and `value/loss` mostly lower,
while `reward/mean` rises more slowly.""",
    9: """\
The rows of the reference are in another order than those of the policy. `inds` is sorted by
length, longest first; the reference gets it sorted by number. So

    h = log pi(y_w|x) - log pi(y_l|x) - (log pi_ref(y'_w|x') - log pi_ref(y'_l|x')),

with the reference of another pair (x', y'): a random offset of ten nats and more. Before
the first step pi is pi_ref, so h must be 0 and the loss ln 2 = 0.69. `eval/loss` is, at
step 0, because the evaluation has the right order; `objective/loss` is not. Each pair still
pushes the right way, but the offset decides how hard: where beta h is far above 0 a pair
is ignored, and far below 0 it gets the full gradient, whatever the policy has learned.""",
    10: """\
The loss has lost its second half. The value of an undesirable completion must be
w_U sigmoid(beta (z0 - u)); here every completion has sigmoid(beta (u - z0)), so the bad ones
are raised like the good ones, and the labels choose only the weight. `eval/margin` shows
it: it stays at 0. The completions were sampled from the policy that the run starts from.
Raising all of them leaves that policy as it is, so `eval/kl` stays small.""",
}


# --- writing a copy ----------------------------------------------------------------------------
def apply(edit: Edit, root: Path) -> None:
    """Replace a text in a file of the copy; a ValueError unless it occurs exactly once."""
    path = root / edit.file
    text = path.read_text()
    count = text.count(edit.old)
    if count != 1:
        raise ValueError(f"{edit.file} has {count} times, not once:\n{edit.old}")
    path.write_text(text.replace(edit.old, edit.new))


def write_copy(exercise: Exercise, folder: Path, healthy: bool = False) -> None:
    """The repository's scripts and what they and the tests need, with the bug unless `healthy`."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    for file in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(file, folder)
    for name in COPIED_FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    edits = exercise.setup if healthy else exercise.setup + exercise.bug
    for edit in edits:
        apply(edit, folder)


# --- running it --------------------------------------------------------------------------------
def train(command: str, folder: Path, metrics: tuple[str, ...]) -> None:
    """Train with a command in the copy, then show where its logs are and how its metrics moved."""
    known_runs = {*folder.glob("runs/*")}
    subprocess.run([sys.executable, *command.split()], cwd=folder, check=True)
    (run_dir,) = {*folder.glob("runs/*")} - known_runs
    print(f"metrics: {run_dir / 'metrics.jsonl'}")
    print(f"samples: {run_dir / 'samples.jsonl'}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    print(summary(rows, metrics))


def summary(rows: list[dict], metrics: tuple[str, ...], num_lines: int = 8) -> str:
    """A table of the metrics at some steps, evenly spaced; evaluations are always among them."""
    spacing = max(1, len(rows) // num_lines)
    lines = ["".join(name.rjust(28) for name in ("step", *metrics))]
    for i, row in enumerate(rows):
        has_evaluation = any(name.startswith("eval/") for name in row)
        if i % spacing == 0 or has_evaluation:
            cells = [f"{row[name]:.4g}" if name in row else "" for name in metrics]
            lines.append("".join(cell.rjust(28) for cell in (str(row["step"]), *cells)))
    return "\n".join(lines)


def solution_text(number: int) -> str:
    """The lines of the bug, why they are wrong, and the test that catches them."""
    exercise, lines = EXERCISES[number], []
    for edit in exercise.bug:
        text = (ROOT / edit.file).read_text()
        line_number = text[: text.index(edit.old)].count("\n") + 1
        lines.append(f"{edit.file}, from line {line_number}:")
        changes = difflib.ndiff(whole_lines(text, edit.old), whole_lines(text, edit.old, edit.new))
        lines += [change.rstrip() for change in changes if not change.startswith("?")]
    lines += ["", SOLUTIONS[number], "", "The test that catches it, in the copy:"]
    lines.append(f"    python -m pytest {path_of_test(exercise)}")
    return "\n".join(lines)


def path_of_test(exercise: Exercise) -> str:
    """Where in tests/ it stands, as pytest wants it."""
    file, _, function = exercise.test.partition("::")
    (path,) = ROOT.glob(f"tests/**/{file}")
    return f"{path.relative_to(ROOT)}::{function}"


def whole_lines(text: str, old: str, new: str | None = None) -> list[str]:
    """The lines of a text in which `old` stands; with `new` in its place, if that is given."""
    start, end = text.index(old), text.index(old) + len(old)
    before = text[:start].rpartition("\n")[2]
    after = "" if old.endswith("\n") else text[end:].partition("\n")[0]
    return (before + (old if new is None else new) + after).splitlines()


def main(
    number: tyro.conf.Positional[int],
    out: Path | None = None,
    healthy: bool = False,
    run: bool = True,
    solution: bool = False,
) -> None:
    """Write a copy of the scripts with a silent bug in it, and train with it.

    Args:
        number: number of the exercise
        out: a new folder for the copy, outside the repository; default: a temporary one
        healthy: leave the bug out
        run: train in the copy; --no-run only writes it
        solution: print the solution, do nothing else
    """
    exercise = EXERCISES[number]
    if solution:
        print(solution_text(number))
        return
    folder = (out or Path(tempfile.mkdtemp(prefix=f"exercise_{number}_"))).resolve()
    if folder.is_relative_to(ROOT):
        raise ValueError(f"--out {folder} lies within the repository")
    write_copy(exercise, folder, healthy)
    print(f"copy: {folder}")
    for command in exercise.commands:
        print(f"in it: python {command}", flush=True)
        if run:
            train(command, folder, exercise.metrics)


if __name__ == "__main__":
    tyro.cli(main)
