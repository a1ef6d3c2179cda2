"""docs/rewards/stories.py by hand, and the experiment on a few rows. The test that trains needs the
pretrained model."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from docs.experiments import stories
from docs.experiments.lib import runs
from docs.experiments.lib.experiment import saved_results
from docs.rewards import stories as rules


# --- the rules ----------------------------------------------------------------------------------
def test_friend():
    texts = ["He met a Friend.", '"Friends!" they said.', "A friendly dog.", ""]
    assert rules.friend([], texts) == [1, 1, 0, 0]


def test_happy_words_count_each_occurrence():
    texts = ["Happy, happy and happy.", "They laughed and had fun.", "Unhappy.", ""]
    assert rules.happy_words([], texts) == [3, 2, 0, 0]


def test_distinct_pairs():
    # happy-and twice, and-happy twice: 2 different pairs of 4.
    texts = ["happy and happy and happy", "one two three", "One", ""]
    assert rules.distinct_pairs([], texts) == [2 / 4, 1, 0, 0]


# --- the experiment -----------------------------------------------------------------------------
def test_split_story():
    text = 'Tom said, "Hi!" Sue left. Bye.'
    assert stories.split_story(text) == ('Tom said, "Hi!"', " Sue left. Bye.")
    assert stories.split_story("Once.\nThen it ended.") == ("Once.", "\nThen it ended.")
    assert stories.split_story("A single sentence.") is None


def test_held_out_stories_are_not_trained_on(tmp_path, monkeypatch):
    rows = [{"text": f"Story {i} begins. It ends."} for i in range(150)]
    runs.write_jsonl(tmp_path / "stories.jsonl", rows)
    monkeypatch.setattr(stories, "STORIES", tmp_path / "stories.jsonl")
    monkeypatch.setattr(stories, "DATA", tmp_path / "data")
    stories.write_data()
    splits = {}
    for split in ("train", "test"):
        text = (tmp_path / "data" / f"{split}.jsonl").read_text()
        splits[split] = [json.loads(line)["prompt"] for line in text.splitlines()]
    assert len(splits["train"]) == 50
    assert len(splits["test"]) == 400
    assert len(set(splits["test"])) == 100
    assert not set(splits["train"]) & set(splits["test"])


def test_a_sample_fits_into_a_cell_of_a_table():
    assert stories.in_a_cell("He said:\n`a | b`") == "`He said: 'a / b'`"


@pytest.mark.slow
@pytest.mark.skipif(not stories.MODEL.is_dir(), reason=f"there is no {stories.MODEL}")
def test_the_whole_experiment_on_a_few_steps(tmp_path, monkeypatch):
    shorter = {
        str(stories.DATA): str(tmp_path / "data"),
        "--epochs 1 ": "--epochs 0.1 ",
        "--total-rollouts 40": "--total-rollouts 2",
    }
    commands = {}
    for label, command in stories.COMMANDS.items():
        for old, new in shorter.items():
            command = command.replace(old, new)
        commands[label] = command
    monkeypatch.setattr(stories, "COMMANDS", commands)
    monkeypatch.setattr(stories, "SFT", commands["SFT"])
    monkeypatch.setattr(stories, "DATA", tmp_path / "data")
    monkeypatch.setattr(stories, "NUM_COPIES", 1)
    monkeypatch.setattr(runs, "SEEDS", (1,))
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    # In this process, which has these values.
    monkeypatch.setattr(runs, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    functions = (stories.tables, stories.draw, stories.measure_seed, stories.find_runs)
    experiment = runs.experiment_of_runs("stories", commands, *functions)
    made = {"commands": commands} | experiment.measure()
    saved = saved_results("stories")
    assert experiment.tables(made).keys() == experiment.tables(saved).keys()
    assert experiment.draw(made).keys() == experiment.draw(saved).keys()
    # `measure_seed` samples the same completions as the last evaluation.
    (run,) = runs.runs_of([commands["friend"]])[commands["friend"]]
    (measured,) = made["numbers"]["friend"]["a friend"]
    assert measured == pytest.approx(run.evaluations[-1]["eval/reward"], abs=1e-5)
