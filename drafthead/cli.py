"""How every recipe script ends when something is wrong: a message for the user, not a traceback."""

import sys
from collections.abc import Callable


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
