"""docs/model_from_checkpoint.py writes what the run itself has saved, to the bit."""

import algorithms
import pytest
from models import save_model
from scripts import short_flags
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from docs import model_from_checkpoint

POLICY = "tiny/arithmetic/policy"
LOGS = ("args.json", "checkpoint.pt", "lock")


def in_4_bits(folder):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(POLICY, quantization_config=config)
    return save_model(folder, model, POLICY)


def larger(folder):
    """With a row of the embedding for each id, and some for none, as a student may have."""
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    return save_model(folder, model, POLICY)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("sft", {}),
        ("grpo", dict(lora_rank=2)),
        ("sft", dict(lora_rank=2, model=in_4_bits)),
        ("rm_bradley_terry", dict(train_layers=1)),
        ("rm_bradley_terry", dict(lora_rank=2)),
        ("ppo_rlhf", {}),
        ("distill", dict(model=larger, teacher=POLICY)),
    ],
    ids="full adapters 4-bits reward-model reward-adapters ppo distill".split(),
)
def test_it_is_the_model_that_the_run_has_saved(name, flags, tmp_path):
    if callable(flags.get("model")):
        flags = flags | dict(model=flags["model"](tmp_path / "model"))
    run_dir = algorithms.run(name, tmp_path, **short_flags(name, **flags))
    model_from_checkpoint.main(run_dir, tmp_path / "out")
    found, saved = (
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*.*") if ok(file)}
        for folder in (tmp_path / "out", run_dir)
    )
    assert found == saved and len(saved) > 3


def ok(file):
    return file.is_file() and file.suffix != ".jsonl" and file.name not in LOGS
