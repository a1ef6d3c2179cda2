"""docs/samplers/vllm.py with a stand-in for its server; marked `engine` with vLLM itself, which

    docs/samplers/install.sh runs/vllm

installs. The file is copied beside a script, with another port and folder.
"""

import json
import os
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import pytest
import torch
from peft import PeftModel
from reviews import plain_model
from runs import metrics_of, torchrun, words
from torch.nn import Parameter

import grpo
from common.generation import generate
from common.logprobs import completion_logprobs, sampling_metrics
from runtime.adapters import add_adapters
from docs.experiments.lib.runs import load_script

PYTHON = Path(__file__).parents[2] / "runs/vllm/bin/python"
ABSENT = "vLLM is not installed: docs/samplers/install.sh runs/vllm"
VLLM = pytest.param(
    "vLLM", marks=[pytest.mark.engine, pytest.mark.skipif(not PYTHON.exists(), reason=ABSENT)]
)
PROMPTS = [[3, 4, 5]] * 4 + [[6, 7, 8, 9]] * 4
STOP = 2


class StandIn(BaseHTTPRequestHandler):
    """What vLLM answers, of the model in its folder."""

    folder = model = policy = None

    def do_GET(self):
        config = {"model": self.folder, "dtype": "torch.float32"}
        self.answer({"vllm_config": {"model_config": config, "lora_config": {"r": 8}}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc" and body == {"method": "reload_weights"}:
            type(self).model = plain_model(self.folder)
        if self.path == "/v1/load_lora_adapter":
            assert body["lora_name"] == "policy" and body["load_inplace"]
            type(self).policy = PeftModel.from_pretrained(
                plain_model(grpo.Args.model), body["lora_path"]
            ).base_model.model
        self.answer({"choices": self.complete(**body)} if self.path == "/v1/completions" else None)

    def complete(self, model, prompt, n, max_tokens, temperature, stop_token_ids, seed, **fixed):
        whole = dict(top_p=1, top_k=0, min_p=0, repetition_penalty=1, ignore_eos=True)
        assert fixed == whole | dict(logprobs=0, return_token_ids=True)
        options = dict(max_new_tokens=max_tokens, temperature=temperature, stop_ids=stop_token_ids)
        rng = torch.Generator().manual_seed(seed)
        served = self.policy if model == "policy" else self.model
        made, logprobs = generate(served, [prompt] * n, rng=rng, **options)
        choices = []
        for i, ((_, ids), numbers) in enumerate(zip(made, logprobs.tolist(), strict=True)):
            rows = {"token_logprobs": numbers[: len(ids)]}
            choices.append({"index": i, "token_ids": ids, "logprobs": rows})
        return choices[::-1]

    def answer(self, content):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


@pytest.fixture(scope="module", params=[pytest.param("stand-in", marks=pytest.mark.docs), VLLM])
def sampler(request, tmp_path_factory):
    """The module, whose server runs."""
    file = tmp_path_factory.mktemp("beside") / "vllm.py"
    folder = str(file.parent / "served")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = Path("docs/samplers/vllm.py").read_text().replace("8000", str(port))
    file.write_text(text.replace("runs/served", folder))
    environment = os.environ | {"PYTHONPATH": ".", "VLLM_SERVER_DEV_MODE": "1"}
    environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    environment |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    subprocess.run([sys.executable, file, grpo.Args.model], env=environment, check=True)
    module = load_script(file.name, file.parent)
    if request.param == "stand-in":
        StandIn.folder = folder
        server = ThreadingHTTPServer(("127.0.0.1", port), StandIn)
        Thread(target=server.serve_forever, daemon=True).start()
        yield module
        server.shutdown()
        return
    flags = "--dtype float32 --logprobs-mode processed_logprobs --max-model-len 96 --enforce-eager "
    flags += "--no-enable-chunked-prefill --enable-lora --max-lora-rank 8"
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    with open(file.with_suffix(".log"), "w") as log:
        command += [*flags.split(), "--port", str(port)]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    while server.poll() is None:
        try:
            urlopen(f"{module.SERVER}/health")
            break
        except OSError:
            time.sleep(1)
    else:
        raise RuntimeError(file.with_suffix(".log").read_text()[-3000:])
    yield module
    server.terminate()
    server.wait()


def changed(kind="tied"):
    """The policy with other weights; those of its output head are the embedding's, or not."""
    model = plain_model(grpo.Args.model)
    if kind == "adapters":
        add_adapters(model, 4, seed=1)
    if kind == "untied":
        model.config.tie_word_embeddings = False
        model.lm_head.weight = Parameter(model.lm_head.weight.detach().clone())
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.05 * torch.randn(weight.shape)
    return model


def sample(sampler, model, **options):
    rng = torch.Generator().manual_seed(1)
    options = dict(max_new_tokens=8, temperature=0.7, stop_ids=[STOP], rng=rng) | options
    return sampler.generate(model, PROMPTS, **options)


@pytest.mark.parametrize("kind", ["tied", "untied", "adapters"])
def test_its_weights_are_the_policys(kind, sampler):
    if kind == "adapters":
        sample(sampler, plain_model(grpo.Args.model))  # the server's weights are the base again
    model = changed(kind)
    sequences, logprobs = sample(sampler, model)
    prompts, completions = zip(*sequences, strict=True)
    assert [*prompts] == PROMPTS
    ours = completion_logprobs(model, sequences, torch.arange(8), 0.7)
    mask = torch.arange(ours.shape[1]) < torch.tensor([len(ids) for ids in completions])[:, None]
    assert sampling_metrics(ours.detach(), logprobs, mask)["policy/sampling_kl"] < 1e-8
    assert all(STOP not in ids[:-1] and (ids[-1] == STOP or len(ids) == 8) for ids in completions)
    assert len({tuple(ids) for ids in completions[:4]}) > 1  # a group's seeds differ
    assert sample(sampler, model)[0] == sequences  # sent once, and drawn from the same seeds
    assert model.config.tie_word_embeddings == (kind != "untied")


def test_adapters_are_sent_alone_or_not_rounded(sampler, monkeypatch):
    model = changed("adapters")
    sample(sampler, plain_model(grpo.Args.model))  # the server's weights are the base again
    monkeypatch.setattr(sampler, "whole_weights", None)  # never asked for
    sample(sampler, model)
    ask = sampler.ask

    def answer_of_a_server_in_bfloat16(path, body=None):
        answer = ask(path, body)
        answer["vllm_config"]["lora_config"] = None
        answer["vllm_config"]["model_config"]["dtype"] = "torch.bfloat16"
        return answer

    monkeypatch.setattr(sampler, "ask", answer_of_a_server_in_bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16: merged adapters .* --enable-lora"):
        sample(sampler, model)


def test_errors_name_what_is_wrong(sampler, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "write", lambda model, weights: None)
        with pytest.raises(RuntimeError, match="other weights"):
            sample(sampler, changed())
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"serves .*, not other"):
        patch.setattr(sampler, "FOLDER", Path("other"))
        sample(sampler, changed())
    with pytest.raises(ValueError, match="another model: its vocab_size differs"):
        sample(sampler, plain_model("tiny/reviews/policy"))
    monkeypatch.setattr(sampler, "SERVER", "http://localhost:9")
    with pytest.raises(RuntimeError, match=r"localhost:9/.* does vLLM run"):
        sample(sampler, changed())


@pytest.mark.parametrize("sampler", [VLLM], indirect=True)
def test_a_model_length_that_is_too_short(sampler):
    with pytest.raises(RuntimeError, match="max_model_len=96"):
        sample(sampler, changed(), max_new_tokens=100)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run(ranks, sampler, tmp_path):
    for script in ("grpo", "ppo_rlhf", "reinforce"):
        text = Path(f"{script}.py").read_text()
        assert "\nfrom common.generation import generate\n" in text
    text = Path("grpo.py").read_text().replace("from common.generation import", "from vllm import")
    script = Path(sampler.__file__).with_name("grpo.py")
    script.write_text(text)
    flags = dict(total_rollouts=2, prompts_per_rollout=4, eval_rows=4, num_minibatches=1)
    flags |= dict(learning_rate=5e-3, output_dir=tmp_path)
    assert torchrun(ranks, [script, *words(flags)], tmp_path / "printed") == [0] * ranks
    (run_dir,) = tmp_path.glob("grpo__*")
    assert all(row["policy/sampling_kl"] < 1e-8 for row in metrics_of(run_dir)[1:])
