"""The head as we compute it against the head as vLLM serves it: the same drafts, round by round."""

import pytest
import torch
from safetensors.torch import load_file

from drafthead.data.packing import pack
from drafthead.data.responses import read_responses
from drafthead.data.store import StateStore
from drafthead.data.windows import whole
from drafthead.drafters.eagle3.alignment import valid_positions
from drafthead.drafters.eagle3.model import DraftModel, draft_shape
from drafthead.drafters.replay import empty_acceptance, match_text, replay
from drafthead.drafters.vocabulary import DraftVocabulary
from drafthead.engine.offline import generate, import_vllm, offline_engine
from drafthead.evaluation.workload import speculative_config
from drafthead.generation.harvest import harvest
from drafthead.generation.prompts.splits import make_prompts
from drafthead.generation.regenerate import regenerate
from drafthead.target.pieces import load_pieces, load_target_spec
from drafthead.training.objective import TTTObjective, score
from drafthead.training.setup import frozen_target
from drafthead.training.validate import replayable
from tests.recipes import tiny_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def float32_recipe(tiny_run, tmp_path_factory):
    """Validation texts and states of the target in float32, where no rounding can decide between tokens."""
    root = tmp_path_factory.mktemp("parity")
    (root / "heads").symlink_to(tiny_run.head_dir.parent)
    recipe = tiny_recipe(root, "target.dtype=float32", "prompts.max_train=28", "prompts.validation=24")
    make_prompts(recipe)
    regenerate(recipe)
    harvest(recipe)
    return recipe


def predicted(recipe) -> dict:
    """Prompt id -> replayed rounds of the exported head, computed by the training code."""
    spec = load_target_spec(recipe.target_path)
    tensors = load_file(recipe.head_dir / "model.safetensors")
    vocabulary = DraftVocabulary(tensors.pop("d2t"), tensors.pop("t2d"))
    model = DraftModel(draft_shape(recipe, spec))
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    pieces = load_pieces(recipe.target_path)
    target = frozen_target(pieces, spec, vocabulary, torch.device("cpu"), torch.float32)
    num_drafts = recipe.eval.num_draft_tokens
    objective = TTTObjective(model, num_drafts)
    store = StateStore(recipe.states_dir("validation"))
    rounds = {}
    for i in range(len(store)):
        batch = pack(store, [whole(i, store.tokens(i)[1], num_drafts)]).to(torch.device("cpu"), torch.float32)
        text = replayable(batch.loss_mask)
        valid = valid_positions(text, batch.layout.cu_rows, num_drafts)
        with torch.no_grad():
            scored = score(objective, batch, target, valid, torch.zeros(num_drafts))
        matches = match_text(scored.predictions, target.target_ids, batch.row_ids)
        rounds[batch.ids[0]] = replay(matches, batch.loss_mask)
    return rounds


def served(recipe) -> dict:
    """Prompt id -> (drafts, accepted per position) of vLLM's own counters, and whether the text was the same."""
    responses = read_responses(recipe.responses_dir("validation"))
    params = import_vllm().SamplingParams(temperature=0, max_tokens=recipe.responses.max_tokens, detokenize=False)
    options = {"per_request_spec_decode_metrics": "summary"}
    with offline_engine(recipe, speculative_config=speculative_config(recipe, "eagle3"), **options) as llm:
        outputs = generate(llm, [r.prompt_ids for r in responses], params)
    counted = {}
    for response, output in zip(responses, outputs, strict=True):
        answer = output.outputs[0]
        histogram = answer.spec_decode_metrics.histogram
        accepted = tuple(sum(histogram[k + 1 :]) for k in range(recipe.eval.num_draft_tokens))
        counted[response.id] = (sum(histogram), accepted, list(answer.token_ids) == list(response.response_ids))
    return counted


def test_predicted_rounds_are_the_rounds_vllm_runs(float32_recipe):
    ours, vllm = predicted(float32_recipe), served(float32_recipe)
    assert ours.keys() == vllm.keys()
    assert all(same for _, _, same in vllm.values()), "speculation changed a greedy float32 answer"
    equal = [
        (ours[i].drafts, ours[i].accepted_per_position) == (drafts, accepted)
        for i, (drafts, accepted, _) in vllm.items()
    ]
    assert sum(equal) / len(equal) >= 0.9, f"{sum(equal)} of {len(equal)} answers have identical rounds"

    pooled = sum(ours.values(), start=empty_acceptance(float32_recipe.eval.num_draft_tokens))
    measured = 1 + sum(sum(a) for _, a, _ in vllm.values()) / sum(d for d, _, _ in vllm.values())
    assert pooled.length == pytest.approx(measured, rel=0.02)
    assert pooled.length > 1.3, "a head that is never accepted proves no parity"
