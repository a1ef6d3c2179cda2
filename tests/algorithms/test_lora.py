"""--lora-rank: the equation, the reference, what is trained, what is saved, in every script."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from gpu_types import take_gpu_types
from plain import plain_logprobs
from models import family_model, save_model, some_wide, tiny_model
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from runs import assert_resumes, keep_earlier_checkpoints, metrics_of, run_and_resume, torchrun
from runs import words
from safetensors.torch import load_file, save_file
from scripts import SPECS, short_flags, with_flag
from spies import Record, spy_by_name, spy_on
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import BitsAndBytesConfig

import dpo
import grpo
import ppo_rlhf
from common.logprobs import completion_logprobs
from runtime.adapters import add_adapters, as_at_start, freeze
from runtime.model import shard
from runtime.saving import checksum
from runtime.saving import save_weights

CPU = torch.device("cpu")
POLICY = "tiny/arithmetic/policy"
LAST_NUMBER = "tiny/arithmetic/reward.py:last_number"
SEQUENCES = [([1, 5, 6], [7, 8, 2]), ([1, 9], [3, 4, 5, 2])]


def with_random_adapters(architecture):
    """A model, the weights that it had, and the B A of each of its adapters by name."""
    model = tiny_model(architecture)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    add_adapters(model, 3, seed=1)
    products = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            torch.nn.init.normal_(b, std=0.3)
            products[f"{name}.weight"] = (b @ a).detach()
    return model, before, products


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_adapters_are_w_plus_two_b_a(architecture, tmp_path):
    """Of every matrix but the output head's; GPT-2 stores its matrices transposed."""
    model, before, products = with_random_adapters(architecture)
    merged = tiny_model(architecture)
    with torch.no_grad():
        for name, weight in merged.named_parameters():
            if name in products:
                product = products[name]
                weight += 2 * (product.T if architecture == "gpt2" else product)
    assert len(products) == {"llama": 7, "gpt2": 4}[architecture] * model.config.num_hidden_layers
    for prompt, completion in SEQUENCES:
        expected, _ = plain_logprobs(merged, prompt, completion)
        found, _ = plain_logprobs(model, prompt, completion)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    save_weights(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert weights.keys() == {*merged.state_dict()} & weights.keys() and len(weights) >= len(before)
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=1e-6)
    assert len(adapter) == 2 * len(products)


@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "Qwen2Moe"])
def test_experts_are_adapted_and_merged_too(family, tmp_path):
    """transformers has those of a layer in one tensor."""
    model = family_model(family)
    model.save_pretrained(tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    experts = [name for name, p in model.named_parameters() if p.dim() == 3]
    add_adapters(model, 3, seed=1)
    adapted = [name for name, _ in model.named_parameters() if ".experts." in name]
    assert len([name for name in adapted if "lora_A" in name]) == len(experts) >= 4
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    expected, _ = plain_logprobs(model, *SEQUENCES[0])
    start, _ = plain_logprobs(family_model(family), *SEQUENCES[0])
    assert (expected - start).abs().max() > 0.01
    save_weights(model, tmp_path)
    for take in (take_merged, freeze, partial(add_adapters, lora_rank=3, seed=1)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        take(model)
        found, _ = plain_logprobs(model, *SEQUENCES[0])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    again = [
        name for name, p in model.named_parameters() if ".experts." in name and p.requires_grad
    ]
    assert again == [name for name in adapted if "lora_" in name]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_reference_is_the_policy_without_its_adapters(architecture):
    model, _, _ = with_random_adapters(architecture)
    inds = torch.arange(2)
    expected = completion_logprobs(tiny_model(architecture), SEQUENCES, inds)
    with as_at_start(model):
        assert torch.equal(completion_logprobs(model, SEQUENCES, inds), expected)
    assert (completion_logprobs(model, SEQUENCES, inds) - expected).abs().max() > 0.01


def test_a_comes_from_the_seed_alone_and_b_is_zero():
    drawn = []
    for seed, other_draws in ((1, 0), (1, 5), (2, 0)):
        torch.manual_seed(9)
        torch.rand(other_draws)
        model = tiny_model("llama")
        add_adapters(model, 3, seed)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert all("lora_A" in name or "lora_B" in name for name in trained)
        assert all(p.abs().sum() == 0 for name, p in trained.items() if "lora_B" in name)
        drawn.append(torch.cat([p.flatten() for name, p in trained.items() if "lora_A" in name]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_no_gradient_is_computed_for_a_frozen_head():
    """Neither its memory nor its time; the others' gradients are those of the plain definition."""
    model, _, _ = with_random_adapters("llama")
    completion_logprobs(model, SEQUENCES, torch.arange(2))  # the trials
    with Record(torch.ops.aten.mm.default) as record:
        completion_logprobs(model, SEQUENCES, torch.arange(2)).sum().backward()
    of_head = model.get_output_embeddings().weight.shape
    shapes = [out.shape for out in record.outputs]
    assert shapes and of_head not in shapes and of_head[::-1] not in shapes
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    sum(plain_logprobs(model, *sequence)[0].sum() for sequence in SEQUENCES).backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(found[name], p.grad, atol=1e-5, rtol=1e-4)


# --- runs ---------------------------------------------------------------------------------------
@pytest.fixture(
    scope="module", params=some_wide(SPECS, fast=["rm_bradley_terry", "ppo_rlhf", "dpo"])
)
def run(request, tmp_path_factory):
    """A script's name, and the folder of its run."""
    script, folder = SPECS[request.param].module, tmp_path_factory.mktemp("lora")
    flags = SPECS[request.param].short_flags | dict(lora_rank=4, learning_rate=1e-2)
    with keep_earlier_checkpoints():
        return request.param, script.main(script.Args(**flags | {"output_dir": str(folder)}))


def test_what_a_run_changes_and_keeps(run):
    """The merged model differs from the start in the adapted matrices, and in a head of scores."""
    name, run_dir = run
    start = load_file(Path(SPECS[name].module.Args.model) / "model.safetensors")
    end = load_file(run_dir / "model.safetensors")
    assert {weight.dtype for weight in end.values()} == {torch.float32}
    changed = {key for key in start if not torch.equal(start[key].float(), end[key])}
    assert changed == {key for key in start if "_proj." in key}
    assert end.keys() - start.keys() == ({"score.weight"} if name == "rm_bradley_terry" else set())
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    for model in SPECS[name].models:
        weights, moments = state[model]
        heads = {key for key in weights if "lora_" not in key}
        expected = {"policy": set(), "model": {"score.weight"}, "critic": {"value_head.weight"}}
        assert heads == expected[model]
        assert moments["state"].keys() == weights.keys() and len(weights) > 4


def test_peft_loads_the_adapter_and_it_is_the_merged_model(run):
    name, run_dir = run
    kind, start = SPECS[name].saved, SPECS[name].module.Args.model
    base = kind.from_pretrained(start, num_labels=1).float()
    model = PeftModel.from_pretrained(base, run_dir / "adapter").eval()
    ids = torch.tensor([[1, 5, 6, 7, 8]])
    with torch.no_grad():
        found = model(input_ids=ids).logits
        expected = kind.from_pretrained(run_dir).float()(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    config = json.loads((run_dir / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == start
    assert (config["modules_to_save"] == ["score"]) == (name == "rm_bradley_terry")


def test_a_run_resumes_to_the_same_bits(run, tmp_path):
    name, run_dir = run
    assert_resumes(SPECS[name].module, run_dir, tmp_path / "run")


def test_the_reference_stays_where_it_was(run):
    """The distance to it is 0 at the start, and not at the end: both sides are one model."""
    name, run_dir = run
    key = "eval/kl" if SPECS[name].kind == "rows" else "objective/kl"
    rows = metrics_of(run_dir)
    kls = [row[key] for row in rows if key in row]
    if name in ("sft", "rm_bradley_terry", "reinforce"):
        assert not kls, "there is none"
    elif name != "distill":  # whose distance is that to the teacher
        assert kls[0] == pytest.approx(0, abs=1e-5) and abs(kls[-1]) > 1e-3
    if name in ("dpo", "kto"):  # in the steps too
        assert any(row.get("reward/margin") for row in rows)


@pytest.mark.parametrize("name", with_flag("reference"))
def test_the_reference_below_adapters_is_the_model_itself(name, tmp_path):
    """In the second step, too, when the policy has moved."""
    script, found = SPECS[name].module, []
    for reference in (None, script.Args.model):
        flags = SPECS[name].short_flags | dict(lora_rank=2, learning_rate=1e-2, reference=reference)
        flags |= short_flags(name, epochs=0.4, total_rollouts=2)
        run_dir = script.main(script.Args(**flags | {"output_dir": str(tmp_path)}))
        rows = metrics_of(run_dir)
        found.append([{key: row[key] for key in row if "time/" not in key} for row in rows])
    assert found[0] == found[1] and len(found[0]) == 3


@pytest.mark.parametrize(
    "critic_init", some_wide(["reward_model", "sft", "policy", "run"], fast=["run"])
)
def test_ppo_scores_with_the_reward_model_as_it_was(critic_init, tmp_path, monkeypatch):
    """Though its critic may be the same model, with adapters and a head of its own; with those of
    a run that has trained it, of another rank, too.
    """
    calls = spy_by_name(ppo_rlhf, monkeypatch, "model_rewards")
    flags = SPECS["ppo_rlhf"].short_flags | dict(lora_rank=4, critic_learning_rate=3e-2)
    reward_model, rank = ppo_rlhf.Args().reward_model, 4
    if critic_init == "run":
        script, rank, critic_init = SPECS["rm_bradley_terry"].module, 2, "reward_model"
        more = dict(lora_rank=rank, learning_rate=1e-2, output_dir=str(tmp_path / "rm"))
        reward_model = str(script.main(script.Args(**SPECS["rm_bradley_terry"].short_flags | more)))
    flags["reward_model"] = reward_model
    flags |= dict(critic_init=critic_init, output_dir=str(tmp_path))
    run_dir = ppo_rlhf.main(ppo_rlhf.Args(**flags))
    critic, _ = torch.load(run_dir / "checkpoint.pt", weights_only=True)["critic"]
    heads = {"reward_model": "value_head.weight", "sft": "score.weight", "policy": "weight"}
    assert {key for key in critic if "lora_" not in key} == {heads[critic_init]}
    assert {len(critic[key]) for key in critic if "lora_A" in key} == {rank} - {
        rank * (critic_init == "policy")
    }
    fresh = AutoModelForSequenceClassification.from_pretrained(reward_model).float()
    last = calls[-1]
    monkeypatch.undo()
    expected = ppo_rlhf.model_rewards(fresh, 2, [], last["sequences"])
    torch.testing.assert_close(last["result"], expected, atol=1e-5, rtol=1e-5)


# --- frozen weights in two bytes ------------------------------------------------------------------
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_frozen_matrices_in_bfloat16_give_the_same_bits(architecture, monkeypatch):
    """Where products are computed in bfloat16 anyway: log-probs and the adapters' gradients."""
    take_gpu_types(monkeypatch)
    results = []
    for stored in (False, True):
        model, _, _ = with_random_adapters(architecture)
        if stored:
            shard(model, CPU)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        size = sum(p.nbytes for p in frozen)
        in_bfloat16 = sum(p.numel() for p in frozen if p.dtype == torch.bfloat16)
        logprobs = completion_logprobs(model, SEQUENCES, torch.arange(2))
        logprobs.sum().backward()
        results.append([logprobs, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert in_bfloat16 > 0 and size == 4 * sum(p.numel() for p in frozen) - 2 * in_bfloat16
    for plain, stored in zip(*results, strict=True):
        assert torch.equal(plain, stored)


def test_a_checkpoint_is_read_in_its_own_type(tmp_path, monkeypatch):
    """7B in bfloat16: 15 GB of host memory, not 30. What is trained becomes float32."""
    kind, tokenizer = AutoModelForCausalLM, AutoTokenizer.from_pretrained(POLICY)
    model = kind.from_pretrained(POLICY, dtype=torch.bfloat16)
    folder = save_model(tmp_path, model, tokenizer)
    trained, frozen = (grpo.load_model(kind, folder, tokenizer, 8) for _ in range(2))
    assert {p.dtype for p in trained.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in shard(trained, CPU).parameters()} == {torch.float32}

    take_gpu_types(monkeypatch)
    projection = frozen.model.layers[0].mlp.up_proj.weight
    place = projection.data_ptr()
    shard(frozen.requires_grad_(False), CPU)
    assert projection.dtype == torch.bfloat16 and projection.data_ptr() == place  # never float32
    assert torch.equal(projection.float(), trained.model.layers[0].mlp.up_proj.weight)


# --- from stage to stage --------------------------------------------------------------------------
@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """The folder of tiny/arithmetic/policy, its weights as the hub has them: in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return save_model(tmp_path_factory.mktemp("exact"), model, POLICY)


def stage_flags(name, source, **flags):
    """Those of a short run of adapters on arithmetic."""
    flags = dict(model=source, lora_rank=4, learning_rate=1e-4) | flags
    dataset = dict(sft="sft", dpo="preferences", grpo="prompts")[name]
    flags |= short_flags(name, dataset=f"tiny/arithmetic/{dataset}", beta=0.1)
    return SPECS[name].short_flags | flags


def stage(name, source, folder, **flags):
    """The folder of such a run."""
    script, flags = SPECS[name].module, stage_flags(name, source, output_dir=str(folder), **flags)
    return str(script.main(script.Args(**flags)))


def loaded(source, take):
    """The policy of a folder as a script has it."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = grpo.load_model(AutoModelForCausalLM, source, tokenizer, 8)
    take(model)
    return shard(model, CPU)


go_on, take_merged = partial(add_adapters, lora_rank=4, seed=1), partial(freeze, merged=True)


def logprobs_of(model):
    with torch.no_grad():
        return completion_logprobs(model, SEQUENCES, torch.arange(2))


@pytest.mark.parametrize("base", some_wide(["exact", "rounded"], fast=["exact"]))
def test_three_stages_lose_nothing_where_products_are_in_bfloat16(
    base, exact, tmp_path, monkeypatch
):
    """Of merged weights a part of what was learned is rounded off; from a base that is rounded
    itself, as a run without adapters, the difference is as small.
    """
    take_gpu_types(monkeypatch)
    if base == "rounded":
        model = AutoModelForCausalLM.from_pretrained(exact)
        for weight in model.parameters():
            weight.data *= 1.003
        base = save_model(tmp_path / "base", model, POLICY)
    else:
        base = exact
    before, source = logprobs_of(loaded(base, freeze)), base
    losses, kept, save = spy_on(grpo, monkeypatch, "grpo_loss"), [], grpo.save_model

    def save_too(run_dir, model, *rest):
        kept.append(logprobs_of(model))
        save(run_dir, model, *rest)

    for name in ("sft", "dpo", "grpo"):
        monkeypatch.setattr(SPECS[name].module, "save_model", save_too)
        source = stage(name, source, tmp_path)
        for take in (freeze, go_on):
            found = logprobs_of(loaded(source, take))
            torch.testing.assert_close(found, kept[-1], atol=1e-6, rtol=0)
        lost = logprobs_of(loaded(source, take_merged)) - kept[-1]
        assert lost.norm() > 0.1 * (kept[-1] - before).norm() > 0
        config = json.loads(Path(source, "adapter/adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == base and config["r"] == 4
        if name == "dpo":
            assert metrics_of(Path(source))[0]["eval/kl"] == 0
    logprobs, old, ref = losses[0][0][:3]  # of the first micro-batch of the first step
    assert torch.equal(logprobs, old) and torch.equal(old, ref)


def test_a_second_stage_resumes_and_is_the_same_on_two_processes(exact, tmp_path):
    first = stage("sft", exact, tmp_path, learning_rate=1e-2)
    flags = stage_flags("dpo", first)
    run_dir = run_and_resume(dpo, tmp_path, **flags)
    command = ["dpo.py", *words(flags | {"output_dir": tmp_path / "two"})]
    assert torchrun(2, command, tmp_path / "out") == [0, 0]
    [two] = (tmp_path / "two").iterdir()
    assert metrics_of(two)[0]["eval/kl"] == pytest.approx(0, abs=1e-5)
    found, expected = (load_file(d / "adapter/adapter_model.safetensors") for d in (two, run_dir))
    start = load_file(Path(first, "adapter/adapter_model.safetensors"))
    for key in expected:
        assert 0 < (found[key] - start[key]).abs().max() < 2e-3
        torch.testing.assert_close(found[key], expected[key], atol=2e-4, rtol=0)
    for folder in (exact, f"{first}/adapter"):
        before, file = checksum([], first), next(Path(folder).glob("*config.json"))
        file.write_text(file.read_text() + " ")
        assert checksum([], first) != before


def test_merged_weights_are_taken_if_the_base_or_the_folder_has_changed(exact, tmp_path):
    run_dir = stage("sft", exact, tmp_path, learning_rate=1e-2)
    with pytest.raises(ValueError, match=r"--lora-rank 3: .*/adapter has rank 4: use that, or"):
        loaded(run_dir, partial(add_adapters, lora_rank=3, seed=1))
    config, file = Path(run_dir, "adapter/adapter_config.json"), f"{run_dir}/model.safetensors"
    text, weights = config.read_text(), load_file(file)
    config.write_text(text.replace(exact, "not/there"))
    for base, reason in (("not/there", ""), (exact, "the run's weights are not base")):
        with pytest.warns(UserWarning, match=f"no adapter over {base}: .*GPU rounds.*{reason}"):
            model = loaded(run_dir, go_on)
        assert torch.equal(logprobs_of(model), logprobs_of(loaded(run_dir, take_merged)))
        config.write_text(text)
        weights["model.layers.0.self_attn.q_proj.weight"] *= 1.001  # the first that is adapted
        save_file(weights, file, {"format": "pt"})


# --- a model in 4 bits ----------------------------------------------------------------------------
@pytest.fixture
def in_4_bits(tmp_path):
    """The folder of tiny/arithmetic/policy, quantised."""
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(POLICY, quantization_config=config)
    return save_model(tmp_path / "quantised", model, POLICY)


@pytest.mark.parametrize("name", some_wide(["sft", "grpo", "ppo_rlhf"], fast=["sft"]))
def test_adapters_on_4_bits(name, in_4_bits, tmp_path):
    """What is saved is what was trained: the quantised weights plus 2 B A, in float32."""
    flags = SPECS[name].short_flags | dict(model=in_4_bits, lora_rank=4, learning_rate=1e-2)
    if name == "ppo_rlhf":
        flags |= dict(reward_model=None, reward_fn=[LAST_NUMBER], critic_init="sft")
        flags["dataset"] = "tiny/arithmetic/prompts"
    run_dir = run_and_resume(SPECS[name].module, tmp_path, **flags)
    base = shard(AutoModelForCausalLM.from_pretrained(in_4_bits).requires_grad_(False), CPU)
    start, _ = plain_logprobs(base, *SEQUENCES[0])
    trained = PeftModel.from_pretrained(base, run_dir / "adapter").train()
    saved = AutoModelForCausalLM.from_pretrained(run_dir)
    assert saved.dtype == torch.float32 and not getattr(saved, "is_quantized", False)
    for sequence in SEQUENCES:
        expected, _ = plain_logprobs(trained, *sequence)
        found, _ = plain_logprobs(saved, *sequence)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (plain_logprobs(saved, *SEQUENCES[0])[0] - start).abs().max() > 0.02
    again = loaded(str(run_dir), go_on)  # the next stage
    assert sum(hasattr(p, "quant_state") for p in again.parameters()) == 7 * 2
    torch.testing.assert_close(logprobs_of(again), logprobs_of(saved), atol=1e-4, rtol=1e-4)
    save_weights(again, tmp_path / "again")
    for key, weight in load_file(tmp_path / "again/model.safetensors").items():
        torch.testing.assert_close(weight, saved.get_parameter(key), atol=1e-6, rtol=0)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_codes_stored_as_floats_are_left_alone(storage, tmp_path, monkeypatch):
    """As models for FSDP have them; as numbers they would be rounded, or doubled in size."""
    pytest.importorskip("bitsandbytes")
    if storage == torch.float32:
        take_gpu_types(monkeypatch)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=storage)
    model = AutoModelForCausalLM.from_pretrained(POLICY, quantization_config=config)
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, model, POLICY))
    codes = {p: p.detach().clone() for p in model.parameters() if hasattr(p, "quant_state")}
    assert len(codes) == 7 * model.config.num_hidden_layers
    shard(model.requires_grad_(False), CPU)
    for found, expected in codes.items():
        assert found.dtype == storage
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_gradients_on_4_bits_are_those_on_the_same_weights_in_32(in_4_bits):
    """Also after a pass without a gradient, for which bitsandbytes may repack the weights."""
    found = []
    for dequantised in (False, True):
        model = AutoModelForCausalLM.from_pretrained(in_4_bits)
        if dequantised:
            model = model.dequantize(torch.float32)
            model.is_loaded_in_4bit = False
        add_adapters(model, 4, 1)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(2)
                torch.nn.init.normal_(weight, std=0.1, generator=generator)
        shard(model, CPU)
        with torch.no_grad():
            completion_logprobs(model, SEQUENCES, torch.arange(2))
        completion_logprobs(model, SEQUENCES, torch.arange(2)).sum().backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


def test_the_adapter_is_saved_before_it_is_merged_on_the_cpu(in_4_bits, tmp_path, monkeypatch):
    """On a GPU the weights in 4 bits may fit, but not in float32: nothing learned is lost."""
    model = AutoModelForCausalLM.from_pretrained(in_4_bits)
    add_adapters(model, 4, 1)
    shard(model, CPU)
    calls, move = [], type(model).cpu
    monkeypatch.setattr(type(model), "cpu", lambda self: calls.append("cpu") or move(self))

    def dequantize(*args):
        assert calls == ["cpu"]
        raise torch.OutOfMemoryError

    monkeypatch.setattr(type(model), "dequantize", dequantize)
    with pytest.raises(torch.OutOfMemoryError):
        save_weights(model, tmp_path)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(saved) == len(trained) == 2 * 7 * model.config.num_hidden_layers
    for name, weight in trained.items():
        assert torch.equal(saved[f"base_model.model.{name.replace('.default', '')}"], weight)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(in_4_bits), tmp_path / "adapter")


def test_4_bits_need_adapters_and_one_process(in_4_bits, monkeypatch):
    for rank, processes in ((0, 1), (4, 2)):
        monkeypatch.setattr("runtime.checks.WORLD_SIZE", processes)
        model = AutoModelForCausalLM.from_pretrained(in_4_bits)
        add_adapters(model, rank, 1)
        with pytest.raises(ValueError, match="in 4 bits needs --lora-rank above 0 and a single"):
            shard(model, CPU)


# --- refused --------------------------------------------------------------------------------------
def test_a_folder_of_adapters_alone(run):
    """transformers would load the model that it belongs to, and train that one."""
    name, run_dir = run
    script, folder = SPECS[name].module, run_dir / "adapter"
    for flag in ("model", "reward_model", "teacher"):
        if hasattr(script.Args, flag):
            args = script.Args(**SPECS[name].short_flags | {flag: str(folder)})
            with pytest.raises(ValueError, match=f"merge the adapters in {folder} first"):
                script.main(args)
