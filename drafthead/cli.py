"""What every recipe script shares: its command line, its status lines, and a message instead of a traceback."""

import argparse
import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from safetensors import SafetensorError
from tqdm import tqdm

from drafthead.config import DEFAULT_RECIPE, REPO_ROOT, Recipe, load_recipe
from drafthead.files import describe, from_torch_file

# Engines that a recipe spawns import this, too: it says how threads wait.
from drafthead.processes import ends_with_parent

# Exit code of a measurement that is done but for servers that failed whenever they were tried.
LEFT_OUT = 3
# Of scripts that end with tables.
NO_TABLES = ("--no-tables", {"action": "store_true", "help": "measure, and print no table"})


def run_recipe(main: Callable[[], None]) -> None:
    """Run a script's main function, with its status lines on standard output.

    Errors that a user can act on (a bad recipe, a missing or mismatched artifact, whatever the operating system says of
    a file, a loss that is not finite) are printed and end the process with exit code 1. Anything else is a bug and
    keeps its traceback. For an unknown option argparse ends with its own code, 2.
    """
    _usable_streams()
    logger = logging.getLogger("drafthead")  # other libraries' loggers stay as they are
    logger.setLevel(logging.INFO)
    # A library that gave the root logger a handler would print every line twice.
    logger.handlers, logger.propagate = [_StatusLines()], False
    try:
        main()
        sys.stdout.flush()
    except (ValueError, FloatingPointError) as error:
        _refuse(f"{type(error).__name__}: {error}")
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not from_torch_file(error):
            raise
        _refuse(describe(error))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes", file=sys.stderr, flush=True)
        sys.exit(130)


class _StatusLines(logging.Handler):
    """The plain message on standard output, above a progress bar that is being drawn."""

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK", "0")
        where = "" if rank == "0" else f"[rank {rank}] "
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        return _printable(f"{where}{level}{super().format(record)}")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except OSError:  # nobody reads it: a status line never ends the work
            pass
        except Exception:  # as logging's own handlers do
            self.handleError(record)


def _printable(text: str) -> str:
    """Characters that would steer a terminal, and halves of surrogate pairs, as escapes: names are never markup."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _usable_streams() -> None:
    """A stream that the caller has closed, or whose encoding lacks a character, ends no work."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the next file to be opened would get its number, and what libraries print
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _refuse(message: str) -> NoReturn:
    try:
        print(flush=True)  # tells whether standard output itself is what failed
    except OSError as error:  # a full disk, or a pipe that nobody reads: what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        message = f"{type(error).__name__}: standard output: {error}; send it elsewhere and run the same command"
    with suppress(OSError):
        print(_printable(f"\n{message}"), file=sys.stderr, flush=True)
    sys.exit(1)


def recipe_from_command_line(description: str | None, *extra: tuple[str, dict]) -> tuple[Recipe, argparse.Namespace]:
    """Parse `[RECIPE] [section.key=value ...]` plus the caller's own flags, in any order.

    Args:
        description: shown by --help; usually the script's docstring.
        extra: (flag, keyword arguments of add_argument) of further options.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=str(DEFAULT_RECIPE), help="default: configs/tiny.yaml")
    parser.add_argument("overrides", nargs="*", help="dotted overrides, such as train.learning_rate=1e-3")
    for flag, options in extra:
        parser.add_argument(flag, **options)
    args = parser.parse_intermixed_args([word for word in sys.argv[1:] if not is_override(word)])
    args.overrides += filter(is_override, sys.argv[1:])
    try:
        return load_recipe(args.recipe, args.overrides), args
    except ValueError as error:  # without its type, which says nothing of a recipe
        _refuse(str(error))


def is_override(word: str) -> bool:
    """Whether a word of the command line is an override, also behind a flag, of whose values it is none."""
    return bool(re.match(r"[\w.][\w.\[\]-]*=", word)) and not os.path.isfile(word)


def run_script(script: str, arguments: Sequence[str], allowed: int = 0) -> int:
    """Run another of the project's scripts, training through accelerate on every GPU that there is.

    It ends with this process; where it fails, this process ends with its exit code, but for the one that is allowed.
    Returns the exit code.
    """
    launcher = ["-m", "accelerate.commands.launch", "--quiet"] if script.startswith("train/") else []
    if launcher:
        import torch  # after drafthead.processes, which says how its threads wait

        if not torch.cuda.is_available():
            launcher += ["--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    command = [sys.executable, *launcher, str(REPO_ROOT / script), *arguments]
    with subprocess.Popen(command, preexec_fn=ends_with_parent()) as process:
        try:
            code = process.wait()
        finally:
            process.terminate()  # nothing when it has ended; otherwise it stops its servers and goes
    if code not in (0, allowed):
        sys.exit(code)
    return code
