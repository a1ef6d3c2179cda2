"""Memory by algorithm: the formula against transformers, autograd and arithmetic by hand, and
docs/explorer.html in a browser against the formula."""

import functools
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import common.logprobs

sys.path.insert(0, "docs/experiments")
import choosing
from choosing import CONSTANTS, DEFAULTS, PARTS, memory, parameters

MODELS, ALGORITHMS = CONSTANTS["models"], CONSTANTS["algorithms"]
PRECISIONS = CONSTANTS["precisions"]
PAGE = Path("docs/explorer.html")


def configuration(model, layers=None):
    """Of transformers; Qwen2.5 and Llama 3.1 have heads of 64 or 128."""
    head = 64 if model["query"] < 1_000 else 128
    kind = Qwen2Config if model["vocab"] > 150_000 else LlamaConfig
    return kind(
        vocab_size=model["vocab"],
        hidden_size=model["hidden"],
        intermediate_size=model["ffn"],
        num_hidden_layers=layers or model["layers"],
        num_attention_heads=model["query"] // head,
        num_key_value_heads=model["kv"] // head,
        tie_word_embeddings=model["tied"],
    )


# Billions, as the cards of the models say.
PUBLISHED = [0.49, 1.54, 3.09, 7.61, 8.03, 14.7, 32.5, 70.6]


@pytest.mark.parametrize(("name", "billions"), [*zip(MODELS, PUBLISHED, strict=True)])
def test_parameters_are_those_of_the_models(name, billions):
    model = MODELS[name]
    assert parameters(model)["policy"] / 1e9 == pytest.approx(billions, rel=0.01)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(configuration(model, layers=2))
    two_layers = parameters(model | {"layers": 2})
    assert made.num_parameters() == pytest.approx(two_layers["policy"], rel=3e-4)
    body = sum(p.numel() for p in made.model.parameters())
    assert body == pytest.approx(two_layers["backbone"], rel=3e-4)


@pytest.mark.parametrize("kind", CONSTANTS["activations"])
def test_activations_are_what_autograd_keeps(kind):
    """Two models that differ by a layer, and all storages that their graphs hold on to."""
    model = dict(hidden=128, query=128, kv=32, ffn=352, vocab=64, layers=2, tied=True)
    rows, length = 2, 24

    def kept(layers, parameters_too):
        heads = dict(num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=layers)
        config = Qwen2Config(vocab_size=64, hidden_size=128, intermediate_size=352, **heads)
        net = AutoModelForCausalLM.from_config(config).eval()
        net = net.bfloat16() if kind == "bfloat16" else net
        own = {p.untyped_storage().data_ptr() for p in net.parameters()}
        sizes, alive = {}, []

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=kind != "float32"),
        ):
            net.model(input_ids=torch.zeros(rows, length, dtype=torch.long), use_cache=False)
        return sum(sizes.values())

    found = kept(3, False) - kept(2, False)
    if kind == "autocast":  # and a copy in bfloat16 of each matrix, which is counted by itself
        layer = parameters(model)["layer"] - 2 * model["hidden"]
        found -= 2 * layer
    each = CONSTANTS["activations"][kind]
    counted = rows * length * sum(each[width] * model[width] for width in each)
    assert found == pytest.approx(counted, rel=0.005)  # the rest: two norms' and each head's number


def test_the_chunk_of_logits_is_that_of_the_scripts():
    assert CONSTANTS["logits_chunk"] == common.logprobs.MAX_LOGITS


def test_bytes_of_a_parameter():
    """16 if trained, 4 if frozen; with more tokens or rows only the last parts change."""
    model, mixed = MODELS["Qwen2.5-0.5B"], PRECISIONS["mixed"]  # tied: all models of one size
    expected = dict(sft=16, rm=16, reinforce=16, reinforce_kl=20, ppo=40, ppo_rule=36, grpo=20)
    expected |= dict(
        ppo_shared=24, grpo_no_kl=16, grpo_rm=24, dpo=16, dpo_online=20, simpo=16, kto=16
    )
    for name, total in expected.items():
        parts = memory(model, ALGORITHMS[name], mixed, **DEFAULTS)["update"]
        state = sum(parts.values()) - parts["copies"] - parts["activations"]
        assert state / parameters(model)["policy"] == pytest.approx(total)
    assert ALGORITHMS.keys() == expected.keys()


def test_a_model_by_hand():
    """Two layers of width 10, feed-forward 30, 100 words, on one GPU and on two."""
    model = dict(hidden=10, layers=2, query=10, kv=5, ffn=30, vocab=100, tied=False)
    layer = 100 + 100 + 50 + 50 + 3 * 300 + 20
    policy, classifier = 2 * layer + 1_000 + 1_000 + 10, 2 * layer + 1_000 + 10
    run = dict(micro_batch=3, prompt=4, completion=6, rollout=8, group=2)
    one = memory(model, ALGORITHMS["ppo"], PRECISIONS["mixed"], gpus=1, **run)
    assert one["update"] == {
        "policy": 4 * policy,
        "reference": 4 * policy,
        "critic": 4 * classifier,
        "reward": 4 * classifier,
        "gradients": 4 * (policy + classifier),
        "adamw": 8 * (policy + classifier),
        "copies": 2 * (policy - 1_000),  # the input embeddings are looked up
        "activations": 30 * 2 * (260 + 40 + 20 + 240) + 4 * 100 * 18 + 4 * 1_000,
        "cache": 0,
    }
    # Eight rows of 10 tokens, keys and values of two layers; the logits of a step.
    assert one["sampling"]["cache"] == 8 * (10 * 2 * 2 * 5 * 2 + 16 * 100)
    assert one["sampling"]["activations"] == one["sampling"]["gradients"] == 0
    two = memory(model, ALGORITHMS["grpo"], PRECISIONS["mixed"], gpus=2, **run)
    assert two["update"]["policy"] == two["update"]["reference"] == 2 * policy
    assert two["update"]["copies"] == 2 * (2_010 + 2 * layer)
    assert two["sampling"]["copies"] == 2 * policy
    assert two["sampling"]["cache"] == one["sampling"]["cache"] / 2
    # With long prompts it is reading them that needs most: two, of groups of two, on each GPU.
    long = memory(model, ALGORITHMS["grpo"], PRECISIONS["mixed"], gpus=2, **run | {"prompt": 999})
    cache = 1_005 * 2 * 2 * 5 * 2
    reading = 2 * (cache + 999 * 2 * (60 + 90))
    assert long["sampling"]["cache"] == max(reading, 4 * (cache + 1_600)) == reading
    pairs = memory(model, ALGORITHMS["dpo"], PRECISIONS["float32"], gpus=1, **run)
    assert pairs.keys() == {"update"} and pairs["update"]["copies"] == 0
    activations = 60 * 2 * (240 + 80 + 40 + 480) + 4 * 100 * 36 + 4 * 1_000
    assert pairs["update"]["activations"] == activations


def test_the_measured_peaks_are_near_the_computed_ones():
    measured = json.loads(choosing.RESULTS.read_text())["numbers"]["measured"]
    assert len(measured) == len(choosing.SCRIPTS) + 2
    for case in measured:
        state, total, came = choosing.expected(case)
        assert state < total >= came and 0.85 < case["peak"] / came < 1.15, case["run"]


def test_the_tables_are_of_these_constants():
    made = json.loads(choosing.RESULTS.read_text())
    assert made == choosing.tables(made["numbers"]["measured"])


def test_the_page_has_the_same_constants():
    (block,) = re.findall(
        r'<script type="application/json" id="constants">(.*?)</script>', PAGE.read_text(), re.S
    )
    assert json.loads(block) == CONSTANTS | {"parts": PARTS, "defaults": DEFAULTS}


def test_the_page_needs_nothing_else():
    assert not re.findall(
        r"(src|href)=\"(?!choosing\.md)|@import|url\(|fetch\(|https?://", PAGE.read_text()
    )


# --- in a browser ------------------------------------------------------------------------------
CHROMIUM = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None
)
browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed")
# Beside the defaults: each precision, one GPU and several, and a model of one's own.
SETTINGS = [
    {},
    dict(model="Qwen2.5-0.5B", precision="float32", micro_batch="4", prompt="64", completion="200"),
    dict(model="Llama-3.1-70B", gpus="16", rollout="1000", group="16", completion="8192"),
    dict(model="Qwen2.5-14B", precision="master", gpus="2", prompt="4096"),
    dict(model="Qwen2.5-3B", precision="bfloat16"),
    dict(hidden="1000", layers="10", query="1200", kv="300", ffn="3000", vocab="50000"),
]
# What a person does: choose, look; and what a reader of the screen is told.
PROBE = """
const text = (node) => node.textContent.trim(), all = (q) => [...document.querySelectorAll(q)];
const colour = (node, name) => getComputedStyle(node)[name];
const part = (x) => [x.dataset.part, Number(x.dataset.bytes), x.getBoundingClientRect().width];
const bars = (x) => [...x.querySelectorAll(".bar")];
const read = () => all("article").map((x) => ({
  algorithm: x.dataset.algorithm,
  peak: text(x.querySelector(".peak")),
  cards: [...x.querySelectorAll(".fits li")].map((y) => [text(y), y.className, y.dataset.gpus]),
  bars: Object.fromEntries(bars(x).map((y) => [y.dataset.stage, [...y.children].map(part)])),
  width: bars(x)[0].getBoundingClientRect().width,
  spoken: bars(x)[0].getAttribute("aria-label"),
}));
function set(name, value) {
  form[name].value = value;
  form[name].dispatchEvent(new Event("input", { bubbles: true }));
}
const found = {
  width: innerWidth, scroll: document.documentElement.scrollWidth, first: read(), chosen: [],
  unlabelled: all("select, input").filter((x) => !x.labels.length || !text(x.labels[0])).length,
  cut: all("article, td, th, li, h2").filter((x) => x.scrollWidth > x.clientWidth + 1).map(text),
  text: colour(document.body, "color"), page: colour(document.body, "backgroundColor"),
  soft: colour(document.querySelector("p"), "color"), card: colour(form, "backgroundColor"),
};
if (innerWidth > 1000) {
  for (const setting of SETTINGS) {
    location.hash = "#";
    fromAddress();
    for (const [name, value] of Object.entries(setting)) set(name, value);
    for (const key of Object.keys(C.algorithms)) {
      set("a", key);
      found.chosen.push(read()[0]);
    }
    found.address = location.hash;
  }
  const before = read()[0].peak;
  set("gpus", "0");
  found.kept = read()[0].peak === before;
  found.error = text(document.getElementById("error"));
  set("gpus", "1");
  found.mended = text(document.getElementById("error"));
}
parent.postMessage(found, "*");
"""


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """The page on a phone's width and on a desk's, in one scheme: what PROBE found."""

    @functools.cache
    def look(dark):
        folder = tmp_path_factory.mktemp("explorer")
        probe = PROBE.replace("SETTINGS", json.dumps(SETTINGS))
        page = PAGE.read_text().replace("</body>", f"<script>{{{probe}}}</script></body>")
        (folder / "explorer.html").write_text(page)
        frames = "".join(
            f'<iframe src="explorer.html#a=dpo&b=kto&gpus=2" style="border:0;width:{width}px;'
            'height:900px"></iframe>'
            for width in (390, 1280)
        )
        (folder / "frames.html").write_text(
            f"<!doctype html>{frames}<pre id=out></pre><script>const all = [];"
            "onmessage = (e) => { all.push(e.data);"
            "document.getElementById('out').textContent = JSON.stringify(all); };</script>"
        )
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        flags = "--headless=new --no-sandbox --disable-gpu --virtual-time-budget=5000 --dump-dom"
        place = [scheme, f"--user-data-dir={folder / 'profile'}", f"file://{folder}/frames.html"]
        command = [CHROMIUM, *flags.split(), *place]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        (out,) = re.findall(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)
        return sorted(json.loads(html.unescape(out)), key=lambda one: one["width"])

    return look


def luminance(colour):
    numbers = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in numbers]
    return sum(x * w for x, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(a, b):
    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


@browser
def test_the_page_shows_what_the_formula_gives(visit):
    phone, desk = visit(False)
    assert (phone["width"], desk["width"]) == (390, 1280)
    # The address sets the controls.
    assert [one["algorithm"] for one in desk["first"]] == ["dpo", "kto"]
    expected = memory(
        MODELS["Qwen2.5-7B"], ALGORITHMS["kto"], PRECISIONS["mixed"], **DEFAULTS | {"gpus": 2}
    )
    shown = {part: size for part, size, _ in desk["first"][1]["bars"]["update"]}
    assert shown == pytest.approx({part: size for part, size in expected["update"].items() if size})
    assert desk["error"].startswith("GPUs") and desk["mended"] == "" and desk["kept"]
    # Choosing sets the address.
    assert "model=own" in desk["address"] and "hidden=1000" in desk["address"]

    chosen = iter(desk["chosen"])
    for setting in SETTINGS:
        asked = {name: int(value) for name, value in setting.items() if value.isdigit()}
        model = MODELS[setting.get("model", "Qwen2.5-7B")]
        model = model | {name: value for name, value in asked.items() if name in model}
        work = DEFAULTS | {name: value for name, value in asked.items() if name in DEFAULTS}
        p = PRECISIONS[setting.get("precision", "mixed")]
        for name, algorithm in ALGORITHMS.items():
            one = next(chosen)
            assert one["algorithm"] == name
            expected = memory(model, algorithm, p, **work)
            assert one["bars"].keys() == expected.keys()
            for stage, parts in expected.items():
                sizes = {part: size for part, size, _ in one["bars"][stage]}
                assert sizes == pytest.approx({k: v for k, v in parts.items() if v}, rel=1e-9)
                assert list(sizes) == [part for part in PARTS if part in sizes]
                # As wide as they are large, each bar to the scale of all.
                widths = {part: width for part, _, width in one["bars"][stage]}
                scale = sum(widths.values()) / sum(sizes.values())
                assert widths == pytest.approx({k: v * scale for k, v in sizes.items()}, abs=0.1)
                assert sum(widths.values()) < one["width"]
            most = max(sum(parts.values()) for parts in expected.values())
            assert float(one["peak"].split()[0]) == pytest.approx(most / 1e9, abs=0.5)
            for card, told, gpus in one["cards"]:
                card = card.split()[0]
                assert (told == "yes") == (most <= int(card) * 1e9)
                peaks = {
                    n: choosing.peak(model, algorithm, p, **work | {"gpus": n})
                    for n in (int(gpus), int(gpus) // 2)
                    if n
                }
                fits = [n for n, size in peaks.items() if size <= int(card) * 1e9]
                assert fits == [int(gpus)] or (int(gpus) == 0 and fits == [])
    assert next(chosen, None) is None


@browser
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_can_be_read_on_a_phone_and_a_desk_in_light_and_dark(visit, dark):
    for one in visit(dark):
        assert one["scroll"] <= one["width"] and one["cut"] == [] and one["unlabelled"] == 0
        assert (luminance(one["page"]) < 0.1) == dark == (luminance(one["card"]) < 0.1)
        assert contrast(one["text"], one["page"]) > 7 and contrast(one["soft"], one["card"]) > 4.5
        assert "policy" in one["first"][0]["spoken"] and "GB" in one["first"][0]["spoken"]


def test_the_worked_example():
    """By hand: 16 bytes for a trained parameter, 4 for a frozen one."""
    parameters = 7_615_616_512  # as Qwen2.5-7B's card and checkpoint have it
    text = Path("docs/choosing.md").read_text()
    example = text.partition("**A worked example.**")[2].partition("\n\n")[0]
    assert f"has {parameters / 1e9:.2f} billion" in example
    headless = parameters - 152_064 * 3_584  # critic and reward model: without an output head
    grpo = (16 + 4) * parameters / 1e9
    ppo = grpo + (16 + 4) * headless / 1e9
    for total in (grpo, ppo):
        assert f"{total:.0f} GB" in example and f"{total / 8:.0f} GB" in example
    assert f"{(parameters - headless) / 1e9:.2f} billion parameters of its vocabulary" in " ".join(
        example.split()
    )
