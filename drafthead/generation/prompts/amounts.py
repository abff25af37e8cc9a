"""How much of each source is drawn: counts or weights, per source and per category, and what a source cannot give."""

from collections import Counter
from collections.abc import Mapping, Sequence

from drafthead.config import PromptsConfig, PromptSource
from drafthead.data.prompts import Prompt
from drafthead.generation.sources.gather import Candidate, Pool
from drafthead.generation.sources.locate import Located

ALL = "*"


def limit(settings: PromptsConfig, config: PromptSource) -> int | None:
    """How many training candidates per category to keep in memory: twice what is asked, for those that are dropped."""
    if config.weight is not None:
        asked: float | None = settings.max_train and settings.max_train + settings.validation
    else:
        asked = config.train if config.train is not None else max((config.categories or {}).values(), default=0)
    return None if asked is None else 2 * int(asked) + 1000


def amounts(
    settings: PromptsConfig, sources: Sequence[Located], pools: dict[str, Pool], notes: list[str]
) -> dict[str, dict[str, int]]:
    """Source -> category -> how many to train on; ALL is every category, as they come."""
    totals = {s.config.name: s.config.train for s in sources if s.config.train is not None}
    weights = {s.config.name: s.config.weight for s in sources if s.config.weight is not None}
    if weights:
        wanted = settings.max_train and settings.max_train + settings.validation
        available = {name: len(pools[name].train) for name in weights}
        totals |= _share(wanted, weights, available, "the mix", notes)
    drawn: dict[str, dict[str, int]] = {}
    for source in sources:
        config, labels = source.config, Counter(c.label for c in pools[source.config.name].train)
        if config.categories is None:
            drawn[config.name] = {ALL: totals.get(config.name, 0)}
        elif config.name in totals:
            drawn[config.name] = _share(totals[config.name], config.categories, labels, config.name, notes)
        else:
            drawn[config.name] = {label: int(n) for label, n in config.categories.items()}
            for label, n in config.categories.items():
                if labels[label] < n:
                    notes.append(f"{config.name}: {labels[label]} training prompts of {label}, asked for {n:.0f}")
    return drawn


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


def first(candidates: Sequence[Candidate], label: str, count: int) -> list[Prompt]:
    """The first prompts of a category, or of ALL."""
    return [c.prompt for c in candidates if label in (ALL, c.label)][:count]


def check_trainable(source: Located) -> None:
    config = source.config
    trains = bool(config.train or config.weight or any((config.categories or {}).values()))
    if trains and source.entry.throughput_only:
        raise ValueError(
            f"prompts.sources: {config.name} is a trace of lengths without text; nothing can be learned from it, "
            "use it with heldout only"
        )
    if trains and source.heldout_share >= 1:
        raise ValueError(
            f"prompts.sources: every prompt of {config.name} is held out, because it is an evaluation set; "
            "remove its train, weight and categories, or set a heldout_share below 1"
        )


def check_amount(
    source: Located, pool: Pool, train: Sequence[Prompt], heldout: Sequence[Prompt], notes: list[str]
) -> None:
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
    if config.train and config.categories is None and len(train) < config.train:
        notes.append(f"{config.name}: {len(train)} training prompts, asked for {config.train}")
    if len(heldout) < config.heldout:
        notes.append(f"{config.name}: {len(heldout)} held-out prompts, asked for {config.heldout}")
