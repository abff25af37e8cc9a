"""From sources to a training and a held-out pool: without duplicates, without overlaps, in the recipe's amounts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from drafthead.config import PromptsConfig, PromptSource
from drafthead.data.contamination import Overlap, find_overlaps
from drafthead.data.prompts import Prompt
from drafthead.generation.draw import draw_evenly, normalised
from drafthead.generation.prompts.amounts import amounts, check_amount, check_trainable, first, limit
from drafthead.generation.sources.gather import Pool, gather
from drafthead.generation.sources.locate import Located, locate

# The three workloads of public heads for gpt-oss, and enough held-out prompts of each for every load of a sweep.
PRESETS = {
    "standard": (
        PromptSource(name="sharegpt", train=60_000, heldout=800),
        PromptSource(name="mlperf-gpt-oss", train=4_500, heldout=800),
        PromptSource(name="swe-bench", train=18_000, heldout=800),
    )
}


@dataclass
class Mix:
    """Prompts of all sources, and what happened on the way.

    Attributes:
        train, heldout: as drawn.
        sources: name -> counts of rows, refused rows, candidates and drawn prompts.
        duplicates: how many candidates repeated another one.
        overlaps: training source and held-out source -> count and an example.
        templates: word runs that were not compared because so many documents share them.
        notes: amounts that a source could not give.
    """

    train: list[Prompt] = field(default_factory=list)
    heldout: list[Prompt] = field(default_factory=list)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    duplicates: int = 0
    overlaps: list[dict[str, Any]] = field(default_factory=list)
    templates: int = 0
    notes: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """Everything but the prompts, for the manifest."""
        return {
            "duplicates_dropped": self.duplicates,
            "sources": self.sources,
            "overlaps": self.overlaps,
            "template_runs": self.templates,
            "notes": self.notes,
        }


def locate_sources(settings: PromptsConfig) -> list[Located]:
    """The files of every source of the recipe, preset or mix.

    Raises:
        FileNotFoundError: a source is not on this machine; the message has the command for each.
        ValueError: a name is unknown, or a source cannot be trained on.
    """
    configs = PRESETS[settings.preset] if settings.preset else settings.sources or ()
    located, missing = [], []
    for config in configs:
        try:
            located.append(locate(config))
        except FileNotFoundError as error:
            missing.append(str(error))
    if missing:
        raise FileNotFoundError("\n".join(missing))
    for source in located:
        check_trainable(source)
    return located


def make_mix(settings: PromptsConfig, sources: Sequence[Located]) -> Mix:
    """Read, clean and draw.

    Raises:
        ValueError: a file is damaged or not what it should be, or a source has nothing for what is asked of it.
    """
    mix = Mix()
    pools = {s.config.name: gather(s, settings.seed, limit(settings, s.config)) for s in sources}
    _drop_duplicates(pools, mix)
    _drop_overlaps(pools, mix)
    drawn = amounts(settings, sources, pools, mix.notes)
    for source in sources:
        name, pool = source.config.name, pools[source.config.name]
        train = list(chain.from_iterable(first(pool.train, label, n) for label, n in drawn[name].items()))
        heldout = draw_evenly([c.prompt for c in pool.heldout], source.config.heldout, settings.seed)
        check_amount(source, pool, train, heldout, mix.notes)
        mix.train += train
        mix.heldout += heldout
        mix.sources[name] = {
            "rows": pool.rows,
            "refused": dict(pool.refused),
            "refused_examples": pool.examples,
            "could_train": len(pool.train),
            "could_hold_out": len(pool.heldout),
            "train": len(train),
            "heldout": len(heldout),
        }
    return mix


def _drop_duplicates(pools: dict[str, Pool], mix: Mix) -> None:
    """Keep the first of prompts that differ in case and white space only; a held-out one before a training one."""
    seen: set[str] = set()
    for side in ("heldout", "train"):
        for pool in pools.values():
            kept = []
            for candidate in getattr(pool, side):
                key = normalised(candidate.prompt)
                if key not in seen:
                    seen.add(key)
                    kept.append(candidate)
                else:
                    mix.duplicates += 1
            setattr(pool, side, kept)


def _drop_overlaps(pools: dict[str, Pool], mix: Mix) -> None:
    """Drop training candidates that share a run of words with any held-out candidate, drawn or in reserve."""
    train = [c.text for pool in pools.values() for c in pool.train]
    heldout = [c.text for pool in pools.values() for c in pool.heldout]
    overlaps = find_overlaps(train, heldout)
    dropped = {overlap.train.id for overlap in overlaps.found}
    for pool in pools.values():
        pool.train = [c for c in pool.train if c.prompt.id not in dropped]
    mix.templates = overlaps.templates
    mix.overlaps = summarise(overlaps.found)


def summarise(found: Sequence[Overlap]) -> list[dict[str, Any]]:
    """One entry per pair of sources: how many training prompts overlap, and the example with the longest overlap."""
    counts = Counter((o.train.source, o.heldout.source) for o in found)
    summary = []
    for (train, heldout), count in sorted(counts.items()):
        worst = max((o for o in found if (o.train.source, o.heldout.source) == (train, heldout)), key=lambda o: o.runs)
        summary.append(
            {
                "train": train,
                "heldout": heldout,
                "prompts": count,
                "example": {"train": worst.train.id, "heldout": worst.heldout.id, "words": worst.words},
            }
        )
    return summary
