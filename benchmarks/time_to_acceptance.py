"""Seconds of training until a replayed acceptance length is reached, ours beside SpecForge's and speculators'.

    python benchmarks/time_to_acceptance.py [RECIPE] [section.key=value ...] [--target 2.0] [--contestants ours]

An EAGLE-3 head of the recipe's shape is trained by every trainer on the recipe's store, which must be there: the same
initial weights, the same documents in every optimiser step. Every --every steps the clock stops, each hands out its
weights, and one replay scores them all over the validation prompts at temperature 0. What is counted: README.md.
"""

import argparse
import json
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from stepbench.environments import CONTESTANTS, DEFAULT_ROOT, python_of
from stepbench.inputs import write_target
from stepbench.referee import Player
from stepbench.shapes import Shape
from stepbench.training import DRAFTS, Plan
from torch import Tensor

from drafthead.artifacts import made_by
from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import Recipe, load_recipe
from drafthead.data.packing import pack, plan_stream, whole
from drafthead.data.store import StateStore
from drafthead.drafters.base import DraftShape, draft_shape, frozen_copy
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import Acceptance
from drafthead.evaluation.reporting.tables import change_cell
from drafthead.exporting.check import Document, choose_documents, replayed_rounds
from drafthead.exporting.export import write_head
from drafthead.files import write_json
from drafthead.statistics import Change, Interval, acceptance_length_interval, few, length_change
from drafthead.target.pieces import TargetPieces, load_pieces
from drafthead.training.inputs import Inputs, draft_vocabulary, open_inputs, survey

VARIANTS = ("same", "shipped")  # same arithmetic, as shipped
AGREE = 0.99  # share of drafts that a contestant's own model and the replay of its weights must have in common
OPTIONS = (
    ("--target", {"type": float, "default": 2.0, "help": "acceptance length to be reached; default: 2.0"}),
    ("--steps", {"type": int, "help": "optimiser steps of every contestant; default: the recipe's"}),
    ("--every", {"type": int, "default": 10, "help": "steps between evaluations; default: 10"}),
    ("--contestants", {"default": ",".join(CONTESTANTS), "help": "such as `ours,specforge same`; default: all"}),
    ("--threads", {"type": int, "default": 2, "help": "of the CPU; default: 2"}),
    ("--envs", {"type": Path, "default": DEFAULT_ROOT, "help": "where the peers' environments are kept"}),
    ("--heads", {"type": Path, "help": "directory for every contestant's last head, as vLLM reads it"}),
    ("--json", {"type": Path, "help": "write everything measured to this file"}),
)
console = Console(stderr=True)


@dataclass(frozen=True)
class Point:
    """A contestant after so many steps and seconds of training; counters of the replay, one per validation prompt."""

    step: int
    seconds: float
    drafts: list[float]
    accepted: list[float]

    @property
    def length(self) -> float:
        return 1 + sum(self.accepted) / sum(self.drafts)


@dataclass
class Course:
    """A contestant on its way.

    Attributes:
        player: process of the contestant.
        shape: shape of the contestant's head.
        points: measured points, from step 0 on.
        agreement: least share of drafts in which the contestant's model agreed with the replay; None: it is the model.
    """

    player: Player
    shape: DraftShape
    points: list[Point] = field(default_factory=list)
    agreement: float | None = None

    def reached(self, target: float) -> Point | None:
        """The first point after a step that is at the target or above."""
        return next((point for point in self.points[1:] if point.length >= target), None)


class Replay:
    """Scores weights as training's validation does: the last answer of every validation prompt that does not loop."""

    def __init__(self, recipe: Recipe, inputs: Inputs, pieces: TargetPieces, target_ids: Tensor):
        self.recipe, self.embeddings = recipe, pieces.embed_tokens.float()
        self.store = StateStore(recipe.states_dir("validation"))
        self.documents: list[Document] = choose_documents(self.store, recipe, sys.maxsize, sys.maxsize)[0]
        head = recipe.head.sized(len(target_ids))
        self.shape = draft_shape(head, inputs.spec, recipe.target.aux_layer_ids)
        t2d = torch.zeros(inputs.spec.vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True)
        self.vocabulary = {"t2d": t2d, "d2t": target_ids - torch.arange(len(target_ids))}

    def rounds(self, shape: DraftShape, weights: dict[str, Tensor]) -> list[Acceptance]:
        return replayed_rounds(self.recipe, self.store, self.documents, {**weights, **self.vocabulary}, shape)

    @torch.no_grad()
    def agreement(self, shape: DraftShape, weights: dict[str, Tensor], drafts: Tensor) -> float:
        """Share of the first document's drafts (K, T) that are the replay's, too."""
        drafter, index = drafter_of(shape.head), self.documents[0].index
        window = whole(index, self.store.tokens(index)[1], drafter)
        batch = pack(self.store, [window], drafter).to(torch.device("cpu"), torch.float32)
        K = min(len(drafts), drafter.num_positions)
        model = frozen_copy(shape, weights, torch.device("cpu"), torch.float32)
        ours = model.draft(batch, self.embeddings, K)  # (K, R)
        rows = batch.layout.rows
        known = rows < len(batch.input_ids) - K  # row t of step k reads token t + 1 + k
        return float((ours[:, known] == drafts[:K, rows[known]]).float().mean())


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    for number in (signal.SIGINT, signal.SIGTERM):  # a plain exit, which ends the contestants
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    pairs = list(product(CONTESTANTS, VARIANTS))
    names = args.contestants.split(",")
    if unknown := set(names) - {*CONTESTANTS, *map(" ".join, pairs)}:
        raise ValueError(f"no {min(unknown)}: --contestants {','.join(CONTESTANTS)}, or `ours same` and the like")
    torch.set_num_threads(args.threads)
    if args.heads:
        args.heads.mkdir(parents=True, exist_ok=True)
    # A run of its own, which is never written: a checkpoint of the recipe's must not be continued.
    overrides = [*args.overrides, "name=time-to-acceptance", f"data={recipe.data or recipe.name}"]
    recipe = load_recipe(args.recipe, overrides)
    if recipe.head.type != "eagle3" or recipe.train.precision != "fp32" or recipe.train.init_from:
        raise ValueError("peers train eagle3 heads from their target, here in fp32: head.type, train.precision")
    with tempfile.TemporaryDirectory(prefix="drafthead-bench-") as directory, ExitStack() as stack:
        replay, plan = write_inputs(recipe, args, overrides, Path(directory))
        asked = [(name, variant) for name, variant in pairs if {name, f"{name} {variant}"} & set(names)]
        loaded = [start(name, variant, replay, Path(directory), args, stack) for name, variant in asked]
        courses = [course for course in loaded if course is not None]
        train(courses, replay, plan, Path(directory), args)
        report(courses, len(replay.documents), plan, recipe, args)
    if len(courses) < len(asked) or any(course.player.entry.error for course in courses):
        raise SystemExit(1)


def write_inputs(
    recipe: Recipe, args: argparse.Namespace, overrides: list[str], directory: Path
) -> tuple[Replay, Plan]:
    """What every contestant starts from; the plan is the one that the recipe's trainer makes."""
    inputs, drafter, config = open_inputs(recipe), drafter_of(recipe.head), recipe.train
    token_survey = survey(inputs.train, inputs.spec.vocab_size, config.tokens_per_batch, drafter)
    vocabulary, pieces = draft_vocabulary(recipe, token_survey), load_pieces(recipe.target_path, recipe.target.revision)
    stream = plan_stream(
        inputs.train, token_survey.windows, config.tokens_per_batch, config.seed, config.epochs, config.batches_per_step
    )
    if len({w.document for w in token_survey.windows}) != len(token_survey.windows):
        raise ValueError("a document is longer than train.tokens_per_batch and peers take documents whole: raise it")
    M = config.batches_per_step
    groups = [stream[i : i + M] for i in range(0, len(stream) // M * M, M)]
    steps = [[window.document for batch in group for window in batch] for group in groups]
    if args.steps is not None and args.steps > len(steps):
        raise ValueError(f"--steps {args.steps}: the recipe has {len(steps)}; raise train.epochs")
    replay = Replay(recipe, inputs, pieces, vocabulary.target_ids)
    shape = Shape(
        "store", inputs.spec.hidden_size, recipe.head.intermediate_size, recipe.head.num_attention_heads,
        recipe.head.num_key_value_heads, recipe.head.head_dim, inputs.spec.vocab_size, len(vocabulary.target_ids),
        tokens=inputs.spec.max_position_embeddings // 2, batch=1, ttt_steps=drafter.num_positions,
        layers=len(recipe.target.aux_layer_ids), eps=inputs.spec.rms_norm_eps,
    )  # fmt: skip
    plan = Plan(
        shape, args.recipe, overrides, str(recipe.states_dir("train")), str(recipe.states_dir("validation")),
        steps[: args.steps], replay.documents[0].index, config.learning_rate,
    )  # fmt: skip
    head = recipe.head.model_copy(update={"norm_before_fc": False, "fc_norm": False})
    draft = drafter.from_target(
        replace(replay.shape, head=head.sized(len(vocabulary.target_ids))), pieces, vocabulary, config.seed
    )
    tensors = {
        "embeddings": pieces.embed_tokens.float(), "final_norm": pieces.final_norm.float(),
        "lm_head": pieces.lm_head.float(), "target_ids": vocabulary.target_ids,
        **{f"draft.{name}": value for name, value in draft.state_dict().items()},
    }  # fmt: skip
    save_file(tensors, directory / "tensors.safetensors")
    plan.write(directory / "plan.json")
    write_target(directory / "target", shape, tensors)
    return replay, plan


def start(
    name: str, variant: str, replay: Replay, inputs: Path, args: argparse.Namespace, stack: ExitStack
) -> Course | None:
    """A contestant that is loaded; None when it could not be."""
    console.print(f"loading {name} {variant}")
    try:
        python = python_of(CONTESTANTS[name], args.envs)
    except RuntimeError as error:
        console.print(f"{name}: {error}", markup=False)
        return None
    player = Player(CONTESTANTS[name], variant, python, ["--train", "--inputs", str(inputs)], args.threads)
    stack.callback(player.stop)
    ready = player.load()
    if ready is None:
        console.print(player.entry.error, markup=False)
        return None
    norms = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
    head = replay.shape.head.model_copy(update={**norms, **ready["head"]})
    return Course(player, replace(replay.shape, head=head, rope_parameters=ready["rope"]))


def train(courses: list[Course], replay: Replay, plan: Plan, directory: Path, args: argparse.Namespace) -> None:
    """Stretches of --every steps, one contestant after the other; every stretch is scored before the next begins."""
    bounds = [0, *range(0, len(plan.steps), args.every), len(plan.steps)]
    for before, step in pairwise(bounds):
        for course in courses:
            if course.player.entry.error is None:
                file = directory / "weights.safetensors"
                play(course, replay, step - before, file)
                if course.player.entry.error:
                    console.print(course.player.entry.error, markup=False)
                elif args.heads and step == len(plan.steps):
                    keep(course, replay, file, args.heads)
        if step == 0:
            check_start(courses)


def play(course: Course, replay: Replay, steps: int, file: Path) -> None:
    """The contestant's next steps, and what its weights are worth then.

    Raises:
        SystemExit: its own model drafts otherwise than the replay of its weights.
    """
    answer = course.player.ask(json.dumps({"steps": steps, "write": str(file)}))
    if answer is None:
        return
    weights = load_file(file)
    drafts = weights.pop(DRAFTS, None)
    if drafts is not None:
        agreement = replay.agreement(course.shape, weights, drafts)
        course.agreement = min(agreement, course.agreement or 1.0)
        if agreement < AGREE:
            raise SystemExit(
                f"{course.player.entry.name} drafts like the replay of its weights in {agreement:.1%} of the positions "
                f"only, not {AGREE:.0%}: its arithmetic is not that of the head that is scored"
            )
    rounds = replay.rounds(course.shape, weights)
    done, seconds = (course.points[-1].step, course.points[-1].seconds) if course.points else (0, 0.0)
    point = Point(done + steps, seconds + answer["seconds"], [r.drafts for r in rounds], [r.accepted for r in rounds])
    course.points.append(point)
    console.print(
        f"{course.player.entry.name:<22} step {point.step:5d}  {point.seconds:7.1f} s  acceptance length "
        f"{point.length:.3f}",
        highlight=False,
    )


def keep(course: Course, replay: Replay, file: Path, heads: Path) -> None:
    """Write the weights of a file as a head that vLLM serves: `eval.methods` takes it beside ours."""
    directory = heads / course.player.entry.name.replace(" ", "-")
    directory.mkdir(parents=True, exist_ok=True)
    recipe, weights = replay.recipe, {**load_file(file), **replay.vocabulary}
    weights.pop(DRAFTS, None)
    write_head(recipe, directory, weights, course.shape, tuple(recipe.target.aux_layer_ids))


def check_start(courses: list[Course]) -> None:
    """Heads of one shape have the same weights before the first step, and so the same counters.

    Raises:
        SystemExit: they have not.
    """
    same = [course for course in courses if course.player.entry.name.endswith(" same") and course.points]
    for course in same[1:]:
        first, other = same[0].points[0], course.points[0]
        if (first.drafts, first.accepted) != (other.drafts, other.accepted):
            raise SystemExit(
                f"before the first step {same[0].player.entry.name} has acceptance length {first.length:.4f} and "
                f"{course.player.entry.name} {other.length:.4f}: they do not start from the same weights"
            )


def summarise(
    courses: list[Course], prompts: int, plan: Plan, recipe: Recipe, args: argparse.Namespace
) -> dict[str, Any]:
    """Everything measured, as JSON."""
    store = StateStore(recipe.states_dir("train"))
    lengths = [len(store.tokens(i)[0]) for i in range(len(store))]
    tokens = [sum(lengths[i] for i in step) for step in plan.steps]
    whole_way = [c for c in courses if c.points and c.points[-1].step == len(plan.steps)]
    ours = {c.player.entry.name: c for c in whole_way if c.player.entry.name.startswith("ours")}
    reached_by = {name: course.reached(args.target) for name, course in ours.items()}
    rows = []
    for course in whole_way:
        reached, last = course.reached(args.target), course.points[-1]
        rows.append({
            "name": course.player.entry.name,
            "version": course.player.entry.version,
            "seconds": reached and reached.seconds,
            "steps": reached and reached.step,
            "tokens": reached and sum(tokens[: reached.step]),
            "times": {name: reached.seconds / point.seconds for name, point in reached_by.items() if reached and point},
            "ahead": {name: asdict(ahead(other.points[-1], last)) for name, other in ours.items() if other != course},
            "train_seconds": last.seconds,
            "final": asdict(acceptance_length_interval(last.drafts, last.accepted)),
            "agreement": course.agreement,
            "points": [{"length": point.length, **asdict(point)} for point in course.points],
        })  # fmt: skip
    return {
        "target": args.target, "steps": len(plan.steps), "tokens": sum(tokens), "every": args.every,
        "num_draft_tokens": recipe.eval.num_draft_tokens, "prompts": prompts,
        "threads": args.threads, "contestants": rows,
        "failed": {c.player.entry.name: c.player.entry.error for c in courses if c.player.entry.error},
        "made_by": made_by(),
    }  # fmt: skip


def ahead(ours: Point, other: Point) -> Change:
    """Acceptance length of one contestant over another's, less 1, paired by prompt."""
    (drafts, accepted), theirs = ((np.transpose([p.drafts]), np.transpose([p.accepted])) for p in (ours, other))
    return length_change((drafts, accepted), theirs)


def report(courses: list[Course], prompts: int, plan: Plan, recipe: Recipe, args: argparse.Namespace) -> None:
    """The table, and the file."""
    summary = summarise(courses, prompts, plan, recipe, args)
    title = (
        f"acceptance length {args.target} at K = {summary['num_draft_tokens']}, {summary['steps']} steps of "
        f"{summary['tokens'] // summary['steps']} tokens, {summary['prompts']} prompts{few(summary['prompts'])}"
    )
    ours = [row["name"] for row in summary["contestants"] if row["name"].startswith("ours")]
    table = Table(
        "contestant", "s to target", "steps", "tokens", *(f"/ {name}" for name in ours), "s in all",
        "acceptance length at the end", *(f"{name} is longer by, %" for name in ours), title=title,
    )  # fmt: skip
    for row in summary["contestants"]:
        longer = {name: Change(**change) for name, change in row["ahead"].items()}
        reached = ["not reached", "-", "-"]
        if row["steps"] is not None:
            reached = [f"{row['seconds']:.1f}", f"{row['steps']}", f"{row['tokens']:,}"]
        table.add_row(
            f"{row['name']} ({row['version']})", *reached,
            *(f"{row['times'][name]:.2f}" if name in row["times"] else "-" for name in ours),
            f"{row['train_seconds']:.1f}", f"{Interval(**row['final']):.3f}",
            *(change_cell(longer[name]).text if name in longer else "-" for name in ours),
        )  # fmt: skip
    Console(width=140).print(table)
    if args.json:
        write_json(args.json, summary)


if __name__ == "__main__":
    run_recipe(main)
