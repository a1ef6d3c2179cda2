"""A micro-batch that reads shared prompts once, beside each row alone, in float64."""

import json
from pathlib import Path

import pytest
import torch
from gpu_types import take_gpu_types
from models import VOCAB, family_model, some_wide, tiny_model
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.logprobs import completion_logprobs, completion_states, last_states
from common.prompts import SharedPrompts, shared_attention, shares_prompts

# Of each family whether it shares prompts. The others have recurrent layers, soft caps, sinks, or
# positions or attention of their own.
READERS = "GPT2 Gemma3 Gemma3n DeepseekV3 Llama Mistral Mixtral OPT Phi Qwen3Moe".split()
REAL_MODEL = Path("runs/SmolLM2-135M-Instruct")
OTHERS = "Bloom Falcon Gemma2 GptOss Lfm2 Mamba2 Qwen3Next StableLm".split()


def random_tokens(generator, number):
    return torch.randint(1, VOCAB, (number,), generator=generator).tolist()


def make_sequences():
    """Groups of two prompts, one prompt that begins another, equal completions, one that begins
    another, completions of one token, and a completion without a token.
    """
    generator = torch.Generator().manual_seed(1)
    long, short = random_tokens(generator, 9), random_tokens(generator, 4)
    answer = random_tokens(generator, 6)
    completions = [answer, answer, answer[:3], [*answer[:3], 7, 8], [3], []]
    sequences = [(long, completion) for completion in completions]
    sequences += [(long[:5], long[5:]), (long[:5], [4, 4])]
    return [*sequences, (short, [9]), (short, random_tokens(generator, 12)), ([5], [6, 1])]


@pytest.fixture
def float64(monkeypatch):
    """What models compute in float32 whatever their type is, such as RMSNorm, is float64 too."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("mistral", {"sliding_window": 4}),
        ("gemma3_text", {"sliding_window": 4, "head_dim": 8}),
        ("mixtral", {"sliding_window": None, "num_local_experts": 4}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),  # takes padded rows
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_a_batch_gives_what_each_row_gives_alone(architecture, overrides, request):
    """Log-probs and entropies by a plain log-softmax, and their gradients."""
    model, sequences = tiny_model(architecture, **overrides).double(), make_sequences()
    request.getfixturevalue("float64")
    model.set_experts_implementation("eager")  # the others know no float64
    rows = [torch.tensor([prompt + completion]) for prompt, completion in sequences]
    states = [model.base_model(input_ids=row).last_hidden_state[0] for row in rows]
    expected = [
        torch.cat([torch.zeros(0, states[0].shape[1]).double(), alone[len(prompt) - 1 : -1]])
        for alone, (prompt, _) in zip(states, sequences, strict=True)
    ]
    weights = torch.linspace(-1, 1, sum(map(len, expected))).double()

    def summary(hidden):
        log_p = model.get_output_embeddings()(hidden).log_softmax(dim=1)
        tokens = torch.tensor([token for _, completion in sequences for token in completion])
        logprobs = log_p.gather(1, tokens[:, None]).squeeze(1)
        entropies = -(log_p.exp() * log_p).sum(dim=1)
        return logprobs, entropies, ((logprobs + entropies) * weights).sum()

    found, row, t = completion_states(model, sequences)
    assert shares_prompts(model) == (architecture != "lfm2")
    places = [(i, t) for i, (_, completion) in enumerate(sequences) for t in range(len(completion))]
    assert [*zip(row.tolist(), t.tolist(), strict=True)] == places
    *of_batch, loss = summary(found)
    *of_rows, expected_loss = summary(torch.cat(expected))
    for values, expected_values in zip(of_batch, of_rows, strict=True):
        assert_close(values, expected_values)
    assert_close(gradients(model, loss), gradients(model, expected_loss))
    last = last_states(model, sequences)
    assert_close(last, torch.stack([alone[-1] for alone in states]))


@pytest.mark.parametrize("name", READERS + OTHERS)
def test_families_share_prompts_or_are_told_apart(name, recwarn):
    model = family_model(name)
    before = model.config._attn_implementation
    assert shares_prompts(model) == (name in READERS)
    said = [str(warning.message) for warning in recwarn]
    caught = [text for text in said if "shared prompts" in text]
    assert len(caught) == (name in OTHERS)
    if reason := {"Gemma2": "softcap", "GptOss": "s_aux"}.get(name):
        assert reason in caught[0]
    assert model.config._attn_implementation == (before if name in OTHERS else "shared_prompts")


def deep_model():
    """Of many layers with large weights: rounding takes its hidden states further than 1e-5."""
    return tiny_model("llama", num_hidden_layers=24, initializer_range=1.0)


def real_model():
    if not REAL_MODEL.is_dir():
        pytest.skip(f"{REAL_MODEL} was not unpacked: docs/real.md")
    return AutoModelForCausalLM.from_pretrained(REAL_MODEL)


both_models = pytest.mark.parametrize(
    "make_model", some_wide([deep_model, real_model], fast=[deep_model])
)


@pytest.mark.parametrize("threads", [1, 2])
@both_models
@pytest.mark.filterwarnings("error:slower")
def test_depth_and_types_do_not_hide_that_a_model_shares_prompts(make_model, threads, monkeypatch):
    """Before and after a step, in float32 and as on a GPU, where frozen weights are bfloat16."""
    model, before = make_model(), torch.get_num_threads()
    torch.set_num_threads(threads)
    for _ in range(2):
        assert try_again(model)
        completion_logprobs(model, make_sequences(), torch.arange(3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1e-4).step()
    take_gpu_types(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        assert try_again(model)
        assert try_again(model.bfloat16())
    torch.set_num_threads(before)


def try_again(model):
    """The trial of a model that has not been tried."""
    vars(model).pop("can_share_prompts", None)
    model.set_attn_implementation("sdpa")
    return shares_prompts(model)


def shifted(shared):
    shared.positions = shared.positions + torch.arange(len(shared.positions)) % 2


def unbranched(shared):
    """Each row sees what the first one has at its places."""
    shared.branches = shared.branches[:1].expand_as(shared.branches)


@pytest.mark.parametrize("in_bfloat16", [False, True])
@pytest.mark.parametrize("plant", [shifted, unbranched])
@both_models
@pytest.mark.filterwarnings("ignore:slower")
def test_the_trial_finds_what_is_wrong(make_model, plant, in_bfloat16, monkeypatch):
    model, make = make_model(), SharedPrompts.__init__

    def make_wrong(shared, *arguments):
        make(shared, *arguments)
        plant(shared)

    monkeypatch.setattr(SharedPrompts, "__init__", make_wrong)
    assert not try_again(model.bfloat16() if in_bfloat16 else model)


def test_layers_of_another_type_are_refused():
    """On rows as short as those of the trial, chunks would not show."""
    model = tiny_model("llama")
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.warns(UserWarning, match="chunked_attention"):
        assert not shares_prompts(model)


def test_a_window_that_layers_keep_for_themselves_is_refused(monkeypatch):
    model = tiny_model("mistral", sliding_window=32)

    def without_window(*arguments, sliding_window, **options):
        return shared_attention(*arguments, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "shared_prompts", without_window)
    with pytest.warns(UserWarning, match="sliding window"):
        assert not shares_prompts(model)


def test_layers_share_the_mask_of_a_window(monkeypatch):
    """Each layer would keep one of L x L numbers for its backward pass."""
    layers = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    sizes = dict(sliding_window=4, head_dim=8, num_hidden_layers=4, layer_types=layers)
    model, masks = tiny_model("gemma3_text", **sizes), []

    def spy(module, query, key, value, mask, **options):
        masks.append(mask)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    completion_states(model, make_sequences())  # the trial
    monkeypatch.setattr("common.prompts.sdpa_attention_forward", spy)
    completion_states(model, make_sequences())
    assert masks[0] is masks[2] is masks[3] and masks[1] is None
    # What torch takes as it is: numbers of the states' type, in rows of a multiple of 8.
    assert masks[0].dtype == torch.float32 and masks[0].stride(2) % 8 == 0


def test_each_prompt_is_read_once():
    model, sequences, counts = tiny_model("llama"), make_sequences(), []
    rows = torch.arange(len(sequences))
    completion_logprobs(model, sequences, rows)  # the trials
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: counts.append(output.shape[:2].numel())
    )
    completion_logprobs(model, sequences, rows)
    last_states(model, sequences)
    of_prompts = sum(map(len, {tuple(prompt) for prompt, _ in sequences}))
    completions = [completion for _, completion in sequences]
    before_the_last = sum(len(completion[:-1]) for completion in completions)
    assert counts == [of_prompts + before_the_last, of_prompts + sum(map(len, completions))]


def test_saved_models_and_samples_know_nothing_of_it(tmp_path):
    model = tiny_model("llama")
    ids = torch.tensor([[1, 2, 3], [0, 1, 2]])  # the second is padded
    options = dict(
        max_new_tokens=5, do_sample=False, pad_token_id=0, attention_mask=(ids > 0).long()
    )
    expected = model.generate(ids, **options)
    assert shares_prompts(model)
    assert torch.equal(model.generate(ids, **options), expected)
    model.save_pretrained(tmp_path)
    assert "shared_prompts" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
