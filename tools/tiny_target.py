"""Recipe: build the embedded default target and its prompts from the standard library's source.

    python -m tools.tiny_target                  # everything: about half an hour on two CPU cores
    python -m tools.tiny_target --prompts-only   # only data_gen/tiny/prompts.jsonl, ten seconds
    python -m tools.tiny_target --measure-only   # only serve the target and count good answers
    python -m tools.tiny_target --architecture qwen3 --output DIR    # a dense sibling, not shipped

The result depends on the Python version (its library is the corpus) and on the seed. The weights are equal
up to floating-point order. Held-out prompts come from `HELDOUT_MODULES` in tools/tiny/corpus.py.
"""

import argparse
import platform
import random
import shlex
import sys
import time
from pathlib import Path

from drafthead.files import write_json
from tools.tiny.architecture import ARCHITECTURES, target_config
from tools.tiny.batches import encode_samples, group
from tools.tiny.corpus import HELDOUT_MODULES, read_library
from tools.tiny.files import RECORD, read_prompts, read_record, save_target, write_prompts
from tools.tiny.measure import check, generate, report
from tools.tiny.samples import Sample, build_samples, prompt_rows
from tools.tiny.tokenizer import train_tokenizer
from tools.tiny.trainer import answer_loss, new_model, train

PROMPTS_PER_CATEGORY = {"train": 600, "heldout": 50}
ROUNDS = 2
MAX_LENGTH = 768
TOKENS_PER_BATCH = 2048
HELDOUT_SAMPLES = 160
DEFAULT_STEPS = 2200


def main() -> None:
    """Build the corpus, train tokenizer and model, save both, and measure the answers."""
    options = parse_arguments()
    directory = options.output / "target"
    if options.measure_only:
        record_measurement(options.output, directory)
        return

    print("reading the standard library ...", flush=True)
    functions, classes = read_library()
    samples = build_samples(functions, classes, ROUNDS, options.seed)
    rows = prompt_rows(samples, PROMPTS_PER_CATEGORY, options.seed)
    write_prompts(rows, options.output / "prompts.jsonl")
    print(f"{len(rows)} prompts written from {len(samples)} samples", flush=True)
    if options.prompts_only:
        return

    train_target(samples, directory, options.architecture, options.steps, options.seed)
    if not options.skip_measure:
        record_measurement(options.output, directory)


def train_target(samples: list[Sample], directory: Path, architecture: str, steps: int, seed: int) -> None:
    """Train tokenizer and model on the train split, save them, and record the losses."""
    started = time.monotonic()
    training = [sample for sample in samples if sample.split == "train"]
    heldout = random.Random(seed).sample([s for s in samples if s.split == "heldout"], HELDOUT_SAMPLES)
    tokenizer = train_tokenizer(f"{s.prompt}\n{s.plan} {s.detail}\n{s.answer}" for s in training)
    model = new_model(target_config(tokenizer, architecture), seed)
    pad = tokenizer.pad_token_id
    batches = group(encode_samples(training, tokenizer, MAX_LENGTH, seed), TOKENS_PER_BATCH, pad, seed)
    heldout_batches = group(encode_samples(heldout, tokenizer, MAX_LENGTH, seed), TOKENS_PER_BATCH, pad, seed)

    print(f"{model.num_parameters():,} parameters, {steps} of {len(batches)} batches", flush=True)
    measured = train(model, batches, steps)
    record: dict[str, object] = {
        "command": shlex.join(["python", "-m", "tools.tiny_target", *sys.argv[1:]]),
        "python": platform.python_version(),
        "seed": seed,
        "steps": steps,
        "parameters": model.num_parameters(),
        "heldout_modules": list(HELDOUT_MODULES),
        **{name: round(value, 4) for name, value in measured.items()},
        "heldout_answer_loss": round(answer_loss(model, heldout_batches), 4),
        "wall_seconds": round(time.monotonic() - started, 1),
    }
    save_target(model, tokenizer, directory)
    write_json(directory / RECORD, record)
    print(f"saved to {directory}: held-out answer loss {record['heldout_answer_loss']}", flush=True)


def record_measurement(output: Path, directory: Path) -> None:
    """Serve the target, count good answers on the held-out prompts, and add them to the record."""
    record = read_record(directory)
    rows = [row for row in read_prompts(output / "prompts.jsonl") if row["split"] == "heldout"]
    result = report(generate(directory, rows))
    record["greedy_heldout_answers"] = result
    write_json(directory / RECORD, record)
    for name, numbers in result.items():
        print(name, numbers)
    check(result)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("data_gen/tiny"), help="directory to write to")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=ARCHITECTURES[0], help="of the target")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of corpus order, weights and batches")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--prompts-only", action="store_true", help="stop after writing the prompts")
    only.add_argument("--measure-only", action="store_true", help="measure the saved target")
    parser.add_argument("--skip-measure", action="store_true", help="train without vLLM installed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
