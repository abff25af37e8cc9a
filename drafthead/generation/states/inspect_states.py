"""`harvest.py --verify`: walk the stores of a recipe and say what is whole and what is broken."""

from drafthead.config import Recipe
from drafthead.data.spool import KIND as SPOOL
from drafthead.data.store import verify_shard, verify_store
from drafthead.provenance import IDENTITY, read_json

SPLITS = ("train", "validation")


def print_verification(recipe: Recipe) -> bool:
    """Verify both splits and print a line per split and per problem.

    Returns:
        Whether both are whole. Of a spool, whose shards come and go without checksums, those that are there are read.
    """
    whole = True
    for split in SPLITS:
        directory = recipe.states_dir(split)
        identity_path = directory / IDENTITY
        shards = sorted(directory.glob("shard-*.safetensors"))
        identity = read_json(identity_path) if identity_path.exists() else {}
        if identity.get("kind") == SPOOL:
            problems, checked = [p for path in shards for p in verify_shard(path, identity)], "structure and values"
        else:
            problems, checked = verify_store(directory), "checksums, structure and values"
        print(
            f"{split:<10} {len(shards)} shards, {checked}: {'whole' if not problems else f'{len(problems)} problems'}"
        )
        for problem in problems:
            print(f"{'':<10} {problem}")
        whole = whole and not problems
    return whole
