"""Prompts that the target writes itself: the user's turn, sampled after the beginning that its chat template gives it.

Magpie (arXiv 2406.08464): a chat model that reads its template up to where a user's message would stand continues with
one. No data of anybody's is needed, and the prompts are about what the target was trained on. The beginning is found by
rendering a message with a placeholder, and so is the token that ends a turn:

    <|im_start|>system\\n...<|im_end|>\\n<|im_start|>user\\n PLACEHOLDER <|im_end|>\\n
    beginning, which the engine reads ^--------------^             ^ end of turn, on which a sample stops

Sampled at temperature 1 from the whole distribution. A part is the unit of work: a fixed range of samples, each with a
seed of its own, generated alone and skipped when present. Parts hold all samples; what is dropped is decided when the
file is written, so a larger number continues and a smaller one takes the first. Given up: the same text on other
hardware or with parts of another size, as of responses.

Rows declare the training side of the split. So no evaluation draws them as if users had written them.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from drafthead.artifacts import IDENTITY, MANIFEST, begin, digest, finish, read_json, read_manifest
from drafthead.config import Recipe
from drafthead.data.prompts import Prompt
from drafthead.data.rendering import CONTROL_TOKEN, Renderer, UnrenderableError
from drafthead.data.responses import loops
from drafthead.engine.generate import Engine, GenerationRequest
from drafthead.engine.offline import offline_engine
from drafthead.engine.running import Runner, Task, run_here, unwritten
from drafthead.files import atomic_path
from drafthead.target.spec import recipe_spec, target_identity
from drafthead.target.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KIND = "self-written prompts"
CATEGORY = "self"
FILE = "prompts.jsonl"
SAMPLES_PER_PART = 250
MAX_TOKENS = 256  # of 250 samples of SmolLM2-135M, 3 ended between here and 512, and 38 went on
_PLACEHOLDER = "placeholder of a message"
_LEAST_SHARE = 0.02  # of usable samples in a round: below it the target has no other prompts to write


@dataclass(frozen=True)
class UserTurn:
    """Where a chat template lets a user write.

    Attributes:
        prefix_ids: token ids before the message.
        end_id: token that ends the message.
        day: date that the template writes, if it writes one.
    """

    prefix_ids: tuple[int, ...]
    end_id: int
    day: date | None


@dataclass(frozen=True)
class SamplePart:
    """A unit of work: `size` samples, of which the first is number `start`, and the file that they get."""

    path: Path
    start: int
    size: int = SAMPLES_PER_PART


def write_self_prompts(recipe: Recipe, number: int, run: Runner = run_here) -> dict[str, Any]:
    """Write so many prompts of the recipe's target to `self_prompts_file`, or leave them as they are.

    Args:
        recipe: recipe; its target and engine sections, seed, date and reasoning effort are read.
        number: number of prompts in the file.
        run: runs the jobs that make the parts.

    Returns:
        The manifest.

    Raises:
        ArtifactError: the directory holds samples made from something else.
        ValueError: the target's template has no place for a user's message, or hardly any sample is usable.
    """
    if number < 1:
        raise ValueError(f"--number {number} writes no prompts; give 1 or more")
    directory, spec, tokenizer = self_prompts_file(recipe).parent, recipe_spec(recipe), load_tokenizer(recipe, True)
    turn = user_turn(recipe, tokenizer, _day(recipe, tokenizer, directory))
    max_tokens = min(MAX_TOKENS, recipe.engine.max_model_len - len(turn.prefix_ids) - 1)
    identity = {
        "target": target_identity(recipe, spec),
        "dtype": recipe.target.dtype,
        "prefix_ids": turn.prefix_ids,
        "day": str(turn.day) if turn.day else None,
        "seed": recipe.prompts.seed,
        "max_tokens": max_tokens,
        "samples_per_part": SAMPLES_PER_PART,
    }
    if begin(directory, KIND, identity):
        manifest = read_manifest(directory)
        if manifest["counts"]["prompts"] == number:
            return manifest
        (directory / MANIFEST).unlink()  # the parts stay: another number of prompts is made from them
    start = partial(sample_worker, recipe, turn, max_tokens)
    task = Task(start, recipe.engine.tensor_parallel_size, "sampling prompts", "sample")
    judge = Judge(tokenizer, turn)
    texts = collect(number, directory, judge, partial(run, task))
    with atomic_path(directory / FILE) as temporary, temporary.open("w", encoding="utf-8") as file:
        for text in texts[:number]:
            row = {"category": CATEGORY, "split": "train", "messages": [{"role": "user", "content": text}]}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    samples = len(texts) + judge.dropped.total()
    counts = {"prompts": number, "samples": samples, "usable": len(texts), "dropped": dict(judge.dropped)}
    return finish(directory, counts)


def collect(number: int, directory: Path, judge: "Judge", make: Callable[[Sequence[SamplePart]], None]) -> list[str]:
    """At least `number` usable texts, from as many parts as that takes: a round for all, then those that it lacks.

    Args:
        number: number of texts.
        directory: directory of the parts.
        judge: tells which samples are usable, and counts the others.
        make: function that samples the missing parts.

    Raises:
        ValueError: hardly any sample of a round is usable.
    """
    texts: list[str] = []
    first, end = 0, math.ceil(number / SAMPLES_PER_PART)
    while len(texts) < number:
        parts = [SamplePart(directory / f"part-{i:05d}.jsonl", i * SAMPLES_PER_PART) for i in range(first, end)]
        if missing := unwritten(parts):
            make(missing)
        usable = judge.usable(parts)
        texts += usable
        share = len(usable) / (SAMPLES_PER_PART * len(parts))
        if share < _LEAST_SHARE:
            raise ValueError(
                f"{len(usable)} prompts came of the last {SAMPLES_PER_PART * len(parts)} samples, {len(texts)} of all "
                f"(dropped: {dict(judge.dropped)}): this target writes too few different ones; lower --number {number}"
            )
        first, end = end, end + math.ceil((number - len(texts)) / (share * SAMPLES_PER_PART))
    return texts


def self_prompts_file(recipe: Recipe) -> Path:
    """The JSONL file of a recipe's self-written prompts, which its `prompts` section names as a source."""
    return recipe.directory("data", recipe.data or recipe.name, "self-prompts", FILE)


def _day(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", directory: Path) -> date | None:
    """The day for a template that writes one: the recipe's, that of samples which are there, or today (UTC)."""
    if "strftime_now" not in str(tokenizer.chat_template):
        return None
    before = read_json(path).get("day") if (path := directory / IDENTITY).exists() else None
    return recipe.prompts.date or (date.fromisoformat(before) if before else datetime.now(UTC).date())


def user_turn(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", day: date | None) -> UserTurn:
    """Where the target's chat template lets a user write, without a system message of the recipe's.

    Args:
        recipe: recipe; the template gets the first of responses.reasoning_efforts.
        tokenizer: tokenizer of the target.
        day: date that the template writes.

    Raises:
        ValueError: the template does not write a message as it is, or ends it with no special token.
    """
    variables: dict[str, Any] = {"reasoning_effort": next(iter(recipe.responses.efforts))}
    variables |= {"strftime_now": day.strftime} if day else {}
    text = tokenizer.apply_chat_template([{"role": "user", "content": _PLACEHOLDER}], tokenize=False, **variables)
    prefix, _, rest = str(text).partition(_PLACEHOLDER)
    special = _special_ids(tokenizer)
    ends = [i for i in _encode(tokenizer, rest) if i in special]
    if not prefix or not ends:
        raise ValueError(
            f"the chat template of {recipe.target.path} renders a user's message as {str(text)!r}: prompts can be "
            "sampled only where something stands before it and a special token ends it"
        )
    return UserTurn(tuple(_encode(tokenizer, prefix)), ends[0], day)


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _special_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


@contextmanager
def sample_worker(recipe: Recipe, turn: UserTurn, max_tokens: int) -> Iterator["SampleWorker"]:
    """A running engine that makes parts."""
    with offline_engine(recipe, seeded=True, disable_log_stats=True) as llm:
        yield SampleWorker(Engine(llm), recipe.prompts.seed, turn, max_tokens)


class SampleWorker:
    """Makes parts with one running engine."""

    def __init__(self, engine: Engine, seed: int, turn: UserTurn, max_tokens: int):
        self._engine, self._seed, self._turn, self._max_tokens = engine, seed, turn, max_tokens

    def make(self, part: SamplePart, bar: tqdm) -> None:
        """Sample a part and write it."""
        self._engine.reset_cache()
        requests = [
            GenerationRequest(
                self._turn.prefix_ids, self._max_tokens, 1.0, _seed_of(self._seed, i), stop_ids=(self._turn.end_id,)
            )
            for i in range(part.start, part.start + part.size)
        ]
        with atomic_path(part.path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for sample in self._engine.generate(requests, bar):
                row = {"token_ids": sample.token_ids, "finish_reason": sample.finish_reason}
                file.write(json.dumps(row) + "\n")

    def finish(self) -> None:
        """Nothing is on its way to disk."""


def _seed_of(seed: int, sample: int) -> int:
    return int(digest([seed, CATEGORY, sample])[:12], 16) % 2**31


class Judge:
    """Which samples are prompts; `dropped` counts the others by reason."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", turn: UserTurn):
        self._tokenizer, self._end, self._special = tokenizer, turn.end_id, _special_ids(tokenizer)
        self._render = Renderer(tokenizer, turn.day)
        self._seen: set[str] = set()
        self.dropped: Counter[str] = Counter()

    def usable(self, parts: Sequence[SamplePart]) -> list[str]:
        """The texts of parts, in order, without those that are dropped."""
        texts = []
        for part in parts:
            for line in part.path.read_text(encoding="utf-8").splitlines():
                sample = json.loads(line)
                text, reason = self._judge(sample["token_ids"], sample["finish_reason"])
                if reason:
                    self.dropped[reason] += 1
                else:
                    texts.append(text)
        return texts

    def _judge(self, token_ids: list[int], finish_reason: str) -> tuple[str, str]:
        """Text of a sample, and why it is dropped, if it is."""
        if finish_reason != "stop":
            return "", "cut"
        *body, end = token_ids
        if end != self._end or not self._special.isdisjoint(body):
            return "", "control token"
        text = str(self._tokenizer.decode(body, skip_special_tokens=False)).strip()
        if not text:
            return "", "empty"
        if "\ufffd" in text:
            return "", "invalid characters"
        if loops(body):
            return "", "looping"
        try:  # control tokens that are spelled out
            self._render(Prompt("", "", "", ({"role": "user", "content": text},)), "medium")
        except UnrenderableError as error:
            return "", "control token" if error.reason == CONTROL_TOKEN else error.reason
        key = " ".join(text.casefold().split())
        if key in self._seen:
            return "", "duplicate"
        self._seen.add(key)
        return text, ""


def print_self_prompts(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """How many samples became prompts, why the others did not, and the lines of a recipe that name the file."""
    counts = manifest["counts"]
    print(f"{counts['prompts']} prompts in {self_prompts_file(recipe)}: {counts['samples']} samples, of which")
    for reason, count in {"usable": counts["usable"], **counts["dropped"]}.items():
        print(f"  {count:>8} {reason}")
