"""The model of a run at its last checkpoint: of a run that was stopped, or that still goes on.

    python docs/model_from_checkpoint.py RUN FOLDER

FOLDER gets what the run would have saved then, of PPO the policy. Start it where the run started.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.checkpoint import state_dict as dcp
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the root of the checkout

from common.tokens import find_stop_ids
from rm_bradley_terry import load_classifier, save_model
from runtime.adapters import add_adapters
from runtime.model import load_model, load_tokenizer, shard
from runtime.saving import CHECKPOINT_OPTIONS


def main(run: Path, folder: Path) -> None:
    args = SimpleNamespace(**json.loads((run / "args.json").read_text()))
    state = torch.load(run / "checkpoint.pt", weights_only=True)  # no lock: the run may go on
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(args.model, args.chat_template_kwargs)
    stop_ids = find_stop_ids(args.model, tokenizer)
    if "model" in state:  # of rm_bradley_terry.py
        model = load_classifier(args, tokenizer, stop_ids, device)
        model.config.score_mean = state["score_mean"]  # of its last evaluation
    else:
        model = load_model(AutoModelForCausalLM, args.model, tokenizer, positions=1)
        if teacher := getattr(args, "teacher", None):  # see distill.py
            stop_ids = [*dict.fromkeys(stop_ids + find_stop_ids(teacher, load_tokenizer(teacher)))]
            theirs = AutoConfig.from_pretrained(teacher).get_text_config().vocab_size
            model.resize_token_embeddings(min(theirs, model.get_input_embeddings().num_embeddings))
        add_adapters(model, args.lora_rank, args.seed)
        shard(model, device)
    weights, _ = state["model" if "model" in state else "policy"]
    if dcp.set_model_state_dict(model, weights, options=CHECKPOINT_OPTIONS).unexpected_keys:
        raise ValueError(f"{run}: its weights are not those of its --model, {args.model}")
    save_model(folder, model, tokenizer, stop_ids)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
