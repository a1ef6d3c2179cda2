"""Scoring: against a plain log-softmax of the model's own logits, row by row, without padding."""

import pytest
import torch
from models import VOCAB, tiny_config, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

import common.logprobs
from common.generation import generate, pad_rows
from common.logprobs import Head, HeadLogprobs, completion_logprobs, find_head

CPU = torch.device("cpu")
PAD = 0
HEADS = {  # architectures, with what their heads do to the logits
    "llama": {},
    "qwen2": {},
    "gpt2": {},
    "gemma2": {"final_logit_softcapping": 5.0},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
}
every_head = pytest.mark.parametrize("architecture", HEADS)
LENGTHS = ((3, 4), (1, 6), (5, 1), (2, 2))  # of prompt and completion


def model_of(architecture, **overrides):
    return tiny_model(architecture, **{**HEADS[architecture], **overrides})


def rows_and_masks(lengths=LENGTHS, seed=5):
    """Token ids of each row, and 1 where they belong to the completion."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, VOCAB, (p + c,), generator=generator).tolist() for p, c in lengths]
    return rows, [[0] * p + [1] * c for p, c in lengths]


def batch(rows, masks, side="right", more_padding=0, pad_id=PAD):
    """Stacked input_ids, attention_mask and completion_mask; columns of pure padding if asked."""
    ids, attention_mask = pad_rows(rows, pad_id, side, CPU)
    completion_mask, _ = pad_rows(masks, 0, side, CPU)
    widths = (more_padding, 0) if side == "left" else (0, more_padding)
    pad = torch.nn.functional.pad
    return (
        pad(ids, widths, value=pad_id),
        pad(attention_mask, widths),
        pad(completion_mask.bool(), widths),
    )


def plain(model, rows, masks, temperature=1.0):
    """Log-probabilities and entropies of all completion tokens, one after the other."""
    logprobs, entropies = [], []
    for row, mask in zip(rows, masks, strict=True):
        logits = model(input_ids=torch.tensor([row])).logits[0].float() / temperature
        for t in range(1, len(row)):
            if mask[t]:
                distribution = torch.log_softmax(logits[t - 1], dim=0)
                logprobs.append(distribution[row[t]])
                entropies.append(-(distribution.exp() * distribution).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def gradients(model, loss):
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, named.values()), strict=True))


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = expected[name].abs().max()
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-4 * scale), name
    assert all(gradient.abs().max() > 0 for gradient in expected.values() if gradient.dim() > 1)


def weights_of(values):
    """Fixed weights of mixed sign, so that no token's gradient hides behind another's."""
    return torch.randn(len(values), generator=torch.Generator().manual_seed(9))


def several_chunks(monkeypatch, positions=3):
    """Let only a few positions fit into a chunk; 13 are scored in `rows_and_masks()`."""
    monkeypatch.setattr(common.logprobs, "MAX_LOGITS", positions * VOCAB + 1)


# --- values and gradients -----------------------------------------------------------------------


@every_head
@pytest.mark.parametrize("side", ["left", "right"])
def test_values_equal_log_softmax_of_the_models_own_logits(architecture, side):
    model, (rows, masks) = model_of(architecture), rows_and_masks()
    inputs = batch(rows, masks, side)
    logprobs, entropy = completion_logprobs(model, *inputs, return_entropy=True)
    expected_logprobs, expected_entropy = plain(model, rows, masks)
    assert torch.allclose(logprobs[inputs[2]], expected_logprobs, atol=2e-5)
    assert torch.allclose(entropy[inputs[2]], expected_entropy, atol=2e-5)


@every_head
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_equal_those_of_log_softmax(architecture, temperature, monkeypatch):
    several_chunks(monkeypatch)
    model, (rows, masks) = model_of(architecture), rows_and_masks()
    inputs = batch(rows, masks)
    found = completion_logprobs(model, *inputs, temperature)[inputs[2]]
    expected, _ = plain(model, rows, masks, temperature)
    assert torch.allclose(found, expected, atol=5e-5)
    weights = weights_of(expected)
    assert_same_gradients(
        gradients(model, found @ weights),
        gradients(model, expected @ weights),
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_gradients_of_the_entropy_equal_the_plain_ones(architecture, monkeypatch):
    several_chunks(monkeypatch)
    model, (rows, masks) = model_of(architecture), rows_and_masks()
    inputs = batch(rows, masks)
    _, entropy = completion_logprobs(model, *inputs, 0.6, return_entropy=True)
    _, expected = plain(model, rows, masks, 0.6)
    assert torch.allclose(entropy[inputs[2]], expected, atol=5e-5)
    weights = weights_of(expected)
    assert_same_gradients(
        gradients(model, entropy[inputs[2]] @ weights),
        gradients(model, expected @ weights),
    )


def test_a_loss_of_both_outputs_gives_the_sum_of_their_gradients(monkeypatch):
    several_chunks(monkeypatch)
    model, (rows, masks) = model_of("gpt2"), rows_and_masks()
    inputs = batch(rows, masks)
    logprobs, entropy = completion_logprobs(model, *inputs, return_entropy=True)
    expected_logprobs, expected_entropy = plain(model, rows, masks)
    assert_same_gradients(
        gradients(model, logprobs.sum() + 0.3 * entropy.sum()),
        gradients(model, expected_logprobs.sum() + 0.3 * expected_entropy.sum()),
    )


@pytest.mark.parametrize(
    "architecture, plain_setting",
    [
        ("gemma2", {"final_logit_softcapping": None}),
        ("granite", {"logits_scaling": 1.0}),
        ("cohere", {"logit_scale": 1.0}),
    ],
)
def test_settings_of_the_head_matter_here(architecture, plain_setting):
    """So that the tests above would see it if `Head` left them out."""
    rows, masks = rows_and_masks()
    with_it, _ = plain(model_of(architecture), rows, masks)
    without_it, _ = plain(model_of(architecture, **plain_setting), rows, masks)
    assert (with_it - without_it).abs().max() > 0.5


@every_head
def test_head_gives_the_models_own_logits(architecture):
    model = model_of(architecture)
    ids = torch.tensor([[4, 9, 1, 33]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state[0]
        expected = model(input_ids=ids).logits[0]
        found = find_head(model, ids[:, :1]).logits(hidden, torch.empty_like(expected))
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
def test_derivatives_equal_finite_differences(biased, cap, temperature, monkeypatch):
    """Of every input of `HeadLogprobs`, in float64, over chunks and parts of one or two rows."""
    monkeypatch.setattr(common.logprobs, "MAX_LOGITS", 2 * 7 + 1)
    to = dict(generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    hidden, weight, bias = torch.randn(5, 4, **to), torch.randn(7, 4, **to), torch.randn(7, **to)
    targets = torch.tensor([0, 6, 2, 2, 5])
    g, g_h = torch.randn(2, 5, **to)

    def loss(hidden, weight, bias):
        """By the definition, in float64."""
        z = 1.5 * (hidden @ weight.T + (bias if biased else 0))
        z = (cap * torch.tanh(z / cap) if cap else z) / temperature
        p = torch.softmax(z, dim=1)
        return g @ p.log().gather(1, targets[:, None]).squeeze(1) - g_h @ (p * p.log()).sum(dim=1)

    inputs = [hidden.float(), weight.float(), bias.float()]
    inputs = [x.requires_grad_() for x in inputs]
    head = Head(inputs[1], inputs[2] if biased else None, 1.5, cap)
    logprobs, entropy = HeadLogprobs.apply(inputs[0], targets, temperature, True, *head)
    (g.float() @ logprobs + g_h.float() @ entropy).backward()
    for i, x in enumerate([hidden, weight, bias][: 2 + biased]):
        for index in range(x.numel()):
            step = torch.zeros(x.numel(), dtype=torch.float64)
            step[index] = 1e-5
            sides = []
            for sign in (1, -1):
                moved = [hidden, weight, bias]
                moved[i] = x + sign * step.view_as(x)
                sides.append(loss(*moved))
            expected = (sides[0] - sides[1]).item() / 2e-5
            assert inputs[i].grad.view(-1)[index].item() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_bfloat16_autocast_rounds_values_and_gradients_only(
    architecture, return_entropy, monkeypatch
):
    """As on a GPU: products in bfloat16, results and gradients of float32 weights in float32."""
    several_chunks(monkeypatch, positions=6)
    model, (rows, masks) = model_of(architecture), rows_and_masks()
    inputs = batch(rows, masks)

    def run(low):
        """The outputs and the gradient of the head, taken outside of autocast as scripts do."""
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            outputs = completion_logprobs(model, *inputs, 0.6, return_entropy)
        outputs = outputs if return_entropy else (outputs,)
        loss = sum(
            values[inputs[2]] @ weights_of(range(int(inputs[2].sum()))) for values in outputs
        )
        (gradient,) = torch.autograd.grad(loss, model.get_output_embeddings().weight)
        return *outputs, gradient

    for exact, rounded in zip(run(low=False), run(low=True), strict=True):
        assert exact.dtype == rounded.dtype == torch.float32
        assert 0 < (exact - rounded).norm() < 0.1 * exact.norm()


def test_a_second_backward_gives_the_same_gradients(monkeypatch):
    """The first one writes over what the forward pass left."""
    several_chunks(monkeypatch)
    model, (rows, masks) = model_of("llama"), rows_and_masks()
    loss = completion_logprobs(model, *batch(rows, masks)).sum()
    first = torch.autograd.grad(loss, model.get_output_embeddings().weight, retain_graph=True)
    again = torch.autograd.grad(loss, model.get_output_embeddings().weight)
    assert torch.allclose(first[0], again[0], atol=1e-6)


def test_temperature_divides_the_logits():
    """Dividing all logits by T is dividing the output embedding by T."""
    model, (rows, masks) = model_of("llama"), rows_and_masks()
    inputs = batch(rows, masks)
    with torch.no_grad():
        found = completion_logprobs(model, *inputs, 0.6, return_entropy=True)
        model.get_output_embeddings().weight /= 0.6
        expected = completion_logprobs(model, *inputs, 1.0, return_entropy=True)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=2e-5)


def test_probabilities_and_entropy_by_enumeration():
    """Score every token of the vocabulary at one position."""
    model, prompt = model_of("llama", initializer_range=0.2), [4, 9, 1]
    rows = [[*prompt, token] for token in range(VOCAB)]
    masks = [[0, 0, 0, 1]] * VOCAB
    with torch.no_grad():
        logprobs, entropy = completion_logprobs(model, *batch(rows, masks), 0.6, True)
    log_p = logprobs[:, 3].double()
    assert log_p.exp().sum().item() == pytest.approx(1, abs=1e-5)
    expected = -(log_p.exp() * log_p).sum()
    assert 0.5 < expected < 3.5  # neither certain nor flat
    assert torch.allclose(entropy[:, 3].double(), expected.expand(VOCAB), atol=1e-4)


def test_entropy_of_a_flat_distribution_is_the_logarithm_of_its_size():
    model, (rows, masks) = model_of("llama"), rows_and_masks()
    inputs = batch(rows, masks)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
        logprobs, entropy = completion_logprobs(model, *inputs, return_entropy=True)
    log_size = torch.tensor(float(VOCAB)).log()
    assert torch.allclose(entropy[inputs[2]], log_size, atol=1e-5)
    assert torch.allclose(logprobs[inputs[2]], -log_size, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_generated_tokens_are_scored_under_the_distribution_that_drew_them(architecture):
    """Under it log p + H has mean 0 at each token; at another temperature it has not."""
    model = model_of(architecture, initializer_range=0.3)
    prompts = pad_rows([[4, 9, 1], [7]] * 300, PAD, "left", CPU)
    torch.manual_seed(0)
    ids, mask, _ = generate(model, *prompts, 6, 0.7, [11], PAD)
    attention_mask = mask.clone()
    attention_mask[:, : prompts[1].shape[1]] = prompts[1]

    def z_score(temperature):
        with torch.no_grad():
            pair = completion_logprobs(model, ids, attention_mask, mask, temperature, True)
        excess = sum(pair)[mask]
        return (excess.mean() / (excess.std() / len(excess) ** 0.5)).item()

    assert abs(z_score(0.7)) < 3
    assert abs(z_score(1.0)) > 5 and abs(z_score(0.5)) > 5


# --- layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_zeros_outside_the_completion_mask(side):
    model, (rows, masks) = model_of("llama"), rows_and_masks()
    inputs = batch(rows, masks, side, more_padding=2)
    for values in completion_logprobs(model, *inputs, return_entropy=True):
        assert values.shape == inputs[0].shape
        assert (values[~inputs[2]] == 0).all()
        assert (values[inputs[2]] != 0).all()


def test_column_0_is_never_scored():
    model, (rows, _) = model_of("llama"), rows_and_masks()
    everything = [[1] * len(row) for row in rows]
    all_but_first = [[0] + [1] * (len(row) - 1) for row in rows]
    found = completion_logprobs(model, *batch(rows, everything))
    assert (found[:, 0] == 0).all()
    assert torch.equal(found, completion_logprobs(model, *batch(rows, all_but_first)))


def test_a_mask_with_holes_scores_just_its_positions():
    model, (rows, _) = model_of("llama"), rows_and_masks()
    masks = [[t % 2 for t in range(len(row))] for row in rows]
    inputs = batch(rows, masks)
    found = completion_logprobs(model, *inputs)
    assert torch.allclose(found[inputs[2]], plain(model, rows, masks)[0], atol=2e-5)


def test_entropy_changes_the_form_of_the_result_but_not_the_logprobs():
    model, (rows, masks) = model_of("llama"), rows_and_masks()
    inputs = batch(rows, masks)
    alone = completion_logprobs(model, *inputs)
    logprobs, entropy = completion_logprobs(model, *inputs, return_entropy=True)
    assert torch.equal(alone, logprobs)
    assert entropy.shape == alone.shape


def test_float32_results_of_a_bfloat16_model():
    model, (rows, masks) = model_of("llama").bfloat16(), rows_and_masks()
    inputs = batch(rows, masks)
    logprobs, entropy = completion_logprobs(model, *inputs, 0.6, return_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    # The softmax is float32 too: its error does not show beside that of bfloat16 logits.
    expected, expected_entropy = plain(model, rows, masks, 0.6)
    assert torch.allclose(logprobs[inputs[2]], expected, atol=0.2)
    assert torch.allclose(entropy[inputs[2]], expected_entropy, atol=0.2)
    logprobs.sum().backward()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_side_amount_and_ids_of_padding_do_not_matter(architecture):
    model, (rows, masks) = model_of(architecture), rows_and_masks()
    alone = []
    for row, mask in zip(rows, masks, strict=True):
        inputs = batch([row], [mask])
        alone.append(completion_logprobs(model, *inputs)[inputs[2]])
    expected = torch.cat(alone)
    for side in ("left", "right"):
        for more_padding in (0, 1, 9):
            for pad_id in (PAD, 31):
                inputs = batch(rows, masks, side, more_padding, pad_id)
                found = completion_logprobs(model, *inputs)[inputs[2]]
                assert torch.allclose(found, expected, atol=1e-5), (side, more_padding, pad_id)
        ids, attention_mask, completion_mask = batch(rows, masks, side, 4)
        garbage = torch.randint(0, VOCAB, ids.shape, generator=torch.Generator().manual_seed(1))
        ids = torch.where(attention_mask, ids, garbage)
        found = completion_logprobs(model, ids, attention_mask, completion_mask)
        assert torch.allclose(found[completion_mask], expected, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_reach_the_gradients(side):
    model, (rows, masks) = model_of("gpt2"), rows_and_masks()
    few, many = batch(rows, masks, side), batch(rows, masks, side, more_padding=6, pad_id=31)
    assert_same_gradients(
        gradients(model, completion_logprobs(model, *many).sum()),
        gradients(model, completion_logprobs(model, *few).sum()),
    )


def test_masks_may_be_of_integers():
    model, (rows, masks) = model_of("llama"), rows_and_masks()
    ids, attention_mask, completion_mask = batch(rows, masks, "left")
    found = completion_logprobs(model, ids, attention_mask.int(), completion_mask.long())
    assert torch.equal(found, completion_logprobs(model, ids, attention_mask, completion_mask))


def test_empty_completion_mask_gives_zeros_and_a_backward_that_works():
    model, (rows, masks) = model_of("llama"), rows_and_masks()
    ids, attention_mask, completion_mask = batch(rows, masks)
    nothing = torch.zeros_like(completion_mask)
    logprobs, entropy = completion_logprobs(model, ids, attention_mask, nothing, 0.6, True)
    assert not logprobs.any() and not entropy.any()
    (logprobs.sum() + entropy.sum()).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_same_values_without_gradients():
    model, (rows, masks) = model_of("llama"), rows_and_masks()
    inputs = batch(rows, masks)
    with_graph = completion_logprobs(model, *inputs)
    with torch.no_grad():
        without = completion_logprobs(model, *inputs)
    assert with_graph.requires_grad and not without.requires_grad
    assert torch.equal(with_graph, without)


# --- the head -----------------------------------------------------------------------------------


class DoubledLlama(LlamaForCausalLM):
    """A head that `Head` cannot know."""

    def forward(self, *args, **inputs):
        output = super().forward(*args, **inputs)
        output.logits = 2 * output.logits
        return output


def test_an_unknown_head_is_refused_by_name():
    model, (rows, masks) = DoubledLlama(tiny_config("llama")).eval(), rows_and_masks()
    for _ in range(2):  # and is not taken for known the second time
        with pytest.raises(ValueError, match="DoubledLlama"):
            completion_logprobs(model, *batch(rows, masks))


class AdaptedHead(torch.nn.Module):
    """A head with a low-rank term, still 0, that `weight` alone would leave out."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.weight, self.bias = linear, linear.weight, linear.bias
        self.adapter = torch.nn.Parameter(torch.zeros(linear.in_features, 1))

    def forward(self, hidden):
        return self.linear(hidden) + hidden @ self.adapter


def test_an_adapter_on_the_head_is_refused():
    model = tiny_model("llama", tie_word_embeddings=False)
    model.set_output_embeddings(AdaptedHead(model.get_output_embeddings()))
    with pytest.raises(ValueError, match="output head of LlamaForCausalLM"):
        completion_logprobs(model, *batch(*rows_and_masks()))


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_unknown_head_is_refused_where_the_first_token_is_padding(side):
    # With pad_token_id the embedding of padding is zero, and so are both logits compared.
    model = DoubledLlama(tiny_config("llama", pad_token_id=0)).eval()
    with pytest.raises(ValueError, match="DoubledLlama"):
        completion_logprobs(model, *batch(*rows_and_masks(((1, 2), (3, 4))), side))


def test_a_known_head_is_not_refused_for_dropout():
    model = tiny_model("gpt2").train()
    completion_logprobs(model, *batch(*rows_and_masks()))
    assert model.training


def record_logits(monkeypatch):
    """Shapes of all logits that are computed from now on."""
    shapes, logits = [], Head.logits

    def recorded(self, hidden, out):
        shapes.append(tuple(out.shape))
        return logits(self, hidden, out)

    monkeypatch.setattr(Head, "logits", recorded)
    return shapes


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_exist_at_the_masked_positions_only_and_in_chunks(monkeypatch, side, return_entropy):
    several_chunks(monkeypatch, positions=3)
    model, (rows, masks) = model_of("llama"), rows_and_masks()
    inputs = batch(rows, masks, side)
    scored = int(inputs[2].sum())
    with torch.no_grad():
        completion_logprobs(model, *inputs)  # the check of the head is done once, here
    shapes = record_logits(monkeypatch)
    outputs = completion_logprobs(model, *inputs, 1.0, return_entropy)
    assert all(width == VOCAB for _, width in shapes)
    assert [n for n, _ in shapes] == [scored % 3] * (scored % 3 > 0) + [3] * (scored // 3)
    forward = list(shapes)
    shapes.clear()
    sum(values.sum() for values in (outputs if return_entropy else (outputs,))).backward()
    # Computed again, one chunk at a time, but for the one that the forward pass did last.
    assert sorted(shapes) == sorted(forward[:-1])


def test_check_of_the_head_takes_one_token_once(monkeypatch):
    model, (rows, masks) = model_of("llama"), rows_and_masks()
    inputs = batch(rows, masks)
    shapes = record_logits(monkeypatch)
    completion_logprobs(model, *inputs)
    scored = int(inputs[2].sum())
    assert [n for n, _ in shapes] == [1, scored]
    completion_logprobs(model, *inputs)
    assert [n for n, _ in shapes] == [1, scored, scored]


def test_graph_does_not_keep_the_logits():
    """Beyond the model's parameters nothing as wide as the vocabulary is saved for backward."""
    model, (rows, masks) = model_of("llama", vocab_size=1003), rows_and_masks()
    inputs = batch(rows, masks)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        completion_logprobs(model, *inputs, 0.6, return_entropy=True)
    parameters = {p.data_ptr() for p in model.parameters()}
    assert saved
    assert all(x.shape[-1:] != (1003,) for x in saved if x.data_ptr() not in parameters)


def test_one_tensor_of_a_chunks_size_is_made_in_each_pass(monkeypatch):
    """What is derived from a chunk must be small beside it, or memory grows by its multiples."""
    monkeypatch.setattr(common.logprobs, "MAX_LOGITS", 8 * 1003)
    model, (rows, masks) = model_of("llama", vocab_size=1003), rows_and_masks()
    inputs = batch(rows, masks)
    with torch.no_grad():
        completion_logprobs(model, *inputs)  # the check of the head
    made = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (1003,) and out.shape[0] >= 3:
                made.add(out.untyped_storage())
            return out

    with Record():
        logprobs, entropy = completion_logprobs(model, *inputs, 0.6, return_entropy=True)
        (logprobs.sum() + entropy.sum()).backward()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len({x.data_ptr() for x in made} - weights) == 1
