"""From the recipe's sources to the three splits of the prompts artifact.

A recipe names one file (`prompts.path`) or a mix of sources (`prompts.sources`). Rows are read and cut into prompts,
duplicates and training prompts that overlap a held-out one are dropped, and the recipe's amounts are drawn. Validation
prompts are carved out of train. Draws are ordered by a hash of seed and content, so adding lines to a source disturbs
as little as possible.

A document's side of the split follows from seed and document alone, so it never changes sides when sources or amounts
change, and held-out documents that are not drawn stay a reserve that no stage trains on. Rows of the user's own files
may declare their side instead. A row that is no conversation is an error in such a file, and counted in a public data
set.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from drafthead.artifacts import MANIFEST, begin, digest, finish, read_manifest
from drafthead.config.recipe import PromptsConfig, PromptSource, Recipe
from drafthead.data.contamination import Candidate, Overlap, find_overlaps
from drafthead.data.prompts import (
    KIND,
    SPLITS,
    Conversation,
    Prompt,
    RowError,
    prompt_id,
    read_prompts,
    split_turns,
    write_prompts,
)
from drafthead.generation.sources import CATALOGUE, LOCAL, WITHHELD, Located, locate, read, read_row
from drafthead.progress import progress_bar

_ALL = sys.maxsize  # prompts
_ANY = ""  # category


@dataclass
class Pool:
    """The candidates of one source.

    Attributes:
        source: source of the prompts, with its files.
        train, heldout: candidates of each side, in the order of their draw.
        rows: number of rows that were read.
        refused: reason -> how many rows were no conversation.
        repaired: what was changed or not read -> in how many rows.
        examples: reason, or what was changed -> where the first one stands.
        duplicates: prompts that were dropped because another source, or another row, has them.
    """

    source: Located
    train: list[Candidate] = field(default_factory=list)
    heldout: list[Candidate] = field(default_factory=list)
    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    duplicates: int = 0

    def draws(self, side: str) -> bool:
        """Whether the recipe draws prompts of a side from this source."""
        return bool(self.source.config.to_train if side == "train" else self.source.config.heldout)


@dataclass
class Mix:
    """Prompts of all sources, as drawn, and what the manifest says about them.

    Attributes:
        train, heldout: prompts of each side.
        report: duplicates that were dropped; rows and prompts of each source; notes on what was left out, as sentences.
    """

    train: list[Prompt]
    heldout: list[Prompt]
    report: dict[str, Any]


def sources_of(settings: PromptsConfig) -> tuple[PromptSource, ...]:
    """The sources of a recipe; `prompts.path` is one of which everything is drawn."""
    if settings.path:
        return (PromptSource(name="local", path=settings.path, train=_ALL, heldout=_ALL),)
    return settings.sources or ()


def planned_prompts(settings: PromptsConfig) -> dict[str, int]:
    """Split -> how many prompts a recipe draws at most, without those that only the files can tell."""
    sources = sources_of(settings)
    train = sum(source.to_train for source in sources) - settings.validation
    heldout = sum(source.heldout for source in sources)
    planned = {
        "train": min(max(train, 0), settings.max_train or _ALL),
        "validation": settings.validation,
        "heldout": min(heldout, settings.max_heldout or _ALL),
    }
    return {split: count for split, count in planned.items() if count < _ALL - settings.validation}


def make_prompts(recipe: Recipe) -> dict[str, Any]:
    """Write the prompts artifact of a recipe, or find it complete; returns its manifest.

    Raises:
        FileNotFoundError: a source is not on this machine; the message has the command that gets it.
        ValueError: a row is not a prompt, or a split would be empty.
        ArtifactError: the directory holds prompts made from something else.
    """
    settings, directory = recipe.prompts, recipe.prompts_dir
    sources = locate_sources(settings)
    keeps_responses = not recipe.responses.regenerate
    identity = {
        **_made_from(settings, sources),
        # What decides which prompts there are: neither the place of files nor the date given to templates.
        "settings": settings.model_dump(exclude={"path", "sources", "date"}),
        **({"answers": "kept"} if keeps_responses else {} if recipe.responses.turn_by_turn else {"history": "given"}),
    }
    if (directory / MANIFEST).exists() and begin(directory, KIND, identity):
        return read_manifest(directory)
    # Before the directory is claimed: a file with a bad line is corrected and read again.
    mix = make_mix(settings, sources, recipe.responses.turn_by_turn)
    splits = split_prompts(settings, mix.train, mix.heldout)
    begin(directory, KIND, identity)
    mix.report["notes"] += _cost_of_validation(mix.train, splits)
    if not keeps_responses and (answered := sum(prompt.response_ids is not None for prompt in mix.train)):
        unused = "the target generates others; responses.regenerate=false trains on them"
        mix.report["notes"].append(f"{answered} training prompts come with response_ids, which are left out: {unused}")
    for split, prompts in splits.items():
        stored = prompts if keeps_responses else [replace(p, response=None, response_ids=None) for p in prompts]
        write_prompts(directory / f"{split}.parquet", stored)
    return finish(directory, {**{split: len(prompts) for split, prompts in splits.items()}, **mix.report})


def locate_sources(settings: PromptsConfig) -> list[Located]:
    """The files of every source of the recipe.

    Raises:
        FileNotFoundError: sources are not on this machine; the message has the command for each.
        ValueError: a name is unknown.
    """
    located, missing = [], []
    for config in sources_of(settings):
        try:
            located.append(locate(config))
        except FileNotFoundError as error:
            missing.append(str(error))
    if missing:
        raise FileNotFoundError("\n".join(missing))
    return located


def _made_from(settings: PromptsConfig, sources: Sequence[Located]) -> dict[str, Any]:
    if settings.path:
        files = sources[0].identity["files"]
        if len(files) > 1:
            raise ValueError(f"prompts.path {settings.path} has {len(files)} files: give one, or use prompts.sources")
        ((name, sha256),) = files.items()
        return {"source": name, "source_sha256": sha256}
    made_from = [{**s.config.model_dump(exclude={"path"}), "made_from": s.identity} for s in sources]
    return {"sources": sorted(made_from, key=lambda source: source["name"])}


def make_mix(settings: PromptsConfig, sources: Sequence[Located], turn_by_turn: bool = True) -> Mix:
    """Read, clean and draw.

    Overlaps within a single file (`prompts.path`) are reported and kept, because its author decides.

    Args:
        settings: prompts section of the recipe.
        sources: sources with their files.
        turn_by_turn: whether the target responds to every question of a training chat.

    Raises:
        ValueError: a file is damaged or not what it should be, or a source has no prompt where some are wanted.
    """
    pools = [gather(source, settings.seed) for source in sorted(sources, key=lambda source: source.config.name)]
    duplicates = drop_duplicates(pools, turn_by_turn)
    overlaps = find_overlaps([c for pool in pools for c in pool.train], [c for pool in pools for c in pool.heldout])
    overlapping = set() if settings.path else {overlap.train.id for overlap in overlaps}
    mix = Mix([], [], {"duplicates_dropped": duplicates, "sources": {}, "notes": _overlap_notes(overlaps, settings)})
    for pool in pools:
        pool.train = [candidate for candidate in pool.train if candidate.prompt.id not in overlapping]
        _draw(pool, settings.seed, mix)
    return mix


def _draw(pool: Pool, seed: int, mix: Mix) -> None:
    """Add the prompts of one source to the mix, and what is to be said about it to the report."""
    config, notes, train = pool.source.config, mix.report["notes"], []
    counts_by_label = config.train if isinstance(config.train, dict) else {_ANY: config.train}
    for label, count in counts_by_label.items():
        drawn = [c.prompt for c in pool.train if label in (_ANY, c.label)][:count]
        notes += _shortage(pool, f"training prompts {label}".strip(), len(drawn), count)
        train += drawn
    heldout = draw_evenly([c.prompt for c in pool.heldout], config.heldout, seed)
    notes += _shortage(pool, "held-out prompts", len(heldout), config.heldout)
    for reason, count in pool.refused.items():
        notes.append(f"{config.name}: {count} of {pool.rows} rows left out: {reason} (such as {pool.examples[reason]})")
    for repair, count in pool.repaired.items():
        notes.append(f"{config.name}: in {count} of {pool.rows} rows {repair} (such as {pool.examples[repair]})")
    if train and pool.source.entry.reminder:
        notes.append(f"REMINDER: {pool.source.entry.reminder}")
    counts = {"rows": pool.rows, "refused": dict(pool.refused), "repaired": dict(pool.repaired)}
    counts |= {"train": len(train), "heldout": len(heldout)}
    mix.report["sources"][config.name] = counts
    mix.train += train
    mix.heldout += heldout


def _shortage(pool: Pool, what: str, available: int, requested: int) -> list[str]:
    if requested and not available:
        documents = len({_document(candidate.prompt) for candidate in (*pool.train, *pool.heldout)})
        raise ValueError(
            f"prompts: {pool.source.config.name} has no {what} left of {pool.rows} rows of {documents} documents "
            f"({len(pool.train)} rows could be trained on, {len(pool.heldout)} are held out at heldout_share "
            f"{pool.source.heldout_share}, {pool.duplicates} are duplicates, of another source perhaps); lines of a "
            'file of yours may declare "split": "train" or "heldout"'
        )
    return (
        [f"{pool.source.config.name}: {available} {what} instead of {requested}"]
        if available < requested < _ALL
        else []
    )


def _overlap_notes(overlaps: Sequence[Overlap], settings: PromptsConfig) -> list[str]:
    """A sentence per pair of sources, with the longest overlap as its example."""
    pairs: dict[tuple[str, str], list[Overlap]] = defaultdict(list)
    for overlap in overlaps:
        pairs[overlap.train.source, overlap.heldout.source].append(overlap)
    decision = "kept, as prompts.path decides its splits" if settings.path else "dropped from training"
    notes = []
    for (train, heldout), of_pair in sorted(pairs.items()):
        worst = max(of_pair, key=lambda overlap: overlap.runs)
        words = f": `{worst.words}`" if heldout in CATALOGUE else ""  # of nobody's own text: notes go to logs
        notes.append(
            f"{len(of_pair)} training prompts of {train} share 13 words with held-out {heldout}, such as "
            f"{worst.train.id} with {worst.heldout.id}{words}; {decision}"
        )
    return notes


def split_prompts(
    settings: PromptsConfig, train: Sequence[Prompt], heldout: Sequence[Prompt]
) -> dict[str, list[Prompt]]:
    """Train, validation and held-out prompts, each in an order fixed by seed and content.

    Validation is drawn first, so that another max_train keeps the prompts that checkpoints are compared on.

    Raises:
        ValueError: a split would be empty.
    """
    documents: dict[str, str] = {}  # document -> the first id of its prompts
    for prompt in train:
        documents[_document(prompt)] = min(documents.get(_document(prompt), prompt.id), prompt.id)
    # Document by document: a prompt of it costs training all others.
    by_document = partial(draw_evenly, group=lambda prompt: documents[_document(prompt)], share=0.5)
    validation = by_document(train, settings.validation, settings.seed)
    taken = {_document(prompt) for prompt in validation}
    rest = [prompt for prompt in train if _document(prompt) not in taken]
    if not rest or not heldout:
        raise ValueError(
            f"prompts.validation {settings.validation} leaves {len(rest)} of {len(train)} prompts to train on, and "
            f"{len(heldout)} are held out: both are needed; lower prompts.validation, or give sources `train` and "
            "`heldout` numbers"
        )
    return {
        "train": draw_evenly(rest, settings.max_train, settings.seed),
        "validation": validation,
        "heldout": draw_evenly(heldout, settings.max_heldout, settings.seed),
    }


def _cost_of_validation(train: Sequence[Prompt], splits: dict[str, list[Prompt]]) -> list[str]:
    """A sentence per category that validation has and training has not, and per source of which training lacks prompts
    because validation has others of their documents."""
    validation, trained = splits["validation"], {prompt.category for prompt in splits["train"]}
    untrained = sorted({prompt.category for prompt in validation} - trained)
    drawn, taken = {prompt.id for prompt in validation}, {_document(prompt) for prompt in validation}
    lost = Counter(p.source for p in train if p.id not in drawn and _document(p) in taken)
    notes = [f"{name}: validation has all that could be trained on" for name in untrained]
    return notes + [
        f"{name}: {count} training prompts are of documents that validation has" for name, count in lost.items()
    ]


def _document(prompt: Prompt) -> str:
    return prompt.document or prompt.id


def draw_evenly(
    prompts: Sequence[Prompt],
    limit: int | None,
    seed: int,
    group: Callable[[Prompt], str] = lambda prompt: prompt.id,
    share: float = 1,
) -> list[Prompt]:
    """At most `limit` prompts, categories as even as their sizes allow, group by group; deterministic in seed and
    content. More than `share` of a category is drawn only where no other has any left."""
    # Rank within the category first: the first n of this order hold every category's first n / categories.
    ordered = sorted(prompts, key=lambda p: (digest([seed, group(p)]), digest([seed, p.id])))
    categories = pd.Series([prompt.category for prompt in ordered], dtype=object)
    ranks = categories.groupby(categories).cumcount()
    spared = ranks + 1 > share * categories.map(categories.value_counts())
    ranks = (ranks + spared * len(ranks)).sort_values(kind="stable")
    return [ordered[place] for place in sorted(ranks.index[:limit])]


def print_prompts(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """A table of sources, categories and splits, and a line for whatever was left out."""
    places = [(p.source, p.category, split) for split in SPLITS for p in read_prompts(recipe.prompts_dir, split)]
    rows = pd.DataFrame(places, columns=["source", "category", "split"])
    table = pd.crosstab([rows.source, rows.category], rows.split)[list(SPLITS)]
    table.loc[("total", ""), :] = table.sum()
    print(table.astype(int).to_string())
    counts = manifest["counts"]
    for note in (f"{counts['duplicates_dropped']} duplicate prompts were dropped", *counts["notes"]):
        print(f"- {note}")


# ---- The prompts of one source ----


def gather(source: Located, seed: int) -> Pool:
    """Read a source. Training prompts that no draw can reach are dropped on the way, so that memory stays bounded.

    Raises:
        ValueError: a file is damaged, a row of the user's own file is no conversation, or more than half of the rows of
            a public data set are none.
    """
    pool = Pool(source)
    groups: dict[tuple[str, str], list[Candidate]] = defaultdict(list)  # of each side and category
    train_counts = source.config.train

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
                limit = 2 * (train_counts[candidate.label] if isinstance(train_counts, dict) else train_counts) + 1000
                if side == "train" and len(group) > 2 * limit:
                    first = {candidate.prompt.id: candidate for candidate in reversed(group)}
                    group[:] = sorted(first.values(), key=order)[:limit]
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


def drop_duplicates(pools: Sequence[Pool], turn_by_turn: bool) -> int:
    """Keep one of prompts that differ in case and white space only; a held-out one before a training one.

    Of several sources the smallest that draws prompts keeps it: one that a larger source contains is not left empty, in
    whatever order they stand.

    With `turn_by_turn` a training chat is also prompted with its first question alone. Those of later turns have
    responses in them that do not exist yet.

    Returns:
        How many were dropped.
    """
    seen: set[bytes] = set()
    for side in ("heldout", "train"):
        held = set(seen)
        for pool in sorted(pools, key=lambda pool: (not pool.draws(side), len(getattr(pool, side)))):
            unique = []
            for candidate in getattr(pool, side):
                prompt, key = candidate.prompt, _normalised(candidate.prompt)
                alone = (
                    split_turns(prompt.messages, "first")[0][0] if turn_by_turn and prompt.messages else prompt.messages
                )
                if key not in seen and _normalised(replace(prompt, messages=alone)) not in held:
                    seen.add(key)
                    unique.append(candidate)
            pool.duplicates += len(getattr(pool, side)) - len(unique)
            setattr(pool, side, unique)
    return sum(pool.duplicates for pool in pools)


def _normalised(prompt: Prompt) -> bytes:
    """A key of 16 bytes that prompts share when they differ in case and white space only."""
    if prompt.prompt_ids is not None:
        return bytes.fromhex(prompt.id).ljust(16, b"\0")
    texts = [[m["role"], " ".join(m["content"].casefold().split()), m.get("tool_calls")] for m in prompt.messages]
    return bytes.fromhex(digest([texts, prompt.tools])[:32])


def _conversations(pool: Pool, path: Path) -> Iterator[Conversation]:
    for where, row in progress_bar(None, f"reading {path.name}", "row", read(path)):
        pool.rows += 1
        try:
            conversation = read_row(row, pool.source.config.name)
        except RowError as error:
            pool.refused[str(error)] += 1
            pool.examples.setdefault(str(error), where)
            continue
        for repair in dict.fromkeys(conversation.repairs):
            pool.repaired[repair] += 1
            pool.examples.setdefault(repair, where)
        yield conversation


def _candidates(source: Located, conversation: Conversation) -> Iterator[Candidate]:
    entry, name = source.entry, source.config.name
    label = conversation.category or entry.category
    if isinstance(source.config.train, dict) and label not in source.config.train:
        return
    # Categories of public sources carry the source's, since "math" in two of them is not one workload.
    category = f"{entry.category}/{label}" if conversation.category and entry is not LOCAL else label
    document = f"{name}:{conversation.document}" if conversation.document else ""
    ids, tools, rows_source = conversation.prompt_ids, conversation.tools, conversation.source or name
    for messages, response in split_turns(conversation.messages, source.config.turns) if ids is None else [((), None)]:
        key = prompt_id(messages, ids, tools)
        response_ids = conversation.response_ids
        prompt = Prompt(key, rows_source, category, messages, ids, tools, document, response, response_ids)
        yield Candidate(prompt, label, conversation.text)


def _check_rows(pool: Pool) -> None:
    withheld, entry = pool.refused[WITHHELD], pool.source.entry
    refused, rows = pool.refused.total() - withheld, pool.rows - withheld
    if refused > rows * (0 if entry is LOCAL else 0.5):
        reasons = [f"  {pool.examples[reason]}: {reason} ({n} rows)" for reason, n in pool.refused.most_common(10)]
        raise ValueError(
            f"prompts: {refused} of {rows} rows of {pool.source.config.name} are no prompts; correct or remove "
            "them, or give another file:\n" + "\n".join(reasons)
        )
