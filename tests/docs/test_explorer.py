"""docs/explorer.html in a real browser: its numbers against the formula of docs/experiments/cost/
memory_model.py, every control, wrong input, a phone and a desk, light and dark, large letters.
"""

import json
import re
import shlex
import time
from pathlib import Path

import pytest
import tyro
from browser import EXPLORER as PAGE
from browser import needs_browser, serve
from scripts import SCRIPTS

from docs.experiments.cost.memory_model import CONSTANTS, DEFAULTS, PARTS, memory, peak

MODELS, ALGORITHMS = CONSTANTS["models"], CONSTANTS["algorithms"]
PRECISIONS = CONSTANTS["precisions"]
START_MODEL = "Qwen2.5-1.5B"
TIGHT = 0.92  # of a card: above it the page says so
COUNTED_GPUS = 64  # above it the page gives no number


def page_json(name):
    pattern = rf'<script type="application/json" id="{name}">(.*?)</script>'
    (block,) = re.findall(pattern, PAGE.read_text(), re.S)
    return json.loads(block)


ABOUT = page_json("about")


def peak_on(card, model, algorithm, compute_bytes, **work):
    """Without bfloat16 the scripts compute in float32."""
    return peak(model, algorithm, compute_bytes if card["bfloat16"] else 4, **work)


def test_the_page_has_the_same_constants():
    assert page_json("constants") == CONSTANTS | {"parts": PARTS, "defaults": DEFAULTS}


def test_the_page_needs_nothing_else():
    """It links to pages beside it, and loads nothing."""
    text = PAGE.read_text()
    assert not re.findall(r"\bsrc=|@import|url\(|fetch\(|https?://", text)
    assert set(re.findall(r'href="([^"]*)"', text)) == {"memory/"}


def test_every_algorithm_has_its_script_and_page():
    assert ABOUT.keys() == ALGORITHMS.keys()
    for about in ABOUT.values():
        script = Path(about["script"])
        assert script.is_file() and (PAGE.parent / f"{script.stem}.md").is_file()


# --- the browser -------------------------------------------------------------------------------
TAB, RIGHT, END = "\ue004", "\ue014", "\ue010"
# `set` is a control as a person sets it; `read` gives all cards of the page, as it shows them.
SCRIPT = """
function set(name, value) {
  const field = document.getElementById(name);
  if (field.type === "checkbox") field.checked = value; else field.value = value;
  for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind, { bubbles: true }));
}
const bars = (x) => [...x.querySelectorAll(".bar")];
const part = (x) => [x.dataset.part, Number(x.dataset.bytes), x.getBoundingClientRect().width];
const read = () => [...document.querySelectorAll("article")].map((x) => ({
  algorithm: x.dataset.algorithm,
  peak: x.querySelector(".peak").textContent,
  cards: [...x.querySelectorAll(".fits li")].map((y) => [
    Number(y.dataset.card), y.className, Number(y.dataset.gpus), y.textContent,
  ]),
  bars: Object.fromEntries(bars(x).map((y) => [y.dataset.stage, [...y.children].map(part)])),
  command: x.querySelector("pre")?.textContent,
}));
"""
CHOOSE = (
    SCRIPT
    + """
const [setting, keys] = arguments;
set("a", "rm");
for (const [name, value] of Object.entries(setting)) set(name, value);
return keys.map((key) => { set("a", key); return read()[0]; });
"""
)
# Every control away from its default: each precision, one GPU and several, long and short texts,
# the flags, a rollout that is no whole number of groups, and a model of one's own.
SETTINGS = [
    {},
    dict(model="Qwen2.5-0.5B", precision="float32", micro_batch=4, completion=200, train_layers=3),
    dict(model="Llama-3.1-70B", gpus=16, rollout=1000, group=16, completion=8192),
    dict(model="Qwen2.5-14B", precision="float32", gpus=2, prompt=4096, checkpointing=True),
    dict(model="Qwen2.5-3B", checkpointing=True, train_layers=0),
    dict(model="Qwen2.5-7B", checkpointing=True, train_layers=4, generation_batch=24),
    dict(rollout=4, group=64, completion=8192, checkpointing=True),
    dict(
        **dict(hidden=1000, layers=10, query=1200, kv=300, ffn=3000, vocab=50_000),
        tied=False,
        micro_batch=64,
        gpus=3,
    ),
    dict(model="Qwen2.5-7B", lora_rank=16, checkpointing=True, train_layers=4, generation_batch=16),
    dict(lora_rank=64, gpus=3, micro_batch=2),
    dict(model="Llama-3.1-8B", lora_rank=1, precision="float32"),
]
LORA = SETTINGS[8]


@needs_browser
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_page_shows_what_the_formula_gives(browser, setting):
    browser.open()
    shown = browser.run(CHOOSE, setting, [*ALGORITHMS])
    model = MODELS[setting.get("model", START_MODEL)]
    model = model | {name: value for name, value in setting.items() if name in model}
    choices = ("model", "precision", *model)
    work = DEFAULTS | {name: value for name, value in setting.items() if name not in choices}
    precision = PRECISIONS[setting.get("precision", "mixed")]
    for (name, algorithm), one in zip(ALGORITHMS.items(), shown, strict=True):
        assert one["algorithm"] == name
        expected = memory(model, algorithm, precision, **work)
        assert one["bars"].keys() == expected.keys()
        for stage, parts in expected.items():
            sizes = {part: size for part, size, _ in one["bars"][stage]}
            assert sizes == pytest.approx({k: v for k, v in parts.items() if v}, rel=1e-9)
            assert list(sizes) == [part for part in PARTS if part in sizes]
            widths = {part: width for part, _, width in one["bars"][stage]}
            scale = sum(widths.values()) / sum(sizes.values())
            assert widths == pytest.approx({k: v * scale for k, v in sizes.items()}, abs=0.1)
        most = max(sum(parts.values()) for parts in expected.values())
        shown_peak = float(one["peak"].split()[0].replace(",", ""))
        assert shown_peak == pytest.approx(most / 1e9, abs=0.5)
        assert len(one["cards"]) == len(CONSTANTS["cards"])
        for card, (size, kind, gpus, text) in zip(CONSTANTS["cards"], one["cards"], strict=True):
            assert size == card["gb"]
            peak = peak_on(card, model, algorithm, precision, **work)
            share = peak / (size * 1e9)
            assert kind == ("no" if share > 1 else "tight" if share > TIGHT else "yes")
            # With so many it is not tight, with one fewer it is; 0: not even with all.
            counts = {gpus, gpus - 1} if 0 < gpus <= COUNTED_GPUS else {gpus, COUNTED_GPUS}
            for count in counts - {0}:
                peak = peak_on(card, model, algorithm, precision, **work | {"gpus": count})
                assert (peak <= TIGHT * size * 1e9) == (count == gpus)
            if gpus == 0:
                everything = work | {"gpus": CONSTANTS["most_gpus"]}
                peak = peak_on(card, model, algorithm, precision, **everything)
                assert peak > TIGHT * size * 1e9 and (kind != "no" or "no number of GPUs" in text)
            if kind == "yes" and work["gpus"] > 1:
                assert text.endswith(f"fits {work['gpus']} x {size} GB")


@needs_browser
def test_the_commands_are_those_of_the_scripts(browser):
    """Each command's flags are flags of the script, and ask for what is shown."""
    uneven = dict(gpus=16, micro_batch=4, rollout=129, prompt=77, generation_batch=3)
    for setting in [{}, SETTINGS[5] | uneven, LORA, LORA | uneven]:
        browser.open()
        shown = browser.run(CHOOSE, setting, [*ALGORITHMS])
        work = DEFAULTS | setting
        for (name, algorithm), one in zip(ALGORITHMS.items(), shown, strict=True):
            lines = one["command"].split(" \\\n  ")
            assert all(line.count("--") <= 1 for line in lines)
            words = shlex.split(" ".join(lines))
            position = words.index(ABOUT[name]["script"])
            launcher = " ".join(words[:position])
            processes = 1
            for count in re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", launcher):
                processes *= int(count)
            assert processes == work["gpus"]
            assert launcher.startswith("python" if processes == 1 else "torchrun ")
            script = SCRIPTS[ABOUT[name]["script"].removesuffix(".py")]
            args = tyro.cli(script.Args, args=words[position + 1 :])
            assert args.micro_batch_size == work["micro_batch"]
            assert args.activation_checkpointing == work.get("checkpointing", False)
            assert args.model == f"Qwen/{setting.get('model', START_MODEL)}-Instruct"
            assert args.lora_rank == work["lora_rank"]
            written = dict(re.findall(r"--(\S*learning-rate) (\S+)", ABOUT[name]["flags"]))
            for flag, rate in written.items():
                factor = 10 if work["lora_rank"] else 1
                found = getattr(args, flag.replace("-", "_"))
                assert found == pytest.approx(factor * float(rate))
            if algorithm["evaluated"]:
                assert args.max_new_tokens == work["completion"]
                of_a_gpu = -(-algorithm["evaluated"] // work["gpus"])
                assert args.generation_batch_size == min(work["generation_batch"], of_a_gpu)
                sampled = "eval_samples" if name == "sft" else "eval_rows"
                assert getattr(args, sampled) == algorithm["evaluated"]
            if algorithm["samples"]:
                lengths = (args.max_prompt_length, args.max_new_tokens)
                assert lengths == (work["prompt"], work["completion"])
                group = args.group_size if algorithm["samples"] == "group" else 1
                completions = args.prompts_per_rollout * group
                assert 0 <= completions - work["rollout"] < group
                of_a_gpu = -(-completions // work["gpus"])
                assert args.generation_batch_size == min(work["generation_batch"], of_a_gpu)
                assert ("reference" in algorithm["frozen"]) == (args.beta > 0)
            else:
                assert args.max_length == work["prompt"] + work["completion"]
                assert args.batch_size >= work["micro_batch"] * work["gpus"]
            if name.startswith("grpo"):
                assert (args.reward_model is not None) == ("reward" in algorithm["frozen"])
            if name.startswith("ppo"):
                has_reward_model = args.reward_model not in (None, "none")
                assert has_reward_model == ("reward" in algorithm["frozen"])
                assert (args.critic_init == "policy") == ("critic" not in algorithm["trained"])
            if name == "rm":
                frozen = None if work["lora_rank"] else setting.get("train_layers")
                assert args.train_layers == frozen


@needs_browser
def test_every_control_changes_the_address_which_brings_it_back(browser):
    choices = dict(a="rm", b="grpo", precision="float32", model="own")
    numbers = dict(gpus=3, micro_batch=2, prompt=100, completion=200, rollout=64, group=4)
    numbers |= dict(hidden=1000, layers=10, query=1200, kv=300, ffn=3000, vocab=50_000)
    numbers |= dict(generation_batch=5, train_layers=5)
    browser.open()
    for name, value in choices.items():  # the last opens the fields of the model
        browser.click(f'#{name} option[value="{value}"]')
    for name, value in numbers.items():
        before = browser.text("#cards")
        browser.type(f"#{name}", str(value))
        assert browser.text("#cards") != before or name == "group"
        assert f"{name}={value}" in browser.hash()
    browser.click("#checkpointing")
    browser.click("#tied")
    address = browser.hash()
    shown = browser.run(SCRIPT + "return read()")
    everything = """return Object.fromEntries([...document.querySelectorAll("select, input")].map(
        (x) => [x.id, x.type === "checkbox" ? x.checked : x.value]))"""
    expected = choices | {name: str(value) for name, value in numbers.items()}
    expected |= dict(checkpointing=True, tied=False, lora_rank="0")
    assert browser.run(everything) == expected
    browser.open(address=address[1:])
    assert browser.run(everything) == expected
    assert browser.run(SCRIPT + "return read()") == shown
    assert browser.run("return document.getElementById('note').hidden")


@needs_browser
def test_adapters_are_in_the_first_view_and_in_the_address(browser):
    browser.open(width=360, address="a=grpo&b=rm&model=Qwen2.5-7B")
    assert browser.text("#size").endswith("122 GB trained, 16.3 GB frozen.")
    before = browser.text("#cards")
    browser.type("#lora_rank", "16")
    assert browser.text("#cards") != before and "lora_rank=16" in browser.hash()
    assert browser.text("#size").endswith("40 million in adapters: 0.6 GB.")
    assert not browser.run("return document.getElementById('more').open")
    shown, address = browser.run(SCRIPT + "return read()"), browser.hash()
    browser.open(width=360, address=address[1:])
    assert browser.run(SCRIPT + "return read()") == shown
    assert not browser.run("return document.getElementById('more').open")


@needs_browser
def test_fields_without_effect_are_hidden(browser):
    visible = """const fields = [...document.querySelectorAll("[data-for] input")];
        return fields.filter((x) => x.getClientRects().length).map((x) => x.id)"""
    shown = {
        "a=rm&b=rm": ["train_layers"],
        "a=rm&b=rm&lora_rank=8": [],
        "a=sft&b=dpo": ["generation_batch"],
        "a=sft&b=ppo": ["rollout", "generation_batch"],
        "a=grpo&b=rm": ["rollout", "group", "generation_batch", "train_layers"],
    }
    for address, names in shown.items():
        browser.open(address=address + "&prompt=64")
        assert browser.run(visible) == names
        browser.run(SCRIPT + "set('gpus', 2)")
        assert ("rollout" in browser.hash()) == ("rollout" in names)


WRONG = dict(
    gpus=["0", "4097", "5000", "1.5", "-1", ""],
    micro_batch=["0", "1e9"],
    group=["1"],
    train_layers=["29", "-1"],
    lora_rank=["-1", "1.5", ""],
    vocab=["0", ""],
)


@needs_browser
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_keeps_the_results_dimmed_and_stays_out_of_the_address(browser, name):
    browser.open(address="a=rm&b=grpo&gpus=2")
    browser.click("#own summary")
    state = """return [location.hash, document.getElementById("cards").innerText,
        [...document.querySelectorAll("label, article")].map((x) => x.getBoundingClientRect().top),
        document.getElementById("summary").innerText]"""
    look = """const opacity = (x) => getComputedStyle(document.getElementById(x)).opacity;
        return [opacity("cards"), document.getElementById("wrong").hidden,
        [...document.querySelectorAll("[aria-invalid=true]")].map((x) => x.id)]"""
    before = browser.run(state)
    most = {"gpus": "4,096", "train_layers": "28"}.get(name, "1,000,000")
    good = browser.run("return document.getElementById(arguments[0]).value", name)
    for value in WRONG[name]:
        browser.run(SCRIPT + "set(...arguments)", name, value)
        assert browser.run(state) == before
        opacity, hidden, invalid = browser.run(look)
        assert float(opacity) < 0.5 and not hidden and invalid == [name]
        assert most in browser.text("#wrong")
    browser.run(SCRIPT + "set(...arguments)", name, good or "3")
    opacity, hidden, invalid = browser.run(look)
    assert float(opacity) == 1 and hidden and invalid == []


@needs_browser
def test_the_results_wait_for_the_end_of_typing(browser):
    """Two keys, one result."""
    browser.open()
    typed = """const field = document.getElementById("gpus"), done = arguments[0], peaks = [];
        const peak = () => peaks.push(document.querySelector(".peak").textContent);
        for (const text of ["1", "16"]) {
          field.value = text;
          field.dispatchEvent(new Event("input", { bubbles: true }));
          peak();
        }
        setTimeout(() => { peak(); done(peaks); }, 500);"""
    first, second, last = browser.send("POST", "/execute/async", {"script": typed, "args": []})
    assert first == second != last and "gpus=16" in browser.hash()


@needs_browser
@pytest.mark.parametrize(
    "address",
    [
        "gpus=0",
        "gpus=5000",
        "gpus=abc",
        "a=nothing",
        "model=own&hidden=-3",
        "hidden=5",
        "precision=half",
        "checkpointing=2",
        "train_layers=99",
        "whatever=1",
        "gpus=1e400",
    ],
)
def test_a_wrong_address_falls_back_to_the_defaults_and_says_so(browser, address):
    browser.open(address=address)
    wrong = address.split("&")[-1]
    assert wrong in browser.text("#note")
    assert browser.run("return document.querySelectorAll('article').length") == 2
    assert browser.run("return document.querySelectorAll('[aria-invalid=true]').length") == 0
    default = memory(MODELS[START_MODEL], ALGORITHMS["grpo"], PRECISIONS["mixed"], **DEFAULTS)
    peak = max(sum(parts.values()) for parts in default.values())
    assert browser.text(".peak").startswith(f"{peak / 1e9:.1f} GB")
    browser.type("#gpus", "2")
    assert browser.run("return document.getElementById('note').hidden")
    assert wrong not in browser.hash()


@needs_browser
def test_what_fits_is_said(browser):
    """The smallest card, the margin, several GPUs, a card without bfloat16, and why none fits."""
    tiles = "return [...document.querySelectorAll('article .fits li')].map((x) => x.innerText)"
    browser.open(width=360)
    summary = browser.text("#summary")
    assert summary.count("fits") == 2 and "fits none" not in summary
    t4 = browser.run(tiles)[0]
    work, float32 = DEFAULTS, PRECISIONS["float32"]
    parts = memory(MODELS[START_MODEL], ALGORITHMS["grpo"], float32, **work).values()
    assert f"{max(sum(x.values()) for x in parts) / 1e9:.1f} GB in float32: needs" in t4
    browser.open(width=360, address="a=rm&b=ppo&model=Llama-3.1-70B&gpus=48")
    first, second = browser.text("#summary").split("PPO")
    assert "fits 48 x 141 GB, tight on 48 x 96 GB" in first and "tight on 48 x 192 GB" in second
    assert "whole policy, 141 GB" in browser.text("article:nth-child(2) .note")
    browser.open(width=360, address="a=dpo&b=ppo&model=Llama-3.1-70B&completion=4096")
    assert "--activation-checkpointing" in browser.text("article .note")
    assert "needs over 64 GPUs" in browser.text("article:nth-child(2) .fits")


@needs_browser
def test_the_scale_ends_at_the_next_card(browser):
    browser.open(address="a=sft&b=dpo")
    ends = """const box = (x) => x.getBoundingClientRect(), bar = document.querySelector(".bar");
        const marks = [...document.querySelectorAll("article:first-child .mark")];
        const last = marks.at(-1);
        return [last.innerText, box(last).right - box(bar).right]"""
    name, gap = browser.run(ends)
    assert name == "48 GB" and abs(gap) < 1


@needs_browser
def test_the_prompts_reading_is_not_called_a_cache(browser):
    browser.open(address="a=ppo&b=grpo")
    parts = memory(MODELS[START_MODEL], ALGORITHMS["ppo"], PRECISIONS["mixed"], **DEFAULTS)
    assert parts["sampling"]["reading"] > parts["sampling"]["cache"] > 0
    table = browser.text("article table")
    assert re.search(rf"reading the prompts\s+\S\s+{parts['sampling']['reading'] / 1e9:.1f}", table)
    assert re.search(rf"KV cache\s+\S\s+{parts['sampling']['cache'] / 1e9:.1f}", table)


@needs_browser
def test_details_come_by_click_keyboard_and_row(browser):
    browser.open(width=360)
    assert browser.text(".detail").startswith("Choose")
    browser.click(".bar [data-part=adamw]")
    assert browser.text(".detail").startswith("AdamW, 12.3 GB (")
    assert browser.run("return document.activeElement.dataset.part") == "adamw"
    browser.press("\ue012")  # left
    assert browser.text(".detail").startswith("gradients, ")
    browser.press(RIGHT, RIGHT)
    assert browser.text(".detail").startswith("copies of weights, ")
    browser.press(END)
    assert browser.text(".detail").startswith("activations, ")
    browser.press(TAB)  # one stop for each bar
    detail = browser.text(".detail")
    assert detail.startswith("policy, ") and "while it samples" in detail
    browser.click("article tr[data-row=cache]")
    detail = browser.text(".detail")
    assert detail.startswith("KV cache, ") and "while it samples" in detail
    pressed = "return [...document.querySelectorAll('[aria-pressed=true]')].map((x) => x.ariaLabel)"
    assert [label.split(":")[0] for label in browser.run(pressed)] == ["KV cache"]


@needs_browser
@pytest.mark.parametrize("has_clipboard", [True, False])
def test_the_command_can_be_copied(browser, has_clipboard):
    """By the clipboard's interface, and where a browser refuses that, by a selection."""
    browser.open()
    allowed = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.emulate("Browser.grantPermissions", permissions=allowed)
    if has_clipboard:
        browser.run("document.execCommand = () => false")
    else:
        browser.run("navigator.clipboard.writeText = () => Promise.reject()")
    browser.click(".copy")
    deadline = time.monotonic() + 5
    while browser.text(".copy") == "Copy command" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert browser.text(".copy") == "Copied"
    paste = "const done = arguments[0]; navigator.clipboard.readText().then(done)"
    pasted = browser.send("POST", "/execute/async", {"script": paste, "args": []})
    assert pasted == browser.text("pre") and pasted.startswith("python grpo.py \\\n  --model Qwen/")


@needs_browser
def test_links_lead_to_the_pages_of_the_site(browser):
    """There memory.md is memory/. From a disk, where Markdown is shown raw, they are names."""
    links = CHOOSE.replace("read()[0]", "[...document.links].map((x) => x.href)")
    with serve(PAGE.parent) as site:
        browser.open(page=site + PAGE.name)
        by_algorithm = browser.run(links, {}, [*ALGORITHMS])
    for name, found in zip(ALGORITHMS, by_algorithm, strict=True):
        pages = [link.removeprefix(site).partition("#")[0].removesuffix("/") for link in found]
        stem = Path(ABOUT[name]["script"]).stem
        assert pages == [stem, "ppo_rlhf", "memory"]
    browser.open()
    assert browser.run("return document.links.length") == 0


# --- how it looks ------------------------------------------------------------------------------
# Texts with their colours and those of what they stand on; hidden ones have no box.
TEXTS = """
const seen = [], clear = "rgba(0, 0, 0, 0)";
const ground = (x) => getComputedStyle(x).backgroundColor;
for (const node of document.querySelectorAll("main *")) {
  const own = [...node.childNodes].some((x) => x.nodeType === 3 && x.textContent.trim());
  if (!own || node.tagName === "OPTION" || !node.getClientRects().length) continue;
  let under = node;
  while (ground(under) === clear) under = under.parentElement;
  seen.push([node.textContent.trim().slice(0, 40), getComputedStyle(node).color, ground(under)]);
}
return seen;
"""
LAYOUT = """
const all = (q) => [...document.querySelectorAll(q)], style = (x) => getComputedStyle(x);
const box = (x) => x.getBoundingClientRect();
const blocks = all("article, td, th, li, h2, p, dd, label, .copy, #summary b");
const touched = all("select, input, .copy, .part").filter((x) => x.getClientRects().length);
const labels = all(".part span:not([hidden])");
return {
  width: innerWidth,
  scroll: document.documentElement.scrollWidth,
  cut: blocks.filter((x) => x.scrollWidth > x.clientWidth + 1).map((x) => x.textContent),
  unlabelled: all("select, input").filter((x) => !x.labels[0]?.textContent.trim()).length,
  small: touched.filter((x) => x.offsetHeight < 20).length,
  labels: labels.map((x) => x.textContent),
  overflowing: labels.filter((x) => box(x).width > box(x.parentElement).width).length,
  tints: all(".part").map((x) => [x.dataset.part, style(x).backgroundColor]),
  edges: all(".part").map((x) => style(x).boxShadow),
  unnamed: all(".part").filter((x) => box(x).width >= 22 && x.firstChild.hidden)
    .map((x) => x.dataset.part),
  page: style(document.body).backgroundColor,
};
"""


def luminance(colour):
    """Of `rgb(r, g, b)`, by WCAG 2.2."""
    numbers = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in numbers]
    return sum(x * w for x, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(a, b):
    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 838, 1280])
def test_it_can_be_read_on_a_phone_and_a_desk_in_light_and_dark(browser, width, dark):
    for address in ("", "a=ppo&b=rm&gpus=64&model=Llama-3.1-70B&checkpointing=1"):
        browser.open(width, dark, address)
        browser.run("for (const x of document.querySelectorAll('details')) x.open = true")
        look = browser.run(LAYOUT)
        assert look["width"] == width and look["scroll"] <= width
        assert (luminance(look["page"]) < 0.1) == dark
        assert look["cut"] == [] and look["unlabelled"] == look["overflowing"] == look["small"] == 0
        texts = browser.run(TEXTS)
        pale = [text for text in texts if contrast(*text[1:]) < 4.5]
        assert len(texts) > 80 and pale == []
        # Two parts that meet have dark edges; each has a tint, and where there is room a label.
        for edge, (_, tint) in zip(look["edges"], look["tints"], strict=True):
            assert contrast(edge, tint) >= 3 and "inset" in edge
        tints = dict(look["tints"])
        assert len({*tints.values()}) == len(tints)
        assert look["unnamed"] == []
        if not address:
            names = {"policy", "critic", "grads", "AdamW"}  # on a phone the frozen ones are narrow
            assert names | ({"ref", "RM"} if width > 360 else set()) <= {*look["labels"]}


@needs_browser
@pytest.mark.parametrize("width", [360, 838, 1280])
def test_large_letters_do_not_overflow(browser, width):
    browser.open(width, address="a=ppo&b=rm&gpus=64&model=Llama-3.1-70B&checkpointing=1")
    browser.run("for (const x of document.querySelectorAll('details')) x.open = true")
    browser.run("document.documentElement.style.fontSize = '200%'")
    look = browser.run(LAYOUT)
    assert look["scroll"] <= width and look["cut"] == []


@needs_browser
def test_an_error_can_be_read(browser):
    for dark in (False, True):
        browser.open(360, dark, "gpus=7000")
        pale = [text for text in browser.run(TEXTS) if contrast(*text[1:]) < 4.5]
        browser.run(SCRIPT + "set('gpus', 0)")
        pale += [text for text in browser.run(TEXTS) if contrast(*text[1:]) < 4.5]
        assert pale == []


BOXES = """
const box = (q) => document.querySelector(q).getBoundingClientRect();
return ["form", "article", ".bar", "#summary"].map((q) => [box(q).left, box(q).top, box(q).bottom]);
"""


@needs_browser
def test_on_a_desk_the_results_are_beside_the_controls(browser):
    browser.open(width=1280)
    form, article, bar, _ = browser.run(BOXES)
    assert article[0] > form[0] + 300 and abs(article[1] - form[1]) < 5
    assert bar[1] < 500
    browser.run("scrollTo(0, 900)")
    form, *_ = browser.run(BOXES)
    assert 0 <= form[1] < 20 and form[2] <= 800


@needs_browser
def test_on_a_phone_the_defaults_are_folded_and_the_peak_stays_in_sight(browser):
    browser.open(width=360)
    _, _, bar, _ = browser.run(BOXES)
    assert bar[1] < 850
    assert not browser.run("return document.getElementById('more').open")
    browser.open(width=360, address="completion=8192")
    assert browser.run("return document.getElementById('more').open")
    for name in ("gpus", "completion", "group", "checkpointing"):
        browser.run("document.getElementById(arguments[0]).focus()", name)
        where = browser.run(
            """const nodes = [document.getElementById("summary"), document.activeElement];
            const boxes = nodes.map((x) => x.getBoundingClientRect());
            return [...boxes.map((x) => [x.top, x.bottom]), innerHeight];"""
        )
        (top, bottom), (field_top, field_bottom), height = where
        assert top >= 0 and bottom <= field_top and field_bottom <= height + 1, name
        assert bottom < 0.2 * height or top > 0
    before = browser.text("#summary")
    browser.click("#checkpointing")
    assert browser.text("#summary") != before
