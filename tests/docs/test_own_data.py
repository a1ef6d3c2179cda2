"""docs/data.md: each script reads the line that its table shows, and what was trained is used."""

import json
import re
from pathlib import Path

import algorithms
import pytest
import torch
from models import save_model
from scripts import SCRIPTS, short_flags
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny.reviews.gold import grammatical

pytestmark = pytest.mark.docs

PAGE = Path("docs/data.md").read_text()
TABLE = re.findall(r"^\| (`\w+\.py`.*?) \| `(\{.*?\})` \|$", PAGE, re.MULTILINE)
LINES = {name: line for names, line in TABLE[::-1] for name in re.findall(r"`(\w+)\.py`", names)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_reads_its_line(name, tokenizer, tmp_path, monkeypatch):
    rows = [json.loads(LINES[name])] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # It would drop rows with characters that the tokenizer does not know.
    monkeypatch.setattr("common.tokens.check_ids", lambda *_: None)
    model = AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy")
    folder = save_model(tmp_path / "model", model, tokenizer)
    flags = dict(model=folder, teacher=folder)
    flags |= dict(dataset=str(tmp_path / "rows.jsonl"), train_split="train")
    flags |= dict(eval_split="train[:2]", critic_init="sft")
    if name == "ppo_rlhf":
        flags["reward_fn"] = ["tiny/arithmetic/reward.py:last_number"]
    if name == "grpo_tools":
        flags["environment"] = "tiny/calculator/calculator.py:calculator"
        flags["reward_fn"] = "tiny/calculator/calculator.py:right"
    algorithms.run(name, tmp_path, **short_flags(name, **flags))


def test_the_code_that_uses_a_run(tmp_path, capsys):
    """After a run that changes next to nothing: the policy of the reviews, with a chat template."""
    policy = "tiny/reviews/policy"
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    tokenizer.chat_template += "{{ eos_token if message.role == 'assistant' else ' ' }}{% endfor %}"
    folder = save_model(tmp_path / "chat", AutoModelForCausalLM.from_pretrained(policy), tokenizer)
    flags = dict(model=folder, dataset="tiny/reviews/sft", learning_rate=1e-9)
    run = algorithms.run("sft", tmp_path, chat=True, **flags)

    code = PAGE.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 10
    code = re.sub(r'run = ".*"', f'run = "{run}"', code)
    code = code.replace("What is 25 + 60?", "review of jaws :").replace("=24", "=60")
    capsys.readouterr()
    torch.manual_seed(1)
    exec(code, {})
    review = capsys.readouterr().out.strip()
    assert grammatical([""], [review]) == [1.0], review
