"""Real models, tokenizers and data through the same code; skipped where they are not at hand."""

import json
from pathlib import Path

import pytest
from reviews import dataset
from runs import metrics_of
from transformers import AutoTokenizer

import dpo
import grpo
import sft
from common.tokens import find_stop_ids
from tiny.arithmetic.reward import last_number

REAL = Path(__file__).parents[3] / "shared" / "real"
pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason=f"no real models and data in {REAL}")
STORIES_MODEL = str(REAL / "models" / "stories260K")


def test_grpo_runs_on_real_gsm8k_rows(tmp_path):
    args = grpo.Args(
        model=STORIES_MODEL,
        dataset=str(REAL / "data" / "gsm8k"),
        prompt_column="question",
        train_split="train[:64]",
        max_prompt_length=200,
        max_new_tokens=24,
        total_rollouts=2,
        prompts_per_rollout=4,
        group_size=4,
        num_minibatches=2,
        micro_batch_size=4,
        eval_rows=8,
        mask_truncated=True,
        output_dir=str(tmp_path),
    )
    run_dir = grpo.main(args)
    rows = metrics_of(run_dir)
    assert len(rows) == 3
    assert all("eval/accuracy" in row for row in (rows[0], rows[-1]))


def test_gsm8k_answers_reward_themselves():
    lines = (REAL / "data" / "gsm8k" / "test.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    finals = [f"The answer is {answer.split('####')[1].strip()}." for answer in answers]
    assert set(last_number([], finals, answers)) == {1.0}
    wrong = [f"The answer is {answer.split('####')[1].strip()}1." for answer in answers]
    assert set(last_number([], wrong, answers)) == {0.0}


def test_phi3_chat_ends_a_turn_at_its_end_token():
    tokenizer = AutoTokenizer.from_pretrained(REAL / "tokenizers" / "phi-3-mini")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    stop_ids = find_stop_ids(str(REAL), tokenizer)
    assert stop_ids == sorted([tokenizer.eos_token_id, end])
    prompt, completion = sft.encode_pair(tokenizer, turns[:1], turns[1:], stop_ids)
    assert tokenizer.decode(prompt).endswith("<|assistant|>")
    assert completion[-1] == end
    assert completion.count(end) == 1
    assert tokenizer.decode(completion[:-1]).strip() == "Hello."


def test_pairs_of_phi3_chats(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(REAL / "tokenizers" / "phi-3-mini")
    question = {"role": "user", "content": "Hi."}
    good, bad = ({"role": "assistant", "content": text} for text in ("Hello there.", "What?"))
    rows = [{"prompt": [question], "chosen": [good], "rejected": [bad]}]
    rows += [{"chosen": [question, good], "rejected": [question, bad]}]
    pairs, stop_ids = [], find_stop_ids(str(REAL), tokenizer)
    for row in rows:
        args = dpo.Args(dataset=dataset(tmp_path, [row]), max_length=48)
        pairs += dpo.load_preference_pairs(args, "train", tokenizer, stop_ids)
    assert pairs[0].prompt.ids == pairs[1].prompt.ids
    assert tokenizer.decode(pairs[0].prompt.ids).endswith("<|assistant|>")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    for pair in pairs:
        for side, message in ((pair.chosen_ids, good), (pair.rejected_ids, bad)):
            assert side[-1] == end  # the turn's, and not the EOS that is also the padding
            assert tokenizer.decode(side[:-1]).strip() == message["content"]


def test_gpt2_has_no_pad_and_no_bos():
    tokenizer = AutoTokenizer.from_pretrained(REAL / "tokenizers" / "gpt2")
    eos = tokenizer.eos_token_id
    assert tokenizer.pad_token_id is None
    prompt, completion = sft.encode_pair(tokenizer, "2 + 2 =", " 4", [eos])
    assert prompt == tokenizer("2 + 2 =").input_ids
    assert completion == [*tokenizer(" 4").input_ids, eos]
    with pytest.raises(sft.UnusableRow, match="prompt's last token is another one"):
        sft.encode_pair(tokenizer, "2 + 2 = ", "four", [eos])  # " four"
