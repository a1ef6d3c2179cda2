"""The three scripts that sample read prompts alike: what cannot be used is dropped and counted."""

import json

import pytest
from scripts import SCRIPTS
from transformers import AutoTokenizer

POLICY = "tiny/arithmetic/policy"
SAMPLING = ["reinforce", "ppo_rlhf", "grpo"]
ROWS = [
    {"prompt": "1+2=", "answer": "3"},
    {"prompt": "", "answer": "3"},
    {"prompt": "1+2+3+4+5=", "answer": "15"},
    {"prompt": "2+2=", "answer": "4"},
    {"prompt": None, "answer": "3"},
    {"prompt": " \n", "answer": "3"},
]


@pytest.mark.parametrize("name", SAMPLING)
def test_empty_and_long_prompts_are_dropped_and_counted(name, tmp_path, capsys):
    script = SCRIPTS[name]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    args = script.Args(dataset=str(tmp_path), max_prompt_length=5)  # <bos> and four characters
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    prompts = script.load_prompts(args, "train", tokenizer)
    assert [prompt.text for prompt in prompts] == ["1+2=", "2+2="]
    assert [prompt.columns for prompt in prompts] == [{"answer": "3"}, {"answer": "4"}]
    assert [len(prompt.ids) for prompt in prompts] == [5, 5]
    assert capsys.readouterr().out == (
        "train: 2 of 6 rows; dropped 3 empty, first ''; "
        "dropped 1 longer than --max-prompt-length 5, first '1+2+3+4+5='\n"
    )
