"""A conversation that is being answered turn by turn, and the one question of it that comes next.

Each answer of the target is one stored sequence: prompt as the engine read it, then the answer. A later turn's prompt
is rendered anew from the messages, as a server does it, and is not the tokens of the turns before: Harmony drops the
analysis of earlier answers, other templates move or trim text. One sequence for the whole chat would therefore hold
tokens that no engine ever read in that place. What the exact form costs is that a chat's beginning is stored, and its
states are harvested, once per turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from drafthead.data.prompts import Prompt
from drafthead.data.reading import ParsedResponse

Message = dict[str, Any]


@dataclass(frozen=True)
class Dialogue:
    """A conversation up to the question at hand.

    Attributes:
        prompt: as it was drawn, with all its questions.
        asked: messages up to the question at hand.
        waiting: what the user says after each further answer.
        turn: number of the question, from 0.
    """

    prompt: Prompt
    asked: tuple[Message, ...]
    waiting: tuple[tuple[Message, ...], ...] = ()
    turn: int = 0

    @property
    def id(self) -> str:
        """Of the answer: the prompt's id, with the turn where the conversation has several (1 is the first)."""
        return f"{self.prompt.id}-{self.turn + 1}" if self.turn or self.waiting else self.prompt.id

    @property
    def question(self) -> Prompt:
        """What is to be rendered."""
        return replace(self.prompt, messages=self.asked)

    @property
    def turns_left(self) -> int:
        """Answers to come, this one included."""
        return 1 + len(self.waiting)

    def after(self, said: ParsedResponse) -> "Dialogue | None":
        """The next question, with this answer in its history; None at the end."""
        if not self.waiting:
            return None
        history = (*self.asked, said.message(), *self.waiting[0])
        return replace(self, asked=history, waiting=self.waiting[1:], turn=self.turn + 1)


def open_dialogue(prompt: Prompt, turn_by_turn: bool) -> Dialogue:
    """A conversation at its first question, or at its last one with the history of the data.

    Tool results answer the calls of whoever made them, so a conversation with tools in it keeps its history.
    """
    used_tools = any(m["role"] == "tool" or m.get("tool_calls") for m in prompt.messages)
    if prompt.prompt_ids is not None or used_tools or not turn_by_turn:
        return Dialogue(prompt, prompt.messages)
    first, *later = _questions(prompt.messages)
    return Dialogue(prompt, first, tuple(later))


def _questions(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """What is said before each answer; an assistant's words before the first question stay where they are.

    Of  s u1 a1 u2 a2 a3 u3  that is  [s u1] [u2] [u3].
    """
    questions: list[list[Message]] = [[]]
    asked = False
    for message in messages:
        if message["role"] != "assistant":
            questions[-1].append(message)
            asked = asked or message["role"] == "user"
        elif not asked:
            questions[-1].append(message)
        elif questions[-1]:
            questions.append([])
    return [tuple(question) for question in questions]
