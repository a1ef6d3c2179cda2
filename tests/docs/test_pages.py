"""What the pages name exists, and what the scripts log is explained."""

import ast
import json
import re
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest
from scripts import SCRIPTS, short_flags

sys.path.insert(0, str(Path("docs/experiments").resolve()))
from tables import BLOCK, load_tables, markdown

PAGES = [Path("README.md"), Path("tiny/README.md"), *Path("docs").glob("*.md")]
GROUPS = "reward|objective|policy|value|completions|eval|time"
SOURCES = {
    path: path.read_text()
    for pattern in ("*.py", "*/*.py", "*/*/*.py")
    for path in Path().glob(pattern)
}
PROGRAM = "".join(text for path, text in SOURCES.items() if path.parts[0] != "tests")
FLAGS = {
    f"--{flag.replace('_', '-')}" for script in SCRIPTS.values() for flag in vars(script.Args())
} | {
    "--healthy",
    "--help",
    "--no-run",
    "--solution",
    "--out",
    "--metrics",
    "--label",
    "--data",
    "--floor",
    "--jobs",
    "--medium",
    "--profile",
    "--redraw",
    "--repeats",
    "--shapes",
    "--steps",
    "--tokenizer",
    "--nproc_per_node",
    "--nnodes",
    "--rdzv_backend",
    "--rdzv_endpoint",
    "--rdzv_id",
    "--no-scale-rewards",
    "--no-whiten-advantages",
}
NAMES = {
    node.name
    for text in SOURCES.values()
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.FunctionDef)
}
# Metrics whose names a script puts together.
BUILT = {"reward_model", "mean", "variance", "return_mean", "return_variance"}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_flags_functions_tests_and_files_on_a_page_exist(page):
    text = page.read_text()
    outside_pip = re.sub(r"python -m .*", "", text)
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", outside_pip):
        assert flag in FLAGS, f"{page}: there is no flag {flag}"
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"test_\w+", quoted):
            assert quoted in NAMES, f"{page}: there is no test {quoted}"
        elif re.fullmatch(r"[a-z]\w*_\w+", quoted):
            assert quoted in NAMES or quoted in PROGRAM, f"{page}: there is no {quoted}"
        elif re.fullmatch(rf"({GROUPS})/\w+", quoted):
            name = quoted.split("/")[1]
            assert f'"{quoted}"' in PROGRAM or name in NAMES | BUILT, f"{page}: {quoted}"
        elif re.fullmatch(r"(tests|common|docs|tiny)/[\w/.]+", quoted):
            assert Path(quoted).exists(), f"{page}: there is no {quoted}"
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (page.parent / link).exists(), f"{page}: {link}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_logged_metric_is_on_the_page(name, tmp_path):
    small = dict(epochs=0.01, total_rollouts=1, prompts_per_rollout=4, group_size=2)
    small |= dict(num_minibatches=1, eval_split="test[:4]", eval_samples=2)
    script = SCRIPTS[name]
    run_dir = script.main(script.Args(output_dir=str(tmp_path), **short_flags(name, **small)))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    logged = {metric for line in lines for metric in json.loads(line)} - {"step"}
    page = Path(f"docs/{name}.md").read_text()
    explained = set(re.findall(rf"`((?:{GROUPS})/\w+)`", page))
    # Only with a reward model, or only without.
    either = {"reward/reward_model", "reward/last_number"}
    assert explained - either == logged - either


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_on_the_page(name):
    text = Path(f"docs/{name}.md").read_text()
    for flag, default in vars(SCRIPTS[name].Args()).items():
        (row,) = re.findall(rf"^\| `--{flag.replace('_', '-')}` \| (.*?) \|", text, re.MULTILINE)
        assert ast.literal_eval(row.strip("`") or "None") == (None if default == [] else default)


@pytest.mark.parametrize("name", SCRIPTS)
def test_module_docstring_names_only_flags_that_exist(name):
    doc = SCRIPTS[name].__doc__
    assert f"python {name}.py" in doc
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", doc):
        assert flag in FLAGS


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_has_help(name, capsys):
    """Behind the field, or on the line above; a section's first flag shows the section's name."""
    lines = SOURCES[Path(f"{name}.py")].splitlines()
    (args,) = [n for n in ast.parse("\n".join(lines)).body if getattr(n, "name", "") == "Args"]
    with pytest.raises(SystemExit):
        SCRIPTS[name].parse_args(["--help"])
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for field in args.body:
        line, above = lines[field.lineno - 1], lines[field.lineno - 2]
        help_text = line.rpartition("  # ")[2] if "  # " in line else above.strip(" #")
        assert " ".join(help_text.split()[:3]) in shown, f"{name}.py: {field.target.id} has no help"
    for section in [line.strip(" #") for line in lines if line.startswith("    # --- ")]:
        in_args = args.lineno < lines.index(f"    # {section}") < args.end_lineno
        assert not in_args or section in shown, f"{name}.py --help lacks {section}"


def test_the_readme_counts_the_scripts_lines_and_links_the_loop():
    text = Path("README.md").read_text()
    for name in SCRIPTS:
        (counted,) = re.findall(rf"\[`{name}\.py`\]\({name}\.py\) \| (\d+) \|", text)
        assert int(counted) == len(SOURCES[Path(f"{name}.py")].splitlines())
    (first, last) = map(int, re.search(r"grpo\.py#L(\d+)-L(\d+)", text).groups())
    lines = SOURCES[Path("grpo.py")].splitlines()
    assert lines[first - 1].startswith("    for step in progress:")
    assert lines[last].strip() == "# 6. Log, evaluate, save."
    # Each line of the excerpt stands in the loop, in its order; `...` leaves arguments out.
    loop = re.sub(r"\s", "", "".join(lines[first - 1 : last]))
    for line in text.partition("```python\n")[2].partition("```")[0].splitlines():
        code = re.sub(r"\s|\.\.\.\)", "", line)
        assert code in loop, line
        loop = loop.partition(code)[2]


def test_tables_on_the_pages_are_those_of_the_results():
    tables, shown = load_tables(), []
    for page in PAGES:
        text = page.read_text()
        assert text.count("<!-- table ") == text.count("<!-- end table -->")
        for name, block in BLOCK.findall(text):
            shown.append(name)
            assert block == markdown(tables[name]), f"{page}: {name}"
    assert sorted(shown) == sorted(tables)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_to_lines_point_at_what_they_name(page):
    for name, path, line in re.findall(r"\[`(\w+)`\]\(([\w/.]+\.py)#L(\d+)\)", page.read_text()):
        source = (page.parent / path).read_text().splitlines()[int(line) - 1]
        assert re.search(rf"(def|class) {name}\b|^{name} = ", source), f"{page}: {name}, {source}"


def test_the_readmes_results_are_those_of_the_experiments():
    rows = {
        "sft": ("sft", "(default)", "loss"),
        "rm_bradley_terry": ("reward_model", "(default)", "pair accuracy"),
        "reinforce": ("reinforce", "`--baseline leave_one_out`", "reward"),
        "ppo_rlhf": ("ppo", "(default)", "reward"),
        "grpo": ("grpo", "(default)", "accuracy"),
        "dpo": ("dpo", "(default)", "reward"),
        "kto": ("kto", "(default)", "reward"),
    }
    assert rows.keys() == SCRIPTS.keys()
    for name, (experiment, label, quantity) in rows.items():
        made = json.loads(Path(f"docs/results/{experiment}.json").read_text())
        values = made["numbers"][label][quantity]
        (row,) = re.findall(
            rf"^\| \[`{name}\.py`\].*$", Path("README.md").read_text(), re.MULTILINE
        )
        assert f" {min(values):.3f} to {max(values):.3f}" in row


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_markdown_leaves_the_formulas_alone(page):
    """GitHub reads Markdown first: it eats backslashes, and takes `}_` for emphasis."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"\$`[^`\n]*`\$|`[^`\n]*`|(?m:^    .*\$seed.*$)", "", text)
    assert "$$" not in text
    for formula in re.findall(r"\$([^$\n]+)\$", text):
        assert not re.search(r"\\[|,;{}!]|[})\]]_|\w\*", formula), f"{page}: {formula}"


def test_what_the_page_says_of_the_variance_holds():
    made = json.loads(Path("docs/results/variance.json").read_text())["numbers"].values()
    noises = [
        dict(zip(of["noise"], at, strict=True))
        for of in made
        for at in zip(*of["noise"].values(), strict=True)
    ]
    lower = sum(noise["none"] < noise["leave one out"] for noise in noises)
    worse = sorted(noise["none"] / noise["leave one out"] for noise in noises)[lower:]
    shifted = [noise["none, rewards 1 and 2"] / noise["none"] for noise in noises]
    page = " ".join(Path("docs/reinforce.md").read_text().split())
    assert f"in {lower} of the {len(noises)} measurements" in page
    assert "it is {:.0f}, {:.0f} and {:.0f} times as large".format(*worse) in page
    assert f"{min(shifted):.1f} to {max(shifted):.0f} times the variance" in page


def test_what_the_index_says_of_the_frontier_holds():
    """Two means of five seeds differ if they are three standard errors of the difference apart."""
    numbers = json.loads(Path("docs/results/frontier.json").read_text())["numbers"]
    rewards = {label: values["reward"] for label, values in numbers.items()}

    def standard_errors(first: str, second: str) -> float:
        a, b = rewards[first], rewards[second]
        return (mean(a) - mean(b)) / ((stdev(a) ** 2 + stdev(b) ** 2) / 5) ** 0.5

    ppo, grpo = "PPO, KL in the reward, beta ", "GRPO, KL in the reward, beta "
    loss, dpo = "GRPO, KL in the loss, beta ", "DPO, beta "
    assert standard_errors(ppo + "0.2", grpo + "0.2") > 3
    assert min(rewards[ppo + "0.2"]) > max(rewards[grpo + "0.2"])
    assert abs(standard_errors(ppo + "0.5", grpo + "0.5")) < 3
    assert abs(standard_errors(ppo + "0.1", grpo + "0.1")) < 3
    assert standard_errors(ppo + "0.5", dpo + "1") > 3
    assert standard_errors(grpo + "0.5", dpo + "1") > 3
    assert standard_errors(ppo + "0.2", dpo + "0.3") > 3
    assert abs(standard_errors(grpo + "0.2", dpo + "0.3")) < 3
    assert abs(standard_errors(grpo + "0.1", loss + "0.1")) < 3
    page = " ".join(Path("docs/index.md").read_text().split())
    of_grpo = standard_errors(loss + "0.2", loss + "0.1")
    of_dpo = standard_errors(dpo + "0.3", dpo + "0.1")
    assert f"0.74, then 0.66, {of_grpo:.1f} standard errors" in page
    assert f"0.82, then 0.78, {of_dpo:.1f})" in page


def test_phrases_that_no_author_of_the_field_would_write_stay_away():
    """Found by readers once: literal translations, each with a plain term in its place now."""
    phrases = (
        "hangs on|goes on from|what stands before|Nobody knows|start of everything|less a number|"
        "ends in one text|pays for length|takes? their room|shall be|on its good side|"
        "quadratic mean|lets go of|still to come|those of other programs|gets and must"
    )
    for path in [*PAGES, Path("docs/explorer.html"), *Path().glob("*.py")]:
        found = re.search(phrases, path.read_text())
        assert not found, f"{path}: {found[0]}"
