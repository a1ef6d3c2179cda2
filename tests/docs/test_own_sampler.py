"""The example of docs/sampler.md, with a server that the test starts in place of an engine."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from reviews import plain_model
from runs import metrics_of

import grpo
from common.generation import generate

pytestmark = pytest.mark.docs


class Completions(BaseHTTPRequestHandler):
    """What an OpenAI-compatible server answers, of the policy that the run starts from."""

    model, rng, bodies = plain_model(grpo.Args.model), torch.Generator().manual_seed(1), []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        options = dict(max_new_tokens=body["max_tokens"], temperature=body["temperature"])
        options |= dict(stop_ids=body["stop_token_ids"], rng=self.rng)
        made, logprobs = generate(self.model, body["prompt"], **options)
        choices = []
        for i, (ids, numbers) in enumerate(zip(made, logprobs.tolist(), strict=True)):
            rows = {"token_logprobs": numbers[: len(ids)]}
            choices.append({"index": i, "token_ids": ids, "logprobs": rows})
        answer = json.dumps({"choices": choices[::-1]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words):
        pass


def test_the_example_of_a_server(tmp_path):
    """Its first rollout is of the policy that is trained, and its second of older weights."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    Thread(target=server.serve_forever, daemon=True).start()
    page = Path("docs/sampler.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in example.splitlines() if line]) <= 15
    (tmp_path / "sampler.py").write_text(example.replace("8000", str(server.server_port)))
    for script in ("grpo", "ppo_rlhf", "reinforce"):
        assert "\nfrom common.generation import generate\n" in Path(f"{script}.py").read_text()
    ours = Path("grpo.py").read_text()
    theirs = ours.replace("from common.generation import", "from sampler import")
    (tmp_path / "grpo.py").write_text(theirs)
    flags = "--total-rollouts 2 --prompts-per-rollout 4 --eval-rows 4 --num-minibatches 1"
    words = f"{flags} --learning-rate 5e-3 --output-dir {tmp_path}/runs".split()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:."}
    command = [sys.executable, str(tmp_path / "grpo.py"), *words]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    server.shutdown()
    (run_dir,) = (tmp_path / "runs").iterdir()
    _, first, second = metrics_of(run_dir)
    assert 0 < first["completions/length_mean"] <= grpo.Args.max_new_tokens
    assert first["policy/sampling_kl"] < 1e-10 and second["policy/sampling_kl"] > 1e-4
    assert {(body["top_p"], body["top_k"]) for body in Completions.bodies} == {(1, -1)}
