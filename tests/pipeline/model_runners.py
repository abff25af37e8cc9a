"""A head served under vLLM's model runner V1, or V2 with its Triton kernels interpreted, on a CPU."""

from pathlib import Path

from drafthead.generation.prompts import make_prompts
from tests.recipes import tiny_recipe
from tests.scripts import run_ok
from tests.warm import run_warm

_FEW = (
    "prompts.max_train=8", "prompts.validation=2", "prompts.max_heldout=4",
    "engine.max_model_len=512", "engine.max_num_seqs=4", "eval.max_tokens=24", "eval.methods=[head]",
)  # fmt: skip


def accepted(runner: str, head: Path, root: Path, *settings: str) -> str:
    """What tools/gpu_engine.py says of four held-out prompts, after the runner's name."""
    (root / "heads").mkdir(exist_ok=True)
    if not (root / "heads" / "tiny").exists():
        (root / "heads" / "tiny").symlink_to(head)
    make_prompts(tiny_recipe(root, *_FEW, *settings))
    options = ("--runner", runner, f"output_dir={root}", *_FEW, *settings)
    if runner == "V1":
        printed = run_warm("tools/gpu_engine.py", *options)
    else:
        ask = "import tests.gpu.interpreted_triton, runpy; runpy.run_path('tools/gpu_engine.py', run_name='__main__')"
        printed = run_ok("-c", ask, *options)
    return printed.splitlines()[-1].partition(f"model runner {runner}, ")[2]
