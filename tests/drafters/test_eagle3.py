"""Which rows of a document carry loss, with the expected matrices written out, and what is named outside the folder."""

import re

import pytest
import torch

from drafthead.config import REPO_ROOT
from tests.drafters.small_draft import eagle3


@pytest.mark.parametrize(
    ("generated", "rows"),
    [
        # tokens  P  P  G  G  G  G
        ([0, 0, 1, 1, 1, 1], [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]]),
        ([0, 1, 1], [[1, 0, 0], [0, 0, 0], [0, 0, 0]]),
        # a user turn between two responses: x[4] was not generated
        ([0, 1, 1, 1, 0, 1, 1, 1], [[1, 1, 0, 1, 1, 1, 0, 0], [1, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0]]),
    ],
)
def test_a_row_counts_where_the_target_generated_what_it_predicts(generated, rows):
    assert eagle3(3).loss_rows(torch.tensor(generated)).long().tolist() == rows


# The script of the stage, a key of vLLM's own harvesting method and the interface of its classes that give out states
# have the name in them; methods that vLLM serves are a table of the evaluation section.
NOT_OURS = re.compile(r"train/eagle3\.py|eagle_aux_hidden_state_layer_ids|SupportsEagle3")
FOLDERS = ("eagle3", "peagle", "dflash", "dspark")
# Evaluation checks heads of others, of any kind, by the keys of their files.
OTHERS = (
    "drafters/registry.py", "config/__init__.py", "config/evaluation.py", "evaluation/measuring/presets.py",
    "evaluation/workload.py",
)  # fmt: skip
EXEMPT = (*(f"drafters/{name}/" for name in FOLDERS), *OTHERS)


def test_nothing_outside_their_folders_names_a_drafter():
    """Data, store, harvest, training and export know drafters only by the interface."""
    package = REPO_ROOT / "drafthead"
    names = re.compile(r"eagle|midlayer|\bttt|_ttt|dflash|dspark|markov", re.IGNORECASE)
    lines = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in sorted(package.rglob("*"))
        if path.suffix in (".py", ".jinja") and not str(path.relative_to(package)).startswith(EXEMPT)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if names.search(NOT_OURS.sub("", line))
    ]
    assert not lines, "\n".join(lines)
