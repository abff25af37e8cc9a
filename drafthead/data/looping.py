"""Does a text go in circles? One rule for every stage.

A share of repeated 8-grams: cheap, and blind to what the text means. Honest tables and code can reach the limit too.
Answers that loop are counted when they are made, and left out of acceptance, predicted in training and measured in
evaluation alike: nearly every draft of a loop is accepted, by any head, and a checkpoint picked by loops would be
picked for what nobody wants served.
"""

import numpy as np
from numpy.typing import ArrayLike

NGRAM = 8  # a repeated run of eight tokens is rarely honest text
LIMIT = 0.1  # of the n-grams


def repeated_share(token_ids: ArrayLike) -> float:
    """Share of a text's n-grams that occurred before in it: 0 for fresh text, near 1 for a loop."""
    ids = np.asarray(token_ids)
    if len(ids) < NGRAM:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(ids, NGRAM)
    return 1.0 - len(np.unique(windows, axis=0)) / len(windows)


def loops(token_ids: ArrayLike) -> bool:
    """Whether more than `LIMIT` of the text repeats itself."""
    return repeated_share(token_ids) > LIMIT
