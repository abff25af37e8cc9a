"""What every recipe script shares: its command line, and a message instead of a traceback when something is wrong."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

import drafthead.processes  # noqa: F401  engines that a recipe spawns import the recipe's module, and with it this one
from drafthead.config import DEFAULT_RECIPE, Recipe, load_recipe
from drafthead.space import ran_out

_FOR_USERS = (
    ValueError, FloatingPointError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError,
    PermissionError,
)  # fmt: skip

# Of scripts that end with tables.
NO_TABLES = ("--no-tables", {"action": "store_true", "help": "measure, and print no table"})


def run_recipe(main: Callable[[], None]) -> None:
    """Run a script's main function.

    Errors that a user can act on (a bad recipe, a missing or mismatched artefact, a file that may not be read or
    written, a full disk, a loss that is not finite) are printed and end the process with exit code 2. Anything else is
    a bug and keeps its traceback.
    """
    try:
        main()
    except _FOR_USERS as error:
        _refuse(f"{type(error).__name__}: {error}")
    except OSError as error:
        if not ran_out(error):
            raise
        _refuse(f"DiskFullError: {error}; make room and run the same command, which continues")
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes", file=sys.stderr, flush=True)
        sys.exit(130)


def _refuse(message: str) -> NoReturn:
    # Text that a terminal cannot show, such as half of a surrogate pair, is no reason for a traceback.
    print(f"\n{message}".encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)
    sys.exit(2)


def recipe_from_command_line(description: str | None, *extra: tuple[str, dict]) -> tuple[Recipe, argparse.Namespace]:
    """Parse `[RECIPE] [section.key=value ...]` plus the caller's own flags.

    Args:
        description: shown by --help; usually the script's docstring.
        extra: (flag, keyword arguments of add_argument) of further options.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=str(DEFAULT_RECIPE), help="default: configs/tiny.yaml")
    parser.add_argument("overrides", nargs="*", help="dotted overrides, such as train.learning_rate=1e-3")
    for flag, options in extra:
        parser.add_argument(flag, **options)
    args = parser.parse_args()
    if "=" in args.recipe:  # overrides of the default recipe
        args.overrides.insert(0, args.recipe)
        args.recipe = str(DEFAULT_RECIPE)
    try:
        return load_recipe(args.recipe, args.overrides), args
    except (FileNotFoundError, ValueError) as error:
        _refuse(str(error))
