"""Makes the numbers, tables and figures of the pages.

    python -m docs.experiments grpo                   # an experiment: its runs, tables and figures
    python -m docs.experiments grpo dpo --redraw      # from docs/results, without new runs
    python -m docs.experiments --redraw               # all tables and figures
    python -m docs.experiments grpo --labels "(default)"   # these runs of it alone

An experiment NAME writes docs/results/NAME.json, docs/figures/NAME*.svg and its tables on pages,
between the comment lines that name them. A table may show numbers of another experiment: --redraw
without a name writes all. Runs that runs/experiments already holds are read, not repeated, as long
as their flags, the script, common/ and runtime/ are the same.
"""

import sys

import tyro

from docs.experiments.cost.memory_model import write_explorer
from docs.experiments.lib.navigation import add_navigation
from docs.experiments.lib.tables import write_pages
from docs.experiments.registry import EXPERIMENTS, tables_of


def main(
    names: tyro.conf.Positional[tuple[str, ...]],
    redraw: bool = False,
    labels: tuple[str, ...] = (),
) -> None:
    """Make experiments, and write the pages.

    Args:
        names: experiments; with --redraw and no name all
        redraw: make figures and tables from docs/results alone, without runs
        labels: make these runs alone, by their labels in docs/results; the others' numbers stay
    """
    unknown = {*names} - {*EXPERIMENTS}
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}")
    if not (names or redraw):
        sys.exit(f"experiments: {', '.join(EXPERIMENTS)}")
    for name in names or EXPERIMENTS:
        print(name, flush=True)
        EXPERIMENTS[name].redraw() if redraw else EXPERIMENTS[name].make(labels)
    write_pages(tables_of(names or EXPERIMENTS))
    add_navigation()
    write_explorer()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.splitlines()[0])
