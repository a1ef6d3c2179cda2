"""docs/model_from_checkpoint.py writes what the run itself has saved, to the bit."""

import algorithms
import pytest
from models import save_model
from scripts import short_flags
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from docs import model_from_checkpoint

POLICY = "tiny/arithmetic/policy"
CASES = {
    "all weights": ("sft", {}),
    "adapters": ("grpo", dict(lora_rank=2)),
    "4 bits": ("sft", dict(lora_rank=2)),
    "reward model": ("rm_bradley_terry", dict(train_layers=1)),
    "reward model, adapters": ("rm_bradley_terry", dict(lora_rank=2)),
    "of PPO": ("ppo_rlhf", {}),
    "larger than its teacher": ("distill", dict(teacher=POLICY)),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_that_the_run_has_saved(case, tmp_path):
    name, flags = CASES[case]
    config = None
    if case == "4 bits":
        pytest.importorskip("bitsandbytes")
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    if case in ("4 bits", "larger than its teacher"):
        model = AutoModelForCausalLM.from_pretrained(POLICY, quantization_config=config)
        if config is None:
            model.resize_token_embeddings(model.config.vocab_size + 8)
        flags = flags | dict(model=save_model(tmp_path / "model", model, POLICY))
    run_dir = algorithms.run(name, tmp_path, **short_flags(name, **flags))
    model_from_checkpoint.main(run_dir, tmp_path / "found")
    files = [file for file in (tmp_path / "found").rglob("*.*") if file.is_file()]
    assert len(files) > 3
    for file in files:
        saved = run_dir / file.relative_to(tmp_path / "found")
        assert file.read_bytes() == saved.read_bytes(), file
