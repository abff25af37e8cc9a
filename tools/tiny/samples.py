"""Build the training samples and the shipped prompts of the four workloads.

Gives up: balance inside a workload; a style appears as often as functions allow it.
Alternative: take requests from public chat data; it would need a download and a larger model.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drafthead.data.prompts import prompt_id
from tools.tiny import explain, produce
from tools.tiny.corpus import Class, Function, is_heldout
from tools.tiny.wording import called, count, listed, purpose, raised, returns_value

CATEGORIES = ("chat", "long", "code", "structured")
EFFORTS = ("low", "medium", "high")
SHORT_SOURCE = (60, 280)
LONG_SOURCE = (600, 1050)
ANSWER_CHARS = (50, 520)


@dataclass(frozen=True)
class Sample:
    """One request with the answer the target should learn, and the thoughts for two efforts."""

    category: str
    module: str
    prompt: str
    plan: str
    detail: str
    answer: str

    @property
    def split(self) -> str:
        """`heldout` or `train`, by the module alone."""
        return "heldout" if is_heldout(self.module) else "train"

    def thinking(self, effort: str) -> str:
        """The analysis message: none for low, one remark for medium, two for high."""
        return {"low": "", "medium": self.plan, "high": f"{self.plan} {self.detail}"}[effort]


def build_samples(functions: list[Function], classes: list[Class], rounds: int, seed: int) -> list[Sample]:
    """Return samples without duplicate requests; each round picks other styles for the same sources."""
    seen: set[str] = set()
    samples: list[Sample] = []
    for round_number in range(rounds):
        choose = random.Random(f"{seed}/{round_number}")
        for sample in _one_round(functions, classes, choose):
            if sample.prompt not in seen and _is_usable(sample.answer):
                seen.add(sample.prompt)
                samples.append(sample)
    return samples


def prompt_rows(
    samples: list[Sample], per_category: dict[str, int], seed: int, categories: tuple[str, ...] = CATEGORIES
) -> list[dict[str, object]]:
    """Pick the shipped prompts: `per_category[split]` of each workload, in a fixed random order."""
    rows: list[dict[str, object]] = []
    for split, number in per_category.items():
        for category in categories:
            pool = [s for s in samples if s.split == split and s.category == category]
            if len(pool) < number:
                raise ValueError(f"only {len(pool)} of {number} {split} prompts for {category}: add rounds")
            picked = random.Random(f"{seed}/{split}/{category}").sample(pool, number)
            rows.extend(_row(sample) for sample in picked)
    return rows


def _row(sample: Sample) -> dict[str, object]:
    messages = [{"role": "user", "content": sample.prompt}]
    return {
        "id": prompt_id(messages),
        "source": "tiny",
        "category": sample.category,
        "split": sample.split,
        "module": sample.module,
        "messages": messages,
    }


def _one_round(functions: list[Function], classes: list[Class], choose: random.Random) -> Iterator[Sample]:
    makers: dict[str, Callable[[Function, random.Random], tuple[str, str]]] = {
        "chat": explain.chat,
        "code": produce.code,
        "structured": produce.structured,
    }
    for function in functions:
        size = len(function.source)
        if not function.source.isascii():
            continue
        if SHORT_SOURCE[0] <= size <= SHORT_SOURCE[1]:
            for category, make in makers.items():
                yield _sample(category, function, *make(function, choose))
        elif LONG_SOURCE[0] <= size <= LONG_SOURCE[1]:
            yield _sample("long", function, *explain.long_function(function, choose))
    for owner in classes:
        source = _shown_source(owner)
        if source.isascii() and len(source) >= LONG_SOURCE[0]:
            prompt, answer = explain.long_class(owner, source, choose)
            plan = f"A class with {count(len(owner.methods), 'method')}."
            yield Sample("long", owner.module, prompt, plan, "I name three of them at most.", answer)


def _sample(category: str, function: Function, prompt: str, answer: str) -> Sample:
    needed = count(len(function.parameters), "argument")
    plan = {
        "chat": f"They ask about `{function.name}`. It has {needed}.",
        "long": f"A long function, {count(len(function.node.body), 'step')}.",
        "code": f"Code is wanted, with {needed}.",
        "structured": f"JSON only, with {needed}.",
    }[category]
    calls, errors = called(function), raised(function)
    hint = f"It calls {listed(calls[:1])}" if calls and category != "code" else f"It {purpose(function)}"
    end = f"raises `{errors[0]}`" if errors and category != "code" else "gives a value back"
    detail = f"{hint} and {end}." if errors or returns_value(function) else f"{hint} and gives nothing back."
    return Sample(category, function.module, prompt, plan, detail, answer)


def _shown_source(owner: Class) -> str:
    """The class header and as many whole methods as fit."""
    text = owner.header
    for method in owner.methods:
        indented = "\n".join(f"    {line}" for line in method.source.splitlines())
        if len(text) + len(indented) > LONG_SOURCE[1]:
            break
        text += f"\n{indented}"
    return text


def _is_usable(answer: str) -> bool:
    """Keep answers that a small model can finish: neither tiny nor long, plain and free of repetition."""
    fits, words = ANSWER_CHARS[0] <= len(answer) <= ANSWER_CHARS[1], answer.split()
    grams = [tuple(words[i : i + 6]) for i in range(len(words) - 5)]
    return fits and answer.isascii() and len(set(grams)) == len(grams)
