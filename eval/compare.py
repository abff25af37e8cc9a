"""Heads of every drafter, or of every variant of a recipe, trained for equally many tokens and compared.

    python eval/compare.py [RECIPE] --mask-token-id ID [--heads dflash eagle3 ...] [--layers 1 2] [--seeds 0] [--serve]
    python eval/compare.py [RECIPE] --variants benchmarks/quality.yaml --heads recipe rate_1e-3 ... [--no-control]

Each head is a recipe of its own, such as NAME-dflash_l2_s0, that differs in head and train.seed and uses the recipe's
data, which is made first where it is missing. A file of variants has a name and overrides of the recipe per line; one
that changes the data gets data of its own. Every head is trained, exported, and served by vLLM at every draft length of
--lengths; a drafter that vLLM does not serve on this machine is replayed only, as all are. The head of the first seed
is trained once more without hidden states (`--no-control`: not). With --serve the first seed's heads are served under
load beside the baseline, and the report's verdict picks one of them by measured speed.

Interrupted, the same command continues; so it does with more heads, layers or seeds. Once the data is there, commands
with other heads, layers or seeds may run side by side; the whole one after them prints the table.
"""

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from pydantic import TypeAdapter

from drafthead.artifacts import MANIFEST, digest, read_manifest, require
from drafthead.cli import recipe_from_command_line, run_recipe, run_script
from drafthead.config import Recipe, load_recipe
from drafthead.data.store import StateStore
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.trained import best_checkpoint, read_checkpoint
from drafthead.engine.offline import on_cpu
from drafthead.evaluation.columns import write_rows
from drafthead.evaluation.reporting.heads import REPLAYED, comparison_table, served_rows
from drafthead.evaluation.reporting.tables import print_table
from drafthead.exporting.check import choose_documents, replayed_rounds
from drafthead.files import reading_external
from drafthead.target.spec import load_target_spec

Variants = dict[str, list[str]]  # overrides of the recipe by name
HEADS: Variants = {
    "eagle3": ["head.type=eagle3"],
    "eagle3.1": ["head.type=eagle3", "head.fc_norm=true", "head.norm_output=true"],
    "peagle": ["head.type=peagle"],
    "dflash": ["head.type=dflash"],
    "dspark": ["head.type=dspark"],
}
_OF_DATA = ("target.", "engine.", "prompts.", "responses.", "states.")  # sections that decide what is trained on
_OURS = ("name=", "data=", "output_dir=", "head.num_layers=", "train.seed=", "train.zero_hidden_states=")
OPTIONS = (
    ("--variants", {"type": Path, "help": "YAML: name: [section.key=value, ...]; default: every drafter"}),
    ("--heads", {"nargs": "+", "help": "of the variants, by name; default: all"}),
    ("--layers", {"nargs": "+", "type": int, "default": [1, 2, 4], "help": "of the head; default: 1 2 4"}),
    ("--seeds", {"nargs": "+", "type": int, "default": [0, 1, 2], "help": "of training; default: 0 1 2"}),
    ("--lengths", {"nargs": "+", "type": int, "default": [3, 5, 7], "help": "draft tokens; default: 3 5 7"}),
    ("--mask-token-id", {"type": int, "help": "of parallel drafters: a token that no text contains"}),
    ("--no-control", {"action": "store_true", "help": "train none without hidden states"}),
    ("--serve", {"action": "store_true", "help": "measure speed under load too"}),
)  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    """A head to be trained: the variant `kind`; `control`: on zeroed hidden states."""

    kind: str
    own: tuple[str, ...]  # overrides
    layers: int
    seed: int
    control: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}_l{self.layers}_s{self.seed}{'_control' if self.control else ''}"

    def overrides(self, recipe: Recipe, args: Any) -> list[str]:
        """What makes its recipe of the given one."""
        K = max(args.lengths)
        head = next((text for text in self.own if text.startswith("head.type=")), f"head.type={recipe.head.type}")
        positions = [f"head.num_ttt_steps={K}"]
        if head != "head.type=eagle3":
            if args.mask_token_id is None:
                raise ValueError(f"{self.kind} needs --mask-token-id: the id of a token that the tokenizer reserves")
            positions = [f"head.num_draft_positions={K}", f"head.mask_token_id={args.mask_token_id}"]
        return [
            f"name={recipe.name}-{self.name}", head, *positions, f"head.num_layers={self.layers}",
            f"train.seed={self.seed}", f"train.zero_hidden_states={json.dumps(self.control)}",
            "eval.methods=[head]", f"eval.num_draft_tokens={args.lengths}",
            *(text for text in self.own if text != head), *self.data_overrides(recipe),
        ]  # fmt: skip

    def recipe(self, recipe: Recipe, args: Any) -> Recipe:
        """Its recipe, of the given one.

        Raises:
            ValueError: the variant does not fit the recipe, or --lengths.
        """
        try:
            return load_recipe(args.recipe, [*args.overrides, *self.overrides(recipe, args)])
        except ValueError as error:
            raise ValueError(f"{self.kind} with --lengths {max(args.lengths)}: {error}") from error

    def data_overrides(self, recipe: Recipe) -> list[str]:
        """What makes the recipe of its data of the given one."""
        data = recipe.data or recipe.name
        changed = [text for text in self.own if text.startswith(_OF_DATA)]
        return [f"data={data}-{self.kind}" if changed else f"data={data}", *changed]


def chosen_variants(args: Any) -> Variants:
    """Those that --variants and --heads name.

    Raises:
        ValueError: the file is not as it should be, or has no variant of such a name.
    """
    variants = HEADS if args.variants is None else read_variants(args.variants)
    if unknown := set(args.heads or ()) - set(variants):
        raise ValueError(f"--heads {min(unknown)}: choose from {', '.join(variants)}")
    return {name: variants[name] for name in args.heads or variants}


def read_variants(path: Path) -> Variants:
    """Name -> overrides."""
    with reading_external(path, "Lines must be `name: [section.key=value, ...]`", ValueError):
        found = TypeAdapter(Variants).validate_python(yaml.safe_load(path.read_text()))
    if ours := [f"{name}: {text}" for name, own in found.items() for text in own if text.startswith(_OURS)]:
        raise ValueError(f"{path}: {ours[0]} is no variant; --layers and --seeds say it, and names are given")
    return found


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    given = [args.recipe, *args.overrides]
    contestants = [
        Contestant(kind, tuple(own), layers, seed, control)
        for layers in args.layers
        for kind, own in chosen_variants(args).items()
        for seed in args.seeds
        for control in (False, True)
        if not control or (seed == args.seeds[0] and not args.no_control)
    ]
    recipes = {c: c.recipe(recipe, args) for c in contestants}
    served = serving_overrides(recipe, recipes, args) if args.serve else []
    load_recipe(args.recipe, [*args.overrides, *served])  # refused now, not when all heads are trained
    for contestant, own in recipes.items():
        if not (own.states_dir("validation") / MANIFEST).exists():
            for stage in ("prompts", "regenerate", "harvest"):
                run_script(f"data_gen/{stage}.py", given + contestant.data_overrides(recipe))
    files = [measured(c, own, given + c.overrides(recipe, args), args.lengths) for c, own in recipes.items()]
    print_table(comparison_table(pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)))
    if served:
        run_script("eval/head.py", given + served)


def measured(contestant: Contestant, recipe: Recipe, arguments: list[str], lengths: list[int]) -> Path:
    """Train, export and count, as far as that is not done; returns the file of its rows.

    Rows of another recipe are not taken for its own: the stages find what differs, and refuse or continue.
    """
    path, counted = recipe.results_dir / "heads.parquet", recipe.eval
    of_eval = [counted.draft_tokens, counted.temperatures, counted.reasoning_efforts, counted.max_tokens]
    made_from = digest([recipe.model_dump(mode="json", exclude={"eval"}), *of_eval])
    if path.exists() and pd.read_parquet(path).attrs.get("recipe") == made_from:
        return path
    print(f"\n{contestant.name}", flush=True)
    run_script("train/eagle3.py", arguments)
    run_script("export/head.py", arguments)
    source = read_checkpoint(best_checkpoint(recipe.run_dir))
    shape, weights = source.shape(load_target_spec(recipe.target_path, recipe.target.revision)), source.weights()
    store, replayed = StateStore(recipe.states_dir("validation")), []
    for k in lengths:
        at = recipe.changed("eval", draft_tokens=(k,))
        documents, _ = choose_documents(store, at, sys.maxsize, sys.maxsize)
        rounds = replayed_rounds(at, store, documents, weights, shape)
        replayed += [
            {"k": k, "prompt": document.id, "drafts": one.drafts, "accepted": one.accepted, "how": REPLAYED}
            for document, one in zip(documents, rounds, strict=True)
        ]
    rows = [pd.DataFrame(replayed)]
    if servable(recipe):
        run_script("eval/acceptance.py", [*arguments, "--no-tables"])
        rows.append(served_rows(recipe))
    parameters = require(recipe.head_dir, "head", "python export/head.py RECIPE")["counts"]["parameters"]
    seconds = read_manifest(recipe.run_dir)["counts"]["train_seconds"]
    which: dict[str, Any] = {"kind": contestant.kind, "layers": contestant.layers, "seed": contestant.seed}
    which |= {"control": contestant.control, "parameters": parameters, "seconds": seconds}
    found = pd.concat(rows, ignore_index=True).assign(**which)
    found.attrs["recipe"] = made_from
    write_rows(found, path)
    return path


def servable(recipe: Recipe) -> bool:
    """Whether vLLM serves the recipe's drafter on this machine."""
    return not (on_cpu() and getattr(drafter_of(recipe.head).vllm, "GPU_ONLY", False))


def serving_overrides(recipe: Recipe, recipes: dict[Contestant, Recipe], args: Any) -> list[str]:
    """Every head of the first seed as a method of one evaluation.

    Raises:
        ValueError: vLLM serves none of them on this machine.
    """
    methods = []
    for contestant, own in recipes.items():
        if contestant.seed == args.seeds[0] and not contestant.control and servable(own):
            config = drafter_of(own.head).vllm.speculative_config(own.head_dir, 1)
            method, head, _ = (config.pop(key) for key in ("method", "model", "num_speculative_tokens"))
            name = f"{contestant.kind}_l{contestant.layers}".replace("-", "_")  # no dash is in a method's name
            methods.append({"name": name, "method": method, "head": head, "extra": config})
    if not methods:
        kinds = ", ".join(dict.fromkeys(contestant.kind for contestant in recipes))
        raise ValueError(f"--serve: vLLM serves no {kinds} head on a CPU; leave --serve out, or add another of --heads")
    served = [method["name"] for method in methods]
    positions = "num_ttt_steps" if recipe.head.type == "eagle3" else "num_draft_positions"
    return [
        f"name={recipe.name}-served", f"data={recipe.data or recipe.name}", f"eval.methods={json.dumps(methods)}",
        f"eval.served={json.dumps(served)}", f"eval.num_draft_tokens={args.lengths}",
        f"head.{positions}={max(args.lengths)}",  # of a head that is not served
    ]  # fmt: skip


if __name__ == "__main__":
    run_recipe(main)
