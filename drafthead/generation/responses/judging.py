"""What is wrong with an answer, as far as that can be told without reading it: cut off, refused, going in circles.

Truncation is the engine's word. A refusal is an answer that begins like one (responses.refusal_openings): cheap, in
the language of the list only, and blind to polite refusals that begin otherwise. Loops are told by `data.responses`,
whose limit honest tables and code can reach too; see the samples before you drop by it. What happens to such
answers is the recipe's choice; they are counted in either case.
"""

from collections.abc import Sequence

from drafthead.config.responses import ResponsesConfig
from drafthead.data.reading import ParsedResponse
from drafthead.data.responses import loops

TRUNCATED, REFUSED, LOOPING = "truncated", "refused", "looping"
FLAGS = (TRUNCATED, REFUSED, LOOPING)
DROPPED = "dropped"  # the reason why such an answer is missing
_QUOTES = str.maketrans("\u2018\u2019", "''")


def judge(settings: ResponsesConfig, said: ParsedResponse, token_ids: Sequence[int], finish_reason: str) -> list[str]:
    """The flags that an answer earns, in the order of FLAGS."""
    earned = {
        TRUNCATED: finish_reason == "length",
        REFUSED: is_refusal(said.content, settings.refusal_openings),
        LOOPING: loops(token_ids),
    }
    return [flag for flag in FLAGS if earned[flag]]


def dropped(settings: ResponsesConfig, flags: Sequence[str]) -> bool:
    """Whether the recipe leaves out an answer with these flags."""
    rules = {TRUNCATED: settings.on_truncated, REFUSED: settings.on_refused, LOOPING: settings.on_loop}
    return any(rules[flag] == "drop" for flag in flags)


def is_refusal(text: str, openings: Sequence[str]) -> bool:
    """Whether a text begins with one of the openings, whatever its case, quotation marks and spaces."""
    begins = _plain(text[:200])
    return any(begins.startswith(_plain(opening)) for opening in openings)


def _plain(text: str) -> str:
    return " ".join(text.translate(_QUOTES).casefold().split())
