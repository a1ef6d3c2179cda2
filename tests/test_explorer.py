"""docs/explorer.html in a real browser: its numbers against the formula of docs/experiments/
choosing.py, every control, wrong input, a phone and a desk, light and dark.

Needs Chromium and its driver (Debian: `apt install chromium chromium-driver`), and talks to the
driver in WebDriver, which is JSON over HTTP (www.w3.org/TR/webdriver2).
"""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import tyro
from scripts import SCRIPTS

sys.path.insert(0, "docs/experiments")
import choosing
from choosing import CONSTANTS, DEFAULTS, PARTS, memory

MODELS, ALGORITHMS = CONSTANTS["models"], CONSTANTS["algorithms"]
PRECISIONS = CONSTANTS["precisions"]
PAGE = Path("docs/explorer.html")
START_MODEL = "Qwen2.5-1.5B"


def page_json(name):
    pattern = rf'<script type="application/json" id="{name}">(.*?)</script>'
    (block,) = re.findall(pattern, PAGE.read_text(), re.S)
    return json.loads(block)


ABOUT = page_json("about")


def test_the_page_has_the_same_constants():
    assert page_json("constants") == CONSTANTS | {"parts": PARTS, "defaults": DEFAULTS}


def test_the_page_needs_nothing_else():
    """It links to pages, and loads nothing."""
    text = PAGE.read_text()
    assert not re.findall(r"\bsrc=|@import|url\(|fetch\(|https?://", text)
    assert set(re.findall(r'href="([^"]*)"', text)) == {"choosing.md#memory"}


def test_every_algorithm_has_its_script_and_page():
    assert ABOUT.keys() == ALGORITHMS.keys()
    for about in ABOUT.values():
        assert Path(about["script"]).is_file() and (PAGE.parent / about["page"]).is_file()


# --- the browser -------------------------------------------------------------------------------
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and chromedriver"
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, by the standard


class Browser:
    """One tab of a headless Chromium."""

    def __init__(self, folder):
        log = (folder / "driver.txt").open("w+")
        self.driver = subprocess.Popen([DRIVER, "--port=0"], stdout=log, stderr=log)
        deadline, port = time.monotonic() + 20, None
        while port is None and time.monotonic() < deadline:
            time.sleep(0.05)
            port = re.search(r"successfully on port (\d+)", (folder / "driver.txt").read_text())
        self.address = f"http://127.0.0.1:{port[1]}"
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
        ]
        options = {"binary": CHROMIUM, "args": [*flags, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        session = self.send("POST", "/session", wanted)["sessionId"]
        self.address += f"/session/{session}"

    def send(self, method, path, body=None):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.address + path, data, method=method)
        proxies = urllib.request.ProxyHandler({})
        with urllib.request.build_opener(proxies).open(request, timeout=60) as reply:
            return json.load(reply)["value"]

    def close(self):
        try:
            self.send("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()

    def run(self, script, *args):
        """What a JavaScript function body returns."""
        return self.send("POST", "/execute/sync", {"script": script, "args": [*args]})

    def emulate(self, command, **params):
        """A command of the DevTools protocol."""
        return self.send("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, width=1280, dark=False, address=""):
        """A fresh page. `address` is what stands after the #."""
        self.emulate(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.emulate("Emulation.setEmulatedMedia", features=[scheme])
        self.send("POST", "/url", {"url": "about:blank"})
        self.send("POST", "/url", {"url": f"{PAGE.absolute().as_uri()}#{address}"})

    def element(self, css):
        found = self.send("POST", "/element", {"using": "css selector", "value": css})
        return f"/element/{found[ELEMENT]}"

    def click(self, css):
        self.send("POST", f"{self.element(css)}/click")

    def type(self, css, text):
        """Replaces what a field holds, key by key."""
        element = self.element(css)
        self.send("POST", f"{element}/clear")
        self.send("POST", f"{element}/value", {"text": text})

    def press(self, *keys):
        downs_and_ups = [
            {"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")
        ]
        keyboard = {"type": "key", "id": "keyboard", "actions": downs_and_ups}
        self.send("POST", "/actions", {"actions": [keyboard]})

    def text(self, css):
        return self.run("return document.querySelector(arguments[0]).innerText", css)

    def hash(self):
        return self.run("return location.hash")


TAB, RIGHT, END = "\ue004", "\ue014", "\ue010"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


# All cards of the page, as it shows them.
READ = """
const bars = (x) => [...x.querySelectorAll(".bar")];
const part = (x) => [x.dataset.part, Number(x.dataset.bytes), x.getBoundingClientRect().width];
const read = () => [...document.querySelectorAll("article")].map((x) => ({
  algorithm: x.dataset.algorithm,
  peak: x.querySelector(".peak").textContent,
  cards: [...x.querySelectorAll(".fits li")].map((y) => [
    Number(y.dataset.card), y.className, Number(y.dataset.gpus),
  ]),
  bars: Object.fromEntries(bars(x).map((y) => [y.dataset.stage, [...y.children].map(part)])),
  command: x.querySelector("pre")?.textContent,
}));
"""
CHOOSE = (
    READ
    + """
const [setting, keys] = arguments;
function set(name, value) {
  const field = document.getElementById(name);
  if (field.type === "checkbox") field.checked = value; else field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
}
set("a", "rm");
for (const [name, value] of Object.entries(setting)) set(name, value);
const found = [];
for (const key of keys) {
  set("a", key);
  found.push(read()[0]);
}
return found;
"""
)
# Every control away from its default: each precision, one GPU and several, long and short texts,
# the flags, and a model of one's own.
SETTINGS = [
    {},
    dict(model="Qwen2.5-0.5B", precision="float32", micro_batch=4, completion=200, train_layers=3),
    dict(model="Llama-3.1-70B", gpus=16, rollout=1000, group=16, completion=8192),
    dict(model="Qwen2.5-14B", precision="master", gpus=2, prompt=4096, checkpointing=True),
    dict(model="Qwen2.5-3B", precision="bfloat16", checkpointing=True, train_layers=0),
    dict(model="Qwen2.5-7B", checkpointing=True, train_layers=4),
    dict(
        **dict(hidden=1000, layers=10, query=1200, kv=300, ffn=3000, vocab=50_000),
        tied=False,
        micro_batch=64,
        gpus=3,
    ),
]


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
        for card, (size, told, gpus) in zip(CONSTANTS["cards"], one["cards"], strict=True):
            assert size == card["gb"]
            peak = choosing.peak_on(card, model, algorithm, precision, **work)
            assert (told == "yes") == (peak <= size * 1e9)
            # With so many it fits, with one fewer it does not; 0: not even with all.
            most_gpus = CONSTANTS["most_gpus"]
            for count in {gpus, gpus - 1 if gpus else most_gpus} - {0}:
                asked = work | {"gpus": count}
                peak = choosing.peak_on(card, model, algorithm, precision, **asked)
                assert (peak <= size * 1e9) == (count == gpus)


@needs_browser
def test_the_commands_are_those_of_the_scripts(browser):
    """Each command's flags are flags of the script, and ask for what is shown."""
    settings = [{}, SETTINGS[5] | dict(gpus=16, micro_batch=4, rollout=129, prompt=77)]
    for setting in settings:
        browser.open()
        shown = browser.run(CHOOSE, setting, [*ALGORITHMS])
        work = DEFAULTS | setting
        for (name, algorithm), one in zip(ALGORITHMS.items(), shown, strict=True):
            words = shlex.split(one["command"].replace("\\\n", " "))
            position = words.index(ABOUT[name]["script"])
            launcher = " ".join(words[:position])
            processes = 1
            for count in re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", launcher):
                processes *= int(count)
            assert processes == work["gpus"]
            assert launcher.startswith("python" if processes == 1 else "torchrun ")
            script = SCRIPTS[ABOUT[name]["script"].removesuffix(".py")]
            args = tyro.cli(script.Args, args=words[position + 1 :])
            args = script.check_args(args)
            assert args.micro_batch_size == work["micro_batch"]
            assert args.activation_checkpointing == work.get("checkpointing", False)
            assert args.model == f"Qwen/{setting.get('model', START_MODEL)}-Instruct"
            if algorithm["samples"]:
                lengths = (args.max_prompt_length, args.max_new_tokens)
                assert lengths == (work["prompt"], work["completion"])
                group = args.group_size if algorithm["samples"] == "group" else 1
                completions = args.prompts_per_rollout * group
                assert 0 <= completions - work["rollout"] < group
                assert ("reference" in algorithm["frozen"]) == (args.beta > 0)
            else:
                assert args.max_length == work["prompt"] + work["completion"]
                assert args.batch_size >= work["micro_batch"] * work["gpus"]
            if name.startswith(("ppo", "grpo")):
                assert (args.reward_model is not None) == ("reward" in algorithm["frozen"])
            if name.startswith("ppo"):
                assert (args.critic_init == "policy") == ("critic" not in algorithm["trained"])
            if name == "rm":
                assert args.train_layers == setting.get("train_layers")
    other = browser.run(CHOOSE, dict(precision="bfloat16"), ["grpo"])
    assert other[0]["command"] is None and "no flag" in browser.text("article")


@needs_browser
def test_every_control_changes_the_address_which_brings_it_back(browser):
    values = dict(a="rm", b="kto", model="own", precision="master", checkpointing=True, tied=False)
    numbers = dict(gpus=3, micro_batch=2, prompt=100, completion=200, rollout=64, group=4)
    numbers |= dict(hidden=1000, layers=10, query=1200, kv=300, ffn=3000, vocab=50_000)
    numbers |= dict(train_layers=5)
    browser.open()
    browser.click('#a option[value="rm"]')
    browser.click('#b option[value="kto"]')
    browser.click('#precision option[value="master"]')
    browser.click('#model option[value="own"]')  # opens the fields of the model
    for name, value in numbers.items():
        before = browser.text("#cards")
        browser.type(f"#{name}", str(value))
        if name not in ("group", "rollout", "kv", "query"):  # nothing of rm and kto
            assert browser.text("#cards") != before or name in ("train_layers",)
        assert f"{name}={value}" in browser.hash()
    browser.click("#checkpointing")
    browser.click("#tied")
    address = browser.hash()
    shown = browser.run(READ + "return read()")
    everything = """return Object.fromEntries([...document.querySelectorAll("select, input")].map(
        (x) => [x.name, x.type === "checkbox" ? x.checked : x.value]))"""
    expected = values | {name: str(value) for name, value in numbers.items()}
    assert browser.run(everything) == expected
    browser.open(address=address[1:])
    assert browser.run(everything) == expected and browser.run(READ + "return read()") == shown
    assert browser.run("return document.getElementById('note').hidden")


WRONG = dict(
    gpus=["0", "4097", "5000", "1.5", "-1", ""],
    micro_batch=["0", "1e9"],
    group=["1"],
    train_layers=["29", "-1"],
    vocab=["0", ""],
)


@needs_browser
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_shows_no_result_and_stays_out_of_the_address(browser, name):
    browser.open(address="a=rm&b=ppo&gpus=2")
    browser.click("#own summary")
    before = browser.hash()
    most = {"gpus": "4,096", "train_layers": "28"}.get(name, "1,000,000")
    good = browser.run("return document.getElementById(arguments[0]).value", name)
    for value in WRONG[name]:
        browser.type(f"#{name}", value)
        if not value:  # WebDriver's `clear` makes no input event in every version
            browser.type(f"#{name}", "5\ue003")
        assert browser.run("return document.querySelectorAll('article').length") == 0
        assert browser.text("#summary").startswith("No result.") and most in browser.text(
            "#summary"
        )
        assert most in browser.text(f"#{name}_wrong")
        invalid = "return [...document.querySelectorAll('[aria-invalid=true]')].map((x) => x.name)"
        assert browser.run(invalid) == [name]
        addresses = re.findall(rf"\b{name}=[^&]*", browser.hash())
        assert f"{name}={value}" not in addresses or not value
        assert value == "" or "=0&" not in browser.hash()
    browser.type(f"#{name}", good or "3")
    assert browser.run("return document.querySelectorAll('article').length") == 2
    assert browser.run(invalid) == [] and browser.text(f"#{name}_wrong") == ""
    assert before.startswith("#a=rm")


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
def test_the_default_fits_a_card(browser):
    browser.open()
    assert browser.run("return document.querySelectorAll('#summary div').length") == 2
    assert browser.text("#summary").count("fits") == 2
    assert "fits none" not in browser.text("#summary")
    assert browser.run("return document.querySelectorAll('.fits').length") == 2


@needs_browser
def test_the_prompts_reading_is_not_called_a_cache(browser):
    browser.open(address="a=ppo&b=grpo")
    parts = memory(MODELS[START_MODEL], ALGORITHMS["ppo"], PRECISIONS["mixed"], **DEFAULTS)
    assert parts["sampling"]["reading"] > parts["sampling"]["cache"] > 0
    table = browser.text("article table")
    assert re.search(rf"reading the prompts\s+\S\s+{parts['sampling']['reading'] / 1e9:.1f}", table)
    assert re.search(rf"KV cache\s+\S\s+{parts['sampling']['cache'] / 1e9:.1f}", table)


@needs_browser
def test_details_come_by_mouse_click_and_keyboard(browser):
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
    assert browser.text("article .detail:nth-of-type(3)").startswith("policy, ")
    browser.run("scrollTo(0, 0)")
    browser.open()
    mouse = """const part = document.querySelector(".bar [data-part=reference]");
        part.dispatchEvent(new MouseEvent("mouseenter"));"""
    browser.run(mouse)
    assert browser.text(".detail").startswith("reference, ")


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
    assert pasted == browser.text("pre") and pasted.startswith("python grpo.py --model Qwen/")


@needs_browser
def test_links_lead_to_files(browser):
    browser.open()
    links = browser.run(
        CHOOSE.replace("read()[0]", "[...document.links].map((x) => x.href)"), {}, [*ALGORITHMS]
    )
    for link in {*itertools.chain(*links)}:
        assert Path(link.removeprefix("file://").partition("#")[0]).is_file(), link


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
@pytest.mark.parametrize("width", [360, 1280])
def test_it_can_be_read_on_a_phone_and_a_desk_in_light_and_dark(browser, width, dark):
    for address in ("", "a=ppo&b=rm&gpus=64&model=Llama-3.1-70B&checkpointing=1"):
        browser.open(width, dark, address)
        browser.click("#own summary")
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
            assert {"policy", "ref", "critic", "RM", "grads", "AdamW"} <= {*look["labels"]}


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_an_error_can_be_read(browser, dark):
    browser.open(360, dark, "gpus=7000")
    pale = [text for text in browser.run(TEXTS) if contrast(*text[1:]) < 4.5]
    browser.type("#gpus", "0")
    pale += [text for text in browser.run(TEXTS) if contrast(*text[1:]) < 4.5]
    assert pale == []


@needs_browser
def test_the_peak_stays_in_sight_while_a_control_is_turned(browser):
    browser.open(width=360)
    for name in ("gpus", "completion", "group", "checkpointing"):
        browser.run("document.getElementById(arguments[0]).focus()", name)
        where = browser.run(
            """const nodes = [document.getElementById("summary"), document.activeElement];
            const boxes = nodes.map((x) => x.getBoundingClientRect());
            return [...boxes.map((x) => [x.top, x.bottom]), innerHeight];"""
        )
        (top, bottom), (field_top, field_bottom), height = where
        assert top >= 0 and bottom <= field_top and field_bottom <= height, name
        assert bottom < 0.2 * height or top > 0
    before = browser.text("#summary")
    browser.click("#checkpointing")
    assert browser.text("#summary") != before
