"""Ranks and starts of a run that would train something else are told so."""

import pytest
import torch
from safetensors.torch import save_file

from drafthead.drafters.vocabulary import DraftVocabulary
from drafthead.provenance import ArtefactError
from drafthead.training.agreement import check_alike, check_vocabulary
from drafthead.training.checkpoint import MODEL_FILE


def test_a_rank_of_another_recipe_is_named_with_its_host():
    ranks = [("a", {"train": {"seed": 0}}), ("a", {"train": {"seed": 0}}), ("b", {"train": {"seed": 1}})]
    check_alike(ranks[:2])
    with pytest.raises(ArtefactError, match=r"rank 2 on b .* rank 0 on a:\n  train\.seed: found 1, wanted 0\n"):
        check_alike(ranks)


def test_a_run_does_not_go_on_with_rows_for_other_tokens(tmp_path):
    vocabulary = DraftVocabulary(torch.tensor([0, 0, 1]), torch.tensor([True, True, False, True]))
    save_file({"d2t": vocabulary.d2t}, tmp_path / MODEL_FILE)
    check_vocabulary(tmp_path, vocabulary)
    other = DraftVocabulary(torch.tensor([0, 1, 1]), torch.tensor([True, False, True, True]))
    with pytest.raises(ArtefactError, match=r"vocabulary of 3 tokens, .* generation_config\.json.* has changed"):
        check_vocabulary(tmp_path, other)
