"""docs/experiments: pages show what the results hold, and runs, samples and their
numbers are what they should be.
"""

import json
import re
from pathlib import Path

import pytest
from scripts import SCRIPTS

from docs.experiments.lib import metrics, runs, tables
from docs.experiments.lib.experiment import as_json, saved_results
from docs.experiments.lib.metrics import last, late
from docs.experiments.lib.runs import Run, key_of, run_of, runs_of
from docs.experiments.registry import EXPERIMENTS, tables_of


# --- results -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_results_have_each_seed_in_the_form_that_is_written(name):
    experiment, results = EXPERIMENTS[name], EXPERIMENTS[name].results()
    if experiment.keeps_results():
        assert Path(f"docs/results/{name}.json").read_text() == as_json(results) + "\n"
    if not experiment.measure_all:  # which has one run
        both = (results.get("numbers", {}), results.get("curves", {}))
        for of_metrics in [each for by_label in both for each in by_label.values()]:
            seeds = experiment.seeds or runs.SEEDS
            assert {len(of_seeds) for of_seeds in of_metrics.values()} == {len(seeds)}


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if EXPERIMENTS[name].commands])
def test_commands_parse_and_are_those_of_the_results(name):
    commands = EXPERIMENTS[name].commands
    assert saved_results(name)["commands"] == commands
    for command in commands.values():
        for part in (command, *re.findall(r"\{(.*)\}", command)):
            script, *flags = re.sub(r"\{.*\}", "tiny/arithmetic/policy", part).split()
            args = SCRIPTS[script.removesuffix(".py")].parse_args(flags)
            reward_fns = [getattr(args, flag, None) for flag in ("reward_fn", "eval_reward_fn")]
            for spec in re.findall(r"[\w/]+\.py(?=:)", str(reward_fns)):
                assert Path(spec).is_file()


# --- pages -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def made_tables():
    return tables_of(EXPERIMENTS)


@pytest.mark.docs
@pytest.mark.parametrize("page", tables.pages(), ids=str)
def test_pages_have_the_tables_code_and_lines_that_are_generated(page, made_tables):
    """`python -m docs.experiments --redraw` mends them."""
    assert tables.generated(page, made_tables) == page.read_text()


@pytest.mark.docs
def test_every_table_is_on_a_page(made_tables):
    text = "".join(page.read_text() for page in tables.pages())
    assert {name for _, name, *_ in tables.TABLE.findall(text)} == {*made_tables}


# --- runs --------------------------------------------------------------------------------------
SCRIPT = """
import json, sys
from pathlib import Path
from types import SimpleNamespace

def parse_args(words):  # as tyro reads them
    flags = dict(a="0", seed="1", output_dir="runs", model="", reward_fn="")
    for word in " ".join(words).replace("--", "\\n").split("\\n")[1:]:
        name, value = word.replace("=", " ").split()
        flags[name.replace("-", "_")] = value
    return SimpleNamespace(**flags)

if __name__ == "__main__":
    args = parse_args(sys.argv[1:])
    folder = Path(args.output_dir, "run")
    folder.mkdir(parents=True)
    rows = [{"step": 0, "eval/reward": 0.5}, {"step": 1, "x/loss": 2.0}, {"step": 2, "x/loss": 4.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    (folder / "args.json").write_text(json.dumps(vars(args)))
    (folder / "model.safetensors").touch()
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with a script that is quickly done; runs are kept in another one."""
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(runs, "SEEDS", (1, 2))
    root = tmp_path / "root"
    (root / "common").mkdir(parents=True)
    (root / "common/losses.py").write_text("BETA = 1\n")
    (root / "reward.py").write_text("def reward(): return 1\n")
    (root / "policy").mkdir()
    (root / "policy/weights").write_text("1")
    (root / "quick.py").write_text(SCRIPT)
    return root


def flags_of(run):
    return json.loads((run.folder / "args.json").read_text())


COMMAND = "quick.py --a 1 --model policy --reward-fn reward.py:reward"


def test_a_run_is_made_once_whatever_the_spelling_of_its_command(root):
    same = "quick.py  --reward-fn reward.py:reward --model=policy --a 2 --a 1"
    made = runs_of([COMMAND, same], root)
    assert made[COMMAND] == made[same] and len([*runs.RUNS.iterdir()]) == len(runs.SEEDS)
    for seed, run in zip(runs.SEEDS, made[COMMAND], strict=True):
        assert flags_of(run)["a"] == "1" and flags_of(run)["seed"] == str(seed)
        assert run_of(COMMAND, seed, root).folder == run.folder
    others = [(COMMAND, 3), (COMMAND.replace("--a 1", "--a 2"), 1), (COMMAND[:-7], 1)]
    assert len({key_of(*other, root) for other in [(COMMAND, 1), *others]}) == 4


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("quick.py", '"x/loss": 4.0', '"x/loss": 5.0'),
        ("common/losses.py", "1", "2"),
        ("reward.py", "return 1", "return 2"),
        ("policy/weights", "1", "2"),
    ],
)
def test_a_change_to_what_a_run_is_made_of_makes_another_one(root, file, old, new):
    """Numbers from before a fix do not come back, and a comment makes no new run."""
    before = key_of(COMMAND, 1, root)
    text = (root / file).read_text()
    (root / file).write_text(text.replace(old, new))
    assert key_of(COMMAND, 1, root) != before
    (root / file).write_text(text + ("\n# a comment\n" if file.endswith(".py") else ""))
    assert key_of(COMMAND, 1, root) == before


def test_a_command_names_the_model_of_another_run_with_its_seed(root):
    first, second = "quick.py --a 1", "quick.py --a 3 --model {quick.py --a 1}"
    made = runs_of([second, first], root)
    assert [*made] == [second, first]
    for one, other in zip(made[first], made[second], strict=True):
        assert flags_of(other)["model"] == str(one.folder)
        assert flags_of(other)["seed"] == flags_of(one)["seed"]
    assert key_of(second.replace("--a 1", "--a 2"), 1, root) != key_of(second, 1, root)
    assert key_of(second.replace("--a 1", "--a=1"), 1, root) == key_of(second, 1, root)


def test_an_interrupted_run_is_made_again(root):
    run = run_of("quick.py", 1, root)
    (run.folder / "model.safetensors").unlink()
    (run.folder / "left").touch()
    again = run_of("quick.py", 1, root)
    assert (again.folder / "model.safetensors").exists() and not (again.folder / "left").exists()


def test_metrics_of_a_run(tmp_path):
    rows = [{"step": 0, "eval/x": 9.0}, *({"step": i, "a/x": float(i)} for i in range(1, 8))]
    rows.append({"step": 8, "a/x": 0.0, "eval/x": 2.0})
    runs.write_jsonl(tmp_path / "metrics.jsonl", rows)
    run = Run(tmp_path)
    for metric, name, expected in (
        (late("a/x"), "a/x", (4 + 5 + 6 + 7 + 0) / 5),
        (last("eval/x"), "eval/x", 2),
        (metrics.first("eval/x"), "first eval/x", 9),
        (metrics.first("a/x"), "first a/x", 1),
        (metrics.highest("a/x"), "highest a/x", 7),
        (metrics.average("a/x"), "average a/x", 28 / 8),
        (metrics.at("a/x", 3), "a/x at 3", 3),
    ):
        assert (metric.name, metric.of_run(run)) == (name, expected)
    assert [*run.values("eval/x").items()] == [(0, 9.0), (8, 2.0)]


# --- samples -----------------------------------------------------------------------------------
def test_kl_of_samples_reads_them_back_from_the_log(tmp_path):
    """As dpo.py measures it, on the tokens that were sampled."""
    flags = dict(train_split="train[:64]", eval_split="test[:20]", epochs=1.0, micro_batch_size=8)
    run = runs.train(SCRIPTS["dpo"], output_dir=str(tmp_path), learning_rate=2e-3, **flags)
    found = metrics.kl_of_samples(run)
    assert found == pytest.approx(last("eval/kl").of_run(run), abs=1e-4) and found > 0.001
