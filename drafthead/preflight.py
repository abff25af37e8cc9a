"""What every stage needs of the target, the recipe and the launcher, asked by the first command: a later stage would
ask after hours.

Only config.json and the tokenizer's files are read, and neither torch, transformers nor vLLM is imported: a check costs
a few tenths of a second. What only weights or a running engine can tell is left to the stages.
"""

import os
from collections.abc import Mapping
from importlib.metadata import packages_distributions, version
from typing import Any

from drafthead.artifacts import MANIFEST
from drafthead.config import Recipe
from drafthead.config.recipe import on_disk
from drafthead.target.families import gives_hidden_states
from drafthead.target.spec import TargetSpec, recipe_spec, target_config
from drafthead.target.tokenizer import chat_template

# What a launcher of several processes sets for each of them, as torch.distributed reads it.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# How launchers that set none of these say how many processes there are: srun, Open MPI, MPICH, MVAPICH.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def preflight(recipe: Recipe, plan: bool = False) -> None:
    """Refuse a recipe that a later stage would refuse.

    Args:
        recipe: recipe whose sections are all checked.
        plan: whether nothing will be run; then config.json is enough of the target.

    Raises:
        FileNotFoundError: a file of the target, or of prompts, is missing.
        ValueError: the recipe and its target do not fit each other, or the installed vLLM; the message has the value
            and what to change.
    """
    spec = recipe_spec(recipe)
    config = target_config(recipe.target_path, recipe.target.revision)
    check_hidden_states(recipe, config)
    recipe.head.check_vocabulary(spec.vocab_size)
    check_parallel(recipe, config)
    check_lengths(recipe, spec)
    check_prompts(recipe)
    if not plan:
        chat_template(recipe)


def check_hidden_states(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Refuse a family of which the installed vLLM hands out no hidden states: nothing could be harvested or served.

    Raises:
        ValueError: naming the class, and vLLM's version.
    """
    architectures = [str(name) for name in config.get("architectures") or ()]
    if architectures and gives_hidden_states(architectures) is False:
        installed = version(packages_distributions()["vllm"][0])
        raise ValueError(
            f"vLLM {installed} does not hand out the hidden states of {architectures[0]} (its class lacks "
            f"SupportsEagle3): for target {recipe.target.path} no draft model can be harvested or served; install a "
            "vLLM whose class has it, or give another target.path"
        )


def check_parallel(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Refuse tensor parallelism that does not divide the target's attention heads, which vLLM asks for.

    Raises:
        ValueError: naming both numbers.
    """
    gpus, heads = recipe.engine.tensor_parallel_size, config.get("num_attention_heads")
    if isinstance(heads, int) and heads % gpus:
        raise ValueError(
            f"engine.tensor_parallel_size {gpus} does not divide the {heads} attention heads of target "
            f"{recipe.target.path}; set it to a divisor"
        )


def check_lengths(recipe: Recipe, spec: TargetSpec) -> None:
    """Refuse an engine.max_model_len beyond the target's positions, as vLLM does unless
    VLLM_ALLOW_LONG_MAX_MODEL_LEN says otherwise.

    Raises:
        ValueError: naming both numbers.
    """
    factor = spec.rope_parameters.get("factor")
    positions = spec.max_position_embeddings * max(1.0, factor if isinstance(factor, int | float) else 1.0)
    allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").lower() in ("1", "true")
    if recipe.engine.max_model_len > positions and not allowed:
        raise ValueError(
            f"engine.max_model_len {recipe.engine.max_model_len} exceeds the {positions:.0f} positions of target "
            f"{recipe.target.path}; set it lower"
        )


def check_prompts(recipe: Recipe) -> None:
    """Refuse files of prompts that are not here or empty, until prompts are drawn.

    Raises:
        FileNotFoundError: naming the key and the path.
        ValueError: likewise.
    """
    if (recipe.prompts_dir / MANIFEST).exists():
        return
    sources = {f"prompts.sources {source.name}": source.path for source in recipe.prompts.sources or ()}
    for key, path in {"prompts.path": recipe.prompts.path, **sources}.items():
        place = on_disk(path) if path else None
        if place is not None and not place.exists():
            raise FileNotFoundError(f"{key}: {path} does not exist (looked at {place}); give another path")
        if place is not None and place.is_file() and place.stat().st_size == 0:
            raise ValueError(f"{key}: {place} is empty; give another path")


def check_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a start of several processes that do not know of each other, whatever started them.

    Without LOCAL_RANK, say, accelerate takes each for a single process and fails in the first collective call; without
    any of the variables, every process would train the whole run.

    Raises:
        ValueError: naming what is set and what is missing.
    """
    stated = {name: environment[name] for name in _RANK_VARIABLES if name in environment}
    counts = {name: environment[name] for name in ("WORLD_SIZE", *_COUNTS) if name in environment}
    several = {name: count for name, count in counts.items() if count != "1"}
    if "RANK" not in stated and not several:
        return
    missing = [name for name in _RANK_VARIABLES if name not in stated]
    remedy = "start training with `accelerate launch` or `torchrun`, which set all of them for each process"
    if missing:
        shown = ", ".join(f"{name}={value}" for name, value in (several | stated).items())
        raise ValueError(
            f"the launcher set {shown} and not {', '.join(missing)}: {remedy}, or set them as torch.distributed reads "
            "them (LOCAL_RANK is the number of the process on its machine, 0 where it is alone there)"
        )
    try:
        rank, ranks, local = (int(stated[name]) for name in _RANK_VARIABLES[:3])
    except ValueError:
        rank, ranks, local = 0, 0, 0
    if not 0 <= rank < ranks or not 0 <= local < ranks:
        shown = ", ".join(f"{name}={stated[name]}" for name in _RANK_VARIABLES[:3])
        raise ValueError(f"the launcher set {shown}: RANK and LOCAL_RANK count from 0 to WORLD_SIZE - 1; {remedy}")
