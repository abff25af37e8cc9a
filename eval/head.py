"""Evaluate a head: acceptance, serving, report. Rerun, it measures only what is missing.

    python eval/head.py [RECIPE] [section.key=value ...]

Each part is a process of its own: an engine that ran inside a process leaves its threads and memory behind,
and the servers measured next must not share a machine with them. The exit code is 3 where the report lacks a server
that failed whenever it was tried.
"""

import signal
import sys

from drafthead.cli import LEFT_OUT, recipe_from_command_line, run_recipe, run_script

# One screen for all three: the tables of each stand in the report.
PARTS = (("acceptance.py", "--no-tables"), ("serving.py", "--no-tables"), ("report.py",))


def main() -> None:
    recipe_from_command_line(__doc__)  # a bad recipe is reported once, before anything starts
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    codes = [run_script(f"eval/{script}", [*sys.argv[1:], *options], LEFT_OUT) for script, *options in PARTS]
    if max(codes):
        sys.exit(LEFT_OUT)


if __name__ == "__main__":
    run_recipe(main)
