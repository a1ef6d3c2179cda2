"""Sampling: the distribution, the ends, and that a row knows nothing of the others."""

import functools

import pytest
import torch
from plain import plain_logprobs
from models import APART, FREE, REFUSED, VOCAB, family_model, some_slow, tiny_model
from spies import spy_on
from transformers import LlamaModel

import common.generation
from common.generation import generate, make_decoder, sample_tokens

LAST_UNIFORM = 1 - 2**-53  # the largest float64 below 1
both_caches = pytest.mark.parametrize("cache_kind", ["growing", "static"], indirect=True)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def ragged_rows(lengths=(7, 2, 5, 1), seed=3):
    return [torch.randint(1, VOCAB, (n,), generator=seeded(seed + n)).tolist() for n in lengths]


def sample(model, rows, max_new_tokens=12, temperature=1.0, stop_ids=(), rng=None, **options):
    options |= dict(max_new_tokens=max_new_tokens, temperature=temperature)
    sequences, _ = generate(model, rows, stop_ids=list(stop_ids), rng=rng or seeded(0), **options)
    assert [prompt for prompt, _ in sequences] == rows
    return [completion for _, completion in sequences]


def cut(tokens, stop_ids):
    """Tokens up to the first stop id, which is included."""
    ends = [i for i, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def a_stop_id(tokens_of_rows):
    """A token that ends some row in its first half and leaves another row to go on longer."""
    longest = len(tokens_of_rows[0])
    for token in sorted({token for tokens in tokens_of_rows for token in tokens}):
        lengths = [len(cut(tokens, [token])) for tokens in tokens_of_rows]
        if min(lengths) <= longest // 2 and max(lengths) == longest:
            return token
    raise AssertionError("no token ends a row early and spares another")


@pytest.fixture(autouse=True)
def cache_kind(request, monkeypatch):
    """The growing cache of CPUs; for `both_caches` also the static one of GPUs, not captured."""
    kind = getattr(request, "param", "growing")
    devices = ("cpu",) if kind == "static" else ()
    monkeypatch.setattr(common.generation, "GRAPH_DEVICES", devices)
    monkeypatch.setattr(common.generation, "capture", lambda step: step)
    return kind


class CountingBackbone(LlamaModel):
    """After token n comes n + 1, always, so that completions can be worked out by hand.

    After the last token of the vocabulary comes 0.
    """

    def forward(self, input_ids, **inputs):
        self.batch_sizes.append(len(input_ids))
        output = super().forward(input_ids, **inputs)
        next_tokens = (input_ids + 1) % VOCAB
        output.last_hidden_state = 100.0 * torch.nn.functional.one_hot(next_tokens, VOCAB)
        return output


@pytest.fixture
def counting():
    """Its hidden states are its logits."""
    model = tiny_model(
        "llama", tie_word_embeddings=False, hidden_size=VOCAB, head_dim=8, num_attention_heads=2
    )
    model.model.__class__ = CountingBackbone
    torch.nn.init.eye_(model.lm_head.weight)
    model.batch_sizes = model.model.batch_sizes = []
    sample(model, [[1]], 1)  # the trial of its head
    model.batch_sizes.clear()
    return model


# --- every family of models ---------------------------------------------------------------------

# Two equal prompts, and three of one length.
FAMILY_ROWS = ragged_rows((7, 2)) + ragged_rows((2, 5), seed=4) + ragged_rows((5,), seed=4)
FAMILY_ROWS += ragged_rows((1,)) + ragged_rows((2,), seed=5)


@functools.cache
def plain_greedy(name):
    """A model, and 8 tokens of each row: the argmax of forward passes over one row, no cache."""
    model, made = family_model(name), []
    for row in FAMILY_ROWS:
        ids = list(row)
        for _ in range(8):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
        made.append(ids[len(row) :])
    assert len({tuple(tokens) for tokens in made}) > 3  # of 6 different prompts
    return model, made


@both_caches
@pytest.mark.parametrize("name", some_slow(FREE))
def test_greedy_equals_plain_forward_passes_in_every_family(name, cache_kind, monkeypatch):
    model, made = plain_greedy(name)
    for stop_ids in ([], [made[0][2]], [made[3][1], made[5][0]]):
        found = sample(model, FAMILY_ROWS, 8, temperature=0, stop_ids=stop_ids)
        assert found == [cut(tokens, stop_ids) for tokens in made]


@pytest.mark.parametrize("cache_kind", ["static"], indirect=True)
@pytest.mark.parametrize("architecture, kind", [("llama", "GraphDecoder"), ("gemma2", "Decoder")])
def test_windows_that_slide_keep_the_growing_cache(architecture, kind, cache_kind):
    """How they move is decided in Python, which a captured step would not run again."""
    decoder = make_decoder(tiny_model(architecture), [[1, 2]], 2)
    assert type(decoder).__name__ == kind


@pytest.mark.parametrize("name", [*some_slow(APART), *REFUSED, "XLNetLMHeadModel"])
def test_a_model_that_no_cache_serves_is_refused_by_name(name):
    model = family_model(name)
    for _ in range(2):  # and is not taken for usable the second time
        with pytest.raises(ValueError, match=type(model).__name__):
            sample(model, FAMILY_ROWS)


# --- the distribution ---------------------------------------------------------------------------
@both_caches
def test_log_probs_are_those_of_the_distribution_that_is_drawn_from(cache_kind):
    """By a plain forward pass over the whole sequence; 0 after its end; of a greedy choice 0."""
    model, rows = tiny_model("llama", initializer_range=0.3), ragged_rows((3, 9, 1, 5, 4, 2))
    stop_ids = [a_stop_id(sample(model, rows, 8, temperature=0.7))]
    options = dict(max_new_tokens=8, stop_ids=stop_ids, batch_size=4)
    made, logprobs = generate(model, rows, temperature=0.7, rng=seeded(0), **options)
    lengths = {len(tokens) for _, tokens in made}
    assert logprobs.shape == (6, max(lengths)) and logprobs.dtype == torch.float32
    assert len(lengths) > 1
    for (row, tokens), found in zip(made, logprobs, strict=True):
        expected, _ = plain_logprobs(model, row, tokens, 0.7)
        torch.testing.assert_close(found[: len(tokens)], expected, rtol=1e-6, atol=3e-6)
        assert (found[len(tokens) :] == 0).all()
    _, of_greedy = generate(model, rows, temperature=0, rng=seeded(0), **options)
    assert (of_greedy == 0).all()


def test_zero_probability_tokens_are_never_drawn():
    rows, vocab = 2000, 60
    logits = 3 * torch.randn(rows, vocab, generator=seeded(0))
    forbidden = torch.rand(rows, vocab, generator=seeded(1)) < 0.5
    forbidden[:, [0, 1, 30, 31, vocab - 2, vocab - 1]] = True
    forbidden[:, 40] = False
    logits[forbidden] = -torch.inf
    random = torch.rand(rows, dtype=torch.float64, generator=seeded(2))
    for uniform in (random, torch.zeros_like(random), torch.full_like(random, LAST_UNIFORM)):
        tokens, _ = sample_tokens(logits, 0.7, uniform)
        assert not forbidden.gather(1, tokens[:, None]).any()
    # On a GPU an id beyond the vocabulary would end the process without a word of the cause.
    tokens, _ = sample_tokens(torch.full((rows, vocab), torch.nan), 1.0, random)
    assert (tokens < vocab).all() and (tokens >= 0).all()


def test_bfloat16_logits_are_sampled_in_float32():
    """A softmax in bfloat16 would move the borders between tokens by a part in 256."""
    logits = torch.tensor([0.0, 1.0, -0.5, 0.25]).bfloat16()  # without rounding
    uniform = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    found, _ = sample_tokens(logits.expand(20_000, -1), 1.0, uniform)
    probabilities = torch.softmax(logits.double(), dim=0)
    assert torch.allclose(found.bincount() / 20_000, probabilities.float(), atol=1.1 / 20_000)


def test_rare_tokens_of_a_large_vocabulary_are_told_apart():
    """150,000 tokens of 1e-9 behind one likely token: float32 sums near 1 are 6e-8 apart."""
    rare = 150_000
    logits = torch.full((1, rare + 1), 1e-9).log()
    logits[0, 0] = 0.0
    mass = rare * 1e-9 / (1 + rare * 1e-9)
    middle = torch.arange(75_000, 75_100)
    uniform = 1 - mass * (1 - middle.double() / rare)  # one number for each of 100 neighbours
    tokens, _ = sample_tokens(logits.expand(100, -1), 1.0, uniform)
    assert (tokens - middle).abs().max() < 750  # the float32 softmax is off by this much
    assert len(set(tokens.tolist())) > 90


# --- random numbers -----------------------------------------------------------------------------
@both_caches
@pytest.mark.parametrize("rows", [ragged_rows(), [[5, 17, 30]] * 4])
def test_token_t_of_row_b_inverts_the_cumulative_sum_at_random_number_b_t(rows):
    """Drawn on the CPU in float64, all at once; here inverted by counting, row by row. What the
    checkpoint says of sampling is not read.
    """
    model = tiny_model("llama", initializer_range=0.3)
    model.generation_config.update(do_sample=True, top_k=1, temperature=0.1, eos_token_id=[5])
    uniform = torch.rand(4, 6, dtype=torch.float64, generator=seeded(0))
    made = sample(model, rows, 6, temperature=0.7)
    for row, numbers, tokens in zip(rows, uniform, made, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row + tokens])).logits[0].double()
        for t, token in enumerate(tokens):
            sums = torch.softmax(logits[len(row) - 1 + t] / 0.7, dim=0).cumsum(dim=0)
            assert token == (sums < numbers[t]).sum()


@both_caches
def test_tokens_do_not_depend_on_the_batch_size_nor_on_when_other_rows_end(monkeypatch):
    model = family_model("Llama")
    without_end = sample(model, FAMILY_ROWS)
    stop_ids = [a_stop_id(without_end)]
    expected = [cut(tokens, stop_ids) for tokens in without_end]
    calls = spy_on(common.generation, monkeypatch, "decode")
    for batch_size in (1, 4, None):
        calls.clear()
        found = sample(model, FAMILY_ROWS, stop_ids=stop_ids, batch_size=batch_size)
        assert found == expected
        sizes = [len(prompts) for (_, prompts, *_), _ in calls]
        assert max(sizes) <= (batch_size or 9) and sum(sizes) == len(FAMILY_ROWS)


def test_ranks_sample_together_what_one_process_samples(monkeypatch):
    """Of 8 ranks some get no row; all move their generators alike."""
    model, rows = tiny_model("llama"), ragged_rows((7, 2, 5, 1, 4, 3))
    stop_ids = [a_stop_id(sample(model, rows))]
    generator = seeded(0)
    expected = sample(model, rows, stop_ids=stop_ids, rng=generator)
    monkeypatch.setattr(common.generation, "WORLD_SIZE", 8)
    made = []

    def gather(part):
        made.extend(part)
        return expected

    monkeypatch.setattr(common.generation, "all_gather", gather)
    for rank in range(8):
        monkeypatch.setattr(common.generation, "RANK", rank)
        of_rank = seeded(0)
        sample(model, rows, stop_ids=stop_ids, rng=of_rank)
        assert torch.equal(of_rank.get_state(), generator.get_state())
    assert made == expected


# --- ends and padding ---------------------------------------------------------------------------
BY_HAND = {
    # The stop token is included, prompt and padding are not; the second was cut off.
    "rows of different lengths": (
        [[7, 8], [3], [20, 10, 9]],
        [11],
        [[9, 10, 11], [4, 5, 6, 7], [10, 11]],
    ),
    # Within, rows are padded with 0; here it is also a token of prompts, and a stop id.
    "the id of padding": ([[0, 48], [3], [0, 0]], [0], [[49, 0], [4, 5, 6, 7], [1, 2, 3, 4]]),
}


@both_caches
@pytest.mark.parametrize("case", BY_HAND)
def test_completions_worked_by_hand(case, counting):
    rows, stop_ids, expected = BY_HAND[case]
    made = sample(counting, rows, 4, 0, stop_ids)
    assert made == expected
    assert all(type(token) is int for tokens in made for token in tokens)
    assert len(counting.batch_sizes) == max(map(len, expected))
    assert sample(counting, rows, 0) == [[] for _ in rows]


@both_caches
def test_finished_rows_leave_the_batch(counting, cache_kind):
    # They draw the stop id 11 as their first, third and second token, and never.
    sample(counting, [[10], [8], [9], [20]], 5, 0, stop_ids=[11])
    # With a static cache when half of the rows have ended, for few sizes and so few captures.
    assert counting.batch_sizes == ([4, 3, 2, 1, 1] if cache_kind == "growing" else [4, 4, 2, 1, 1])


@both_caches
def test_equal_prompts_are_read_once(counting):
    # [0, 0, 7] differs from [7] only by its mask, where the padding has the id 0.
    rows = [[0, 0, 7]] * 2 + [[7]] * 3 + [[1, 2, 3], [7]]
    made = sample(counting, rows, 4, 0, stop_ids=[10])
    assert counting.batch_sizes[0] == 3
    assert made == [[8, 9, 10]] * 5 + [[4, 5, 6, 7], [8, 9, 10]]


@both_caches
def test_each_step_feeds_the_model_one_new_token_a_row(monkeypatch):
    model = tiny_model("llama")
    sample(model, [[1]], 1)  # the trial of its head
    calls = spy_on(model.model, monkeypatch, "forward")
    heads = spy_on(common.generation, monkeypatch, "head_logits")
    sample(model, ragged_rows(), 3)
    assert [ids.shape for (ids, *_), _ in calls] == [(4, 7), (4, 1), (4, 1)]
    # Logits of the last token only, of prompts too.
    assert [logits.shape for _, logits in heads] == 3 * [(4, VOCAB)]
