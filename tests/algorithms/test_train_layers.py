"""rm_bradley_terry.py --train-layers: the head and the last layers, the rest frozen."""

from functools import partial

import algorithms
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from common.model import transformer_layers
from rm_bradley_terry import Args, load_classifier

run = partial(algorithms.run, "rm_bradley_terry", epochs=0.5)  # two steps


def load(num_layers):
    args = Args(train_layers=num_layers)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return load_classifier(args, tokenizer, [tokenizer.eos_token_id], torch.device("cpu"))


@pytest.mark.parametrize("num_layers", [0, 1, None])
def test_only_the_head_and_the_last_layers_move_and_have_moments(tmp_path, num_layers, capsys):
    run_dir = run(tmp_path, train_layers=num_layers)
    start = load(num_layers)
    end = load_file(run_dir / "model.safetensors")
    layers = transformer_layers(start)
    trained = {"score.weight"}
    if num_layers is None:
        trained = {name for name, _ in start.named_parameters()}
    else:
        last = range(len(layers) - num_layers, len(layers))
        for name, _ in start.named_parameters():
            if any(f".layers.{i}." in name for i in last):
                trained.add(name)
    moved = {name for name, p in start.named_parameters() if not torch.equal(p, end[name])}
    assert moved == trained
    _, moments = torch.load(run_dir / "checkpoint.pt", weights_only=True)["model"]
    assert moments["state"].keys() == trained
    count = sum(p.numel() for name, p in start.named_parameters() if name in trained)
    assert f"{count:,} of them trained" in capsys.readouterr().out


def test_more_layers_than_the_model_has_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--train-layers 3: there are 2 layers"):
        run(tmp_path, train_layers=3)
