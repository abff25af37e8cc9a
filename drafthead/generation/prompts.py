"""From the recipe's sources to the three splits of the prompts artifact.

A recipe gives one file whose rows may declare their split (`prompts.path`), or a mix of data sets (`prompts.preset`,
`prompts.sources`; see generation/prompt_mix.py). Validation prompts are carved out of train. Draws are ordered by a
hash of seed and content, so adding lines to a source disturbs as little as possible.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drafthead.artifacts import MANIFEST, begin, finish, read_manifest
from drafthead.config import REPO_ROOT, PromptsConfig, PromptSource, Recipe
from drafthead.data.prompts import KIND, Prompt, write_prompts
from drafthead.files import sha256_file
from drafthead.generation.draw import draw_evenly
from drafthead.generation.prompt_mix import Mix, drop_duplicates, locate_sources, make_mix
from drafthead.generation.prompt_pool import gather
from drafthead.generation.source_files import Located
from drafthead.generation.sources import LOCAL


def make_prompts(recipe: Recipe) -> dict[str, Any]:
    """Write the prompts artifact of a recipe, or find it complete; returns its manifest.

    Raises:
        FileNotFoundError: a source is not on this machine; the message has the command that gets it.
        ValueError: a row is not a prompt, the declared splits overlap, or a split would be empty.
        ArtifactError: the directory holds prompts made from something else.
    """
    settings, directory = recipe.prompts, recipe.prompts_dir
    sources = [_own_file(settings.path)] if settings.path else locate_sources(settings)
    made_from = (
        sources[0].identity
        if settings.path
        else {"sources": [{**s.config.model_dump(exclude={"path"}), "made_from": s.identity} for s in sources]}
    )
    keeps_responses = not recipe.responses.regenerate
    identity = {
        **made_from,
        # What decides which prompts there are: neither the place of files nor the date given to templates.
        "settings": settings.model_dump(exclude={"path", "preset", "sources", "date"}),
        **({"answers": "kept"} if keeps_responses else {}),
    }
    if (directory / MANIFEST).exists() and begin(directory, KIND, identity):
        return read_manifest(directory)
    # Before the directory is claimed: a file with a bad line is corrected and read again.
    mix = _read_own_file(settings, sources[0]) if settings.path else make_mix(settings, sources)
    splits = split_prompts(settings, mix.train, mix.heldout)
    begin(directory, KIND, identity)
    for split, prompts in splits.items():
        stored = prompts if keeps_responses else [replace(prompt, response=None) for prompt in prompts]
        write_prompts(directory / f"{split}.parquet", stored)
    return finish(directory, {**{split: len(prompts) for split, prompts in splits.items()}, **mix.report})


def _own_file(name: str) -> Located:
    path = REPO_ROOT / name
    if not path.is_file():
        raise FileNotFoundError(
            f"prompts.path {name} does not exist (looked at {path}): give a JSONL file whose lines have "
            '"messages" and "split"'
        )
    identity = {"source": path.name, "source_sha256": sha256_file(path)}
    return Located(PromptSource(name="local", path=name), LOCAL, [path], [], identity)


def _read_own_file(settings: PromptsConfig, source: Located) -> Mix:
    """All prompts of a file. Overlaps between its declared splits are kept and reported, because its author decides."""
    pools = {"local": gather(source, settings.seed, limit=None, rows_name_source=True)}
    duplicates = drop_duplicates(pools)
    train, heldout = ([c.prompt for c in side] for side in (pools["local"].train, pools["local"].heldout))
    return Mix(train, heldout, {"duplicates_dropped": duplicates})


def own_prompts(settings: PromptsConfig) -> dict[str, list[Prompt]]:
    """What `make_prompts` draws from `prompts.path`, without writing it."""
    mix = _read_own_file(settings, _own_file(str(settings.path)))
    return split_prompts(settings, mix.train, mix.heldout)


def split_prompts(
    settings: PromptsConfig, train: Sequence[Prompt], heldout: Sequence[Prompt]
) -> dict[str, list[Prompt]]:
    """Train, validation and held-out prompts, each in an order fixed by seed and content.

    Validation is drawn first, so that another max_train keeps the prompts that checkpoints are compared on.

    Raises:
        ValueError: a split would be empty.
    """
    origin = settings.path or "the mix"
    for split, prompts in (("train", train), ("heldout", heldout)):
        if not prompts:
            raise ValueError(
                f'{origin} has no {split} prompt; declare "split": "{split}" on lines of a file of yours, or give a '
                f"source a `{split}` number"
            )
    validation = draw_evenly(train, settings.validation, settings.seed)
    taken = {prompt.document or prompt.id for prompt in validation}
    rest = [prompt for prompt in train if (prompt.document or prompt.id) not in taken]
    if settings.validation >= len(train) or not rest:
        raise ValueError(
            f"prompts.validation {settings.validation} leaves nothing to train on: {origin} has {len(train)} training "
            "prompts; lower prompts.validation or add prompts"
        )
    return {
        "train": draw_evenly(rest, settings.max_train, settings.seed),
        "validation": validation,
        "heldout": draw_evenly(heldout, settings.max_heldout, settings.seed),
    }
