"""The head as we compute it against the head as vLLM serves it: the same drafts, round by round."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafthead.artifacts import IDENTITY, begin, read_json
from drafthead.data.packing import Window, pack, whole
from drafthead.data.responses import KIND as RESPONSES
from drafthead.data.responses import part_path, write_part
from drafthead.data.store import StateStore
from drafthead.drafters.base import DraftModule, frozen_copy
from drafthead.drafters.batch import PackedBatch
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import generated_runs, match_text, round_roots
from drafthead.drafters.vocabulary import DraftVocabulary
from drafthead.engine.offline import import_vllm, offline_engine
from drafthead.evaluation.workload import speculative_config
from drafthead.generation.harvest import harvest
from drafthead.generation.regenerate import finish_split
from drafthead.losses.fused import first_drafts
from drafthead.target.pieces import load_pieces
from tests.artifacts import read_responses
from tests.exporting.runs import shape_of
from tests.pipeline.model_runners import accepted

pytestmark = pytest.mark.slow
TEMPERATURES = (0.0, 0.7)


def head_of(recipe) -> tuple[DraftModule, Tensor, Tensor]:
    """The exported head as the training code has it, the target's ids of its drafts, and the embeddings."""
    tensors = load_file(recipe.head_dir / "model.safetensors")
    model = frozen_copy(shape_of(recipe), tensors, torch.device("cpu"), torch.float32)
    ids = DraftVocabulary(tensors["d2t"], tensors["t2d"]).target_ids
    return model, ids, load_pieces(recipe.target_path).embed_tokens.float()


def batches_of(recipe) -> Iterator[tuple[Window, PackedBatch]]:
    """Every validation text by itself."""
    drafter, store = drafter_of(recipe.head), StateStore(recipe.states_dir("validation"))
    for i in range(len(store)):
        window = whole(i, store.tokens(i)[1], drafter)
        yield window, pack(store, [window], drafter).to(torch.device("cpu"), torch.float32)


@pytest.mark.long
def test_both_model_runners_accept_the_same_drafts(tiny_run, tmp_path):
    """V2 is the default on GPUs; its Triton kernels are interpreted."""
    pytest.importorskip("triton")
    found = [accepted(runner, tiny_run.head_dir, tmp_path) for runner in ("V1", "V2")]
    assert found[0] == found[1]
    assert "acceptance length" in found[0]


@pytest.fixture(scope="module")
def recorded(tiny_run) -> dict[float, list[tuple[list[int], list[int]]]]:
    """Temperature -> text of every validation prompt as vLLM generates it with the head, and the root of each round."""
    vllm, recipe = import_vllm(), tiny_run
    prompts = [r.prompt_ids for r in read_responses(recipe.responses_dir("validation"))]
    texts = {f"{t} {i}": (list(ids), []) for t in TEMPERATURES for i, ids in enumerate(prompts)}
    with offline_engine(recipe, speculative_config=speculative_config(recipe, "head")) as llm:
        for name, (ids, _) in texts.items():
            params = vllm.SamplingParams(
                temperature=float(name.split()[0]), max_tokens=recipe.responses.max_tokens, detokenize=False,
                output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
            )  # fmt: skip
            llm.llm_engine.add_request(name, vllm.TokensPrompt(prompt_token_ids=list(ids)), params)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                text, roots = texts[output.request_id]
                # A step verifies the drafts of the root before the newest token; the first one reads the prompt.
                if len(text) > len(output.prompt_token_ids):
                    roots.append(len(text) - 2)
                text += output.outputs[0].token_ids
    return {t: [text for name, text in texts.items() if name.startswith(f"{t} ")] for t in TEMPERATURES}


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_replay_has_the_rounds_that_vllm_ran(tiny_run, recorded, temperature, tmp_path):
    """Sampled too: a rejected draft is never drawn again, so the text tells what was accepted."""
    texts = recorded[temperature]
    recipe = tiny_run.model_copy(update={"output_dir": str(tmp_path)}).changed("states", backend="transformers")
    for split in ("train", "validation"):
        source = tiny_run.responses_dir(split)
        begin(recipe.responses_dir(split), RESPONSES, read_json(source / IDENTITY) | {"recorded": temperature})
        responses = read_responses(source)[:1]  # of the training split, which is not read
        if split == "validation":
            pairs = list(zip(read_responses(source), texts, strict=True))
            unchanged = all(text[len(r.prompt_ids) :] == r.response_ids for r, (text, _) in pairs)
            assert unchanged or temperature, "speculation changed a greedy float32 answer"
            responses = [
                replace(r, response_ids=text[len(r.prompt_ids) :], continuation_ids=[]) for r, (text, _) in pairs
            ]
        write_part(part_path(recipe.responses_dir(split), 0), responses)
        finish_split(recipe.responses_dir(split))
    harvest(recipe)

    model, ids, embeddings = head_of(tiny_run)
    K = recipe.eval.num_draft_tokens  # served; the head was trained for one more
    same = total = kept = 0
    for (text, theirs), (window, batch) in zip(texts, batches_of(recipe), strict=True):
        assert batch.input_ids.tolist() == text
        batch = replace(batch, scored=batch.scored[:K])
        rows = model.head_rows(batch, embeddings, K)
        drafts = first_drafts(rows, model.head_weight).view(batch.scored.shape)
        agreeing = match_text(drafts, ids, batch.row_ids) & batch.scored
        counts = agreeing.long().cumprod(0).sum(0).tolist()  # (R,) accepted drafts of every root
        ours = []
        for run in generated_runs(batch.loss_mask):
            # Of a text that begins before the window, the first row is the first root.
            roots = round_roots(counts, slice(max(run.start, 1), run.stop))
            ours += [root + window.first_row for root in roots if batch.scored[0, root]]
            kept += sum(counts[root] for root in roots)
        same, total = same + (ours == theirs), total + 1
    rounds = sum(len(roots) for _, roots in texts)
    assert rounds > 300
    assert kept > 0.3 * rounds, "a head that is never accepted proves no parity"
    assert same / total >= 0.9, f"{same} of {total} texts have the rounds that vllm ran, token for token"
