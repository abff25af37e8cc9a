"""How long the texts of a recipe are, as far as anything on disk says: exact from responses, a bound from prompts.

With neither, the recipe's own numbers and the assumptions of the command line stand in, and whoever prints says so.
"""

from dataclasses import dataclass
from typing import Literal

from drafthead.config import Recipe
from drafthead.data.prompts import read_prompts
from drafthead.data.reading import Said
from drafthead.data.responses import iter_responses
from drafthead.generation.dialogue import Turn, continuation, open_dialogue, prepare
from drafthead.generation.regenerate import is_regenerated, kept_responses
from drafthead.progress import progress_bar
from drafthead.provenance import MANIFEST
from drafthead.stage_plan import PROMPTS, Assumed
from drafthead.target.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Text:
    """Length of one sequence: tokens before the response, of the response, and after it."""

    prompt: int
    response: int
    after: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.response + self.after

    @property
    def rows(self) -> int:
        """Rows that can carry loss: from two before the first generated token on (see drafters.layout)."""
        return self.response + self.after + min(self.prompt, 2) if self.response else 0


@dataclass(frozen=True)
class Texts:
    """The texts of a split, and what their lengths were taken from."""

    split: str
    texts: list[Text]
    known: Literal["responses", "prompts", "nothing"]

    @property
    def exact(self) -> bool:
        return self.known == "responses"

    @property
    def tokens(self) -> int:
        return sum(text.tokens for text in self.texts)

    @property
    def answers(self) -> int:
        """Tokens that the target says."""
        return sum(text.response + text.after for text in self.texts)

    @property
    def mean(self) -> float:
        """Tokens of a sequence."""
        return self.tokens / max(len(self.texts), 1)


def texts_of(recipe: Recipe, split: str, assumed: Assumed) -> Texts:
    """The texts of "train" or "validation", as well as they are known."""
    if (recipe.responses_dir(split) / MANIFEST).exists():
        said = iter_responses(recipe.responses_dir(split))
        texts = [Text(len(r.prompt_ids), len(r.response_ids), len(r.continuation_ids)) for r in said]
        return Texts(split, texts, "responses")
    if (recipe.prompts_dir / MANIFEST).exists():
        return Texts(split, _of_prompts(recipe, split, assumed), "prompts")
    count = recipe.prompts.validation if split == "validation" else conversations(recipe, assumed)
    return Texts(split, [_assumed_text(recipe, split, assumed)] * count, "nothing")


def amount_notes(recipe: Recipe, texts: Texts, assumed: Assumed) -> tuple[str, ...]:
    """What was assumed of a split, a sentence each; nothing once the responses exist."""
    found = []
    if texts.known == "nothing":
        turns = "; a chat of several turns has an answer each" if recipe.responses.turn_by_turn else ""
        found.append(
            f"no prompts yet: {len(texts.texts):,} of {texts.texts[0].prompt:,} tokens with one answer each{turns} "
            "(--prompts, --prompt-tokens)"
        )
    if not texts.exact:
        answer = assumed.answer_tokens
        found.append(
            f"no responses yet: every answer counted with --answer-tokens {answer:,}" if answer else
            f"no responses yet: every answer counted with responses.max_tokens {recipe.responses.max_tokens:,}, an "
            "upper bound (--answer-tokens)"
        )  # fmt: skip
    return tuple(found)


def conversations(recipe: Recipe, assumed: Assumed) -> int:
    """Training conversations, as the recipe or the command line has them."""
    declared = recipe.prompts.max_train or sum(source.train or 0 for source in recipe.prompts.sources or ())
    return assumed.prompts or declared or PROMPTS


def _assumed_text(recipe: Recipe, split: str, assumed: Assumed) -> Text:
    after = continuation(recipe, split)
    answer = min(assumed.answer_tokens or recipe.responses.max_tokens, recipe.responses.max_tokens)
    room = recipe.engine.max_model_len - 1 - after
    return Text(min(assumed.prompt_tokens, room - answer), answer, after)


def _of_prompts(recipe: Recipe, split: str, assumed: Assumed) -> list[Text]:
    tokenizer, prompts = load_tokenizer(recipe, templated=True), read_prompts(recipe.prompts_dir, split)
    if not is_regenerated(recipe, split):
        with progress_bar(len(prompts), "reading answers", "prompt") as bar:
            kept, _ = kept_responses(recipe, tokenizer, prompts, bar)
        return [Text(len(response.prompt_ids), len(response.response_ids)) for response in kept]
    texts: list[Text] = []
    dialogues = [open_dialogue(prompt, recipe.responses.turn_by_turn) for prompt in prompts]
    while dialogues:
        requests, _ = prepare(recipe, tokenizer, split, dialogues)
        texts += [_longest(recipe, split, request, assumed) for request in requests]
        # Counted above with answers of full length; a word stands for them in what is rendered.
        dialogues = [later for request in requests if (later := request.dialogue.after(Said("yes")))]
    return texts


def _longest(recipe: Recipe, split: str, request: Turn, assumed: Assumed) -> Text:
    """A question with the longest answers before it that the engine has room for."""
    after = continuation(recipe, split)
    answer = min(request.max_tokens, assumed.answer_tokens or request.max_tokens)
    room = recipe.engine.max_model_len - 1 - after - answer
    earlier = request.dialogue.turn * (assumed.answer_tokens or recipe.responses.max_tokens)
    return Text(min(len(request.prompt_ids) + earlier, room), answer, after)
