"""One optimiser step of a draft model, ours beside SpecForge's and speculators', on the same tensors.

    python benchmarks/train_step.py                            # CPU: everything from nothing, about 15 minutes
    python benchmarks/train_step.py --shape gpt-oss-120b       # GPU: ours at the true shape, share of the peak
    python benchmarks/train_step.py --shape tiny --contestants ours
    python benchmarks/train_step.py --drafter dflash           # or peagle, dspark: beside speculators'
    python benchmarks/train_step.py --shape smollm2-135m --contestants ours-trained    # train.precision bf16, fp32

A step is forward, unroll, loss, backward and AdamW. What is measured, and what is not: README.md beside this.
"""

import argparse
import json
import platform
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file
from stepbench import results
from stepbench.environments import CONTESTANTS, DEFAULT_ROOT, python_of
from stepbench.inputs import normed, write_inputs
from stepbench.peak import HeadProducts
from stepbench.referee import Entry, Player
from stepbench.shapes import SHAPES, Shape

from drafthead.artifacts import made_by
from drafthead.files import write_json

console = Console(stderr=True)
PEERS = "ours,specforge,speculators"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="cpu")
    parser.add_argument("--drafter", choices=("eagle3", "peagle", "dflash", "dspark"), default="eagle3")
    everybody = ",".join(CONTESTANTS)
    parser.add_argument("--contestants", help=f"comma-separated, of {everybody}; default on a CPU: {PEERS}")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each contestant, after one warm-up")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--envs", type=Path, default=DEFAULT_ROOT, help="where the peers' environments are kept")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table of README.md instead")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    shape = SHAPES[options.shape]
    if shape.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"--shape {shape.name} needs a CUDA GPU and torch finds none: run it on a machine "
            "with one, or use --shape cpu; --shape tiny runs the same code anywhere"
        )
    default = "ours" if shape.device == "cuda" or shape.name == "tiny" else PEERS
    names = (options.contestants or default).split(",")
    if unknown := set(names) - set(CONTESTANTS):
        raise SystemExit(f"no contestant {sorted(unknown)}; choose from {','.join(CONTESTANTS)}")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="drafthead-bench-") as directory:
        inputs = Path(directory)
        write_inputs(shape, inputs)
        entries, products = compete(shape, names, inputs, options)
        summary = results.summarise(shape, options.drafter, entries, products.best, target_entropy(shape, inputs))
    summary |= {"made_by": made_by(), "threads": options.threads, "processor": processor(shape.device)}
    summary["matmul_rates"] = products.rates
    report(summary, options)


def compete(
    shape: Shape, names: list[str], inputs: Path, options: argparse.Namespace
) -> tuple[list[Entry], HeadProducts]:
    """Warm everybody up, one after the other, then rounds of one step each."""
    players: list[Player] = []
    entries: list[Entry] = []
    for contestant in (CONTESTANTS[name] for name in names):
        ways = contestant.ways(options.drafter, shape.device)
        if not ways:
            console.print(f"{contestant.name} trains no {options.drafter}")
            continue
        try:
            python = python_of(contestant, options.envs)
        except RuntimeError as error:
            entries.append(Entry(contestant.name, error=str(error)))
            continue
        for variant in ways:
            console.print(f"first step of {contestant.name} {variant}")
            arguments = ["--shape", shape.name, "--inputs", str(inputs), "--device", shape.device]
            player = Player(contestant, variant, python, [*arguments, "--drafter", options.drafter], options.threads)
            player.prepare()
            if player.entry.error:
                console.print(f"[red]failed[/red] {player.entry.name}")
            players.append(player)
    products = HeadProducts(shape, shape.device)
    for number in range(options.rounds):
        console.print(f"round {number + 1} of {options.rounds}")
        products.play()
        for player in players:
            player.play()
    for player in players:
        player.close()
    return entries + [player.entry for player in players], products


def target_entropy(shape: Shape, inputs: Path) -> float:
    """Mean entropy of the target over the draft vocabulary at the rows that TTT step 0 is compared with."""
    tensors = load_file(inputs / "tensors.safetensors")
    rows = tensors["lm_head"][tensors["target_ids"]].float()
    states = normed(tensors["last_hidden"][:, 1:-1], shape.eps).flatten(0, 1).float()
    pieces = [(part @ rows.T).log_softmax(-1) for part in states.split(256)]
    return float(-sum((p.exp() * p).sum() for p in pieces) / len(states))


def processor(device: str) -> str:
    """What did the arithmetic."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":")[1].strip() if names else platform.processor()


def report(summary: dict, options: argparse.Namespace) -> None:
    """The table, the goals, what failed; and the file. Exit code 1 if anything failed."""
    if options.markdown and summary["contestants"]:
        print(results.markdown(summary))
    else:
        Console(width=130).print(results.rich_table(summary))
        peak = summary["matmul_peak_flops_per_second"]
        print(f"matmul peak {peak / 1e9:.1f} GFLOP/s; operations of a step, GFLOP:")
        print({row["name"]: round(row["flops"] / 1e9, 1) for row in summary["contestants"]})
        print(json.dumps(summary["goals"], indent=2))
    for error in summary["failed"].values():
        console.print(f"[red]failed[/red] {error}", markup=True, highlight=False)
    if options.json:
        write_json(options.json, summary)
    if summary["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
