"""The training recipe with DeepSpeed's options as on CUDA: many buckets, sent while the backward goes on."""

from drafthead.cli import run_recipe
from drafthead.training import accelerator
from train.eagle3 import main

_on_cpu = accelerator.deepspeed_config


def _on_cuda(*args):
    options = _on_cpu(*args)
    options["zero_optimization"] |= {"overlap_comm": True, "reduce_bucket_size": 20_000}
    return options


if __name__ == "__main__":
    accelerator.deepspeed_config = _on_cuda
    run_recipe(main)
