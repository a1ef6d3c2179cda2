"""`generate` of common/generation.py by a vLLM server that reads the same disk: docs/sampler.md."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, repeat
from pathlib import Path
from urllib.request import HTTPError, Request, urlopen

import torch
from torch.distributed.checkpoint import state_dict as dcp
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from common.logprobs import completion_logprobs
from runtime.processes import RANK, all_gather, from_rank_0
from runtime.saving import save_adapter

SERVER, FOLDER = "http://localhost:8000", Path("runs/served")


@torch.no_grad()
def generate(model, prompts, *, max_new_tokens, temperature, stop_ids, rng, batch_size=None):
    """As in common/generation.py, but the server chooses how many it samples at a time."""
    body = dict(max_tokens=max_new_tokens, temperature=temperature)
    body |= dict(top_p=1, top_k=0, min_p=0, repetition_penalty=1)  # the whole distribution
    body |= dict(stop_token_ids=stop_ids, ignore_eos=True, logprobs=0, return_token_ids=True)
    requests, sampled = [], []
    prompts = [list(prompt) for prompt in prompts]
    for prompt, equal in groupby(prompts):
        seed = torch.randint(2**62, [], generator=rng).item()  # the server adds 0, 1, ... to it
        requests.append(body | dict(prompt=prompt, n=len([*equal]), seed=seed))
    served = send(model)
    if RANK == 0:
        requests = [served | request for request in requests]
        with ThreadPoolExecutor(len(requests)) as pool:
            for answer in pool.map(ask, repeat("v1/completions"), requests):
                sampled += sorted(answer["choices"], key=lambda choice: choice["index"])
    sampled = all_gather(sampled)
    completions = [choice["token_ids"] for choice in sampled]
    sequences = list(zip(prompts, completions, strict=True))
    rows = [torch.tensor(choice["logprobs"]["token_logprobs"]) for choice in sampled]
    logprobs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    if temperature > 0:  # has the server these weights? k3 of one completion, nats per token
        ours = completion_logprobs(model, sequences[:1], torch.tensor([0]), temperature)[0]
        log_ratio = (ours - logprobs[0, : len(ours)]).double()
        kl = (log_ratio.expm1() - log_ratio).mean().item()
        if RANK == 0 and not kl < model.largest_kl:
            raise RuntimeError(f"{SERVER}: other weights or another --logprobs-mode, k3 {kl:.2g}")
    return sequences, logprobs


def send(model):
    """To the server, through the folder: the adapter alone if there is one and the server takes
    it, else all weights, if they have changed. Returns the name under which it serves them.
    """
    server = from_rank_0(RANK == 0 and ask("server_info?config_format=json")["vllm_config"])
    dtype, served = server["model_config"]["dtype"], server["model_config"]["model"]
    is_exact = dtype == "torch.float32" and model.device.type == "cpu"
    model.largest_kl = 1e-6 if is_exact else 0.3  # in bfloat16 0.06 was seen
    if hasattr(model, "peft_config") and server["lora_config"]:
        send_adapter(model)
        return {"model": "policy"}
    if hasattr(model, "peft_config") and dtype != "torch.float32":
        why = "merged adapters would be rounded, and much of what they have learned lost"
        raise ValueError(f"{SERVER} in {dtype}: {why}: vllm serve with --enable-lora")
    weights = whole_weights(model)  # gathered by all ranks
    if RANK == 0:
        send_weights(model, weights, served)
    return {"model": served}


def send_adapter(model):
    """A and B replace those of the last call."""
    folder = FOLDER / "adapter"
    save_adapter(model, folder)  # all ranks
    if RANK == 0:
        replaced = {"lora_name": "policy", "load_inplace": True}
        ask("v1/load_lora_adapter", replaced | {"lora_path": str(folder.resolve())})
        ask("reset_prefix_cache", {})


def send_weights(model, weights, served):
    hashes = [torch.hash_tensor(weight).item() for weight in weights.values()]
    if hashes == getattr(model, "hashes_sent", None):
        return
    if Path(served).resolve() != FOLDER.resolve():
        raise ValueError(f"{SERVER} serves {served}, not {FOLDER}")
    ours, theirs = model.config.get_text_config(), AutoConfig.from_pretrained(FOLDER)
    for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers"):
        if getattr(ours, name) != getattr(theirs.get_text_config(), name):
            raise ValueError(f"{FOLDER} is of another model: its {name} differs")
    write(model, weights)
    ask("collective_rpc", {"method": "reload_weights"})
    ask("reset_prefix_cache", {})
    model.hashes_sent = hashes


def whole_weights(model):
    """On rank 0, by their names in a checkpoint: adapters are merged, a tied head is a copy."""
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp.get_model_state_dict(model, options=options)
    for name in [name for name in weights if ".start." in name]:  # the adapter before training
        del weights[name]
    for name in [name for name in weights if ".lora_A." in name]:
        base = name.partition("lora_A.")[0] + "base_layer.weight"
        a, b = weights.pop(name), weights.pop(name.replace("lora_A", "lora_B"))
        weights[base] = weights[base] + 2 * b @ a
    return {name.replace(".base_layer", ""): weights.pop(name).clone() for name in [*weights]}


def write(model, weights):
    model.generation_config = GenerationConfig()  # transformers may refuse to save the model's own
    model.save_pretrained(FOLDER, state_dict=weights)
    # vLLM packs a tied head on a CPU when it starts, but not when it reloads.
    AutoConfig.from_pretrained(FOLDER, tie_word_embeddings=False).save_pretrained(FOLDER)


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"{SERVER}/{path}", data, {"Content-Type": "application/json"})
    try:
        answer = urlopen(request)
        is_json = "json" in answer.headers.get("Content-Type", "")
        return json.load(answer) if is_json else None
    except OSError as error:
        said = error.read().decode() if isinstance(error, HTTPError) else "does vLLM run?"
        raise RuntimeError(f"{request.full_url}: {error}, {said}") from error


if __name__ == "__main__":  # python -m docs.samplers.vllm MODEL
    policy = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    write(policy, whole_weights(policy))
    AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(FOLDER)
