"""What every recipe script shares: its command line, and a message instead of a traceback when something is wrong."""

import argparse
import sys
from collections.abc import Callable

from drafthead.config import DEFAULT_RECIPE, Recipe, load_recipe

# Of scripts that end with tables.
NO_TABLES = ("--no-tables", {"action": "store_true", "help": "measure, and print no table"})


def run_recipe(main: Callable[[], None]) -> None:
    """Run a script's main function.

    Errors that a user can act on (a bad recipe, a missing or mismatched artefact, a loss that is not
    finite) are printed and end the process with exit code 2. Anything else is a bug and keeps its traceback.
    """
    try:
        main()
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes", file=sys.stderr, flush=True)
        sys.exit(130)


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
        parser.exit(2, f"{error}\n")
