"""accelerate with DeepSpeed, set up from the recipe alone, and a check for every way it is bypassed without an error.

No `accelerate config` file and no DeepSpeed JSON is needed: `accelerate launch` starts
the processes, and everything else is decided here.
"""

import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from drafthead.artifacts import ArtifactError, describe_difference
from drafthead.config.train import TrainConfig
from drafthead.training.optimizer import MAX_GRAD_NORM


def build_accelerator(config: TrainConfig, model: nn.Module, log_dir: str) -> Any:
    """An Accelerator whose engine is DeepSpeed.

    Args:
        config: train section of the recipe.
        model: head to train; only its size is read, for DeepSpeed's buckets.
        log_dir: directory that a tracker may write to.

    Raises:
        ValueError: the environment would bypass DeepSpeed or train every rank on the same data.
    """
    _single_process_defaults()
    _skip_runtime_compilation()
    if config.deterministic:
        _repeat_to_the_last_bit()
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from accelerate.utils import DistributedType

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    accelerator = Accelerator(
        mixed_precision="no",  # not what `accelerate config` once said: the precision stands in DeepSpeed's settings
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepspeed_config(config, model)),
        # Without a named backend, ranks on CPU each believe they are alone.
        kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=timedelta(minutes=30))],
        gradient_accumulation_steps=accumulation_steps(config),
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=log_dir,
    )
    if not torch.cuda.is_available():
        # accelerate gives every process one thread unless told otherwise.
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError(
            f"accelerate came up as {accelerator.distributed_type} and would bypass DeepSpeed: launch without --cpu "
            "(the CPU is used when there is no GPU), unset ACCELERATE_* variables and look at `accelerate env`"
        )
    return accelerator


def deepspeed_config(config: TrainConfig, model: nn.Module) -> dict:
    """The DeepSpeed configuration for a recipe."""
    bucket = bucket_elements(sum(p.numel() for p in model.parameters()))
    return {
        "train_micro_batch_size_per_gpu": 1,  # a packed batch is one row
        "gradient_accumulation_steps": accumulation_steps(config),
        # Of Muon, DeepSpeed would clip the orthogonalised update, whose norm says nothing of the gradient; at
        # ZeRO 0 it clips without telling the norm, so training.optimizer does it.
        "gradient_clipping": MAX_GRAD_NORM if config.optimizer == "adamw" and config.zero_stage else 0.0,
        "zero_optimization": {
            "stage": config.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": 10_000,
            "overlap_comm": torch.cuda.is_available(),
            "reduce_scatter": config.optimizer == "adamw",  # Muon needs whole gradients
        },
        "bf16": {"enabled": config.precision == "bf16"},
        # A torch optimiser is given, so DeepSpeed has no fused one to compile.
        "zero_allow_untested_optimizer": True,
    }


def bucket_elements(num_parameters: int) -> int:
    """Elements that are reduced at a time.

    DeepSpeed's 5e8 make small models an order of magnitude slower, and hold every gradient twice on a GPU, where one
    bucket fills while another is sent: with all parameters in one, nothing overlaps. It refuses odd numbers.
    """
    return max(1_000_000, min(50_000_000, num_parameters)) // 2 * 2


def accumulation_steps(config: TrainConfig, ranks: int = 0) -> int:
    """Micro batches that one rank accumulates in an optimiser step; `ranks` 0: those of this launch.

    Raises:
        ValueError: the ranks do not share the step evenly.
    """
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    if config.batches_per_step % ranks:
        above = -(-config.batches_per_step // ranks) * ranks
        raise ValueError(
            f"train.batches_per_step {config.batches_per_step} is not divisible by {ranks} ranks; "
            f"set it to {above}, or launch a number of processes that divides it"
        )
    return config.batches_per_step // ranks


def _repeat_to_the_last_bit() -> None:
    """On CUDA, flash attention's backward adds in whatever order its blocks end, and cuBLAS may split a product.

    PyTorch raises an error for an operation that has no deterministic form.
    """
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
        torch.use_deterministic_algorithms(True)


def _single_process_defaults() -> None:
    """`accelerate launch` with one process, and plain `python`, set no rendezvous variables.

    Asked for several without a GPU, it starts one all the same; the address it leaves behind tells.
    """
    if "RANK" in os.environ:
        return
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ:
        raise ValueError(
            "accelerate was asked for several processes and started one: add --multi_gpu to `accelerate launch` "
            "(on CPU too, where it only means several processes). If one was meant, unset MASTER_ADDR"
        )
    # Port 0: any that is free.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def _skip_runtime_compilation() -> None:
    """On CPU DeepSpeed would compile for minutes: an extension for shared memory, and Muon's iteration.

    gloo and eager execution give the same losses.
    """
    if not torch.cuda.is_available():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # known, so DeepSpeed need not warn that it found no other
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def check_ranks(made_from: dict[str, Any]) -> None:
    """Compare what this rank would train with what the others would; every rank calls this.

    Raises:
        ArtifactError: ranks were started with other settings, or read other files.
    """
    from accelerate.utils import gather_object

    (first_host, expected), *other_ranks = gather_object([(socket.gethostname(), made_from)])
    for rank, (host, identity) in enumerate(other_ranks, start=1):
        if identity != expected:
            raise ArtifactError(
                f"rank {rank} on {host} would train another run than rank 0 on {first_host}:\n"
                f"{describe_difference(identity, expected)}\n"
                "start all nodes with the same command, and let them see the same files (output_dir, target.path)"
            )
