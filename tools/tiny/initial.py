"""Start the target with a copying circuit, so that it can repeat names from the prompt after short training.

A transformer learns to copy by pairing two heads: one stores at each position the token before it, the next
looks up where the current token was seen before and predicts what followed. From random weights that pairing
takes far more tokens than this recipe has. Here it is written into the initial weights: the head of layer 0
attends one position back through its biases, and layers 1 and 3 look up and copy. Training is free to change it.
Where projections have no biases (Qwen3), one direction of the embeddings is the same for all tokens and stands for
them; where queries and keys are normed, their norms have the gain.
Gives up: a plain random start.
Alternative: train far longer; without the circuit no name was copied after 1.3 million tokens.
"""

import torch
from transformers import PreTrainedModel

EMBEDDING_STD = 0.3
MEMORY = 64  # dimensions that hold the previous token, empty in the embeddings
COPY_LAYERS = (1, 3)
FAST_PAIRS = 4  # rotary frequencies quick enough to tell neighbours apart
SLOW_PAIR = 8  # from here on rotary frequencies are slow enough to compare content across the context
POSITION_GAIN = 7.0
STORE_GAIN = 0.6
MATCH_GAIN = 3.0
COPY_GAIN = 1.0
CONSTANT = 2.0  # of every embedding in the direction that stands for biases; the rest has a norm of 3.4
NORM_GAIN = 2.5  # of normed queries and keys
LOGIT_GAIN = 0.25


@torch.no_grad()
def write_copying_circuit(model: PreTrainedModel) -> None:
    """Overwrite embeddings and two heads in each of three layers; everything else stays random."""
    config = model.config
    size = config.hidden_size
    if config.num_key_value_heads != 2 or config.head_dim != 32 or config.num_hidden_layers < 4:
        raise ValueError("the copying circuit needs 2 key heads, head_dim 32 and 4 layers: adapt initial.py")
    basis = torch.linalg.qr(torch.randn(size, size)).Q
    memory, content = basis[:, :MEMORY].T, basis[:, MEMORY:].T
    turn = torch.linalg.qr(torch.randn(size, size)).Q
    codes = torch.randn(config.vocab_size, content.shape[0])
    constant = None if model.model.layers[0].self_attn.k_proj.bias is not None else content[-1]
    if constant is not None:
        codes[:, -1] = 0.0
    embedding = EMBEDDING_STD * codes @ content
    model.model.embed_tokens.weight.copy_(embedding if constant is None else embedding + CONSTANT * constant)
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.fill_(NORM_GAIN)
    # Turned, so that a token's own embedding does not vote for the same token again.
    model.lm_head.weight.copy_(LOGIT_GAIN * embedding @ turn.T)
    for part in range(2):
        rows = slice(32 * part, 32 * part + 32)
        _store_previous(model, part, content[rows], memory[rows], constant)
    for number, layer in enumerate(COPY_LAYERS):
        for part in range(2):
            start = 32 * number + 16 * part
            value = content[(2 * number + part) * 32 :][:32]
            look = slice(start, start + 16)
            _copy(model, layer, part, content[look], memory[look], value, value @ turn.T)


def _store_previous(
    model: PreTrainedModel, part: int, read: torch.Tensor, write: torch.Tensor, constant: torch.Tensor | None
) -> None:
    """Layer 0: attend to the position before, and write its code into the memory dimensions."""
    attention = model.model.layers[0].self_attn
    head = part * attention.num_key_value_groups * 32
    key = part * 32
    pairs = torch.arange(FAST_PAIRS)
    angles = model.model.rotary_emb.inv_freq[:FAST_PAIRS]
    # The score of distance d is a sum of cos(frequency * (d - 1)): largest one position back.
    for projection, rows, values in (
        (attention.k_proj, key + pairs, torch.ones(FAST_PAIRS)),
        (attention.q_proj, head + pairs, angles.cos()),
        (attention.q_proj, head + pairs + 16, -angles.sin()),
    ):
        if constant is None:
            projection.bias[rows] = POSITION_GAIN * values
        else:
            projection.weight[rows] = POSITION_GAIN * values[:, None] * constant
    attention.v_proj.weight[key : key + 32] = read
    attention.o_proj.weight[:, head : head + 32] = STORE_GAIN * write.T


def _copy(
    model: PreTrainedModel,
    layer: int,
    part: int,
    current: torch.Tensor,
    previous: torch.Tensor,
    value: torch.Tensor,
    write: torch.Tensor,
) -> None:
    """Find positions whose stored predecessor is the current token, and copy the token there to the output."""
    attention = model.model.layers[layer].self_attn
    head = part * attention.num_key_value_groups * 32
    key = part * 32
    slow = torch.cat([torch.arange(SLOW_PAIR, 16), torch.arange(16 + SLOW_PAIR, 32)])
    attention.q_proj.weight[head : head + 32] = 0.0
    attention.q_proj.weight[head + slow] = MATCH_GAIN * current
    attention.k_proj.weight[key + slow] = MATCH_GAIN * previous
    attention.v_proj.weight[key : key + 32] = value
    attention.o_proj.weight[:, head : head + 32] = COPY_GAIN * write.T
