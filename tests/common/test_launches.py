"""What a GPU would be asked to do: launches and waits, counted on a simulated device."""

import ast
from functools import cache
from pathlib import Path

import pytest
import torch
from docs.experiments.cost.launches import (
    count_logprobs,
    count_script,
    counted,
    generate_ours,
    logprobs_ours,
    logprobs_plain,
    make_model,
    per_token,
    per_token_of_graph,
)
from models import tiny_model
from scripts import SCRIPTS
from simulated_gpu import SIM, SimulatedGPU

import common.logprobs
from common.generation import generate

VOCABULARY = 1_000
# transformers looks whether a row packs several sequences, once per forward pass, and the head of a
# model is tried once per run.
WAITS_LEFT = {"hidden_states", "output_head"}


@pytest.fixture(scope="module")
def model():
    return make_model(VOCABULARY)


def test_logprobs_take_few_launches_per_chunk(model, monkeypatch):
    monkeypatch.setattr(common.logprobs, "MAX_LOGITS", 32 * VOCABULARY)
    plain = count_logprobs(logprobs_plain, model, 32).launches.total()
    one_chunk = [
        count_logprobs(logprobs_ours, model, num_tokens).launches.total() for num_tokens in (4, 32)
    ]
    two_chunks = count_logprobs(logprobs_ours, model, 64).launches.total()
    assert one_chunk[0] == one_chunk[1]  # whatever the number of tokens in it
    assert one_chunk[1] - plain <= 30
    assert 0 < two_chunks - one_chunk[1] <= 30


def test_logprobs_wait_for_transformers_alone(model):
    waits = count_logprobs(logprobs_ours, model, 32).waits
    assert {frames[-1].name for frames in waits} == {"hidden_states"}


def test_a_token_is_waited_for_once_in_eight(model):
    launches_of_graph, waits_of_graph = per_token_of_graph(model)
    assert launches_of_graph <= 14  # the replay, the copy of its input, and the sampling
    assert waits_of_graph <= 1 / 8
    _, waits = per_token(generate_ours, model)
    assert waits <= 1 + 1 / 8  # one is of transformers, which looks for padding in the mask


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


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_waits_in_its_loop_over_micro_batches(name):
    launches_of_step, _, counter = count_script(name)
    assert launches_of_step > 100
    source = Path(f"{name}.py").read_text().splitlines()
    backward = [i for i, line in enumerate(source, start=1) if ".backward()" in line]
    assert backward and {*backward} <= micro_batch_lines(f"{name}.py")
    for frames in counter.waits:
        if any(frame.lineno in micro_batch_lines(frame.filename) for frame in frames):
            assert frames[-1].name in WAITS_LEFT, frames


def test_launches_and_waits_are_seen():
    with counted() as counter:
        x = torch.ones(4, device=SIM)
        (x.view(2, 2)[0] + 1).mul_(2)  # a view is none
        torch.ones(4).exp()  # on the CPU
    assert counter.launches == {"ones": 1, "add": 1, "mul_": 1} and counter.waits == []
    with counted() as counter:
        torch.ones(3).to(SIM, non_blocking=True)
    assert counter.waits == []
    waiting = [
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.sum().item(),
    ]
    waiting += [lambda x: torch.tensor([1.0], device=SIM), lambda x: torch.ones(3).to(SIM)]
    for operation in waiting:
        with counted() as counter:
            operation(torch.ones(4, device=SIM))
        assert len(counter.waits) == 1


@pytest.mark.parametrize("stop_ids", [[], [7], [*range(0, 50, 4)]])
def test_completions_are_the_same_where_ended_sequences_stay_for_some_tokens(stop_ids):
    model, prompts = tiny_model("llama"), [[1, 5, 2], [7], [9, 4, 4, 8, 6], [7], [2, 2]]

    def sample():
        return generate(
            model,
            prompts,
            max_new_tokens=21,
            temperature=1.0,
            stop_ids=stop_ids,
            rng=torch.Generator().manual_seed(0),
        )

    expected = sample()
    if len(stop_ids) > 1:
        assert len({len(completion) for completion in expected}) > 2
    with SimulatedGPU():
        model.to(SIM)
        assert sample() == expected
