"""Real models, tokenizers and data through the same code; skipped where they are not at hand."""

import json
from pathlib import Path

import pytest
from encoded import encode_pair
from transformers import AutoTokenizer

import sft
from common.tokens import find_stop_ids
from tiny.arithmetic.reward import last_number

REAL = Path(__file__).parents[3] / "shared" / "real"
pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason=f"no real models and data in {REAL}")


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
    prompt, completion = encode_pair(tokenizer, turns[:1], turns[1:], stop_ids)
    assert tokenizer.decode(prompt).endswith("<|assistant|>")
    assert completion[-1] == end
    assert completion.count(end) == 1
    assert tokenizer.decode(completion[:-1]).strip() == "Hello."


def test_gpt2_has_no_pad_and_no_bos():
    tokenizer = AutoTokenizer.from_pretrained(REAL / "tokenizers" / "gpt2")
    eos = tokenizer.eos_token_id
    assert tokenizer.pad_token_id is None
    prompt, completion = encode_pair(tokenizer, "2 + 2 =", " 4", [eos])
    assert prompt == tokenizer("2 + 2 =").input_ids
    assert completion == [*tokenizer(" 4").input_ids, eos]
    with pytest.raises(sft.UnusableRow, match="prompt's last token changes with the completion"):
        encode_pair(tokenizer, "2 + 2 = ", "four", [eos])  # " four"
