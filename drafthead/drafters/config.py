"""The parts of the recipe's head section that draft models share: vocabulary, size of blocks, mask token."""

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from drafthead.section import Section


class HeadConfig(Section):
    """The draft model's shape. Hidden size, vocabulary and RoPE are the target's."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = frozenset()  # fields that change how a head is trained, not what it is

    type: str  # which drafter; see drafters.registry
    # How many target tokens the head can propose: a number, or as many as make up a share of the generated tokens.
    draft_vocab_size: int = Field(default=0, ge=0)  # 0: chosen by coverage
    coverage: float | None = Field(default=None, gt=0, le=1)
    num_layers: int = Field(default=1, gt=0)
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, le=256, multiple_of=8)  # as flash attention wants it, in training and in vLLM
    sliding_window: int | None = Field(default=None, gt=0)  # tokens that every layer attends to; None: all

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"head.num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"head.num_key_value_heads {self.num_key_value_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < (least := self.num_positions + 2):
            raise ValueError(
                f"head.sliding_window {self.sliding_window} leaves {self.num_positions} draft positions no token of "
                f"the text; give at least {least}, or leave it out"
            )
        if bool(self.draft_vocab_size) == (self.coverage is not None):
            raise ValueError(
                f"head.draft_vocab_size {self.draft_vocab_size} and head.coverage {self.coverage}: set exactly one; "
                "with head.coverage=0.98 leave head.draft_vocab_size out, or set it to 0"
            )
        return self

    @property
    def num_positions(self) -> int:
        """K: draft positions that training covers; no more can be served as predicted."""
        raise NotImplementedError

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse tokens that the target does not have.

        Args:
            vocab_size: vocabulary size of the target.

        Raises:
            ValueError: the head has more draft tokens, or its mask token lies beyond.
        """
        if self.draft_vocab_size > vocab_size:
            raise ValueError(
                f"head.draft_vocab_size {self.draft_vocab_size} exceeds the target's vocabulary of {vocab_size}: lower "
                "it"
            )

    def architecture(self) -> dict[str, Any]:
        """What decides the weights and their arithmetic, as JSON values: equal for heads that can stand in for each
        other."""
        return self.model_dump(mode="json", exclude=set(self.TRAINING_ONLY))

    def sized(self, draft_vocab_size: int) -> Self:
        """The head with the draft vocabulary it got: unchanged unless its size was chosen by coverage."""
        return self if self.coverage is None else self.model_copy(update={"draft_vocab_size": draft_vocab_size})


class ParallelHead(HeadConfig):
    """What heads that fill several draft positions in one pass have beyond that."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = frozenset({"num_draft_positions"})

    mask_token_id: int = Field(ge=0)  # stands for the tokens that are not known yet: one that no text contains
    num_draft_positions: int = Field(default=7, gt=0)  # K

    def check_vocabulary(self, vocab_size: int) -> None:
        super().check_vocabulary(vocab_size)
        if self.mask_token_id >= vocab_size:
            raise ValueError(
                f"head.mask_token_id {self.mask_token_id} is not below the target's vocabulary of {vocab_size}; choose "
                "a token that the tokenizer reserves"
            )

    @property
    def num_positions(self) -> int:
        return self.num_draft_positions
