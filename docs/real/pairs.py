"""Preference pairs of a model's own samples, labelled by a rule that errs as people do.

    python docs/real/pairs.py runs/SmolLM2-135M-Instruct

Two completions y_1 and y_2 of a prompt have tones s_1 and s_2 (docs/rewards/tone.py). The first is
chosen with the probability of Bradley and Terry's model,

    P(y_1 is chosen) = sigmoid(4 (s_1 - s_2)) ,

so the nearer the two, the more often the label is wrong. Pairs of the same tone are left out.
docs/real/pairs has the rows for rm_bradley_terry.py and dpo.py; docs/real/labels has each side as
a row for kto.py. The licence of the texts is the model's, Apache-2.0.
"""

import json
from pathlib import Path

import torch
import tyro
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM

from common.generation import generate
from common.tokens import encode, find_stop_ids, load_tokenizer
from docs.rewards.tone import tone

FILMS = "docs/real/films"
ROUNDS = {"train": 3, "test": 2}  # pairs per prompt


def main(model: tyro.conf.Positional[str], temperature: float = 0.7, seed: int = 1) -> None:
    """Sample, label and write the pairs."""
    tokenizer = load_tokenizer(model)
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    rng = torch.Generator().manual_seed(seed)
    for split, rounds in ROUNDS.items():
        prompts = [*load_dataset(FILMS, split=split)["prompt"]] * 2 * rounds
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        completion_ids = generate(
            policy,
            [encode(tokenizer, message, add_generation_prompt=True) for message in messages],
            max_new_tokens=40,
            temperature=temperature,
            stop_ids=find_stop_ids(model, tokenizer),
            rng=rng,
            batch_size=48,
        )
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        tones = torch.tensor(tone(prompts, texts))
        half = len(texts) // 2
        first_chosen = torch.sigmoid(4 * (tones[:half] - tones[half:])) > torch.rand(
            half, generator=rng
        )
        pairs, labels = [], []
        for i in range(half):
            if tones[i] == tones[i + half]:
                continue
            chosen, rejected = (i, i + half) if first_chosen[i] else (i + half, i)
            row = {"prompt": prompts[i]}
            pairs.append(row | {"chosen": texts[chosen], "rejected": texts[rejected]})
            labels.append(row | {"completion": texts[chosen], "label": True})
            labels.append(row | {"completion": texts[rejected], "label": False})
        for name, rows in (("pairs", pairs), ("labels", labels)):
            folder = Path("docs/real") / name
            folder.mkdir(exist_ok=True)
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (folder / f"{split}.jsonl").write_text("".join(lines))
        right = [tone([], [p["chosen"]])[0] > tone([], [p["rejected"]])[0] for p in pairs]
        print(f"{split}: {len(pairs)} pairs, {sum(right) / len(pairs):.2f} labelled by their tone")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.splitlines()[0])
