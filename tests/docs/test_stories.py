"""docs/rewards/stories.py by hand, docs/experiments/stories.py on a few rows, docs/stories.md by
the result file. Only the test that trains needs the pretrained model."""

import json
import re
import sys
from pathlib import Path
from statistics import mean

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "experiments"))
import stories

from docs.rewards import stories as rules

REAL = Path(__file__).parents[2] / "shared" / "real"
PAGE = " ".join(Path("docs/stories.md").read_text().split())
RESULTS = Path("docs/results/stories.json")


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


def test_held_out_stories_are_not_trained_on(tmp_path):
    rows = [{"text": f"Story {i} begins. It ends."} for i in range(150)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "train.jsonl").write_text(lines)
    stories.write_data(tmp_path, tmp_path / "data")
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
@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real models and data in {REAL}")
def test_the_whole_command_on_a_few_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(stories, "SEEDS", (1,))
    monkeypatch.setattr(stories, "NUM_COPIES", 1)
    monkeypatch.setattr(stories, "RESULTS", tmp_path)
    monkeypatch.setattr(stories, "insert_tables", lambda: None)
    monkeypatch.setattr(stories, "draw", lambda results: None)
    short = {
        label: command.replace("--epochs 1", "--epochs 0.1").replace(
            "--total-rollouts 40", "--total-rollouts 2"
        )
        for label, command in stories.COMMANDS.items()
    }
    monkeypatch.setattr(stories, "COMMANDS", short)
    model, data = str(REAL / "models" / "stories260K"), str(REAL / "data" / "stories")
    stories.main(stories.Args(model=model, data=data, out=str(tmp_path / "runs")))
    made = json.loads((tmp_path / "stories.json").read_text())
    assert made["tables"].keys() == json.loads(RESULTS.read_text())["tables"].keys()
    for label in short:
        assert len(made["numbers"][label]["friend"]) == 1
    (run,) = (tmp_path / "runs" / "friend").glob("grpo__1__*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # `measure` samples the same completions as the last evaluation.
    assert made["numbers"]["friend"]["friend"] == [round(rows[-1]["eval/reward"], 4)]


# --- the results --------------------------------------------------------------------------------
def test_the_table_follows_from_the_numbers():
    made = json.loads(RESULTS.read_text())
    assert made["commands"] == stories.COMMANDS
    for row in made["tables"]["stories"]["rows"]:
        friends = made["numbers"][row[0]]["friend"]
        assert len(friends) == len(stories.SEEDS)
        told = f"{mean(friends):.2f} ({min(friends):.2f} to {max(friends):.2f})"
        assert row[1] in (told, f"{mean(friends):.2f}")


def test_one_rule_is_hacked_and_a_kl_holds_it():
    """On every seed."""
    numbers = json.loads(RESULTS.read_text())["numbers"]
    start, hacked, held = (numbers[label] for label in ("SFT", stories.HACKED, stories.HELD))
    assert min(numbers["friend"]["friend"]) > max(start["friend"]) + 0.4
    assert min(hacked["happy words"]) > max(held["happy words"]) > min(held["happy words"])
    assert min(held["happy words"]) > max(start["happy words"])
    assert max(hacked["distinct pairs"]) < 0.5
    assert min(held["distinct pairs"]) > 0.8


def test_the_page_shows_the_flags_that_were_run():
    for command in stories.COMMANDS.values():
        for flag in ("--beta", "--reward-fn", "--epochs", "--learning-rate", "--total-rollouts"):
            for value in re.findall(rf"{flag} (\S+)", command):
                assert f"{flag} {value}" in PAGE


def test_numbers_in_the_text():
    numbers = json.loads(RESULTS.read_text())["numbers"]

    def told(label, quantity, digits=2):
        return f"{mean(numbers[label][quantity]):.{digits}f}"

    friends = [told(label, "friend") for label in ("SFT", "friend")]
    assert "{} of the stories have a friend before and {} after".format(*friends) in PAGE
    assert f"64 tokens come to hold {told(stories.HACKED, 'happy words', 0)} happy words" in PAGE
    pairs = [told(label, "distinct pairs") for label in ("SFT", stories.HACKED)]
    assert "distinct pairs fall from {} to {}".format(*pairs) in PAGE
    logprobs = [told(label, "log-prob") for label in ("SFT", stories.HACKED)]
    assert "from {} to {} nats per token".format(*logprobs) in PAGE
    held, start = told(stories.HELD, "happy words", 1), told("SFT", "happy words")
    assert f"gives {held} happy words per story instead of {start}" in PAGE
    kls = [told(label, "KL", 0) for label in (stories.HELD, stories.HACKED)]
    assert "ends at {} nats per completion; without the penalty it is {}".format(*kls) in PAGE
    for name in ("before", "after"):
        assert max(numbers[f"ends within {stories.LONG} tokens"][name]) <= 0.01
    losses = [mean(numbers["held-out loss"][name]) for name in ("before", "after")]
    assert "{:.2f} falls to {:.2f}".format(*losses) in PAGE
