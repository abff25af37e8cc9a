"""Evaluate a head: acceptance, serving, report. Rerun, it measures only what is missing.

    python eval/head.py [RECIPE] [section.key=value ...]

Each part is a process of its own: an engine that ran inside a process leaves its threads and memory behind,
and the servers measured next must not share a machine with them.
"""

import signal
import sys

from drafthead.cli import recipe_from_command_line, run_recipe, run_script

# One screen for all three: the tables of each stand in the report.
PARTS = (("acceptance.py", "--no-tables"), ("serving.py", "--no-tables"), ("report.py",))


def main() -> None:
    recipe_from_command_line(__doc__)  # a bad recipe is reported once, before anything starts
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    for script, *options in PARTS:
        run_script(f"eval/{script}", [*sys.argv[1:], *options])


if __name__ == "__main__":
    run_recipe(main)
