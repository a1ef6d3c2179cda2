"""docs/one_card.md: its commands, with small numbers, on SmolLM2-135M-Instruct."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from peft import PeftModel
from plain import plain_logprobs
from scripts import SCRIPTS, short_flags
from transformers import AutoModelForCausalLM

MODEL = "runs/SmolLM2-135M-Instruct"
SMALL = dict(train_split="train[:4]", eval_split="train[4:6]", epochs=1.0, batch_size=2)
SMALL |= dict(max_new_tokens=6, eval_samples=1, total_rollouts=1, prompts_per_rollout=2)
SMALL |= dict(group_size=2, generation_batch_size=4, learning_rate=1e-3)


@pytest.mark.docs
@pytest.mark.skipif(not Path(MODEL).exists(), reason="python docs/real/unpack.py " + MODEL)
def test_the_last_adapter_has_what_all_stages_taught(tmp_path):
    rule = "def right(prompts, **_): return [float(i % 2) for i in range(len(prompts))]"
    (tmp_path / "rule.py").write_text(rule)
    ours = {"$MODEL": MODEL, "rule.py:right": f"{tmp_path}/rule.py:right"}
    ours |= {
        f"{rows}.jsonl": "docs/real/sums/train.jsonl" for rows in ("demonstrations", "prompts")
    }
    ours["pairs.jsonl"] = "docs/real/pairs/train.jsonl"
    page = Path("docs/one_card.md").read_text().replace("\\\n", "")
    for name, words in re.findall(r"^    python (\w+)\.py (.*)", page, re.MULTILINE):
        args = SCRIPTS[name].parse_args([ours.get(word, word) for word in shlex.split(words)])
        small = short_flags(name, **SMALL)
        run_dir = SCRIPTS[name].main(replace(args, output_dir=str(tmp_path), **small))
        ours[f"runs/{name}__1__..."] = str(run_dir)
    served = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(MODEL), run_dir / "adapter"
    )
    saved = AutoModelForCausalLM.from_pretrained(run_dir)
    sequence = list(range(100, 120)), list(range(200, 210))
    found, expected = (plain_logprobs(model, *sequence)[0] for model in (served, saved))
    assert (found - expected).abs().max() < 1e-3
