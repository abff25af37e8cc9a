"""EAGLE-3 and P-EAGLE drafting the slow way, as an engine does it: token by token, one explicit key/value list.

No unrolled tricks: for every root t the list starts with the step-0 entries of indices 0..t of the
document, and every further draft appends one entry. This is the reference of training-time test.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafthead.drafters.batch import tail_layout
from drafthead.drafters.config import ParallelHead
from drafthead.drafters.eagle3.drafter import DraftLayer, DraftModel
from drafthead.drafters.peagle.drafter import PEagleModel


def rms_norm(states: Tensor, norm) -> Tensor:
    return states / (states.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def rotate_one(vector: Tensor, position: int, frequencies: Tensor, factor: float) -> Tensor:
    """Rotate (heads, D) by complex multiplication of paired halves."""
    half = vector.shape[-1] // 2
    pair = torch.complex(vector[..., :half], vector[..., half:])
    turned = pair * torch.polar(torch.full_like(frequencies, factor), position * frequencies)
    return torch.cat([turned.real, turned.imag], dim=-1)


def layer_entry(layer: DraftLayer, state: Tensor, embedding: Tensor):
    """What a layer's attention reads, and the residual, for one position (H,)."""
    if layer.hidden_norm is None:
        return rms_norm(state, layer.input_layernorm), state
    normed = rms_norm(state, layer.hidden_norm)
    mixed = torch.cat([rms_norm(embedding, layer.input_layernorm), normed])
    return mixed, normed if layer.norm_before_residual else state


def attend(queries: Tensor, keys: list[Tensor], values: list[Tensor], sinks: Tensor | None = None) -> Tensor:
    """(heads * D,): one softmax for each head of (heads, D) over a list of (groups, D), and a score without a value."""
    outputs, per_group = [], len(queries) // len(keys[0])
    for head, query in enumerate(queries):
        group = head // per_group
        scores = torch.stack([query @ key[group] for key in keys]) / queries.shape[1] ** 0.5
        weights = scores.softmax(0) if sinks is None else torch.cat([scores, sinks[head, None]]).softmax(0)[:-1]
        outputs.append(sum(w * value[group] for w, value in zip(weights, values, strict=True)))
    return torch.cat(outputs)


def add_mlp(layer, state: Tensor) -> Tensor:
    inner, mlp = rms_norm(state, layer.post_attention_layernorm), layer.mlp
    gated = torch.nn.functional.silu(mlp.gate_proj.weight @ inner) * (mlp.up_proj.weight @ inner)
    return state + mlp.down_proj.weight @ gated


def run_layer(layer: DraftLayer, state, embedding, position, entries, frequencies, factor) -> Tensor:
    """One position through one layer; appends its key and value to `entries`."""
    attention, dim = layer.self_attn, 2 * len(frequencies)
    mixed, residual = layer_entry(layer, state, embedding)
    query = rotate_one((attention.q_proj.weight @ mixed).view(-1, dim), position, frequencies, factor)
    key = rotate_one((attention.k_proj.weight @ mixed).view(-1, dim), position, frequencies, factor)
    entries.append((key, (attention.v_proj.weight @ mixed).view(-1, dim)))
    seen = entries[-attention.window :] if attention.window else entries
    return add_mlp(layer, residual + attention.o_proj.weight @ attend(query, *map(list, zip(*seen, strict=True))))


def combine(model: DraftModel, aux: Tensor) -> Tensor:
    if model.input_norm is not None:
        aux = rms_norm(aux, model.input_norm)
    if model.fc_norm is not None:
        pieces = aux.view(len(model.fc_norm), -1)
        aux = torch.cat([rms_norm(piece, norm) for piece, norm in zip(pieces, model.fc_norm, strict=True)])
    return model.fc.weight @ aux


def naive_unroll(
    model: DraftModel, aux: Tensor, embeddings: Tensor, first_position: int, num_steps: int, handed_on: bool = False
) -> Tensor:
    """All drafts from all roots of one document; P-EAGLE's need no text beyond the token behind the root.

    Args:
        aux: (T, N * H); embeddings: (T, H) of the tokens themselves; first_position: of token 0.

    Returns:
        (K, T, H) normed states, or the features handed on; rows whose input token lies past the end are zero.
    """
    frequencies, factor = model.rope.frequencies.to(aux.dtype), model.rope.factor  # float32, from which both start
    layers = [model.midlayer, *model.layers.values()]
    num_tokens, masked = aux.shape[0], isinstance(model, PEagleModel)
    rows = {}
    for root in range(num_tokens - 1):
        entries = [[] for _ in layers]

        def run(state, embedding, index):
            """All layers at one index; every layer's key and value is appended to its list."""
            for layer, cache in zip(layers, entries, strict=True):  # noqa: B023 - called within this iteration
                state = run_layer(layer, state, embedding, first_position + index, cache, frequencies, factor)
            return state

        # Re-run over every verified token before the root, then draft from it: on the head's own states, or on masks.
        for index in range(root):
            run(combine(model, aux[index]), embeddings[index + 1], index)
        feature = combine(model, aux[root])
        for k in range(num_steps if masked else min(num_steps, num_tokens - 1 - root)):
            if masked and k:
                state = run(combine(model, model.mask_hidden[0]), model.mask_embedding, root + k)
            else:
                state = run(feature, embeddings[root + k + 1], root + k)
            normed = rms_norm(state, model.norm)
            feature = normed if model.shape.head.norm_output else state
            rows[k, root] = feature if handed_on else normed
    missing = torch.zeros(embeddings.shape[-1], dtype=aux.dtype)
    stacked = [[rows.get((k, t), missing) for t in range(num_tokens)] for k in range(num_steps)]
    return torch.stack([torch.stack(row) for row in stacked])


def assert_parity(model, ours, naive, lengths, num_positions, firsts=None) -> None:
    """Packed documents have the states and gradients of each by itself; the gradients too where steps are recomputed.

    Args:
        model: model that both decode with.
        ours: (model, aux, embeddings, positions, layout, K) -> (K, R, H) of the packed documents.
        naive: (model, aux, embeddings, position of token 0, K) -> (K, at most T, H) of one document.
        lengths: lengths of the documents.
        num_positions: K, number of draft positions.
        firsts: first rows with loss of the documents; None: all rows carry loss.
    """
    generator, total = torch.Generator().manual_seed(sum(lengths)), sum(lengths)
    aux = torch.randn(total, 8 * model.shape.num_aux_layers, generator=generator, dtype=torch.float64)
    aux.requires_grad_()
    embeddings = torch.randn(total, 8, generator=generator, dtype=torch.float64)
    layout = tail_layout(lengths, firsts or [0] * len(lengths))
    begins = [3 * i for i in range(len(lengths))]  # documents need not start at position 0
    positions = torch.cat([torch.arange(n) + p for n, p in zip(lengths, begins, strict=True)])
    # Every root that has a next token; step k of one that is no parallel drafter reads k tokens beyond it.
    beyond = torch.arange(num_positions)[:, None] * (not isinstance(model.head, ParallelHead))
    valid = torch.cat([torch.arange(n) < n - 1 - beyond for n in layout.cu_rows.diff().tolist()], dim=1)
    trained = [aux, *(p for n, p in model.named_parameters() if n != "lm_head.weight" and "markov" not in n)]
    parts = [
        naive(model, aux[a:b], embeddings[a:b], p, num_positions)
        for (a, b), p in zip(pairwise(layout.cu_seqlens.tolist()), begins, strict=True)
    ]
    # Rows behind a document's last root, which has no next token.
    padded = [pad(part, (0, 0, 0, n - part.shape[1])) for part, n in zip(parts, lengths, strict=True)]
    expected = torch.cat(padded, dim=1)[:, layout.rows]
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64) * valid[..., None]
    wanted_grads = torch.autograd.grad((expected * weights).sum(), trained, materialize_grads=True)
    grads = []
    for model.recompute in (False, True):
        rows = ours(model, aux, embeddings, positions, layout, num_positions)
        torch.testing.assert_close(rows[valid], expected[valid], rtol=0, atol=1e-9)
        grads.append(torch.autograd.grad((rows * weights).sum(), trained, materialize_grads=True))
    for one, again, other in zip(*grads, wanted_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
        torch.testing.assert_close(again, one, rtol=0, atol=1e-12)
