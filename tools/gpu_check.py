"""Everything that only a GPU can show, in one command, with a table of what came out.

    python tools/gpu_check.py              # or: make gpu-check
    python tools/gpu_check.py --only kernels,step
    python tools/gpu_check.py --list       # what it would run; works anywhere
    python tools/gpu_check.py --without-vllm kernels    # then step, training: see tools/gpu_bare.py

Each check is a command of its own with a log in results/gpu-check. One that fails does not stop the others. Until
somebody has run a line, the documentation calls it untested.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console
from rich.table import Table

from drafthead.artifacts import made_by
from drafthead.config import REPO_ROOT
from drafthead.files import write_json

RESULTS = REPO_ROOT / "results" / "gpu-check"
PYTHON = sys.executable
_TINY = (
    "configs/tiny.yaml", f"output_dir={RESULTS}/tiny", "target.dtype=bfloat16", "prompts.max_train=320",
    "prompts.max_heldout=40",
)  # fmt: skip
_TRAINED = (*_TINY, "train.precision=bf16")
_BLOCKS = (*_TRAINED, "name=dspark", "data=tiny", "head.type=dspark", "head.mask_token_id=9")
_MXFP4 = f"{RESULTS}/mxfp4-target"
_LAUNCH = (PYTHON, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1")
_DATA = ("data_gen/prompts.py", "data_gen/regenerate.py", "data_gen/harvest.py")
_TRAIN = "train/eagle3.py"
_V1, _V2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
PARTS = ("kernels", "step", "training")  # of --without-vllm, at most ten minutes each


@dataclass(frozen=True)
class Check:
    """One thing that the documentation marks as not tried.

    Attributes:
        name: name for --only.
        expected: what holds when the check passes.
        commands: commands, run in order; the first that fails ends the check.
        environment: variables set for the commands.
        gpus: number of GPUs that the check takes.
    """

    name: str
    expected: str
    commands: tuple[tuple[str, ...], ...]
    environment: dict[str, str] = field(default_factory=dict)
    gpus: int = 1


def _stages(recipe: tuple[str, ...], *scripts: str) -> tuple[tuple[str, ...], ...]:
    return tuple((PYTHON, script, *recipe) for script in scripts)


def _bare(part: str) -> tuple[tuple[str, ...], ...]:
    return ((PYTHON, "tools/gpu_check.py", "--without-vllm", part),)


def _engine(runner: str, *options: str, recipe: tuple[str, ...] = _TRAINED, **extra: str) -> tuple[str, ...]:
    """A command that asks an engine with the recipe's head; `extra` goes into vLLM's speculative config."""
    keys = ", ".join(f"{key}: {value}" for key, value in extra.items())
    method = f"eval.methods=[{{name: head, method: head, extra: {{{keys}}}}}]"
    return (PYTHON, "tools/gpu_engine.py", "--runner", runner, *recipe, *options, method)


# Of a harvest that ends well, states lead to the target's own greedy text: it compares.
CHECKS = (
    Check("kernels", "Triton kernels and flash attention equal their references", _bare("kernels")),
    Check("step", "a step of gpt-oss-120b's shape: >= 50 % of the data sheet, memory as planned", _bare("step")),
    Check("training", "learns, resumes to the last bit, changes ranks; NCCL", _bare("training")),
    Check(
        "chain", "the embedded recipe from prompts to verdict: connector on GPU memory, CUDA graphs, bf16 training",
        (*_stages(_TINY, *_DATA), (*_LAUNCH, _TRAIN, *_TRAINED), *_stages(_TRAINED, "export/head.py", "eval/head.py")),
    ),
    Check(
        "runner-v1", "model runner V1 with CUDA graphs harvests, and serves the chain's head",
        (*_stages((*_TINY, "name=v1"), *_DATA), _engine("V1")), _V1,
    ),
    Check(
        "runner-v2", "model runner V2 with CUDA graphs harvests, and serves the chain's head",
        (*_stages((*_TINY, "name=v2"), *_DATA), _engine("V2")), _V2,
    ),
    Check(
        "harvest-rate", "time of a harvest over the same prefill alone; shown, not judged (CPU: 1.12; goal: 1.15)",
        ((PYTHON, "benchmarks/harvest.py", *_TINY, "--sequences", "300", "--blocks", "3"),),
    ),
    Check(
        "probabilistic", "sampled drafts are accepted at T = 0.7",
        (_engine("V2", "eval.temperatures=0.7", draft_sample_method="probabilistic"),),
    ),
    Check(
        "block", "block verification accepts drafts at T = 0.7",
        (_engine("V2", "eval.temperatures=0.7", draft_sample_method="probabilistic", rejection_sample_method="block"),),
    ),
    Check(
        "adaptive", "a DSpark head is served, with adaptive verification too",
        ((*_LAUNCH, _TRAIN, *_BLOCKS), *_stages(_BLOCKS, "export/head.py"), _engine("V2", recipe=_BLOCKS),
         _engine("V2", recipe=_BLOCKS, enable_adaptive_verification="true")),
    ),
    Check(
        "synthetic", "vLLM accepts at an assumed length, 2.5",
        (_engine("V2", "--length", "2.5", rejection_sample_method="synthetic", synthetic_acceptance_length="2.5"),),
    ),
    Check(
        "mxfp4", "a target in MXFP4, made small: the states lead to its own text",
        ((PYTHON, "-m", "tools.tiny.mxfp4", _MXFP4),
         *_stages((*_TINY, "name=mxfp4", f"target.path={_MXFP4}"), *_DATA)),
    ),
    Check(
        "tensor-parallel", "the chain's head and a harvest on two GPUs",
        (*_stages((*_TINY, "name=tp2", "engine.tensor_parallel_size=2"), *_DATA),
         _engine("V2", "engine.tensor_parallel_size=2")), gpus=2,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a check ended, after how many seconds, and the last line it printed."""

    name: str
    expected: str
    seen: str
    verdict: str
    seconds: float


def run_check(check: Check) -> Outcome:
    """Run a check; everything it prints goes to its log."""
    if torch.cuda.device_count() < check.gpus:
        return Outcome(check.name, check.expected, f"{torch.cuda.device_count()} GPU", "skipped", 0)
    log = RESULTS / f"{check.name}.log"
    start, verdict = time.perf_counter(), "passed"
    with log.open("w", encoding="utf-8") as out:
        for command in check.commands:
            environment = {**os.environ, **check.environment}
            code = subprocess.run(command, cwd=REPO_ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment)
            if code.returncode:
                verdict = "FAILED"
                break
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    seen = lines[-1] if lines else ""
    return Outcome(check.name, check.expected, seen, verdict, time.perf_counter() - start)


def chosen(only: str | None) -> list[Check]:
    """The checks to run, in order.

    Raises:
        SystemExit: a name is unknown.
    """
    names = only.split(",") if only else [check.name for check in CHECKS]
    if unknown := set(names) - {check.name for check in CHECKS}:
        raise SystemExit(f"no check {min(unknown)}; there are {', '.join(check.name for check in CHECKS)}")
    return [check for check in CHECKS if check.name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, with commas between them")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    parser.add_argument(
        "--without-vllm", metavar="PART", choices=PARTS, help=f"a machine without vLLM: {', '.join(PARTS)}"
    )
    parser.add_argument("--on-cpu", action="store_true", help="try --without-vllm where there is no GPU")
    options = parser.parse_args()
    checks, console = chosen(options.only), Console()
    if not (torch.cuda.is_available() or options.list or (options.on_cpu and options.without_vllm)):
        raise SystemExit("gpu-check needs a CUDA GPU and torch finds none; --list shows what it would run")
    if options.without_vllm:
        import gpu_bare  # beside this file

        gpu_bare.main(options.without_vllm, options.on_cpu, RESULTS)
    if options.list:
        for check in checks:
            console.print(f"[bold]{check.name}[/]  {check.expected}")
            for command in check.commands:
                print("   ", *(f"{k}={v}" for k, v in check.environment.items()), shlex.join(command))
        return
    if options.only is None:  # a stage that an earlier version finished would be passed without being run
        for folder in ("tiny", "mxfp4-target"):
            shutil.rmtree((RESULTS / folder).resolve(), ignore_errors=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for check in checks:
        console.print(f"{check.name}: {check.expected} ...")
        outcomes.append(run_check(check))
    report(outcomes, console)


def report(outcomes: list[Outcome], console: Console) -> None:
    """Print the table, write it beside the logs, and end with exit code 1 if a check failed."""
    table = Table("check", "expected", "seen", "verdict", "seconds", title=torch.cuda.get_device_name())
    for outcome in outcomes:
        table.add_row(outcome.name, outcome.expected, outcome.seen[:80], outcome.verdict, f"{outcome.seconds:.0f}")
    console.print(table)
    made = {"made_by": made_by(), "device": torch.cuda.get_device_name()}
    write_json(RESULTS / "outcome.json", made | {"checks": [asdict(outcome) for outcome in outcomes]})
    print(f"logs: {RESULTS}")
    sys.exit(0 if all(outcome.verdict != "FAILED" for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
