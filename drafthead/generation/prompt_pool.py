"""All prompts of one source: rows read, adapted, cut into prompts, and each put on one side of the split.

A document's side follows from seed and document alone, so it never changes sides when sources or amounts change, and
held-out documents that are not drawn stay a reserve that no stage trains on. Rows of the user's own files may declare
their side instead. A row that is no conversation is an error in such a file, and counted in a public data set.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafthead.artifacts import digest
from drafthead.data.contamination import Text
from drafthead.data.conversations import Conversation, RowError, cut
from drafthead.data.prompts import Prompt, prompt_id
from drafthead.generation.draw import normalised
from drafthead.generation.source_files import Located, read
from drafthead.generation.sources import LOCAL
from drafthead.progress import progress


@dataclass(frozen=True)
class Candidate:
    """A prompt that may be drawn.

    Attributes:
        prompt: as it would be written.
        label: its category within the source, as a recipe names it.
        text: its text, for the search for overlaps.
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
        duplicates: how many prompts of declared splits repeated an earlier one.
    """

    train: list[Candidate] = field(default_factory=list)
    heldout: list[Candidate] = field(default_factory=list)
    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    duplicates: int = 0

    def counts(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "rows": self.rows,
            "refused": dict(self.refused),
            "refused_examples": self.examples,
            "could_train": len(self.train),
            "could_hold_out": len(self.heldout),
        }


def gather(located: Located, seed: int, limit: int | None, rows_name_source: bool = False) -> Pool:
    """Read a source.

    Args:
        located: its files.
        seed: of the split and of the order.
        limit: how many training prompts per category are kept; None: all.
        rows_name_source: take the source of a prompt from its row, where it has one.

    Raises:
        ValueError: a file is damaged, a row of the user's own file is no conversation, more than half of the rows of a
            public data set are none, or a text was declared to be in both splits.
    """
    pool = Pool()
    heaps: dict[tuple[str, str], list[tuple[int, int, Candidate]]] = defaultdict(list)  # of each side and label
    declared: dict[str, tuple[str, str]] = {}  # normalised content -> split and place it was first seen in
    for path in [*located.files, *located.heldout_files]:
        for where, conversation in _conversations(located, path, pool):
            side = conversation.split
            if side is None:
                held = path in located.heldout_files or is_held_out(conversation.document, located.heldout_share, seed)
                side = "heldout" if held else "train"
            for candidate in _candidates(located, conversation, rows_name_source):
                if conversation.split:
                    first = declared.setdefault(normalised(candidate.prompt), (side, where))
                    if first[0] != side:
                        raise ValueError(
                            f"{where}: this {side} prompt is also in split {first[0]} ({first[1]}), so results on "
                            "held-out prompts would be flattered; remove one of the two"
                        )
                    if first[1] != where:
                        pool.duplicates += 1
                        continue
                heap = heaps[side, candidate.label]
                order = int(digest([seed, candidate.prompt.id])[:16], 16)
                heapq.heappush(heap, (-order, -pool.rows, candidate))
                if side == "train" and limit is not None and len(heap) > limit:
                    heapq.heappop(heap)  # the last in order: no draw reaches it
    _check(located, pool)
    pool.heldout = _in_order(heaps, "heldout")
    known = {c.prompt.document for c in pool.heldout} - {""}
    pool.train = [c for c in _in_order(heaps, "train") if c.prompt.document not in known]
    return pool


def _in_order(heaps: Mapping[tuple[str, str], Sequence[tuple[int, int, Candidate]]], wanted: str) -> list[Candidate]:
    entries = [entry for (side, _), heap in heaps.items() if side == wanted for entry in heap]
    return [candidate for *_, candidate in sorted(entries, key=lambda entry: entry[:2], reverse=True)]


def is_held_out(document: str, share: float, seed: int) -> bool:
    """The side of a document: a hash of seed and document, as a fraction, against the share."""
    return int(digest([seed, "heldout", document])[:12], 16) / 16**12 < share


def _conversations(located: Located, path: Path, pool: Pool) -> Iterator[tuple[str, Conversation]]:
    for where, row in progress(read(path), f"reading {path.name}", "row"):
        pool.rows += 1
        try:
            conversation = located.entry.adapter(row)
        except RowError as error:
            pool.refused[str(error)] += 1
            pool.examples.setdefault(str(error), where)
            continue
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{where}: not a row of {located.config.name}: {error!r}") from error
        yield where, conversation


def _candidates(located: Located, conversation: Conversation, rows_name_source: bool) -> Iterator[Candidate]:
    entry, name = located.entry, located.config.name
    label = conversation.category if entry.own_category and conversation.category else entry.category
    if located.config.categories is not None and label not in located.config.categories:
        return
    # Categories of public sources carry the source's, since "math" in two of them is not one workload.
    category = label if label == entry.category or entry.category == "all" else f"{entry.category}/{label}"
    source = conversation.source if rows_name_source and conversation.source else name
    document = f"{name}:{conversation.document}" if conversation.document else ""
    ids, tools = conversation.prompt_ids, conversation.tools
    for messages, response in cut(conversation.messages, located.config.turns) if ids is None else [((), None)]:
        prompt = Prompt(prompt_id(messages, ids, tools), source, category, messages, ids, tools, document, response)
        text = " ".join(m["content"] for m in messages) or conversation.text or " ".join(map(str, ids or ()))
        yield Candidate(prompt, label, Text(prompt.id, source, document, text))


def _check(located: Located, pool: Pool) -> None:
    name = located.config.name
    if not pool.rows:
        raise ValueError(f"prompts: {name} has no rows in {located.files[0]}")
    if not pool.refused:
        return
    reasons = "\n".join(f"  {pool.examples[reason]}: {reason} ({n} rows)" for reason, n in pool.refused.most_common(10))
    if located.entry is LOCAL:
        raise ValueError(
            f"{pool.refused.total()} of {pool.rows} rows are no prompts; correct or remove them:\n{reasons}"
        )
    if 2 * pool.refused.total() > pool.rows:
        raise ValueError(
            f"prompts.sources: {pool.refused.total()} of {pool.rows} rows of {name} are no conversations; is this the "
            f"right file?\n{reasons}"
        )
