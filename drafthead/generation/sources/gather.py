"""All prompts of one source: rows read, adapted, cut into prompts, and each put on one side of the split.

A document's side follows from seed and document alone, so it never changes sides when sources or amounts change, and
held-out documents that are not drawn stay a reserve that no stage trains on.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from drafthead.data.contamination import Text
from drafthead.data.prompts import Prompt, prompt_id
from drafthead.generation.sources.adapters import SchemaError
from drafthead.generation.sources.catalogue import Entry
from drafthead.generation.sources.conversation import Conversation, RowError, answer_to, check_unicode, cut
from drafthead.generation.sources.files import read
from drafthead.generation.sources.locate import Located
from drafthead.progress import progress
from drafthead.provenance import digest


@dataclass(frozen=True)
class Candidate:
    """A prompt that may be drawn.

    Attributes:
        prompt: as it would be written.
        label: its category within the source, as a recipe names it.
        text: what it says, for the search for overlaps.
    """

    prompt: Prompt
    label: str
    text: Text


@dataclass
class Pool:
    """The candidates of one source.

    Attributes:
        train, heldout: in the order of their draw.
        rows: how many were read.
        refused: reason -> how many rows were no conversation.
        examples: reason -> where the first one stands.
    """

    train: list[Candidate] = field(default_factory=list)
    heldout: list[Candidate] = field(default_factory=list)
    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


class _Lowest:
    """The candidates of lowest order, at most `limit` per label: what a draw can reach, of a source of any size."""

    def __init__(self, limit: int | None):
        self._limit = limit
        self._heaps: dict[str, list[tuple[int, int, Candidate]]] = defaultdict(list)

    def add(self, order: int, candidate: Candidate, number: int) -> None:
        heap = self._heaps[candidate.label]
        heapq.heappush(heap, (-order, number, candidate))
        if self._limit is not None and len(heap) > self._limit:
            heapq.heappop(heap)

    def sorted(self) -> list[Candidate]:
        entries = [entry for heap in self._heaps.values() for entry in heap]
        return [candidate for _, _, candidate in sorted(entries, key=lambda e: (-e[0], e[1]))]


def gather(located: Located, seed: int, limit: int | None) -> Pool:
    """Read a source.

    Args:
        located: its files.
        seed: of the split and of the order.
        limit: how many training prompts per category are kept; None: all.

    Raises:
        ValueError: a file is damaged, or more than half of the rows are no conversations.
    """
    pool, train, heldout = Pool(), _Lowest(limit), _Lowest(None)
    for path in [*located.files, *located.heldout_files]:
        published = path in located.heldout_files
        for conversation in _conversations(located, path, pool):
            held = published or is_held_out(conversation.document, located.heldout_share, seed)
            for candidate in _candidates(located, conversation):
                order = int(digest([seed, candidate.prompt.id])[:16], 16)
                (heldout if held else train).add(order, candidate, pool.rows)
    _check(located, pool)
    pool.heldout = heldout.sorted()
    known = {c.prompt.document for c in pool.heldout}
    pool.train = [c for c in train.sorted() if c.prompt.document not in known]
    return pool


def is_held_out(document: str, share: float, seed: int) -> bool:
    """The side of a document: a hash of seed and document, as a fraction, against the share."""
    return int(digest([seed, "heldout", document])[:12], 16) / 16**12 < share


def _conversations(located: Located, path: Path, pool: Pool) -> Iterator[Conversation]:
    for where, row in progress(read(path), f"reading {path.name}", "row"):
        pool.rows += 1
        try:
            conversation = located.entry.adapter(row)
            check_unicode(conversation)
        except (RowError, SchemaError) as error:
            pool.refused[str(error)] += 1
            pool.examples.setdefault(str(error), where)
            continue
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{where}: not a row of {located.config.name}: {error!r}") from error
        yield conversation


def _candidates(located: Located, conversation: Conversation) -> Iterator[Candidate]:
    entry, name = located.entry, located.config.name
    label = conversation.category if entry.own_category and conversation.category else entry.category
    if located.config.categories is not None and label not in located.config.categories:
        return
    cuts = cut(conversation.messages, located.config.turns) if conversation.prompt_ids is None else [()]
    for messages in cuts:
        prompt = Prompt(
            prompt_id(messages, conversation.prompt_ids, conversation.tools),
            source=name,
            category=_category(entry, label),
            messages=messages,
            prompt_ids=conversation.prompt_ids,
            tools=conversation.tools,
            document=f"{name}:{conversation.document}",
            answer=answer_to(conversation.messages, messages),
        )
        said = " ".join(m["content"] for m in messages) or conversation.text
        said = said or " ".join(map(str, conversation.prompt_ids or ()))
        yield Candidate(prompt, label, Text(prompt.id, name, prompt.document, said))


def _category(entry: Entry, label: str) -> str:
    """Categories of public sources carry the source's, since "math" in two of them is not one workload."""
    return label if label == entry.category or entry.category == "all" else f"{entry.category}/{label}"


def _check(located: Located, pool: Pool) -> None:
    if not pool.rows:
        raise ValueError(f"prompts.sources: {located.config.name} has no rows in {located.files[0]}")
    if 2 * pool.refused.total() > pool.rows:
        reason, count = pool.refused.most_common(1)[0]
        raise ValueError(
            f"prompts.sources: {count} of {pool.rows} rows of {located.config.name} are no conversations, such as "
            f"{pool.examples[reason]}: {reason}; is this the right file?"
        )
