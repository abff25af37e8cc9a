"""Conversations of several turns for the embedded target."""

import json
from pathlib import Path

from drafthead.config import Recipe
from tests.generation.small import small_recipe

FUNCTION = "```python\ndef {0}(self, {1}):\n    return self._{0}({1})\n```"
NAMES = (("close", "code"), ("send", "data"), ("find", "name"), ("read", "size"), ("push", "item"), ("drop", "key"))


def chat(name: str, argument: str, turns: int) -> list[dict[str, str]]:
    """A chat of so many questions, with responses of another model between them and after the last."""
    questions = [
        f"What does `{name}` do?\n\n{FUNCTION.format(name, argument)}",
        "What does it return?",
        "Keep it short.",
    ]
    responses = [f"It calls `_{name}`.", f"What `_{name}` returns.", "Calls it."]
    pairs = zip(questions[:turns], responses, strict=False)
    return [
        message
        for question, response in pairs
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": response})
    ]


def write_chats(path: Path, answered: bool = True) -> Path:
    """Five training chats of one to three questions, and one that is held out."""
    lines = []
    for i, (name, argument) in enumerate(NAMES):
        messages = chat(name, argument, 1 + i % 3)
        split = "heldout" if i == len(NAMES) - 1 else "train"
        lines.append({"messages": messages if answered else messages[:-1], "split": split, "category": "chat"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def chat_recipe(folder: Path, *overrides: str) -> Recipe:
    """Five chats of one to three questions; room for most responses of the embedded target."""
    path = write_chats(folder / "chats.jsonl")
    return small_recipe(
        folder, f"prompts.path={path}", "prompts.max_train=null", "prompts.validation=1", "responses.max_tokens=160",
        "responses.temperature=0.0", "responses.reasoning_efforts=[high]", "responses.prompts_per_part=3", *overrides,
    )  # fmt: skip
