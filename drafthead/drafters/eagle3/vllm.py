"""EAGLE-3 heads as vLLM 0.32 reads them: config.json and names of tensors, in both directions.

Every key whose default differs between layouts or model runners is written explicitly. Layouts met in public: plain
files (nvidia, lmsys, nebius, yuhuili) with layer ids at the top level, nested, or nowhere; and the speculators layout
(Red Hat), whose config.json names the target, so that `vllm serve HEAD` needs nothing else.
"""

import re
from typing import ClassVar

from torch import Tensor

from drafthead.drafters.base import DraftShape
from drafthead.drafters.vllm import Config, HeadFiles, decoder_config, refuse_other, served_decoder

TARGET_DEFAULT = "the target's default"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# The first layer's name in a checkpoint and in each layout; vLLM reads both, other tools their own.
_FIRST_LAYER = {"vllm": "midlayer.", "speculators": "layers.0."}
# Copies of the target that some trainers store in the head, for training only.
_OF_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight")


class Eagle3Files(HeadFiles):
    """Files of EAGLE-3 heads.

    Attributes:
        SPECULATORS: the algorithm's and the architecture's name in the speculators layout.
        BESIDE_LAYER: in that layout vLLM builds the draft's config from `transformer_layer_config`, then copies these
            keys from beside it, with its own defaults (None: not copied). The number of aux layers and `eagle_config`
            are not among them: a head with another number of aux layers than three loads only when both stand inside.
    """

    METHOD = TYPE = "eagle3"
    OWN: ClassVar[dict[str, str]] = {name: name for name in _NORMS}
    SWAPPABLE = True
    UNREAD = re.compile(rf"{HeadFiles.UNREAD.pattern}|input_norm\.|mask_hidden$|layers\.[1-9]\d*\.hidden_norm\.")
    ALGORITHM = "EAGLE-3"
    ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel")
    SPECULATORS = ("eagle3", "Eagle3DraftModel")
    BESIDE_LAYER: ClassVar[Config] = {
        "draft_vocab_size": None, "target_hidden_size": None, "norm_before_residual": True, "norm_before_fc": False,
        "fc_norm": False, "norm_output": False, LAYER_IDS: None,
    }  # fmt: skip

    def plain_config(self, shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
        norms = {name: getattr(shape.head, name) for name in _NORMS}
        ids = list(aux_layer_ids)
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **decoder_config(shape, dtype),
            **norms,
            "num_aux_hidden_states": len(ids),
            # Model runner V2 reads the ids at the top level only, V1 takes the nested ones where there are none.
            LAYER_IDS: ids,
            "eagle_config": {LAYER_IDS: ids, "use_aux_hidden_state": True, "norm_before_fc": norms["norm_before_fc"]},
        }

    def speculators_config(self, config: Config, num_speculative_tokens: int, verifier: Config) -> Config:
        proposal = {
            "proposal_type": "greedy", "speculative_tokens": num_speculative_tokens, "accept_tolerance": 0.0,
            "verifier_accept_k": 1,
        }  # fmt: skip
        algorithm, architecture = self.SPECULATORS
        beside = ("architectures", "dtype", *self.BESIDE_LAYER)
        return {
            "architectures": [architecture],
            "speculators_model_type": algorithm,
            "dtype": config["dtype"],
            **{key: config[key] for key in self.BESIDE_LAYER},
            "tie_word_embeddings": False,
            "transformer_layer_config": {key: value for key, value in config.items() if key not in beside},
            "speculators_config": {
                "algorithm": algorithm,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": verifier,
            },
        }

    def plain_form(self, config: Config) -> Config:
        if "speculators_model_type" not in config and "speculators_config" not in config:
            return config
        named, (algorithm, _) = config.get("speculators_model_type"), self.SPECULATORS
        if named != algorithm:
            raise ValueError(f"speculators_model_type {named!r} is not {algorithm}")
        beside = {key: config.get(key, default) for key, default in self.BESIDE_LAYER.items()}
        return config["transformer_layer_config"] | {key: value for key, value in beside.items() if value is not None}

    def served_values(self, config: Config) -> Config:
        plain = self.plain_form(config)
        nested = plain.get("eagle_config") or {}
        refuse_other(nested, use_aux_hidden_state=True)
        ids, nested_ids = plain.get(LAYER_IDS), nested.get(LAYER_IDS)
        return {
            **served_decoder(plain),
            **{name: bool(plain.get(name, False)) for name in _NORMS},
            "norm_before_fc": bool(nested.get("norm_before_fc", plain.get("norm_before_fc", False))),
            # fc is sized by the count, else by the nested ids, else for three.
            "num_aux_hidden_states": plain.get("num_aux_hidden_states") or len(nested_ids or range(3)),
            LAYER_IDS: _ascending(ids),
            f"eagle_config.{LAYER_IDS}": _ascending(ids or nested_ids),
        }

    def boundaries(self, served: Config, num_layers: int, layer_ids_are: str | None) -> list[int]:
        """config.json does not state how it counts: vLLM and this project count boundaries (id k is the state after k
        blocks), SGLang and files written for it blocks from 0, one less."""
        layer_ids, default = served[f"eagle_config.{LAYER_IDS}"], [2, num_layers // 2, num_layers - 3]
        if layer_ids == TARGET_DEFAULT:
            return default
        ids = [int(i) for i in layer_ids]
        if layer_ids_are is None and ids == [i - 1 for i in default]:
            raise ValueError(
                f"aux layers {ids} are one below the usual {default}: probably blocks counted from 0. "
                "State which they are: --layer-ids-are blocks, or --layer-ids-are boundaries"
            )
        return [i + 1 for i in ids] if layer_ids_are == "blocks" else ids

    def exported_tensors(
        self, weights: dict[str, Tensor], shape: DraftShape, dtype: str, layout: str = "vllm"
    ) -> dict[str, Tensor]:
        written = super().exported_tensors(weights, shape, dtype)
        return {name.replace(_FIRST_LAYER["vllm"], _FIRST_LAYER[layout]): tensor for name, tensor in written.items()}

    def checkpoint_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        of_head = {
            name: tensor for name, tensor in super().checkpoint_tensors(tensors).items() if name not in _OF_TARGET
        }
        return {
            name.replace(_FIRST_LAYER["speculators"], _FIRST_LAYER["vllm"]): tensor for name, tensor in of_head.items()
        }


def _ascending(ids: list[int] | None) -> list[int] | str:
    return sorted(set(ids)) if ids else TARGET_DEFAULT
