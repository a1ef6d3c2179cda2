"""The judge of judge.py on a server with OpenAI's API, here vLLM's: docs/rewards.md.

    vllm serve Qwen/Qwen2.5-7B-Instruct
    python grpo.py --reward-fn docs/rewards/served_judge.py:grade ...

The grade is the mean of the digits among the 20 most likely first tokens of the reply, over 9.
"""

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from time import sleep
from urllib.request import Request, urlopen

from docs.rewards.judge import question

SERVER = os.environ.get("JUDGE_SERVER", "http://localhost:8000")
TIMEOUT = 300  # seconds; a busy server lets a request wait
RETRY_AFTER = (1, 10, 60)  # seconds between the attempts
REPLY = dict(max_tokens=1, temperature=1, logprobs=True, top_logprobs=20)


def grade(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """The expected grade, from 0 to 1. The server puts the requests together in batches."""
    with ThreadPoolExecutor(64) as pool:
        return [*pool.map(grade_one, prompts, completions)]


def grade_one(prompt: str | list[dict], completion: str) -> float:
    """The same of one completion. A ValueError if no likely token is a digit."""
    message = {"role": "user", "content": question(prompt, completion)}
    body = json.dumps(REPLY | {"messages": [message]}).encode()
    url = f"{SERVER}/v1/chat/completions"
    request = Request(url, body, {"Content-Type": "application/json"})
    (choice,) = json.loads(send(request))["choices"]
    first = choice["logprobs"]["content"][0]["top_logprobs"]
    digits = [
        (int(each["token"]), math.exp(each["logprob"]))
        for each in first
        if each["token"].strip() in [*"0123456789"]
    ]
    if not digits:
        raise ValueError(f"the judge does not reply with a digit, but with {first[0]['token']!r}")
    return sum(digit * p for digit, p in digits) / sum(p for _, p in digits) / 9


def send(request: Request) -> bytes:
    """The server's reply. A ConnectionError names the server if no attempt has one."""
    for pause in (*RETRY_AFTER, None):
        try:
            with urlopen(request, timeout=TIMEOUT) as reply:
                return reply.read()
        except (OSError, HTTPException) as error:  # also no connection, or a status of 400 or more
            if pause is None:
                failed = f"JUDGE_SERVER {SERVER} has failed {len(RETRY_AFTER) + 1} times"
                raise ConnectionError(f"{failed}: {error}") from error
            sleep(pause)
