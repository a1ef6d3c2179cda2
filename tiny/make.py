"""Write the tiny tasks anew: `python tiny/make.py`, from the root of the repository.

Writes the data of the tasks from fixed seeds and trains their policies, the teacher and the
reward model by calling the scripts, as a user would. About four minutes on two CPU cores.
"""

import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

TINY = Path(__file__).parent
sys.path.append(str(TINY.parent))
from common.generation import generate  # noqa: E402
from tiny.reviews import gold  # noqa: E402

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(words: list[str], characters: bool) -> PreTrainedTokenizerFast:
    """One token a character, or one a word, after <bos>."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL + words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    if characters:
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def make_config(folder: Path, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """The configuration of a Llama of 0.44M parameters, and its tokenizer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return config


def train(destination: Path, kind: type, script: str, *flags: str) -> None:
    """Run a script as a user would and keep its model, in bfloat16, and its tokenizer."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, script, "--output-dir", runs, *flags]
        subprocess.run(command, cwd=TINY.parent, check=True)
        (run,) = Path(runs).iterdir()
        shutil.rmtree(destination, ignore_errors=True)
        kind.from_pretrained(run, dtype=torch.bfloat16).save_pretrained(destination)
        AutoTokenizer.from_pretrained(run).save_pretrained(destination)


def sample(folder: Path, prompts: list[str], seed: int) -> list[str]:
    """One completion of at most 40 tokens for each prompt, from a policy at temperature 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequences, _ = generate(
        policy,
        tokenizer(prompts).input_ids,
        max_new_tokens=40,
        temperature=1.0,
        stop_ids=[tokenizer.eos_token_id],
        rng=torch.Generator().manual_seed(seed),
        batch_size=256,
    )
    completions = [completion for _, completion in sequences]
    return tokenizer.batch_decode(completions, skip_special_tokens=True)


# --- arithmetic: the last digit of the sum of five digits -------------------------------------


def demonstrate(digits: list[int], rng: random.Random) -> str:
    """Answer at once, or write the running sums first, each slipped with probability 0.1."""
    if rng.random() < 0.5:
        return f"#{sum(digits) % 10}"
    total, sums = 0, []
    for digit in digits:
        total = (total + digit) % 10
        if rng.random() < 0.1:
            total = (total + rng.randrange(1, 10)) % 10
        sums.append(str(total))
    return ",".join(sums) + f"#{total}"


def make_arithmetic() -> None:
    rng = random.Random(1)
    questions = rng.sample(range(100_000), 6_400 + 500 + 4_000 + 500)
    rows = []
    for question in questions:
        digits = [int(digit) for digit in f"{question:05d}"]
        prompt = "+".join(map(str, digits)) + "="
        answer = str(sum(digits) % 10)
        rows.append((prompt, demonstrate(digits, rng), answer))
    folder = TINY / "arithmetic"
    sft = [{"prompt": prompt, "completion": completion} for prompt, completion, _ in rows]
    rl = [{"prompt": prompt, "answer": answer} for prompt, _, answer in rows]
    write_rows(folder / "sft/train.jsonl", sft[:6_400])
    write_rows(folder / "sft/test.jsonl", sft[6_400:6_900])
    write_rows(folder / "prompts/train.jsonl", rl[6_900:10_900])
    write_rows(folder / "prompts/test.jsonl", rl[10_900:])

    base = folder / "base"  # untrained, so that `python sft.py` has something to start from
    config = make_config(base, make_tokenizer(list("0123456789+=,#"), characters=True))
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    flags = ["--model", str(base), "--dataset", str(folder / "sft")]
    train(folder / "policy", AutoModelForCausalLM, "sft.py", *flags)


def make_teacher() -> None:
    """The result of `python grpo.py`, which `python distill.py` learns from.

    It needs nothing but the policy: PYTHONPATH=tiny python -c "import make; make.make_teacher()"
    """
    train(TINY / "arithmetic/teacher", AutoModelForCausalLM, "grpo.py")


def make_right_and_wrong() -> None:
    """For each prompt the policy's first right sample, preferred to its first wrong one."""
    folder = TINY / "arithmetic"
    for seed, (split, count) in enumerate((("train", 2_000), ("test", 500)), start=1):
        lines = (folder / f"prompts/{split}.jsonl").read_text().splitlines()[:count]
        rows = [json.loads(line) for line in lines]
        draws = itertools.count(1_000 * seed)
        while missing := [row for row in rows if not row.keys() >= {"chosen", "rejected"}]:
            prompts = [row["prompt"] for row in missing]
            completions = sample(folder / "policy", prompts, next(draws))
            for row, completion in zip(missing, completions, strict=True):
                right = completion.rpartition("#")[2] == row["answer"]
                row.setdefault("chosen" if right else "rejected", completion)
        names = ("prompt", "chosen", "rejected", "answer")
        write_rows(
            folder / f"preferences/{split}.jsonl",
            [{name: row[name] for name in names} for row in rows],
        )


# --- reviews: controlled sentiment ------------------------------------------------------------

TITLES = (
    "jaws dune alien heat psycho vertigo fargo gravity inception memento amadeus casablanca rocky "
    "titanic gladiator avatar arrival tenet drive whiplash rebecca notorious spartacus chinatown "
    "brazil network platoon skyfall moonlight parasite"
).split()
HELD_OUT_TITLES = TITLES[-6:]
OPENINGS = (
    "review of {title} :",
    "on {day} i saw {title} .",
    "my thoughts on {title} :",
    "{title} in one paragraph :",
)


def write_review(rng: random.Random) -> str:
    """Two to four different sentences; each slot agrees with the polarity 8 times in 10."""
    kind = rng.random() < 0.5

    def fill(slot: re.Match) -> str:
        words = gold.SLOTS[slot[1]]
        if slot[1] in ("adjective", "verb"):
            half = len(words) // 2  # the kind words stand first
            agrees = rng.random() < 0.8
            words = words[:half] if kind == agrees else words[half:]
        return rng.choice(words)

    sentences: list[str] = []
    length = rng.randint(2, 4)
    while len(sentences) < length:
        sentence = re.sub(r"\{(\w+)\}", fill, rng.choice(gold.TEMPLATES))
        if sentence not in sentences:
            sentences.append(sentence)
    return "".join(f" {sentence} ." for sentence in sentences)


def open_review(titles: list[str], rng: random.Random) -> str:
    return rng.choice(OPENINGS).format(title=rng.choice(titles), day=rng.choice(gold.DAYS))


def make_reviews() -> None:
    rng = random.Random(2)
    folder = TINY / "reviews"
    for split, titles, count in (("train", TITLES[:-6], 4_000), ("test", HELD_OUT_TITLES, 500)):
        rows = [
            {"prompt": open_review(titles, rng), "completion": write_review(rng)}
            for _ in range(count)
        ]
        write_rows(folder / f"sft/{split}.jsonl", rows)
        prompts = [
            opening.format(title=title, day=day)
            for opening in OPENINGS
            for title in titles
            for day in (gold.DAYS if "{day}" in opening else [""])
        ]
        if split == "test":  # one completion a row: enough of them for a precise mean
            prompts *= 8
        rng.shuffle(prompts)
        write_rows(folder / f"prompts/{split}.jsonl", [{"prompt": prompt} for prompt in prompts])

    grammar = " ".join([*gold.TEMPLATES, *OPENINGS])
    words = set(re.sub(r"\{\w+\}", "", grammar).split()) | {".", *TITLES, *gold.DAYS}
    words = words.union(*gold.SLOTS.values())
    with tempfile.TemporaryDirectory() as base:
        config = make_config(Path(base), make_tokenizer(sorted(words), characters=False))
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
        flags = "--learning-rate 3e-3 --epochs 3 --max-new-tokens 40".split()
        flags += ["--model", base, "--dataset", str(folder / "sft")]
        train(folder / "policy", AutoModelForCausalLM, "sft.py", *flags)


def make_preferences() -> None:
    """Pairs of samples of the policy, as a judge with the gold reward and some doubt prefers them.

    The judge prefers a to b with probability sigmoid(4 (gold(a) - gold(b))), the model of Bradley
    and Terry. Pairs of equal gold reward are left out, and those with an empty side.
    """
    rng = random.Random(3)
    folder = TINY / "reviews"
    for seed, (split, count) in enumerate((("train", 2_000), ("test", 500)), start=1):
        lines = (folder / f"prompts/{split}.jsonl").read_text().splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        prompts = [rng.choice(prompts) for _ in range(2 * count)]
        firsts, seconds = (sample(folder / "policy", prompts, 10 * seed + i) for i in (0, 1))
        rows = []
        for prompt, a, b in zip(prompts, firsts, seconds, strict=True):
            difference = gold.score(a) - gold.score(b)
            if a and b and difference != 0:
                a_wins = rng.random() < 1 / (1 + math.exp(-4 * difference))
                chosen, rejected = (a, b) if a_wins else (b, a)
                rows.append({"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"})
        write_rows(folder / f"preferences/{split}.jsonl", rows[:count])


def make_labels() -> None:
    """The completions of those pairs, each by itself, as a judge with some doubt likes them or not.

    True with probability sigmoid(4 gold), shuffled. It needs nothing but the pairs:
    PYTHONPATH=tiny python -c "import make; make.make_labels()"
    """
    rng = random.Random(4)
    for split in ("train", "test"):
        lines = (TINY / f"reviews/preferences/{split}.jsonl").read_text().splitlines()
        rows = []
        for pair in map(json.loads, lines):
            for completion in (pair["chosen"], pair["rejected"]):
                liked = rng.random() < 1 / (1 + math.exp(-4 * gold.score(completion)))
                rows.append({"prompt": pair["prompt"], "completion": completion, "label": liked})
        rng.shuffle(rows)
        write_rows(TINY / f"reviews/labels/{split}.jsonl", rows)


# --- calculator: the sum of three numbers, with a tool -----------------------------------------


def call(numbers: list[int], share: float, rng: random.Random) -> str:
    """The sum by two calls, in this share of the rows; else the sum at once."""
    a, b, c = numbers
    if rng.random() < share:
        return f"?{a}+{b}={a + b};?{a + b}+{c}={a + b + c};#{a + b + c}"
    return f"#{a + b + c}"


def make_calculator() -> None:
    """It needs nothing else: PYTHONPATH=tiny python -c "import make; make.make_calculator()" """
    rng = random.Random(5)
    folder = TINY / "calculator"
    questions = rng.sample(range(90**3), 6_400 + 3_200 + 1_500 + 500)
    numbers = [[10 + q // 8_100, 10 + q // 90 % 90, 10 + q % 90] for q in questions]
    prompts = ["+".join(map(str, of_row)) + "=" for of_row in numbers]
    rl = [
        {"prompt": prompt, "answer": str(sum(of_row))}
        for prompt, of_row in zip(prompts, numbers, strict=True)
    ]
    write_rows(folder / "prompts/train.jsonl", rl[9_600:11_100])
    write_rows(folder / "prompts/test.jsonl", rl[11_100:])
    with tempfile.TemporaryDirectory() as temporary:
        base, able = Path(temporary, "base"), Path(temporary, "able")
        config = make_config(base, make_tokenizer(list("0123456789+=,#?;"), characters=True))
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
        # First all rows call, so that the policy learns to copy. Then one in ten does, so that it
        # seldom calls: with so few from the start it never learns how.
        stages = (
            (base, able, slice(0, 6_400), 1.0, "3", "2e-3"),
            (able, folder / "policy", slice(6_400, 9_600), 0.1, "1", "5e-4"),
        )
        for start, end, rows, share, epochs, learning_rate in stages:
            sft = [
                {"prompt": prompt, "completion": call(of_row, share, rng)}
                for prompt, of_row in zip(prompts[rows], numbers[rows], strict=True)
            ]
            write_rows(Path(temporary, "sft/train.jsonl"), sft)
            write_rows(Path(temporary, "sft/test.jsonl"), sft[:100])
            flags = ["--model", str(start), "--dataset", str(Path(temporary, "sft"))]
            flags += ["--epochs", epochs, "--learning-rate", learning_rate]
            train(end, AutoModelForCausalLM, "sft.py", *flags)


if __name__ == "__main__":
    make_arithmetic()
    make_teacher()
    make_right_and_wrong()
    make_reviews()
    make_preferences()
    make_labels()
    make_calculator()
    reward_model = TINY / "reviews/reward_model"
    train(reward_model, AutoModelForSequenceClassification, "rm_bradley_terry.py")
