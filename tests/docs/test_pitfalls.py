"""The table of docs/pitfalls.md, "what you see": its commands show it."""

import re
from pathlib import Path

from runs import metrics_of

import grpo


def test_the_commands_show_what_the_table_says(tmp_path):
    text = Path("docs/pitfalls.md").read_text()
    table = text.partition("## Is this loss right?")[2].partition("\n## ")[0]
    commands = re.findall(r"\| `(--[^`]+)` \|$", table, re.MULTILINE)
    logs = []
    for command in commands:
        flags = [*command.split(), "--eval-rows", "50", "--output-dir", str(tmp_path)]
        logs.append(metrics_of(grpo.main(grpo.parse_args(flags))))
    one_step, no_advantages, noise, collapse, form = logs
    for row in one_step[1:]:
        assert abs(row["objective/loss"]) < 1e-6 < 0.1 < row["policy/grad_norm"]
        assert row["policy/approx_kl"] == row["policy/clip_fraction_low"] == 0
        assert row["policy/clip_fraction_high"] == 0
    assert no_advantages[1]["policy/grad_norm"] == 0
    assert noise[1]["objective/kl"] == 0 > min(row["objective/kl"] for row in noise[1:])
    assert collapse[-1]["policy/entropy"] < 0.2 and collapse[-1]["reward/mean"] < 0.2
    assert form[1]["reward/mean"] < 0.5 < 0.9 < form[-1]["reward/mean"]
    assert form[-1]["eval/accuracy"] < 0.7
