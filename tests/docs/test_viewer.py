"""docs/viewer.html in a real browser: what it shows of small runs, against the files' numbers."""

import json
import math
import re
from pathlib import Path

import pytest
from browser import needs_browser
from runs import read_log
from scripts import SPECS

import grpo

pytestmark = pytest.mark.docs
PAGE, LEFT = Path("docs/viewer.html"), "\ue012"
LOSS, MEAN, ACCURACY = "objective/loss", "reward/mean", "eval/accuracy"
VALUES = [
    {ACCURACY: 0.25},
    {LOSS: 0.5, MEAN: 1234.5678},
    {LOSS: math.nan, MEAN: -7, ACCURACY: 0.75},
]
ROWS = [{"step": i} | row for i, row in enumerate([*VALUES, {LOSS: 2e-6, MEAN: 0.1}])]
TOKENS = ["<b>6", "\n", " , <img src=x>", "<eos>"]
CHAT = [{"role": "system", "content": "Add <i>up</i>."}, {"role": "user", "content": "6+0="}]
SHOWN_CHAT = "system: Add <i>up</i>.\nuser: 6+0="
RATIOS = dict(log_ratio=[1, -1, 0, -0.5])
GRPO = [dict(prompt=CHAT, advantage=x, reward=x + 2) | RATIOS for x in (0.75, 0.0, -0.5)]
# A prompt for each completion, a number for each token, no reference.
PPO = [dict(prompt=f"{x}+0=", advantage=[x, 1, 0, -1], reward=x) for x in (2, -3)]


def write_run(folder, completions=GRPO, rows=ROWS):
    """Rollouts of steps 1 to 3, samples of steps 0 and 2; the next line of each file is cut."""
    rest = {"completion": f"{folder.name} <b>\n", "reward": 0.25, "length": 5}
    samples = [{"step": step, "prompt": x} | rest for step in (0, 2) for x in ("1+1=", CHAT)]
    common = {"tokens": TOKENS, "rewards/right": 1.0}
    completions = [
        x | common | {"truncated": float(x["reward"] < 2)} for x in reversed(completions)
    ]
    long = {"completions": completions, "unused": "." * 2**21}  # the file is read in several chunks
    rollouts = [{"step": step} | long for step in (1, 2, 3)]
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"exp_name": folder.name, "beta": 0.1}))
    for name, lines in (("metrics", rows), ("samples", samples), ("rollouts", rollouts)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text + '{"step": 4, "completions": [')
    return folder


def open_page(browser, folder):
    browser.open(PAGE)
    browser.drop(folder)
    browser.until("#rollouts > :last-child .key", folder.name)


# What each chart tells at its last steps, and the heights of its first line and first dots.
CURVES = """
return [...document.querySelectorAll("figure")].map((figure) => {
  const told = {}, left = () => new KeyboardEvent("keydown", { key: "ArrowLeft" });
  const [line, dots] = [...figure.querySelectorAll(".run0")].slice(-2).map((path) =>
    (path.getAttribute("d") ?? "").match(/ [\\d.]+/g)?.map(Number));
  for (let i = 0; i < 4; i++, figure.querySelector("svg").dispatchEvent(left())) {
    const [step, values] = figure.querySelector("span").textContent.slice(5).split(": ");
    told[step] = values;
  }
  return [`${figure.closest("details").dataset.group}/${figure.querySelector("b").textContent}`,
    told, line, dots];
});
"""
# Of each completion: facts, how it is set, and each token's text, title, sign and underline.
COMPLETIONS = """
const all = (x, css) => [...x.querySelectorAll(css)], style = (x) => getComputedStyle(x);
const colour = (x) => style(x).backgroundColor.match(/[\\d.]+/g).map(Number);
const token = (x) => [x.textContent, x.title, Math.sign(colour(x)[2] - colour(x)[0]),
  style(x).textDecorationLine === "underline"];
return all(document, "#rollouts article").map((x) => [
  all(x, ".facts span").map((y) => y.textContent), style(x.lastChild).whiteSpace,
  all(x, ".token").map(token)]);
"""


def expected(one, by):
    """The same from the file's numbers."""
    known = {name: one[name] for name in ("advantage", "log_ratio") if name in one}
    each = {name: x if isinstance(x, list) else [x] * 4 for name, x in known.items()}
    mean = "mean " * ("log_ratio" not in one) + f"advantage {sum(each['advantage']) / 4:g}"
    facts = [f"reward {one['reward']:g}", "rewards/right 1", mean, "tokens 4"]
    tokens = []
    for i, (text, x) in enumerate(zip(TOKENS, each.get(by, [0] * 4), strict=True)):
        title = ", ".join(f"{name} {each[name][i]:g}" for name in each)
        tokens.append([text, title, (x > 0) - (x < 0), x < 0])
    return [facts + ["truncated"] * (one["reward"] < 2), "pre-wrap", tokens]


def test_the_page_needs_nothing_else():
    text = PAGE.read_text()
    assert not re.findall(r"\bsrc=|href=|@import|url\(|fetch\(|https?://|innerHTML", text)


@needs_browser
def test_curves(browser, tmp_path):
    open_page(browser, write_run(tmp_path / "a"))
    accuracy, mean, loss = browser.run(CURVES)  # in the groups' order
    assert accuracy == [ACCURACY, {"0": "0.25", "2": "0.75"}, [82, 8], [82, 8]]
    low = pytest.approx(82 - 74 * 7.1 / 1241.5678, abs=0.05)
    assert mean == [MEAN, {"1": "1235", "2": "-7", "3": "0.1"}, [8, 82, low], None]
    assert loss == [LOSS, {"1": "0.5", "2": "NaN", "3": "2e-6"}, [8, 82], None]
    rows = [{"step": i, "time/s": 9 if i == 777 else i % 2} for i in range(4000)]
    open_page(browser, write_run(tmp_path / "long", rows=rows))
    ((_, told, heights, _),) = browser.run(CURVES)
    assert told["3997"] == "1" and len(heights) <= 500 and heights.count(8) == 1


@needs_browser
@pytest.mark.parametrize("completions", [GRPO, PPO])
def test_completions(browser, tmp_path, completions):
    open_page(browser, write_run(tmp_path / "a", completions))
    for by in ("advantage", "log_ratio"):
        browser.run(f"document.querySelector('[value={by}]').click()")
        browser.until("#legend", f"{by} of a token")
        assert browser.run(COMPLETIONS) == [expected(one, by) for one in completions]
    prompts = "return [...document.querySelectorAll('#rollouts .prompt')].map((x) => x.innerText)"
    assert browser.run(prompts) == ([SHOWN_CHAT] if completions is GRPO else ["2+0=", "-3+0="])
    browser.run("document.getElementById('slider').focus()")
    for step, evaluation in ((3, 2), (2, 2), (1, 0)):
        browser.until("#step", f"{step}")
        facts = browser.text("#samples .facts").split("\n")
        assert facts == [f"step {evaluation}", "reward 0.25", "length 5"]
        browser.press(LEFT)


@needs_browser
def test_a_run_of_a_script(browser, tmp_path):
    flags = SPECS["grpo"].short_flags | dict(total_rollouts=2, output_dir=str(tmp_path))
    run_dir = grpo.main(grpo.Args(**flags))
    open_page(browser, run_dir)
    browser.until("#step", "2")
    rows = read_log(run_dir / "rollouts.jsonl")[-1]["completions"]
    rows.sort(key=lambda row: -row["advantage"])
    for row, (facts, _, tokens) in zip(rows, browser.run(COMPLETIONS), strict=True):
        assert facts[:2] == [f"reward {row['reward']:g}", f"rewards/last_number {row['reward']:g}"]
        assert [text for text, *_ in tokens] == row["tokens"]
        assert facts[2] == f"advantage {row['advantage']:g}"
