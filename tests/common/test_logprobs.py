"""Scoring: against a plain log-softmax of the model's own logits, row by row, without padding."""

import math

import pytest
import torch
from gpu_types import take_gpu_types
from plain import plain_logprobs
from models import APART, FREE, REFUSED, VOCAB, family_model, some_slow, tiny_config, tiny_model
from spies import Record, spy_on
from transformers import LlamaForCausalLM

import common.logprobs
from common.logprobs import completion_logprobs, micro_batches, rollout_logprobs

HEADS = {  # architectures, with what their heads do to the logits
    "llama": {},
    "gpt2": {},
    "gemma2": {"final_logit_softcapping": 5.0},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
}
every_head = pytest.mark.parametrize("architecture", HEADS)
LENGTHS = ((3, 4), (1, 6), (5, 1), (2, 2))  # of prompt and completion


def model_of(architecture, **overrides):
    return tiny_model(architecture, **{**HEADS[architecture], **overrides})


def make_pairs(lengths=LENGTHS):
    """Pairs of random tokens, (prompt, completion)."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(1, VOCAB, (p + c,), generator=generator).tolist() for p, c in lengths]
    return [(row[:p], row[p:]) for row, (p, _) in zip(rows, lengths, strict=True)]


def score(model, pairs, temperature=1.0):
    """Log-probabilities and entropies (B, T) of all pairs."""
    inds = range(len(pairs))
    return completion_logprobs(model, pairs, inds, temperature, entropy=True, entropy_gradient=True)


def mask_of(pairs):
    """(B, T): true at the tokens of the completions."""
    lengths = torch.tensor([len(completion) for _, completion in pairs])
    return torch.arange(lengths.max()) < lengths[:, None]


def plain(model, pairs, temperature=1.0):
    """By the definition: log-probs and entropies of all completion tokens, one after the other."""
    each = [plain_logprobs(model, *pair, temperature) for pair in pairs]
    return tuple(torch.cat(values) for values in zip(*each, strict=True))


def gradients(model, loss, **options):
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, named.values(), **options), strict=True))


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = expected[name].abs().max()
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-4 * scale), name
    assert all(gradient.abs().max() > 0 for gradient in expected.values() if gradient.dim() > 1)


def several_chunks(monkeypatch, positions=3):
    """Let only a few positions fit into a chunk; 13 are scored in `make_pairs()`."""
    monkeypatch.setattr(common.logprobs, "MAX_LOGITS", positions * VOCAB + 1)


# --- values and gradients -----------------------------------------------------------------------
def test_the_definition_against_a_loop_over_tokens():
    model, (prompt, completion) = tiny_model("llama"), ([3, 1, 4], [1, 5, 9, 2])
    with torch.no_grad():
        logprobs, entropies = plain_logprobs(model, prompt, completion, 0.6)
        for t in range(4):
            logits = model(torch.tensor([prompt + completion[:t]])).logits[0, -1]
            p = torch.softmax(logits.double() / 0.6, dim=0)
            assert logprobs[t].item() == pytest.approx(math.log(p[completion[t]]), abs=1e-5)
            assert entropies[t].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-5)


@pytest.mark.parametrize("tied", [True, False])  # a tied head's gradient is the embedding's too
@every_head
def test_values_and_gradients_are_those_of_the_definition(architecture, tied, monkeypatch):
    several_chunks(monkeypatch)
    model, pairs = model_of(architecture, tie_word_embeddings=tied), make_pairs()
    same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert same == tied
    if not tied:
        model.get_output_embeddings().bias = torch.nn.Parameter(torch.randn(VOCAB))
    found = score(model, pairs, 0.6)
    for values in found:
        assert values.shape == (4, 6)  # of the longest completion
        assert (values[~mask_of(pairs)] == 0).all()
    # Of log-probs alone, of entropies alone, and of both.
    expected = plain(model, pairs, 0.6)
    weights = torch.randn(2, 13, generator=torch.Generator().manual_seed(9))
    for chosen in ([0], [1], [0, 1]):
        sums = []
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.allclose(ours[mask_of(pairs)], theirs, atol=5e-5)
        for values in ([x[mask_of(pairs)] for x in found], expected):
            loss = sum(values[i] @ weights[i] for i in chosen)
            sums.append(gradients(model, loss, retain_graph=True))
        assert_same_gradients(*sums)
    alone = completion_logprobs(model, pairs, range(4), 0.6)
    assert torch.equal(alone, found[0])
    _, logged = completion_logprobs(model, pairs, range(4), 0.6, entropy=True)
    assert torch.equal(logged, found[1]) and not logged.requires_grad


@pytest.mark.parametrize("name", some_slow(FREE + APART) + REFUSED)
def test_every_family_gives_what_its_own_logits_give(name):
    """Rows are padded on the right, which no model minds."""
    model, pairs = family_model(name), make_pairs()
    with torch.no_grad():
        expected, expected_entropies = plain(model, pairs, 0.7)
        found, entropies = score(model, pairs, 0.7)
    assert torch.allclose(found[mask_of(pairs)], expected, atol=2e-5)
    assert torch.allclose(entropies[mask_of(pairs)], expected_entropies, atol=2e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("low", [-1e4, -torch.inf])
def test_a_token_that_cannot_be_drawn_adds_nothing(low, monkeypatch):
    """It has a bias of -1e4 or -inf. By the definition it adds 0 times -1e4."""
    several_chunks(monkeypatch)
    model, pairs = tiny_model("llama", tie_word_embeddings=False), make_pairs()
    bias, tokens = torch.randn(VOCAB), {token for pair in pairs for ids in pair for token in ids}
    never = min({*range(VOCAB)} - tokens)
    model.lm_head.bias = torch.nn.Parameter(bias)
    score(model, pairs)  # the check of the head
    bias[never] = -1e4
    expected = plain(model, pairs, 0.7)
    bias[never] = low
    found = [values[mask_of(pairs)] for values in score(model, pairs, 0.7)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    weights = torch.linspace(-1, 1, 13)
    losses = [(values[0] + values[1]) @ weights for values in (found, expected)]
    assert_same_gradients(*(gradients(model, loss) for loss in losses))


@pytest.mark.parametrize(("architecture", "entropy"), [("llama", False), ("gemma2", True)])
def test_bfloat16_rounds_values_and_gradients_only(architecture, entropy, monkeypatch):
    """As on a GPU: products in bfloat16, results and gradients of float32 weights in float32."""
    several_chunks(monkeypatch, positions=6)
    pairs = make_pairs()

    def run():
        """The outputs and the gradients of all weights; the head is checked in this pass."""
        model = model_of(architecture, initializer_range=0.2)
        outputs = score(model, pairs) if entropy else [completion_logprobs(model, pairs, range(4))]
        weights = torch.randn(13, generator=torch.Generator().manual_seed(9))
        loss = sum(values[mask_of(pairs)] @ weights for values in outputs)
        return dict(enumerate(outputs)) | gradients(model, loss)

    plain_run = run()
    take_gpu_types(monkeypatch)
    rounded_run = run()
    assert plain_run.keys() == rounded_run.keys()
    for name, exact in plain_run.items():
        rounded = rounded_run[name]
        assert exact.dtype == rounded.dtype == torch.float32
        assert 0 < (exact - rounded).norm() < 0.1 * exact.norm(), name


def test_weights_are_cast_once_per_pass(monkeypatch):
    """Not once per chunk: it takes as long as the product with one."""
    several_chunks(monkeypatch)
    take_gpu_types(monkeypatch)
    model, pairs = model_of("llama"), make_pairs()
    completion_logprobs(model, pairs, range(4))  # the check of the head
    with Record(torch.ops.aten._to_copy.default) as record:
        completion_logprobs(model, pairs, range(4)).sum().backward()
    assert (
        len([x for x in record.outputs if x.shape == (VOCAB, 32) and x.dtype == torch.bfloat16])
        == 1
    )


# --- layout -------------------------------------------------------------------------------------
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "pairs, rows", [(make_pairs(), []), ([([4, 9], []), ([7], [])], [0, 1]), ([([4], [])], [])]
)
def test_nothing_to_score_gives_no_numbers_and_gradients_of_zero(architecture, pairs, rows):
    model, width = model_of(architecture), max(len(completion) for _, completion in pairs)
    for first, second in ((1, 0), (0, 1), (1, 1)):
        logprobs = completion_logprobs(model, pairs, rows)
        both = completion_logprobs(model, pairs, rows, 0.7, entropy=True, entropy_gradient=True)
        output = first * both[0] + second * both[1] if second else logprobs
        assert output.shape == (len(rows), width)
        model.zero_grad()
        output.sum().backward()
        # FSDP's ranks add up gradients together: each must have one for every weight.
        assert all(weight.grad is not None for weight in model.parameters())
        assert not any(weight.grad.any() for weight in model.parameters())


# --- micro-batches ------------------------------------------------------------------------------
def deal(sequences, rows, size, processes, monkeypatch):
    """The micro-batches of each rank."""
    of_ranks = []
    for rank in range(processes):
        monkeypatch.setattr(common.logprobs, "RANK", rank)
        monkeypatch.setattr(common.logprobs, "WORLD_SIZE", processes)
        of_ranks.append([inds.tolist() for inds in micro_batches(sequences, rows, size)])
    return of_ranks


@pytest.mark.parametrize(
    ("sequences", "size", "processes", "expected"),
    [
        # A prompt counts once: 10 + 4 tokens before 1 + 20.
        ([([1] * 10, [2])] * 4 + [([1] * 2, [2] * 5)] * 4, 4, 1, [[[4, 5, 6, 7], [0, 1, 2, 3]]]),
        # Rows of one prompt become neighbours, in their order.
        ([([1] * 2, [2]), ([3] * 2, [2] * 5)] * 2, 2, 1, [[[1, 3], [0, 2]]]),
        # A lone first token makes no group, as in texts without a prompt: by their lengths.
        ([([1], [2] * n) for n in (3, 9, 5, 1)], 2, 1, [[[1, 2], [0, 3]]]),
        # A rank without rows runs as many passes, and a group is cut: each rank has rows.
        ([], 2, 1, [[[]]]),
        ([([1, 1], [2] * n) for n in range(1, 6)], 2, 2, [[[0, 1], [2]], [[3, 4], []]]),
    ],
)
def test_rows_are_dealt_by_hand(sequences, size, processes, expected, monkeypatch):
    rows = torch.arange(len(sequences))
    assert deal(sequences, rows, size, processes, monkeypatch) == expected


def test_ranks_score_a_rollout_together(monkeypatch):
    """Their tensors, 0 at rows that are not theirs, add up to what one process scores."""
    model, pairs = model_of("llama"), make_pairs()
    with torch.no_grad():
        expected = completion_logprobs(model, pairs, range(4), 0.7)
    monkeypatch.setattr(common.logprobs, "WORLD_SIZE", 3)
    monkeypatch.setattr(common.logprobs, "all_reduce_sum", lambda values: values)
    of_ranks = []
    for rank in range(3):
        monkeypatch.setattr(common.logprobs, "RANK", rank)
        batches = micro_batches(pairs, torch.arange(4), 1)
        of_ranks.append(rollout_logprobs(model, pairs, batches, 0.7))
    assert not any(values.requires_grad for values in of_ranks)
    assert torch.stack([values != 0 for values in of_ranks]).sum(dim=0).max() == 1
    assert torch.allclose(sum(of_ranks), expected, atol=1e-5)


# --- the head -----------------------------------------------------------------------------------
class StretchedLlama(LlamaForCausalLM):
    """Logits that are larger than those of its head, by this part of their size."""

    part = 0.0

    def forward(self, *args, **inputs):
        output = super().forward(*args, **inputs)
        output.logits = (1 + self.part) * output.logits.float()
        return output


@pytest.mark.parametrize(
    ("weights", "part", "is_known"),
    [
        (torch.float32, 0.7e-5, True),  # the tolerance is 1e-5
        (torch.float32, 1.5e-5, False),
        (torch.bfloat16, 4e-2, True),  # here 5e-2: a number of 8 bits is off by 4e-3 at most
        (torch.bfloat16, 7e-2, False),
    ],
)
def test_tolerance_of_the_heads_trial_under_autocast(weights, part, is_known, monkeypatch):
    take_gpu_types(monkeypatch)
    torch.manual_seed(0)
    model = StretchedLlama(tiny_config("llama")).eval().to(weights)
    for model.part in (part, -part):
        vars(model).pop("head_is_known", None)
        if is_known:
            completion_logprobs(model, make_pairs(), range(4))
        for _ in range(2 * (not is_known)):  # it is not taken for known the second time
            with pytest.raises(ValueError, match="output head of StretchedLlama"):
                completion_logprobs(model, make_pairs(), range(4))


@pytest.mark.filterwarnings("ignore:slower")
@pytest.mark.parametrize("kind", ["several layers", "not finite"])
def test_a_head_or_weights_that_cannot_be_used_are_named(kind):
    model = tiny_model("llama", tie_word_embeddings=False)
    if kind == "several layers":
        model = family_model("BertLMHeadModel")
    if kind == "not finite":
        model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    reason = "are not finite" if kind == "not finite" else f"head of {type(model).__name__}"
    with pytest.raises(ValueError, match=reason):
        completion_logprobs(model, make_pairs(), range(4))


@pytest.mark.parametrize("entropy", [False, True])
def test_logits_exist_at_the_completions_tokens_only_and_in_chunks(monkeypatch, entropy):
    several_chunks(monkeypatch, positions=3)
    model, pairs = model_of("llama"), make_pairs()
    scored = sum(len(completion) for _, completion in pairs)
    with torch.no_grad():
        completion_logprobs(model, pairs, range(4))  # the check of the head is done once, here
    calls = spy_on(common.logprobs, monkeypatch, "head_logits")
    outputs = completion_logprobs(model, pairs, range(4), 1.0, entropy, entropy)
    assert all(logits.shape[1] == VOCAB for _, logits in calls)
    forward = [len(hidden) for (hidden, *_), _ in calls]
    assert forward == [3] * (scored // 3) + [scored % 3] * (scored % 3 > 0)
    calls.clear()
    sum(values.sum() for values in (outputs if entropy else (outputs,))).backward()
    assert [len(hidden) for (hidden, *_), _ in calls] == forward[::-1]  # computed again


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_an_entropy_without_a_gradient_is_computed_once(entropy_gradient):
    model, pairs = model_of("llama"), make_pairs()
    with Record(torch.ops.aten.clamp.default) as record:
        both = completion_logprobs(model, pairs, range(4), 1.0, True, entropy_gradient)
        sum(values.sum() for values in both).backward()
    assert len([out for out in record.outputs if out.shape == (13, VOCAB)]) == 1 + entropy_gradient


def test_what_is_not_learned_is_0_and_has_no_logits(monkeypatch):
    model, pairs = model_of("llama"), make_pairs()
    flags = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) < 0.5
    is_learned = [flags[i, : len(completion)].tolist() for i, (_, completion) in enumerate(pairs)]
    mask = flags & mask_of(pairs)
    assert 3 < mask.sum() < 10
    whole = completion_logprobs(model, pairs, range(4), 0.6)
    expected = gradients(model, (whole * mask).sum())
    calls = spy_on(common.logprobs, monkeypatch, "head_logits")
    found = completion_logprobs(model, pairs, torch.arange(4), 0.6, is_learned=is_learned)
    assert [len(hidden) for (hidden, *_), _ in calls] == [mask.sum()]
    torch.testing.assert_close(found, whole * mask)
    assert_same_gradients(gradients(model, found.sum()), expected)
    inds = torch.tensor([2, 0])
    some = rollout_logprobs(model, pairs, [inds], 0.6, is_learned=is_learned)
    torch.testing.assert_close(some[inds], (whole * mask)[inds])
    none = [[0] * len(completion) for _, completion in pairs]
    found = completion_logprobs(model, pairs, torch.arange(4), is_learned=none)
    assert (found == 0).all() and found.requires_grad
