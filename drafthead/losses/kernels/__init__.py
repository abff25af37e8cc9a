"""The passes over logits as Triton kernels for CUDA: the two functions of `drafthead.losses.rows`, one program a row.

Importing this package imports Triton; `drafthead.losses.fused` does so only for tensors on CUDA. Block size
and warps are tuned once per vocabulary size, objective and types, and the choice is kept on disk (Triton's
cache): another choice would sum in another order, and a resumed run would no longer repeat the interrupted
one bit for bit.
"""

from drafthead.losses.kernels.score import score_rows
from drafthead.losses.kernels.target import prepare_target

__all__ = ["prepare_target", "score_rows"]
