"""sft.py reads on from where it has read a conversation: it must learn what each turn by itself
would teach.
"""

from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from random import Random

import pytest
from encoded import message, with_lists
from models import CHAT
from runs import write_splits
from transformers import AutoTokenizer

import sft
from common.tokens import find_stop_ids

REAL = Path(__file__).parents[3] / "shared" / "real" / "tokenizers"
# Any role, tools and calls. Thoughts are dropped once the user goes on, as Qwen3's template does.
DROPS = (
    "{% set ns = namespace(asked=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.asked = messages.index(m) %}{% endfor %}{{ tools | tojson if tools }}"
    "{% for m in messages %}{% set head = {'system': ',', 'tool': '+'}[m.role] or '=' %}{{ head }}"
    "{% if m.role == 'assistant' and loop.index0 < ns.asked %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}"
    "{{ call.function.arguments | tojson }}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
KEEPS = DROPS.replace(".split('</think>')[-1]", "")
OPENS = DROPS.replace("%}={% endif", "%}=#{% endif")  # sampled answers alone begin with a thought
DIGITS, WORDS = ["1", "2,3", "3+4", "5"], ["a film", "the plot", "it was dull", "really"]
PROSE = ["  indented\n\tcode", "Été", "\n\nThe end.", "plain words", "x = 1  # one"]
CASES = {
    "keeps": ("tiny/arithmetic/base", KEEPS, DIGITS),
    "drops": ("tiny/arithmetic/base", DROPS, DIGITS),
    "opens": ("tiny/arithmetic/base", OPENS, DIGITS),
    "reviews": ("tiny/reviews/policy", CHAT, WORDS),
    "gpt2": (REAL / "gpt2", DROPS, PROSE),
    "phi-3": (REAL / "phi-3-mini", None, PROSE),
    # Its header ends with a new line, which merges with one of the answer: test_tokens.py.
    "SmolLM2": (Path("runs/SmolLM2-135M-Instruct"), None, ["Été", *PROSE[3:]]),
}


def load_tokenizer(case):
    source, template, texts = CASES[case]
    if not Path(source).is_dir():
        pytest.skip(f"no {source}")
    tokenizer = AutoTokenizer.from_pretrained(source)
    if template:
        tokenizer.chat_template = template.replace("<eos>", tokenizer.eos_token)
        tokenizer.add_tokens(["<think>", "</think>"])
    if texts is DIGITS:
        tokenizer.add_tokens([*'[]{}": '])
    return tokenizer, texts, find_stop_ids("nothing", tokenizer)


def conversation(rng, texts, end, has_calls):
    """Of 1 to 6 turns, some of which are unusable or of weight 0, think or call a tool."""
    turns = [message("system", rng.choice(texts))] * rng.randint(0, 1)
    for _ in range(rng.randint(1, 6)):
        turns.append(message("user", rng.choice(texts)))
        thought = rng.choice(["", "", f"<think>{rng.choice(texts)}</think>"])
        if has_calls and rng.random() < 0.3:
            call = {"function": {"name": "f", "arguments": {rng.choice("123"): rng.choice(texts)}}}
            turns.append(message("assistant", thought, tool_calls=[call]))
            turns.append(message("tool", rng.choice(texts)))
        answers = 8 * [thought + rng.choice(texts)] + ["", f"{rng.choice(texts)}{end}"]
        turns.append(message("assistant", rng.choice(answers)))
        if rng.random() < 0.2:
            turns[-1]["weight"] = 0
    return turns


def plain_turn(tokenizer, turns, stop_ids, tools):
    """The ids of a prompt and of its answer, the last of the turns, read from the start."""

    def write(messages, **options):
        text = tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, **options)
        return tokenizer(text, add_special_tokens=False).input_ids

    prompt, ids = write(turns[:-1], add_generation_prompt=True), write(turns)
    start, answer = len(commonprefix([prompt, ids])), []
    while not answer or answer[-1] not in stop_ids:
        answer.append(ids[start + len(answer)])
    return ids[:start], answer


def plain_texts(tokenizer, turns, stop_ids, tools, max_length):
    """[ids, which of them are learned] of the turns that are usable and fit, joined where one goes
    on from the one before.
    """
    texts, end = [], tokenizer.eos_token
    for i, turn in enumerate(turns):
        is_spoilt = any(end in before["content"] for before in turns[: i + 1])
        is_empty = not turn["content"] and "tool_calls" not in turn
        if turn["role"] != "assistant" or turn.get("weight") == 0 or is_spoilt or is_empty:
            continue
        prompt, answer = plain_turn(tokenizer, turns[: i + 1], stop_ids, tools)
        if len(prompt + answer) > max_length:
            if not texts:
                return []
            continue
        if not texts or prompt[: len(texts[-1][0])] != texts[-1][0]:
            texts.append(([], []))
        ids, is_learned = texts[-1]
        is_learned += [0] * (len(prompt) - len(ids)) + [1] * len(answer)
        ids[:] = prompt + answer
    return texts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("max_length", [10**6, 40])
@pytest.mark.parametrize("case", CASES)
def test_a_conversation_teaches_what_each_turn_by_itself_would(case, max_length, tmp_path):
    tokenizer, texts, stop_ids = load_tokenizer(case)
    has_calls = "tool_calls" in tokenizer.chat_template and case != "opens"
    rng, rows = Random(1), []
    for _ in range(60):
        rows.append({"messages": conversation(rng, texts, tokenizer.eos_token, has_calls)})
        if has_calls and rng.random() < 0.5:
            rows[-1]["tools"] = [{"1": "2"}]
    args = sft.Args(dataset=write_splits(tmp_path, rows), max_length=max_length)
    found = sft.load_demonstrations(args, "train", tokenizer, stop_ids)
    expected = [
        plain_texts(tokenizer, row["messages"], stop_ids, row.get("tools"), max_length)
        for row in rows
    ]
    expected = [texts for texts in expected if texts]
    assert [[tuple(text) for text in with_lists(row)] for row in found] == expected
    assert len(expected) > 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["keeps", "opens", "SmolLM2"])
@pytest.mark.parametrize("max_length", [10**6, 200])
def test_a_conversation_is_tokenised_once_and_no_further_than_it_fits(
    case, max_length, tmp_path, monkeypatch
):
    """A turn's prompt and its answer are read apart: at most twice the text, and one turn more."""
    tokenizer, texts, stop_ids = load_tokenizer(case)
    turns = [message(("user", "assistant")[i % 2], 9 * texts[-1]) for i in range(128)]
    data, read, call = write_splits(tmp_path, [{"messages": turns}]), [], type(tokenizer).__call__

    def spy(self, text, **options):
        read.append(text)
        return call(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", spy)
    args = sft.Args(dataset=data, max_length=max_length)
    [[(ids, is_learned)]] = sft.load_demonstrations(args, "train", tokenizer, stop_ids)
    num_turns = sum(after > before for before, after in pairwise(is_learned))
    assert num_turns == 64 if max_length > 200 else 0 < num_turns < 10
    text = len(tokenizer.decode(ids))
    assert text < sum(map(len, read)) < 2 * text * (num_turns + 1) / num_turns
