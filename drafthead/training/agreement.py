"""What all ranks of a run, and all its starts, must agree on: else one trains something else in silence.

Every rank reads recipe, target and texts by itself, and counts the draft vocabulary from them. On several nodes those
may be other files; between two starts of a run the target's tokenizer may have changed, which no store records.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from drafthead.drafters.vocabulary import DraftVocabulary
from drafthead.provenance import ArtefactError, describe_difference
from drafthead.training.checkpoint import MODEL_FILE


def check_ranks(made_from: dict[str, Any]) -> None:
    """Compare what this rank would train with what the others would; every rank calls this.

    Raises:
        ArtefactError: as `check_alike`.
    """
    from accelerate.utils import gather_object

    check_alike(gather_object([(socket.gethostname(), made_from)]))


def check_alike(ranks: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Refuse ranks that would train different runs: started with other settings, or reading other files.

    Args:
        ranks: host of each rank, and what its run is made from.

    Raises:
        ArtefactError: naming the first rank that differs, its host, and both values.
    """
    first_host, wanted = ranks[0]
    for rank, (host, found) in enumerate(ranks):
        if found != wanted:
            raise ArtefactError(
                f"rank {rank} on {host} would train another run than rank 0 on {first_host}:\n"
                f"{describe_difference(found, wanted)}\n"
                "start all nodes with the same command, and let them see the same files (output_dir, target.path)"
            )


def check_vocabulary(path: Path, vocabulary: DraftVocabulary) -> None:
    """Refuse to go on with rows of lm_head that stand for other tokens.

    Raises:
        ArtefactError: the checkpoint's d2t is not the one that target and texts give today.
    """
    with safe_open(path / MODEL_FILE, framework="pt") as file:
        d2t = file.get_tensor("d2t")
    if not torch.equal(d2t, vocabulary.d2t):
        raise ArtefactError(
            f"{path} has a draft vocabulary of {len(d2t)} tokens, and target and texts now give another one of "
            f"{len(vocabulary.d2t)}: the target's tokenizer or generation_config.json, or transformers, has changed "
            "since the run began. Restore it, or give the recipe another name (name=...)"
        )
