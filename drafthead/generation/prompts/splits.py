"""From the recipe's sources to the three splits of the prompts artefact.

A recipe gives one JSONL that declares its own splits (`prompts.path`), or a mix of data sets (`prompts.preset`,
`prompts.sources`; drafthead/generation/prompts/mix.py). Validation prompts are carved out of train. Draws are ordered
by a hash of seed and content, so adding lines to a source disturbs as little as possible.
"""

from dataclasses import replace
from typing import Any

from drafthead.config import REPO_ROOT, Recipe
from drafthead.data.prompts import KIND, Prompt, write_prompts
from drafthead.files import sha256_file
from drafthead.generation.draw import draw_evenly
from drafthead.generation.prompts.file import Source, read_source
from drafthead.generation.prompts.mix import locate_sources, make_mix
from drafthead.provenance import MANIFEST, begin, finish, read_manifest


def make_prompts(recipe: Recipe) -> dict[str, Any]:
    """Write the prompts artefact of a recipe, or find it complete; returns its manifest.

    Raises:
        FileNotFoundError: a source is not on this machine; the message says how to get it.
        ValueError: a line is not a prompt, the splits overlap, or a split would be empty.
        ArtefactError: the directory holds prompts made from something else.
    """
    return _from_file(recipe) if recipe.prompts.path else _from_mix(recipe)


def _from_file(recipe: Recipe) -> dict[str, Any]:
    assert recipe.prompts.path is not None
    path = REPO_ROOT / recipe.prompts.path
    if not path.is_file():
        raise FileNotFoundError(
            f"prompts.path {recipe.prompts.path} does not exist (looked at {path}): give a JSONL file whose lines have "
            '"messages" and "split"'
        )
    identity = {
        "source": path.name,
        "source_sha256": sha256_file(path),
        "settings": _settings(recipe),
        **_answers(recipe),
    }
    if (recipe.prompts_dir / MANIFEST).exists() and begin(recipe.prompts_dir, KIND, identity):
        return read_manifest(recipe.prompts_dir)
    source = read_source(path)  # before the directory is claimed: a file with a bad line is corrected and read again
    splits = split_prompts(recipe, source)
    begin(recipe.prompts_dir, KIND, identity)
    return _write(recipe, splits, {"duplicates_dropped": source.duplicates})


def _from_mix(recipe: Recipe) -> dict[str, Any]:
    sources = locate_sources(recipe.prompts)
    identity = {
        "sources": [{**s.config.model_dump(exclude={"path"}), "made_from": s.identity} for s in sources],
        "settings": _settings(recipe),
        **_answers(recipe),
    }
    if (recipe.prompts_dir / MANIFEST).exists() and begin(recipe.prompts_dir, KIND, identity):
        return read_manifest(recipe.prompts_dir)
    mix = make_mix(recipe.prompts, sources)  # before the directory is claimed: a mix that fails is corrected and rerun
    for split, prompts in (("train", mix.train), ("heldout", mix.heldout)):
        if not prompts:
            raise ValueError(f"the mix has no {split} prompt; give at least one source a `{split}` number")
    begin(recipe.prompts_dir, KIND, identity)
    splits = split_prompts(recipe, Source({"train": mix.train, "heldout": mix.heldout}, mix.duplicates))
    return _write(recipe, splits, mix.report())


def _write(recipe: Recipe, splits: dict[str, list[Prompt]], report: dict[str, Any]) -> dict[str, Any]:
    for split, prompts in splits.items():
        if not _answers(recipe):
            prompts = [replace(prompt, answer=None) for prompt in prompts]
        write_prompts(recipe.prompts_dir / f"{split}.parquet", prompts)
    return finish(recipe.prompts_dir, {**{split: len(prompts) for split, prompts in splits.items()}, **report})


def _settings(recipe: Recipe) -> dict[str, Any]:
    """What decides which prompts there are: not where they lie, nor what a template is told when it renders them."""
    return recipe.prompts.model_dump(exclude={"path", "preset", "sources", "date"})


def _answers(recipe: Recipe) -> dict[str, str]:
    """What the prompts' identity says of the data's own answers: nothing, unless they are going to be trained on."""
    return {} if recipe.responses.regenerate else {"answers": "kept"}


def split_prompts(recipe: Recipe, source: Source) -> dict[str, list[Prompt]]:
    """Train, validation and held-out prompts, each in an order fixed by seed and content.

    Validation is drawn first, so that another max_train keeps the prompts that checkpoints are compared on.

    Raises:
        ValueError: no training prompt would be left.
    """
    settings = recipe.prompts
    pool = source.splits["train"]
    if settings.validation >= len(pool):
        raise ValueError(
            f"prompts.validation {settings.validation} leaves nothing to train on: {settings.path or 'the mix'} has "
            f"{len(pool)} training prompts; lower prompts.validation or add lines"
        )
    validation = draw_evenly(pool, settings.validation, settings.seed)
    taken = {prompt.document or prompt.id for prompt in validation}
    rest = [prompt for prompt in pool if (prompt.document or prompt.id) not in taken]
    return {
        "train": draw_evenly(rest, settings.max_train, settings.seed),
        "validation": validation,
        "heldout": draw_evenly(source.splits["heldout"], settings.max_heldout, settings.seed),
    }
