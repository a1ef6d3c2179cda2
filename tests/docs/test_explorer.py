"""docs/explorer.html in a real browser: its numbers against the formula of docs/experiments/cost/
memory_model.py, its answer, its commands, wrong input, and how it stands on the site.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import tyro
from browser import EXPLORER as PAGE
from browser import needs_browser, serve
from scripts import SCRIPTS

from docs.experiments.cost.memory_model import CONSTANTS, DEFAULTS, PARTS, memory, peak

pytestmark = pytest.mark.docs
MODELS, ALGORITHMS = CONSTANTS["models"], CONSTANTS["algorithms"]
PRECISIONS = CONSTANTS["precisions"]
START_MODEL, START_CARD = "Qwen2.5-7B", 24
TIGHT = 0.92  # of a card: above it the page says so


def page_json(name):
    pattern = rf'<script type="application/json" id="{name}">(.*?)</script>'
    (block,) = re.findall(pattern, PAGE.read_text(), re.S)
    return json.loads(block)


ABOUT = page_json("about")


def test_the_page_has_the_same_constants_and_needs_nothing_else():
    text = PAGE.read_text()
    assert page_json("constants") == CONSTANTS | {"parts": PARTS, "defaults": DEFAULTS}
    assert not re.findall(r"\bsrc=|@import|url\(|fetch\(|https?://", text)
    assert set(re.findall(r'href="([^"]*)"', text)) == {"./", "memory/", "lora/"}
    assert ABOUT.keys() == ALGORITHMS.keys()


# --- the browser -------------------------------------------------------------------------------
# `set` is a control as a person sets it; `read` gives the first result, as the page shows it.
SCRIPT = """
function set(name, value) {
  const field = document.getElementById(name);
  if (field.type === "checkbox") field.checked = value; else field.value = value;
  for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind, { bubbles: true }));
}
const part = (x) => [x.dataset.part, Number(x.dataset.bytes)];
const parts = (bar) => [bar.dataset.stage, [...bar.children].map(part)];
const read = (article = document.querySelector("article")) => ({
  answer: article.querySelector(".answer").innerText,
  bars: Object.fromEntries([...article.querySelectorAll(".bar")].map(parts)),
  command: article.querySelector("pre").textContent,
});
const choose = (setting, keys) => {
  set("a", "rm");
  for (const [name, value] of Object.entries(setting)) set(name, value);
  return keys.map((key) => { set("a", key); return read(); });
};
"""
CHOOSE = SCRIPT + "return choose(...arguments)"
# Every control away from its default: each precision, one GPU and several, long and short texts,
# the flags, a rollout that is no whole number of groups, and a model of one's own.
OWN = dict(hidden=1000, layers=10, query=1200, kv=300, ffn=3000, vocab=50_000)
SETTINGS = [
    {},
    dict(model="Qwen2.5-0.5B", precision="float32", micro_batch=4, completion=200, train_layers=3),
    dict(model="Llama-3.1-70B", gpus=16, rollout=1000, group=16, completion=8192),
    dict(model="Qwen2.5-14B", precision="float32", gpus=2, prompt=4096, checkpointing=True),
    dict(model="Qwen2.5-3B", checkpointing=True, train_layers=0),
    dict(model="Qwen2.5-7B", checkpointing=True, train_layers=4, generation_batch=24),
    dict(model="Qwen2.5-1.5B", rollout=4, group=64, completion=8192, checkpointing=True),
    OWN | dict(micro_batch=64, gpus=3, tied=False),
    dict(model="Qwen2.5-7B", lora_rank=16, checkpointing=True, train_layers=4, generation_batch=16),
    dict(model="Qwen2.5-1.5B", lora_rank=64, gpus=3, micro_batch=2),
    dict(model="Llama-3.1-8B", lora_rank=1, precision="float32"),
]
UNEVEN = dict(gpus=16, micro_batch=4, rollout=129, prompt=77, generation_batch=3, train_layers=4)


def said(size):
    """Bytes in GB, as the page writes them."""
    return f"{size / 1e9:,.0f}" if size >= 99.95e9 else f"{size / 1e9:.1f}"


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
    for algorithm, one in zip(ALGORITHMS.values(), shown, strict=True):
        expected = memory(model, algorithm, precision, **work)
        assert one["bars"].keys() == expected.keys()
        for stage, parts in expected.items():
            sizes = dict(one["bars"][stage])
            assert sizes == pytest.approx({k: v for k, v in parts.items() if v}, rel=1e-9)
        most = max(sum(parts.values()) for parts in expected.values())
        share = most / (START_CARD * 1e9)
        word = "No" if share > 1 else "Tight" if share > TIGHT else "Yes"
        assert one["answer"].startswith(f"{word}: {said(most)} of {START_CARD} GB")


@needs_browser
def test_the_first_view_answers_with_what_to_change(browser):
    """7B, GRPO, 24 GB, as the page opens; each button sets a flag and those before it."""
    full = dict(model=MODELS[START_MODEL], compute_bytes=2, **DEFAULTS)
    checkpointing, lora = full | dict(checkpointing=True), full | dict(lora_rank=16)
    batches = lora | dict(generation_batch=16)
    steps = [
        ("--activation-checkpointing", "grpo", checkpointing),
        ("--beta 0", "grpo_no_kl", checkpointing),
        ("--lora-rank 16", "grpo", lora),
        ("--generation-batch-size 16", "grpo", batches),
        ("--activation-checkpointing", "grpo", batches | dict(checkpointing=True)),
    ]
    browser.open(width=390)
    sentence = browser.text(".how")
    peaks = [said(peak(algorithm=ALGORITHMS[name], **work)) for _, name, work in steps]
    for (flag, *_), size in zip(steps, peaks, strict=True):
        assert re.search(rf"{flag}( too)? {size}", sentence)
    assert f"{peaks[-1]}: fits" in sentence and sentence.count("fits") == 2
    for i, size in enumerate(peaks):
        browser.open(width=390)
        browser.run("document.querySelectorAll('.how .change')[arguments[0]].click()", i)
        word = "Yes" if i == 4 else "Tight" if float(size) < 24 else "No"
        assert browser.text(".answer") == f"{word}: {size} of 24 GB"
    assert all(flag in browser.text("pre") for flag, *_ in steps[2:])


@needs_browser
def test_the_largest_model_and_whole_nodes_are_buttons(browser):
    browser.open(address="a=grpo&b=grpo&card=24")
    most, work = TIGHT * 24e9, dict(algorithm=ALGORITHMS["grpo"], compute_bytes=2)
    lora = DEFAULTS | dict(lora_rank=16, generation_batch=16, checkpointing=True)
    by_model = {name: peak(model=model, **work, **lora) for name, model in MODELS.items()}
    largest = [name for name, size in by_model.items() if size <= most][-1]
    on = {n: peak(MODELS[START_MODEL], **work, **DEFAULTS | {"gpus": n}) for n in (16, 24)}
    assert on[16] > most >= on[24] and "3 nodes of 8 GPUs" in browser.text(".how")
    assert f"Qwen2.5-0.5B with these settings, {largest} with" in browser.text(".largest")
    browser.run("[...document.querySelectorAll('.how .change')].at(-1).click()")
    assert browser.text(".answer") == f"Yes: {said(on[24])} of 24 GB on each of 3 nodes of 8 GPUs"
    assert "--nnodes=3" in browser.text("pre") and "gpus=24" in browser.hash()
    browser.open(address="a=ppo&b=grpo&model=Llama-3.1-70B&card=80")
    assert "64 GPUs are not enough: on each, copies of weights" in browser.text(".how")


@needs_browser
@pytest.mark.parametrize("setting", [{}, UNEVEN, UNEVEN | dict(lora_rank=16, checkpointing=True)])
def test_the_commands_are_those_of_the_scripts(browser, setting):
    """Each command's flags are flags of the script, and ask for what is shown."""
    browser.open()
    work = DEFAULTS | setting
    shown = browser.run(CHOOSE, setting, [*ALGORITHMS])
    for (name, algorithm), one in zip(ALGORITHMS.items(), shown, strict=True):
        words = shlex.split(one["command"].replace("\\\n", ""))
        position = words.index(ABOUT[name]["script"])
        assert words[0] == ("python" if work["gpus"] == 1 else "torchrun")
        assert work["gpus"] == 1 or {"--nnodes=2", "--nproc_per_node=8"} <= {*words[:position]}
        script = SCRIPTS[ABOUT[name]["script"].removesuffix(".py")]
        args = tyro.cli(script.Args, args=words[position + 1 :])
        assert args.micro_batch_size == work["micro_batch"]
        assert args.activation_checkpointing == work.get("checkpointing", False)
        assert args.lora_rank == work["lora_rank"]
        (rate,) = re.findall(r"--learning-rate (\S+)", ABOUT[name]["flags"])
        assert args.learning_rate == pytest.approx(float(rate) * (10 if work["lora_rank"] else 1))
        sampled = algorithm["evaluated"]
        if algorithm["samples"]:
            lengths = (args.max_prompt_length, args.max_new_tokens)
            assert lengths == (work["prompt"], work["completion"])
            group = args.group_size if algorithm["samples"] == "group" else 1
            sampled = args.prompts_per_rollout * group
            assert 0 <= sampled - work["rollout"] < group
            assert ("reference" in algorithm["frozen"]) == (args.beta > 0)
        else:
            assert args.max_length == work["prompt"] + work["completion"]
            assert args.batch_size >= work["micro_batch"] * work["gpus"]
        if sampled:
            of_a_gpu = -(-sampled // work["gpus"])
            assert args.generation_batch_size == min(work["generation_batch"], of_a_gpu)
        if name.startswith(("grpo", "ppo")):
            has_reward_model = args.reward_model not in (None, "none")
            assert has_reward_model == ("reward" in algorithm["frozen"])
        if name == "rm":
            assert args.train_layers == (None if work["lora_rank"] else setting.get("train_layers"))


@needs_browser
def test_every_control_is_in_the_address_which_brings_it_back(browser):
    values = dict(a="rm", b="grpo", precision="float32", model="own", card="12,5", lora_rank="0")
    values |= dict(gpus="3", micro_batch="2", prompt="100", completion="200", rollout="64")
    values |= dict(group="4", generation_batch="5", train_layers="5", checkpointing=True)
    values |= {name: str(value) for name, value in OWN.items()}
    browser.open()
    browser.run(SCRIPT + "Object.entries(arguments[0]).forEach((x) => set(...x))", values)
    everything = """return Object.fromEntries([...document.querySelectorAll("select, input")].map(
        (x) => [x.id, x.type === "checkbox" ? x.checked : x.value]))"""
    address, shown = browser.hash(), browser.run(SCRIPT + "return read()")
    assert " of 12.5 GB" in shown["answer"]  # not 125
    browser.open(address=address[1:])
    assert browser.run(everything) == values | {"tied": False}
    assert browser.run(SCRIPT + "return read()") == shown
    assert browser.run("return document.getElementById('note').hidden")


WRONG = dict(gpus=["0", "19", "4104", "1.5", ""], card=["1,000", "0", "x"], group=["1"])
WRONG |= dict(prompt=["12,5", "1e3"], train_layers=["29", "-1"], lora_rank=["-1", "1.5", ""])


@needs_browser
def test_wrong_input_keeps_the_results_and_stays_out_of_the_address(browser):
    for name, values in WRONG.items():
        browser.open(address="a=rm&b=grpo&gpus=2")
        before = [browser.hash(), browser.text("#cards")]
        for value in values:
            browser.run(SCRIPT + "set(...arguments)", name, value)
            assert [browser.hash(), browser.text("#cards")] == before
            assert "number" in browser.text("#wrong")
        browser.open(address=f"a=rm&b=grpo&{name}={values[0]}")
        assert f"{name}={values[0]}" in browser.text("#note")


@needs_browser
@pytest.mark.parametrize("file", [PAGE, PAGE.with_name("play.html")], ids=str)
def test_on_the_site_and_a_phone_it_has_the_links_and_the_chosen_scheme(browser, file):
    """There memory.md is memory/. From a disk, where Markdown is shown raw, they are names."""
    links = """return [...document.links].filter((x) => x.getClientRects().length)
        .map((x) => x.getAttribute("href"))"""
    chosen = json.dumps({"color": {"media": "(prefers-color-scheme: dark)", "scheme": "slate"}})
    with serve(file.parent) as site:
        browser.open(page=site + file.name)
        browser.run("localStorage.setItem('/.__palette', arguments[0])", chosen)
        browser.open(page=site + file.name, width=360)
        assert browser.run("return document.documentElement.scrollWidth") == 360
        page = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert page == "rgb(17, 22, 28)"
        home, *found = browser.run(links)
    assert home == "./" and len(found) >= 5
    assert all(Path("docs", f"{link.removesuffix('/')}.md").exists() for link in found)
    browser.open(page=file.absolute().as_uri())
    assert browser.run(links) == []
