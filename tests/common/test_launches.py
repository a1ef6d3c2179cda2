"""What a GPU would be asked to do: launches and waits, counted on a simulated device."""

import ast
from functools import cache
from pathlib import Path

import pytest
import torch
from launches import counted
from models import some_wide, tiny_model
from scripts import SCRIPTS, SPECS, short_flags
from simulated_gpu import SIM, SimulatedGPU

import common.generation
import common.logprobs
from common.generation import generate
from common.logprobs import completion_logprobs

# A model's head, and whether it reads trees, are tried once per run.
WAITS_LEFT = {"gives_the_models_logits", "try_tree"}


def sample(model, num_tokens):
    return generate(
        model,
        [[5] * 10] * 4 + [[7] * 8] * 4,
        max_new_tokens=num_tokens,
        temperature=1.0,
        stop_ids=[],
        rng=torch.Generator().manual_seed(1),
    )


def score(model, num_rows, num_tokens):
    """Forward and backward pass of rows with so many completion tokens in all."""
    sequences = [([5] * 10, [6] * (num_tokens // num_rows))] * num_rows
    with counted() as counter:
        both = completion_logprobs(model, sequences, range(num_rows), entropy=True)
        sum(values.sum() for values in both).backward()
        model.zero_grad()
    return counter


@pytest.fixture(scope="module")
def model():
    model = tiny_model("llama", vocab_size=1000)
    with SimulatedGPU():
        model.to(SIM)
        sample(model, 2)  # the trial of its cache
    score(model, 4, 4)  # the trial of its head
    return model


def test_logprobs_take_few_launches_per_chunk(model, monkeypatch):
    monkeypatch.setattr(common.logprobs, "MAX_LOGITS", 32 * 1000)
    one_chunk = score(model, 4, 4).launches.total()
    assert one_chunk == score(model, 8, 32).launches.total()
    assert 0 < score(model, 8, 64).launches.total() - one_chunk <= 30


def test_logprobs_wait_for_nothing(model):
    assert not score(model, 4, 32).waits


def per_token(model):
    """Launches and waits of one more token: the difference of 16 and 8, divided by 8."""
    counters = []
    for num_tokens in (8, 16):
        with counted() as counter:
            sample(model, num_tokens)
        counters.append(counter)
    few, many = counters
    launches = many.launches.total() - few.launches.total()
    return launches / 8, (len(many.waits) - len(few.waits)) / 8


def test_a_token_is_waited_for_once_in_eight(model, monkeypatch):
    _, waits = per_token(model)
    assert waits <= 1 + 1 / 8  # one is of transformers, which looks for padding in the mask

    def capture(step):
        output = step()
        return lambda: output  # a replay is one launch, which is not counted

    monkeypatch.setattr(common.generation, "GRAPH_DEVICES", ("sim",))
    monkeypatch.setattr(common.generation, "capture", capture)
    launches, waits = per_token(model)
    assert launches <= 16  # the copy of a token into the graph's memory, and the sampling
    assert waits <= 1 / 8


def calls_backward(node):
    return any(getattr(part, "attr", "") == "backward" for part in ast.walk(node))


@cache
def micro_batch_lines(filename):
    """Numbers of the lines in loops over micro-batches: the innermost one with a backward pass, and
    all over something named batches.
    """
    lines = set()
    for loop in ast.walk(ast.parse(Path(filename).read_text())):
        if isinstance(loop, ast.For):
            inner = [part for node in loop.body for part in ast.walk(node)]
            inner = [part for part in inner if isinstance(part, ast.For)]
            trains = calls_backward(loop) and not any(map(calls_backward, inner))
            if trains or "batches" in ast.unparse(loop.iter):
                lines.update(range(loop.body[0].lineno, loop.end_lineno + 1))
    return lines


@pytest.mark.parametrize("name", some_wide(SCRIPTS, fast=["dpo", "ppo_rlhf"]))
def test_no_script_waits_in_its_loop_over_micro_batches(name, tmp_path, monkeypatch):
    script = SCRIPTS[name]
    one_step = dict(train_split="train[:4]", eval_split="test[:2]", epochs=1.0, batch_size=4)
    one_step |= dict(total_rollouts=1, prompts_per_rollout=2, num_minibatches=1, max_new_tokens=4)
    flags = SPECS[name].short_flags | short_flags(name, **one_step, output_dir=str(tmp_path))
    monkeypatch.setattr(script, "join_processes", lambda: SIM)
    with counted() as counter:
        script.main(script.Args(**flags))
    assert counter.launches.total() > 100
    source = Path(f"{name}.py").read_text().splitlines()
    backward = [i for i, line in enumerate(source, start=1) if ".backward()" in line]
    assert backward and {*backward} <= micro_batch_lines(f"{name}.py")
    for frames in counter.waits:
        if any(frame.lineno in micro_batch_lines(frame.filename) for frame in frames):
            assert WAITS_LEFT & {frame.name for frame in frames}, frames
