"""docs/rewards/stories.py by hand, and what the experiment makes of stories."""

from runs import read

from docs.experiments.studies import stories
from docs.experiments.lib import runs
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
        splits[split] = [row["prompt"] for row in read(tmp_path / "data" / f"{split}.jsonl")]
    assert len(splits["train"]) == 50
    assert len(splits["test"]) == 400
    assert len(set(splits["test"])) == 100
    assert not set(splits["train"]) & set(splits["test"])
