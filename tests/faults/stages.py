"""The stages as a user starts them: their command lines, what they write, and how far they got."""

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.faults.payload import GROWING, LEFT_OUT, content, leftovers, visible_files
from tests.recipes import SMALL_HEAD

NAME = "tiny"  # of the recipe
# Several units of work for every stage, each of them small.
SMALL = (
    *SMALL_HEAD, "prompts.max_train=24", "prompts.max_heldout=8", "prompts.validation=4",
    "responses.prompts_per_part=8", "responses.max_tokens=48", "states.sequences_per_shard=8", "head.num_ttt_steps=3",
    "train.tokens_per_batch=512", "train.batches_per_step=2", "train.epochs=12", "train.checkpoint_every=8",
    "train.zero_stage=2", "eval.max_tokens=32", "eval.prompts_per_level=8",
    "eval.concurrency=[1]",  # more at a time share batches by chance, and bf16 shows it in the text
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: name in the table.
        script: path of the script below the checkout.
        writes: folders below output_dir that the stage writes.
        deep: whether everything below the folders is the stage's; otherwise the files directly in them.
        ranks: processes of accelerate's launcher; 0: the script is started by itself.
        more: further overrides of the stage.
    """

    name: str
    script: str
    writes: tuple[str, ...]
    deep: bool = True
    ranks: int = 0
    more: tuple[str, ...] = ()

    def arguments(self, root: Path, *overrides: str) -> list[str]:
        """The script and what a user types after it."""
        return [self.script, f"output_dir={root}", *SMALL, *self.more, *overrides]

    def names(self, root: Path) -> set[str]:
        """Everything that lies in the stage's folders, hidden or not."""
        folders = [root / folder for folder in self.writes]
        return {
            str(p.relative_to(root))
            for f in folders
            if f.exists()
            for p in (f.rglob("*") if self.deep else f.glob("*"))
        }

    def payload(self, root: Path, finished: bool = True) -> dict[str, str]:
        """Digest of every file that has its name; of a stage that has not `finished`, without those that grow."""
        files = [path for folder in self.writes for path in visible_files(root / folder, self.deep)]
        if not finished:
            files = [path for path in files if path.name not in GROWING]
        names = {str(path.relative_to(root)): path for path in files}
        return {name: content(path) for name, path in names.items() if not any(fnmatch(name, p) for p in LEFT_OUT)}

    def leftovers(self, root: Path) -> list[Path]:
        """What should have been cleaned up."""
        return [path for folder in self.writes for path in leftovers(root / folder)]

    def clear(self, root: Path) -> None:
        """As if the stage had never run."""
        for name in sorted(self.names(root), reverse=True):
            path = root / name
            if path.is_dir():
                if self.deep:
                    path.rmdir()
            else:
                path.unlink()
        for folder in self.writes if self.deep else ():
            if (root / folder).exists():
                (root / folder).rmdir()


TRAIN = "train/eagle3.py"
RESULTS = f"results/{NAME}"
STAGES = {
    stage.name: stage
    for stage in (
        Stage("prompts", "data_gen/prompts.py", (f"data/{NAME}/prompts",)),
        Stage("regenerate", "data_gen/regenerate.py", (f"data/{NAME}/responses",)),
        Stage("harvest", "data_gen/harvest.py", (f"data/{NAME}/states",)),
        Stage("train, 1 rank", TRAIN, (f"runs/{NAME}",), ranks=1),
        Stage("train, 2 ranks", TRAIN, (f"runs/{NAME}",), ranks=2),
        Stage("export", "export/head.py", (f"heads/{NAME}",)),
        Stage("acceptance", "eval/acceptance.py", (f"{RESULTS}/acceptance",)),
        Stage("serving", "eval/serving.py", (f"{RESULTS}/serving",)),
        Stage("report", "eval/report.py", (RESULTS,), deep=False),
        *(
            Stage(
                f"train, {kind}", TRAIN, (f"runs/{kind}",), ranks=1,
                more=(f"name={kind}", f"data={NAME}", f"head.type={kind}", "head.mask_token_id=9", "head.num_layers=2"),
            )
            for kind in ("peagle", "dflash", "dspark")
        ),
    )
}  # fmt: skip


def progress(stage: Stage, root: Path, whole: dict[str, str]) -> str:
    """How far a stage is, for the table.

    Args:
        stage: stage that was killed.
        root: output_dir of the run.
        whole: payload of the undisturbed run.
    """
    if not stage.ranks:
        return f"{len(stage.payload(root, finished=False))} of {len(whole)} files"
    run = root / stage.writes[0]
    return f"step {steps_done(run)}, checkpoint {newest_checkpoint(run)}"


def steps_done(run: Path) -> int:
    """The last step that a run has written down; a kill may cut its line short."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def newest_checkpoint(run: Path) -> int:
    """Its step; 0 when there is none."""
    return max((int(path.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*")), default=0)
