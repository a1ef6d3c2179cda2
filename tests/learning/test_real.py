"""Real models, tokenizers and data through the same code; skipped where they are not at hand."""

import json
import math
import random
from pathlib import Path

import pytest
from models import tiny_model
from transformers import AutoTokenizer

import dpo
import grpo
import kto
import ppo_rlhf
import reinforce
import rm_bradley_terry
import sft
from common.tokens import find_stop_ids
from tiny.arithmetic.reward import last_number

REAL = Path(__file__).parents[3] / "shared" / "real"
pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason=f"no real models and data in {REAL}")
STORIES_MODEL = str(REAL / "models" / "stories260K")


def metrics_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_pretrained_model_fine_tunes_on_real_stories(tmp_path):
    args = sft.Args(
        model=STORIES_MODEL,
        dataset=str(REAL / "data" / "stories"),
        train_split="train[:90%]",
        eval_split="train[90%:]",
        max_length=440,
        batch_size=16,
        micro_batch_size=8,
        epochs=0.4,
        learning_rate=5e-4,
        max_new_tokens=64,
        eval_rows=32,
        eval_samples=4,
        output_dir=str(tmp_path),
    )
    first, *_, last = metrics_of(sft.main(args))
    assert first["eval/loss"] < 2  # it is a storyteller already: log 512 is 6.2
    assert last["eval/loss"] < first["eval/loss"]


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


def test_reinforce_runs_on_real_gsm8k_rows(tmp_path):
    args = reinforce.Args(
        model=STORIES_MODEL,
        dataset=str(REAL / "data" / "gsm8k"),
        prompt_column="question",
        train_split="train[:50]",
        eval_split="test[:8]",
        max_prompt_length=256,
        max_new_tokens=24,
        total_rollouts=2,
        prompts_per_rollout=4,
        group_size=4,
        micro_batch_size=4,
        beta=0.1,
        output_dir=str(tmp_path),
    )
    rows = metrics_of(reinforce.main(args))
    assert len(rows) == 3
    assert rows[0]["eval/reward"] == 0  # it writes stories


@pytest.mark.slow
def test_reward_model_and_ppo_on_real_preferences(tmp_path, capsys):
    politeness = str(REAL / "data" / "politeness")
    args = rm_bradley_terry.Args(
        model=STORIES_MODEL,
        dataset=politeness,
        train_split="train[:50%]",
        max_length=400,
        epochs=2.0,
        batch_size=16,
        micro_batch_size=8,
        learning_rate=5e-4,
        warmup_ratio=0.1,
        output_dir=str(tmp_path),
    )
    rm_dir = rm_bradley_terry.main(args)
    # Of 500, three have equal completions, and one joins its prompt without a space.
    assert "496 rows, dropped" in capsys.readouterr().out
    assert metrics_of(rm_dir)[-1]["eval/pair_accuracy"] >= 0.75

    args = ppo_rlhf.Args(
        model=STORIES_MODEL,
        dataset=politeness,
        reward_model=str(rm_dir),
        max_prompt_length=300,
        max_new_tokens=24,
        prompts_per_rollout=32,
        micro_batch_size=16,
        total_rollouts=6,
        learning_rate=1e-3,
        eval_rows=64,
        output_dir=str(tmp_path),
    )
    first, *_, last = metrics_of(ppo_rlhf.main(args))
    assert last["eval/reward"] > first["eval/reward"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "flags", "accuracy"),
    [
        ("politeness", dict(train_split="train[:50%]", epochs=1.0, learning_rate=5e-4), 0.75),
        # Right and wrong solutions of sums: a storyteller learns these few by heart and no more.
        (
            "gsm8k_solutions",
            dict(train_split="train[:32]", eval_split="train[90%:]", epochs=4.0, max_length=300),
            0.0,
        ),
    ],
)
def test_dpo_on_real_preferences(data, flags, accuracy, tmp_path, capsys):
    args = dpo.Args(
        model=STORIES_MODEL,
        dataset=str(REAL / "data" / data),
        **{"max_length": 400, "learning_rate": 2e-4, **flags},
        beta=0.1,
        batch_size=16,
        micro_batch_size=8,
        eval_rows=48,
        max_new_tokens=24,
        output_dir=str(tmp_path),
    )
    rows = metrics_of(dpo.main(args))
    assert rows[1]["objective/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[-1]["objective/loss"] < 0.6
    assert rows[-1]["eval/pair_accuracy"] >= accuracy
    assert ("longer than --max-length" in capsys.readouterr().out) == (data == "gsm8k_solutions")


@pytest.mark.slow
def test_kto_on_real_preferences_as_labelled_rows(tmp_path):
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        pairs = (REAL / "data" / "politeness" / f"{split}.jsonl").read_text().splitlines()
        rows = []
        for pair in map(json.loads, pairs[:500]):
            rows.append({"prompt": pair["prompt"], "completion": pair["chosen"], "label": True})
            rows.append({"prompt": pair["prompt"], "completion": pair["rejected"], "label": False})
        random.Random(0).shuffle(rows)
        lines = [json.dumps(row) + "\n" for row in rows]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(lines))
    args = kto.Args(
        model=STORIES_MODEL,
        dataset=str(tmp_path / "data"),
        max_length=400,
        epochs=1.0,
        learning_rate=5e-4,
        beta=0.1,
        batch_size=16,
        micro_batch_size=8,
        eval_rows=48,
        max_new_tokens=24,
        output_dir=str(tmp_path / "runs"),
    )
    rows = metrics_of(kto.main(args))
    assert rows[1]["reward/margin"] == 0
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"] - 0.05
    assert rows[-1]["eval/margin"] > 0.5


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


def test_dpo_on_phi3_chats(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(REAL / "tokenizers" / "phi-3-mini")
    tokenizer.save_pretrained(tmp_path / "m")
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "m")
    question = {"role": "user", "content": "Hi."}
    good, bad = ({"role": "assistant", "content": text} for text in ("Hello there.", "What?"))
    rows = {
        "explicit": {"prompt": [question], "chosen": [good], "rejected": [bad]},
        "implicit": {"chosen": [question, good], "rejected": [question, bad]},
    }
    pairs, losses = [], []
    for kind, row in rows.items():
        (tmp_path / kind).mkdir()
        for split in ("train", "test"):
            (tmp_path / kind / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
        args = dpo.Args(
            model=str(tmp_path / "m"),
            dataset=str(tmp_path / kind),
            max_length=48,
            epochs=3.0,
            batch_size=1,
            max_new_tokens=8,
            output_dir=str(tmp_path / "runs"),
        )
        stop_ids = find_stop_ids(args.model, tokenizer)
        pairs += dpo.load_preference_pairs(args, "train", tokenizer, stop_ids)
        losses.append([r["objective/loss"] for r in metrics_of(dpo.main(args))[1:]])
    assert pairs[0].prompt.ids == pairs[1].prompt.ids
    assert tokenizer.decode(pairs[0].prompt.ids).endswith("<|assistant|>")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    for pair in pairs:
        for side, message in ((pair.chosen_ids, good), (pair.rejected_ids, bad)):
            assert side[-1] == end  # the turn's, and not the EOS that is also the padding
            assert tokenizer.decode(side[:-1]).strip() == message["content"]
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[0][-1] < losses[0][0]


def test_gpt2_has_no_pad_and_no_bos():
    tokenizer = AutoTokenizer.from_pretrained(REAL / "tokenizers" / "gpt2")
    eos = tokenizer.eos_token_id
    assert tokenizer.pad_token_id is None
    prompt, completion = sft.encode_pair(tokenizer, "2 + 2 =", " 4", [eos])
    assert prompt == tokenizer("2 + 2 =").input_ids
    assert completion == [*tokenizer(" 4").input_ids, eos]
    with pytest.raises(sft.UnusableRow, match="prompt's last token is another one"):
        sft.encode_pair(tokenizer, "2 + 2 = ", "four", [eos])  # " four"
