"""docs/explorer.html in a real browser: its numbers against the formula of docs/experiments/cost/
memory_model.py, and its commands.
"""

import json
import re
import shlex

import pytest
import tyro
from browser import EXPLORER as PAGE
from browser import needs_browser
from scripts import SCRIPTS

from docs.experiments.cost.memory_model import CONSTANTS, DEFAULTS, PARTS, memory

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
    dict(model="Qwen2.5-7B", lora_rank=16, bits=4, checkpointing=True, generation_batch=16),
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
        assert args.learning_rate is None  # the default, that of a real model
        sampled = algorithm["evaluated"]
        if algorithm["samples"]:
            lengths = (args.max_prompt_length, args.max_new_tokens)
            assert lengths == (work["prompt"], work["completion"])
            group = args.group_size if algorithm["samples"] == "group" else 1
            sampled = args.prompts_per_rollout * group
            assert 0 <= sampled - work["rollout"] < group
            assert ("reference" in algorithm["frozen"]) == (getattr(args, "beta", 0) > 0)
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
