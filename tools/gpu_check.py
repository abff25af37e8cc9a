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
_TINY = ("configs/tiny.yaml", f"output_dir={RESULTS}/tiny", "prompts.max_train=320", "prompts.max_heldout=40")
_MXFP4 = (
    "configs/gpt-oss-20b.yaml", f"output_dir={RESULTS}/mxfp4", "prompts.preset=null",
    "prompts.path=data_gen/tiny/prompts.jsonl", "prompts.max_train=32", "prompts.max_heldout=8", "prompts.validation=8",
    "responses.max_tokens=256",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One thing that the documentation marks as not tried.

    Attributes:
        name: for --only.
        shows: what passes when it passes.
        commands: run in order; the first that fails ends the check.
        environment: variables set for them.
    """

    name: str
    shows: str
    commands: tuple[tuple[str, ...], ...]
    environment: dict[str, str] = field(default_factory=dict)


def _stages(recipe: tuple[str, ...], *scripts: str) -> tuple[tuple[str, ...], ...]:
    return tuple((PYTHON, script, *recipe) for script in scripts)


PARTS = ("kernels", "step", "training")  # of --without-vllm, at most ten minutes each
_LAUNCH = (PYTHON, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1")
_DATA = ("data_gen/prompts.py", "data_gen/regenerate.py", "data_gen/harvest.py")

CHECKS = (
    Check(
        "kernels", "Triton kernels and flash attention equal their references",
        ((PYTHON, "-m", "pytest", "-q", "-m", "requires_gpu", "tests"),
         (PYTHON, "-m", "pytest", "-q", "tests/losses/kernel_cases.py", "tests/drafters/kernel_cases.py")),
    ),
    Check(
        "step", "one training step at gpt-oss-120b's shape: tokens/s, memory, share of the matmul peak",
        ((PYTHON, "benchmarks/train_step.py", "--shape", "gpt-oss-120b", "--json", f"{RESULTS}/step.json"),),
    ),
    Check(
        "chain", "the embedded recipe from prompts to verdict: connector on GPU memory, CUDA graphs, bf16 training",
        (*_stages(_TINY, *_DATA), (*_LAUNCH, "train/eagle3.py", *_TINY, "train.precision=bf16"),
         *_stages((*_TINY, "train.precision=bf16"), "export/head.py", "eval/head.py")),
    ),
    Check(
        # V2 is what the chain runs: vLLM's default wherever Triton works.
        "runner-v1", "acceptance under vLLM's model runner V1, to compare with the chain's (after chain)",
        (
            ("rm", "-rf", f"{RESULTS}/tiny/results/tiny/acceptance"),
            (PYTHON, "eval/acceptance.py", *_TINY, "train.precision=bf16", "eval.methods=[eagle3]"),
        ),
        {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    Check(
        "synthetic", "a plan from an untrained head whose drafts vLLM accepts at an assumed length",
        ((PYTHON, "eval/plan.py", *_TINY, "name=plan", "--measure", "--acceptance-length", "2.5"),),
    ),
    Check(
        "mxfp4", "answers and hidden states of gpt-oss-20b in MXFP4 (its weights must be cached)",
        _stages(_MXFP4, *_DATA),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a check ended, after how many seconds, and the last line it printed."""

    name: str
    passed: bool
    seconds: float
    last_line: str


def run_check(check: Check) -> Outcome:
    """Run a check; everything it prints goes to its log."""
    log = RESULTS / f"{check.name}.log"
    start, passed = time.perf_counter(), True
    with log.open("w", encoding="utf-8") as out:
        for command in check.commands:
            environment = {**os.environ, **check.environment}
            code = subprocess.run(command, cwd=REPO_ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment)
            if code.returncode:
                passed = False
                break
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return Outcome(check.name, passed, time.perf_counter() - start, lines[-1] if lines else "")


def chosen(only: str | None) -> list[Check]:
    """The checks to run, in order.

    Raises:
        SystemExit: a name is unknown.
    """
    wanted = only.split(",") if only else [check.name for check in CHECKS]
    if unknown := set(wanted) - {check.name for check in CHECKS}:
        raise SystemExit(f"no check {min(unknown)}; there are {', '.join(check.name for check in CHECKS)}")
    return [check for check in CHECKS if check.name in wanted]


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
    if not (torch.cuda.is_available() or options.list or options.on_cpu):
        raise SystemExit("gpu-check needs a CUDA GPU and torch finds none; --list shows what it would run")
    if options.without_vllm:
        import gpu_bare  # beside this file

        gpu_bare.main(options.without_vllm, options.on_cpu, RESULTS)
    if options.list:
        for check in checks:
            console.print(f"[bold]{check.name}[/]  {check.shows}")
            for command in check.commands:
                print("   ", " ".join((*(f"{k}={v}" for k, v in check.environment.items()), *command)))
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for check in checks:
        console.print(f"{check.name}: {check.shows} ...")
        outcomes.append(run_check(check))
    report(outcomes, console)


def report(outcomes: list[Outcome], console: Console) -> None:
    """Print the table, write it beside the logs, and end with exit code 1 if a check failed."""
    table = Table("check", "result", "seconds", "last line", title=f"{torch.cuda.get_device_name()}")
    for outcome in outcomes:
        result = "[green]passed[/]" if outcome.passed else "[red]failed[/]"
        table.add_row(outcome.name, result, f"{outcome.seconds:.0f}", outcome.last_line[:80])
    console.print(table)
    made = {"made_by": made_by(), "device": torch.cuda.get_device_name()}
    write_json(RESULTS / "outcome.json", made | {"checks": [asdict(outcome) for outcome in outcomes]})
    print(f"logs: {RESULTS}")
    sys.exit(0 if all(outcome.passed for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
