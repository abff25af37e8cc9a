"""Keep a served head good: capture, notice drift, train on, compare, swap, roll back.

    python data_gen/adapt.py [RECIPE] [section.key=value ...]      the loop, until it is stopped
    python data_gen/adapt.py --serve [RECIPE] ...                  only the server, with the head in service
    python data_gen/adapt.py --traffic FILE [--rate R] [RECIPE] .. sends prompts of a file, and ends after them
    python data_gen/adapt.py --roll-back [RECIPE] ...              puts the head before the one in service back

The recipe's head is trained and exported. The loop uses the server that `--serve` runs in another terminal, or starts
one. Killed at any moment, the same command goes on: adapt/NAME/state.json says which head is in service, and
results/NAME/adapting/report.html tells which served when and why it was replaced (docs/adapting.md).
"""

import os
import signal
import sys
import time
from pathlib import Path

from drafthead import locks
from drafthead.adapting.control import Control, folder, read_traffic, send_traffic, serving
from drafthead.adapting.history import write_history
from drafthead.adapting.loop import Loop, run_loop
from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config.evaluation import LoadConfig

OPTIONS = (
    ("--serve", {"action": "store_true", "help": "only serve, until stopped"}),
    ("--roll-back", {"action": "store_true", "help": "put the head before the one in service back"}),
    ("--traffic", {"type": Path, "metavar": "FILE", "help": "prompts to send, one a line (docs/prompts.md)"}),
    ("--rate", {"type": float, "default": 2.0, "help": "of --traffic: requests per second"}),
)


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    os.umask(0o077)  # of the stages, too: captured text is private
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    command = [args.recipe, *args.overrides]
    if args.serve:
        loop = Loop.opened(recipe, command)
        with serving(recipe, loop.head_dir(loop.served.name)) as control:
            print(f"serving on {control.server.base_url}; the API key is in {folder(recipe) / 'server.json'}")
            while control.head() or (control.server.process and not control.server.how_it_ended()):
                time.sleep(1)
            raise control.server.gone("it was serving")
    if args.roll_back:
        roll_back(Loop.opened(recipe, command))
        return
    if not args.rate > 0:
        raise ValueError(f"--rate {args.rate:g}: give requests per second, more than 0")
    locks.acquire(folder(recipe))
    loop = Loop.opened(recipe, command)
    requests = read_traffic(recipe, args.traffic) if args.traffic else []
    load = LoadConfig(request_rate=args.rate, concurrency=recipe.engine.max_num_seqs)
    with serving(recipe, loop.head_dir(loop.served.name)) as control:
        traffic = send_traffic(recipe, control.server, requests, load) if args.traffic else None
        run_loop(loop, control, traffic.done if traffic else lambda: False, write_history)
        if traffic:
            sent = traffic.result()
            print(f"traffic: {len(sent.good)} of {len(sent.requests)} requests answered")
            for error in sorted({request.error for request in sent.requests if request.error}):
                print(f"  not answered: {error}")
            if requests and not sent.good:
                raise ValueError(f"no request of {args.traffic} was answered; the reasons stand above")


def roll_back(loop: Loop) -> None:
    """At once, whatever a loop that runs is doing: the server is told here, the state file by whoever holds it."""
    before = loop.request_roll_back()
    if (running := Control.running(loop.recipe)) is not None:
        running.load(loop.head_dir(before.name))
    try:
        locks.acquire(folder(loop.recipe), timeout_s=0)
    except locks.InUseError:
        print(f"{before.name} drafts again; the loop that is running notes it when its present step ends")
    else:
        loop.answer_request()
        write_history(loop)


if __name__ == "__main__":
    run_recipe(main)
