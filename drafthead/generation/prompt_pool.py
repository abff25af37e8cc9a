"""All prompts of one source: rows read, cut into prompts, and each put on one side of the split.

A document's side follows from seed and document alone, so it never changes sides when sources or amounts change, and
held-out documents that are not drawn stay a reserve that no stage trains on. Rows of the user's own files may declare
their side instead. A row that is no conversation is an error in such a file, and counted in a public data set.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drafthead.artifacts import digest
from drafthead.data.contamination import Candidate
from drafthead.data.conversations import Conversation, RowError, cut
from drafthead.data.prompts import Prompt, prompt_id
from drafthead.generation.source_files import Located, read
from drafthead.generation.sources import LOCAL, read_row
from drafthead.progress import progress


@dataclass
class Pool:
    """The candidates of one source.

    Attributes:
        source: with its files.
        train, heldout: in the order of their draw.
        rows: how many were read.
        refused: reason -> how many rows were no conversation.
        examples: reason -> where the first one stands.
    """

    source: Located
    train: list[Candidate] = field(default_factory=list)
    heldout: list[Candidate] = field(default_factory=list)
    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


def gather(source: Located, seed: int) -> Pool:
    """Read a source. Training prompts that no draw can reach are dropped on the way, so that memory stays bounded.

    Raises:
        ValueError: a file is damaged, a row of the user's own file is no conversation, or more than half of the rows of
            a public data set are none.
    """
    pool = Pool(source)
    groups: dict[tuple[str, str], list[Candidate]] = defaultdict(list)  # of each side and category
    wanted = source.config.train

    def order(candidate: Candidate) -> str:
        return digest([seed, candidate.prompt.id])

    for path in [*source.files, *source.heldout_files]:
        share = 1.0 if path in source.heldout_files else source.heldout_share
        for conversation in _conversations(pool, path):
            side = conversation.split or ("heldout" if is_held_out(conversation.document, share, seed) else "train")
            for candidate in _candidates(source, conversation):
                group = groups[side, candidate.label]
                group.append(candidate)
                # Twice what is wanted, for those that are dropped as duplicates or overlaps.
                limit = 2 * (wanted[candidate.label] if isinstance(wanted, dict) else wanted) + 1000
                if side == "train" and len(group) > 2 * limit:
                    group.sort(key=order)
                    del group[limit:]
    _check_rows(pool)
    for (side, _), group in groups.items():
        getattr(pool, side).extend(group)
    held = {candidate.prompt.document for candidate in pool.heldout} - {""}
    pool.heldout.sort(key=order)
    pool.train = sorted((c for c in pool.train if c.prompt.document not in held), key=order)
    return pool


def is_held_out(document: str, share: float, seed: int) -> bool:
    """The side of a document: a hash of seed and document, as a fraction, against the share."""
    return int(digest([seed, "heldout", document])[:12], 16) / 16**12 < share


def drop_duplicates(pools: Sequence[Pool]) -> int:
    """Keep the first of prompts that differ in case and white space only; a held-out one before a training one.

    Returns:
        How many were dropped.
    """
    seen: set[str] = set()
    dropped = 0
    for side in ("heldout", "train"):
        for pool in pools:
            kept = []
            for candidate in getattr(pool, side):
                if (key := _normalised(candidate.prompt)) not in seen:
                    seen.add(key)
                    kept.append(candidate)
            dropped += len(getattr(pool, side)) - len(kept)
            setattr(pool, side, kept)
    return dropped


def _normalised(prompt: Prompt) -> str:
    """A key that prompts share when they differ in case and white space only."""
    if prompt.prompt_ids is not None:
        return prompt.id
    texts = [[m["role"], " ".join(m["content"].casefold().split()), m.get("tool_calls")] for m in prompt.messages]
    return digest([texts, prompt.tools])


def _conversations(pool: Pool, path: Path) -> Iterator[Conversation]:
    for where, row in progress(read(path), f"reading {path.name}", "row"):
        pool.rows += 1
        try:
            yield read_row(row, pool.source.entry)
        except RowError as error:
            pool.refused[str(error)] += 1
            pool.examples.setdefault(str(error), where)


def _candidates(source: Located, conversation: Conversation) -> Iterator[Candidate]:
    entry, name = source.entry, source.config.name
    label = conversation.category or entry.category
    if isinstance(source.config.train, dict) and label not in source.config.train:
        return
    # Categories of public sources carry the source's, since "math" in two of them is not one workload.
    category = f"{entry.category}/{label}" if conversation.category and entry is not LOCAL else label
    document = f"{name}:{conversation.document}" if conversation.document else ""
    ids, tools, rows_source = conversation.prompt_ids, conversation.tools, conversation.source or name
    for messages, response in cut(conversation.messages, source.config.turns) if ids is None else [((), None)]:
        text = " ".join(m["content"] for m in messages) or conversation.text or " ".join(map(str, ids or ()))
        key = prompt_id(messages, ids, tools)
        answer = conversation.response_ids
        prompt = Prompt(key, rows_source, category, messages, ids, tools, document, response, answer)
        yield Candidate(prompt, label, text)


def _check_rows(pool: Pool) -> None:
    refused, entry = pool.refused.total(), pool.source.entry
    if refused > pool.rows * (0 if entry is LOCAL else 0.5):
        reasons = [f"  {pool.examples[reason]}: {reason} ({n} rows)" for reason, n in pool.refused.most_common(10)]
        raise ValueError(
            f"prompts: {refused} of {pool.rows} rows of {pool.source.config.name} are no prompts; correct or remove "
            "them, or give another file:\n" + "\n".join(reasons)
        )
