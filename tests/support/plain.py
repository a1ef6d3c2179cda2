"""What common/logprobs.py computes, written down as its definition."""

import torch


def plain_logprobs(model, prompt, completion, temperature=1.0):
    """The definition, for one sequence: log pi(y_t | x, y_<t), and the entropy of pi(. | x, y_<t).
    Both (T,), with pi = softmax(logits / temperature).
    """
    ids = torch.tensor([prompt + completion], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]  # (T, V)
    log_p = (logits.float() / temperature).log_softmax(dim=-1)
    logprobs = log_p.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    return logprobs, -(log_p.exp() * log_p).sum(dim=-1)
