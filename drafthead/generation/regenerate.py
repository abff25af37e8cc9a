"""The target answers the training and validation prompts, so that a head learns the text it will be asked to draft.

Training prompts are answered at the recipe's temperature, validation prompts greedily and K tokens past the stop,
because acceptance is replayed over the target's own T = 0 text (K = train.num_ttt_steps). A part is the unit of
work: a fixed slice of the prompts, skipped when present. Effort and seed of a prompt follow from responses.seed
and its id alone. Given up: the same text on other hardware or another batch; bf16 sums depend on both.

Left out and counted: prompts that leave no room in engine.max_model_len, and prompts that cannot be rendered for
this target (drafthead/data/rendering.py). A chat template that writes the date (gpt-oss) makes prompts of different
days differ; the manifest says when it was made. Pre-tokenised prompts are read as they are: the reasoning effort
noted with their responses was drawn but is not in them.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafthead.config import Recipe
from drafthead.data.prompts import KIND as PROMPTS
from drafthead.data.prompts import Prompt, read_prompts
from drafthead.data.rendering import CONTROL_TOKEN as CONTROL_TOKEN  # a reason beside NO_ROOM
from drafthead.data.rendering import UnrenderableError, renderer
from drafthead.data.responses import KIND, Response, part_path, read_responses, write_part
from drafthead.models.target import TargetSpec, check_tap_ids, load_target_spec, target_identity
from drafthead.progress import progress_bar
from drafthead.provenance import begin, digest, finish, reference, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM

SPLITS = ("train", "validation")
NO_ROOM = "no room for a response in engine.max_model_len"


@dataclass(frozen=True)
class Part:
    """A unit of work.

    Attributes:
        split: "train" or "validation".
        path: where the part is written.
        prompts: the slice of the split that it answers.
    """

    split: str
    path: Path
    prompts: Sequence[Prompt]


@dataclass(frozen=True)
class Request:
    """One prompt as the engine gets it.

    Attributes:
        prompt: what is asked.
        prompt_ids: chat template applied.
        max_tokens: room for the response.
        effort: reasoning effort.
        seed: sampling seed.
    """

    prompt: Prompt
    prompt_ids: list[int]
    max_tokens: int
    effort: str
    seed: int


def regenerate(recipe: Recipe) -> None:
    """Make the responses artefacts of both splits; finished parts are kept, and no engine starts when all are.

    Raises:
        ArtefactError: there are no prompts, or a directory holds responses made from something else.
        FileNotFoundError: the target is missing.
        ValueError: the target does not fit the recipe, or no prompt of a split can be answered.
    """
    spec = load_target_spec(recipe.target_path, recipe.target.revision, recipe.target.trust_remote_code)
    check_tap_ids(spec, recipe.target.tap_ids)
    prompts = require(recipe.prompts_dir, PROMPTS, "python data_gen/prompts.py RECIPE")
    unfinished = [
        split
        for split in SPLITS
        if not begin(recipe.responses_dir(split), KIND, _identity(recipe, spec, prompts, split))
    ]
    if not unfinished:
        return
    parts = {split: list_parts(recipe, split) for split in unfinished}
    missing = [part for split in unfinished for part in parts[split] if not part.path.exists()]
    tokenizer = load_tokenizer(recipe)
    if missing:
        answer_parts(recipe, tokenizer, missing)
    for split in unfinished:
        _finish_split(recipe, tokenizer, split)


def list_parts(recipe: Recipe, split: str) -> list[Part]:
    """The parts of a split, in order."""
    prompts, size = read_prompts(recipe.prompts_dir, split), recipe.responses.prompts_per_part
    directory = recipe.responses_dir(split)
    return [
        Part(split, part_path(directory, i), prompts[start : start + size])
        for i, start in enumerate(range(0, len(prompts), size))
    ]


def answer_parts(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", parts: Sequence[Part]) -> None:
    """Answer the prompts of `parts` with one engine and write each part as it is done."""
    from drafthead.serving.engine import offline_engine  # vLLM takes seconds to import

    started, tokens = time.monotonic(), 0
    total = sum(len(part.prompts) for part in parts)
    engine = offline_engine(recipe, seeded=True, log_stats=False)
    with engine as llm, progress_bar(total, "regenerating", "prompt") as bar:
        for part in parts:
            requests, skipped = prepare(recipe, tokenizer, part.split, part.prompts)
            bar.update(len(skipped))
            responses = _answer(recipe, llm, tokenizer, part.split, requests, bar)
            write_part(part.path, responses)
            tokens += sum(len(response.response_ids) for response in responses)
    print(f"generated {tokens:,} tokens at {tokens / (time.monotonic() - started):,.0f} tokens/s, start included")


def prepare(
    recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", split: str, prompts: Sequence[Prompt]
) -> tuple[list[Request], dict[str, str]]:
    """Tokenise prompts; those that cannot be answered come back as prompt id -> reason."""
    requests: list[Request] = []
    skipped: dict[str, str] = {}
    render = renderer(tokenizer)
    for prompt in prompts:
        effort, seed = draw(recipe, prompt.id)
        try:
            prompt_ids = render(prompt, effort)
        except UnrenderableError as error:
            skipped[prompt.id] = error.reason
            continue
        # One token stays free: an engine never reads its own last token, and the harvest generates one more.
        room = recipe.engine.max_model_len - 1 - len(prompt_ids) - _continuation(recipe, split)
        if room < 1:
            skipped[prompt.id] = NO_ROOM
            continue
        requests.append(Request(prompt, prompt_ids, min(room, recipe.responses.max_tokens), effort, seed))
    return requests, skipped


def draw(recipe: Recipe, prompt_id: str) -> tuple[str, int]:
    """Reasoning effort and sampling seed of a prompt, from responses.seed and the prompt's id alone."""
    number = int(digest([recipe.responses.seed, prompt_id])[:12], 16)
    efforts = recipe.responses.reasoning_efforts
    return efforts[number % len(efforts)], (number >> 8) % 2**31


def load_tokenizer(recipe: Recipe) -> "PreTrainedTokenizerBase":
    """The target's tokenizer.

    Raises:
        ValueError: it has no chat template.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        recipe.target_path, revision=recipe.target.revision, trust_remote_code=recipe.target.trust_remote_code
    )
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {recipe.target.path} has no chat template; a head must be trained on templated prompts, "
            "use the instruction-tuned checkpoint"
        )
    return tokenizer


def _answer(
    recipe: Recipe, llm: "LLM", tokenizer: "PreTrainedTokenizerBase", split: str, requests: Sequence[Request], bar: Any
) -> list[Response]:
    from vllm import SamplingParams

    from drafthead.serving.engine import generate

    temperature = recipe.responses.temperature if split == "train" else 0.0
    params = [
        SamplingParams(temperature=temperature, seed=r.seed, max_tokens=r.max_tokens, detokenize=False)
        for r in requests
    ]
    answers = [output.outputs[0] for output in generate(llm, [r.prompt_ids for r in requests], params, bar)]
    continuations: list[list[int]] = [[] for _ in requests]
    if count := _continuation(recipe, split):
        texts = [[*r.prompt_ids, *a.token_ids] for r, a in zip(requests, answers, strict=True)]
        beyond = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        continuations = [list(output.outputs[0].token_ids) for output in generate(llm, texts, beyond)]
    return [
        Response(
            id=request.prompt.id,
            category=request.prompt.category,
            prompt_ids=request.prompt_ids,
            response_ids=list(answer.token_ids),
            continuation_ids=continuation,
            text=str(tokenizer.decode(list(answer.token_ids), skip_special_tokens=False)),
            finish_reason=str(answer.finish_reason),
            temperature=temperature,
            reasoning_effort=request.effort,
            seed=request.seed,
        )
        for request, answer, continuation in zip(requests, answers, continuations, strict=True)
    ]


def _continuation(recipe: Recipe, split: str) -> int:
    return recipe.train.num_ttt_steps if split == "validation" else 0


def _identity(recipe: Recipe, spec: TargetSpec, prompts: dict[str, Any], split: str) -> dict[str, Any]:
    settings = recipe.responses.model_dump()
    if split == "validation":
        settings["temperature"] = 0.0
    return {
        "split": split,
        "prompts": reference(prompts),
        "target": target_identity(recipe, spec),
        "dtype": recipe.target.dtype,
        "settings": settings,
        "continuation_tokens": _continuation(recipe, split),
        "max_model_len": recipe.engine.max_model_len,
    }


def _finish_split(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", split: str) -> None:
    directory = recipe.responses_dir(split)
    prompts, responses = read_prompts(recipe.prompts_dir, split), read_responses(directory)
    answered = {response.id for response in responses}
    _, skipped = prepare(recipe, tokenizer, split, [prompt for prompt in prompts if prompt.id not in answered])
    if not responses:
        raise ValueError(f"no {split} prompt could be answered: {dict(Counter(skipped.values()))}")
    counts = {
        "responses": len(responses),
        "skipped": dict(Counter(skipped.values())),
        "prompt_tokens": sum(len(r.prompt_ids) for r in responses),
        "response_tokens": sum(len(r.response_ids) for r in responses),
    }
    finish(directory, counts)
