"""From sources to a training and a held-out pool: without duplicates, without overlaps, in the recipe's amounts.

Counts are met as far as a source goes. Weights hold: when one source has too little, all shrink.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafthead.config import PromptsConfig, PromptSource
from drafthead.data.contamination import Overlap, find_overlaps
from drafthead.data.prompts import Prompt
from drafthead.generation.draw import draw_evenly, normalised
from drafthead.generation.prompt_pool import Candidate, Pool, gather
from drafthead.generation.source_files import Located, locate

# The three workloads of public heads for gpt-oss, and enough held-out prompts of each for every load of a sweep.
PRESETS = {
    "standard": (
        PromptSource(name="sharegpt", train=60_000, heldout=800),
        PromptSource(name="mlperf-gpt-oss", train=4_500, heldout=800),
        PromptSource(name="swe-bench", train=18_000, heldout=800),
    )
}
_ALL = "*"  # every category of a source, as they come


@dataclass
class Mix:
    """Prompts of all sources, and what happened on the way.

    Attributes:
        train, heldout: as drawn.
        report: for the manifest: counts by source, duplicates and overlaps that were dropped, `template_runs` (word
            runs that were not compared because so many documents share them), and notes on amounts not met.
    """

    train: list[Prompt] = field(default_factory=list)
    heldout: list[Prompt] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


def sources_of(settings: PromptsConfig) -> tuple[PromptSource, ...]:
    """The sources of a preset or a mix; none for `prompts.path`."""
    return PRESETS[settings.preset] if settings.preset else settings.sources or ()


def planned_prompts(settings: PromptsConfig) -> dict[str, int] | None:
    """Split -> how many prompts a recipe draws at most, without reading a file.

    Returns:
        None when only the files can tell how many training prompts there are; without "heldout" when only they can
        tell that.
    """
    sources, train, heldout = sources_of(settings), settings.max_train, settings.max_heldout
    if sources:
        drawn = sum(source.heldout for source in sources)
        heldout = min(drawn, heldout or drawn)
    if sources and all(source.weight is None for source in sources):
        drawn = sum(int(s.train if s.train is not None else sum((s.categories or {}).values())) for s in sources)
        rest = max(drawn - settings.validation, 0)
        train = min(rest, train or rest)
    if train is None:
        return None
    known = {"train": train, "validation": settings.validation}
    return known if heldout is None else {**known, "heldout": heldout}


def locate_sources(settings: PromptsConfig) -> list[Located]:
    """The files of every source of the recipe, preset or mix.

    Raises:
        FileNotFoundError: a source is not on this machine; the message has the command for each.
        ValueError: a name is unknown, or a source cannot be trained on.
    """
    located, missing = [], []
    for config in sources_of(settings):
        try:
            located.append(locate(config))
        except FileNotFoundError as error:
            missing.append(str(error))
    if missing:
        raise FileNotFoundError("\n".join(missing))
    for source in located:
        _check_trainable(source)
    return located


def make_mix(settings: PromptsConfig, sources: Sequence[Located]) -> Mix:
    """Read, clean and draw.

    Raises:
        ValueError: a file is damaged or not what it should be, or a source has no prompt where some are wanted.
    """
    notes: list[str] = []
    pools = {s.config.name: gather(s, settings.seed, _limit(settings, s.config)) for s in sources}
    duplicates = drop_duplicates(pools)
    overlaps = find_overlaps(
        [c.text for pool in pools.values() for c in pool.train],
        [c.text for pool in pools.values() for c in pool.heldout],  # drawn or in reserve
    )
    overlapping = {overlap.train.id for overlap in overlaps.found}
    for pool in pools.values():
        pool.train = [c for c in pool.train if c.prompt.id not in overlapping]
    mix, counts = Mix(), {}
    amounts = _amounts(settings, sources, pools, notes)
    for source in sources:
        name, pool = source.config.name, pools[source.config.name]
        train = [
            prompt
            for label, count in amounts[name].items()
            for prompt in [c.prompt for c in pool.train if label in (_ALL, c.label)][:count]
        ]
        heldout = draw_evenly([c.prompt for c in pool.heldout], source.config.heldout, settings.seed)
        _check_amount(source, pool, len(train), len(heldout), notes)
        mix.train += train
        mix.heldout += heldout
        counts[name] = {**pool.counts(), "train": len(train), "heldout": len(heldout)}
    mix.report = {
        "duplicates_dropped": duplicates,
        "sources": counts,
        "overlaps": summarise(overlaps.found),
        "template_runs": overlaps.templates,
        "notes": notes,
    }
    return mix


def drop_duplicates(pools: Mapping[str, Pool]) -> int:
    """Keep the first of prompts that differ in case and white space only; a held-out one before a training one.

    Returns:
        How many were dropped, those of declared splits included.
    """
    seen: set[str] = set()
    dropped = 0
    for side in ("heldout", "train"):
        for pool in pools.values():
            first: dict[str, Candidate] = {}
            for candidate in getattr(pool, side):
                first.setdefault(normalised(candidate.prompt), candidate)
            kept = [candidate for key, candidate in first.items() if key not in seen]
            dropped += len(getattr(pool, side)) - len(kept)
            seen.update(first)
            setattr(pool, side, kept)
    return dropped + sum(pool.duplicates for pool in pools.values())


def summarise(found: Sequence[Overlap]) -> list[dict[str, Any]]:
    """One entry per pair of sources: how many training prompts overlap, and the example with the longest overlap."""
    pairs: dict[tuple[str, str], list[Overlap]] = {}
    for overlap in found:
        pairs.setdefault((overlap.train.source, overlap.heldout.source), []).append(overlap)
    summary = []
    for (train, heldout), overlaps in sorted(pairs.items()):
        worst = max(overlaps, key=lambda o: o.runs)
        example = {"train": worst.train.id, "heldout": worst.heldout.id, "words": worst.words}
        summary.append({"train": train, "heldout": heldout, "prompts": len(overlaps), "example": example})
    return summary


def _limit(settings: PromptsConfig, config: PromptSource) -> int | None:
    """Training candidates per category to keep in memory: twice what is wanted, for those that are dropped."""
    if config.weight is not None:
        wanted: float | None = settings.max_train and settings.max_train + settings.validation
    else:
        wanted = config.train if config.train is not None else max((config.categories or {}).values(), default=0)
    return None if wanted is None else 2 * int(wanted) + 1000


def _amounts(
    settings: PromptsConfig, sources: Sequence[Located], pools: Mapping[str, Pool], notes: list[str]
) -> dict[str, dict[str, int]]:
    """Source -> category, or _ALL -> how many prompts to train on; adds to the notes what falls short."""
    configs = [source.config for source in sources]
    totals = {c.name: c.train for c in configs if c.train is not None}
    weights = {c.name: c.weight for c in configs if c.weight is not None}
    if weights:
        wanted = settings.max_train and settings.max_train + settings.validation
        totals |= _share(wanted, weights, {name: len(pools[name].train) for name in weights}, "the mix", notes)
    amounts: dict[str, dict[str, int]] = {}
    for config in configs:
        available = Counter(c.label for c in pools[config.name].train)
        if config.categories is None:
            amounts[config.name] = {_ALL: totals.get(config.name, 0)}
        elif config.name in totals:
            amounts[config.name] = _share(totals[config.name], config.categories, available, config.name, notes)
        else:
            amounts[config.name] = {label: int(n) for label, n in config.categories.items()}
            for label, n in config.categories.items():
                if available[label] < n:
                    notes.append(f"{config.name}: {available[label]} training prompts of {label} instead of {n:.0f}")
    return amounts


def _share(
    total: int | None, weights: Mapping[str, float], available: Mapping[str, int], name: str, notes: list[str]
) -> dict[str, int]:
    """Split a total by weights; when one part has too little, all shrink, so that the weights hold."""
    weights = {key: weight for key, weight in weights.items() if weight > 0}
    if not weights:
        return {}
    whole = sum(weights.values())
    reach = {key: available.get(key, 0) * whole / weight for key, weight in weights.items()}
    scarce = min(reach, key=lambda key: reach[key])
    if total is None or reach[scarce] < total:
        if total is not None:
            notes.append(
                f"{name}: {int(reach[scarce])} training prompts instead of {total}, because {scarce} has only "
                f"{available.get(scarce, 0)} and the weights hold"
            )
        total = int(reach[scarce])
    return {key: int(total * weight / whole) for key, weight in weights.items()}


def _check_trainable(source: Located) -> None:
    config = source.config
    if not (config.train or config.weight or any((config.categories or {}).values())):
        return
    if source.entry.throughput_only:
        raise ValueError(
            f"prompts.sources: {config.name} is a trace of lengths without text; nothing can be learned from it, "
            "use it with heldout only"
        )
    if source.heldout_share >= 1:
        raise ValueError(
            f"prompts.sources: every prompt of {config.name} is held out, because it is an evaluation set; "
            "remove its train, weight and categories, or set a heldout_share below 1"
        )


def _check_amount(source: Located, pool: Pool, train: int, heldout: int, notes: list[str]) -> None:
    config = source.config
    if (config.train or config.weight) and not train:
        raise ValueError(
            f"prompts.sources: {config.name} has no training prompt left of {pool.rows} rows ({len(pool.heldout)} are "
            "held out); see heldout_share and categories"
        )
    if config.heldout and not heldout:
        raise ValueError(
            f"prompts.sources: no document of {config.name} is held out at heldout_share {source.heldout_share}; "
            "raise it"
        )
    if config.train and config.categories is None and train < config.train:
        notes.append(f"{config.name}: {train} training prompts instead of {config.train}")
    if heldout < config.heldout:
        notes.append(f"{config.name}: {heldout} held-out prompts instead of {config.heldout}")
