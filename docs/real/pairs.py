"""Preference pairs of a model's own samples, labelled by a rule that errs as people do, or a judge.

    python -m docs.real.pairs runs/SmolLM2-135M-Instruct
    JUDGE=... python -m docs.real.pairs MODEL --judge --prompts FOLDER --output-dir runs/judged

Of four completions of a prompt the one of the highest and the one of the lowest tone become a pair
(docs/rewards/tone.py), with tones s_1 > s_2. The label errs as Bradley and Terry's model says,

    P(y_1 is chosen) = sigmoid(2 (s_1 - s_2)) ,

so the nearer the two, the more often it is wrong. Groups of a single tone are left out. With
--judge a language model's grades are taken as they are (docs/rewards/judge.py). The folder pairs
has the rows for rm_bradley_terry.py and dpo.py; labels has each side as a row for kto.py. The
licence of the texts is the model's, Apache-2.0.
"""

import json
from pathlib import Path

import torch
import tyro
from datasets import load_dataset
from transformers import AutoModelForCausalLM

from common.generation import generate
from common.tokens import find_stop_ids
from runtime.model import load_tokenizer
from docs.experiments.lib.sampling import encode_prompts
from docs.rewards.judge import grade
from docs.rewards.tone import tone

GROUP_SIZE = 4
PAIRS = {"train": 5, "test": 2}  # per prompt


def main(
    model: tyro.conf.Positional[str],
    judge: bool = False,
    prompts: str = "docs/real/films",
    output_dir: Path = Path("docs/real"),
    max_new_tokens: int = 40,
    temperature: float = 0.7,
    seed: int = 1,
) -> None:
    """Sample, label and write the pairs.

    Args:
        model: folder or hub name; it writes the completions
        judge: labels are by the grades of the model that JUDGE names
        prompts: a dataset with a column `prompt`
        output_dir: gets the folders pairs and labels
        max_new_tokens: of a completion
        temperature: of the samples
        seed: of the samples and of the rule's errors
    """
    if judge and output_dir == Path("docs/real"):  # whose pairs the pages are about
        raise ValueError("--judge needs another folder: --output-dir")
    tokenizer = load_tokenizer(model)
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    rng = torch.Generator().manual_seed(seed)
    for split, pairs_per_prompt in PAIRS.items():
        texts_of_prompts = [*load_dataset(prompts, split=split)["prompt"]] * pairs_per_prompt
        messages = [[{"role": "user", "content": prompt}] for prompt in texts_of_prompts]
        prompt_ids = encode_prompts(tokenizer, messages)
        sequences, _ = generate(
            policy,
            [ids for ids in prompt_ids for _ in range(GROUP_SIZE)],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop_ids=find_stop_ids(model, tokenizer),
            rng=rng,
            batch_size=48,
        )
        completion_ids = [completion for _, completion in sequences]
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        asked = [prompt for prompt in messages for _ in range(GROUP_SIZE)]
        scores = grade(asked, texts) if judge else tone(asked, texts)
        scores = torch.tensor(scores).view(-1, GROUP_SIZE)
        gaps = scores.max(dim=1).values - scores.min(dim=1).values
        is_right = torch.sigmoid(2 * gaps) > torch.rand(len(gaps), generator=rng)
        is_right |= judge
        pairs, labels = [], []
        for i, prompt in enumerate(texts_of_prompts):
            if gaps[i] == 0:
                continue
            group = texts[i * GROUP_SIZE : (i + 1) * GROUP_SIZE]
            chosen, rejected = group[scores[i].argmax()], group[scores[i].argmin()]
            if not is_right[i]:
                chosen, rejected = rejected, chosen
            pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
            labels.append({"prompt": prompt, "completion": chosen, "label": True})
            labels.append({"prompt": prompt, "completion": rejected, "label": False})
        for name, rows in (("pairs", pairs), ("labels", labels)):
            folder = output_dir / name
            folder.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (folder / f"{split}.jsonl").write_text("".join(lines))
        share = is_right[gaps > 0].float().mean()
        print(f"{split}: {len(pairs)} pairs, {share:.2f} labelled by their scores")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.splitlines()[0])
