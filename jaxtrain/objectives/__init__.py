"""Objectives: (model, params, batch, step, key) -> sums of losses. One file each, and one table.

Optimizers are in `optim/`; `train/step.py` uses the sums. To add an objective, write a file with
its configuration and its factory, and add it to `OBJECTIVES` and `ObjectiveConfig`.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from jaxtrain.data import Tokenizer
from jaxtrain.data.batches.augment import Augment
from jaxtrain.objectives.base import LossOptions, Objective, StepBatch
from jaxtrain.objectives.distill import DistillConfig, make_distill
from jaxtrain.objectives.dpo import DPOConfig, dpo_loss
from jaxtrain.objectives.ipo import IPOConfig, ipo_loss
from jaxtrain.objectives.kto import KTOConfig, kto_loss, kto_reference_point
from jaxtrain.objectives.masked_lm import MaskedLMConfig, make_masked_lm, masked_rows
from jaxtrain.objectives.mtp import MTPConfig, make_mtp
from jaxtrain.objectives.multi_token import MultiTokenConfig, make_multi_token
from jaxtrain.objectives.next_token import NEXT_TOKEN, NextTokenConfig, make_next_token
from jaxtrain.objectives.orpo import ORPOConfig, orpo_loss
from jaxtrain.objectives.preference import PreferenceMethod, answer_logps, make_preference
from jaxtrain.objectives.prefix_token import PrefixTokenConfig, make_prefix_token
from jaxtrain.objectives.sampled_softmax import SampledSoftmaxConfig, make_sampled_softmax
from jaxtrain.objectives.selective import SelectiveConfig, make_selective

ObjectiveConfig = Annotated[
    NextTokenConfig
    | MultiTokenConfig
    | MTPConfig
    | PrefixTokenConfig
    | SampledSoftmaxConfig
    | SelectiveConfig
    | DistillConfig
    | MaskedLMConfig
    | DPOConfig
    | IPOConfig
    | ORPOConfig
    | KTOConfig,
    Field(discriminator="name"),
]
PREFERENCES: dict[str, PreferenceMethod] = {
    "dpo": PreferenceMethod(dpo_loss),
    "ipo": PreferenceMethod(ipo_loss),
    "orpo": PreferenceMethod(orpo_loss, has_reference=False),
    "kto": PreferenceMethod(kto_loss, is_labelled=True, share=kto_reference_point),
}
OBJECTIVES: dict[str, Callable[[Any, LossOptions], Objective]] = {
    "next_token": make_next_token,
    "multi_token": make_multi_token,
    "mtp": make_mtp,
    "prefix_token": make_prefix_token,
    "sampled_softmax": make_sampled_softmax,
    "selective": make_selective,
    "distill": make_distill,
    "masked_lm": make_masked_lm,
    **dict.fromkeys(PREFERENCES, lambda c, options: make_preference(c, PREFERENCES[c.name])),
}

# Changes of token rows by an objective, made as rows are read, in training and in validation.
ROW_CHANGES: dict[str, Callable[[Any, Tokenizer, int], Augment]] = {"masked_lm": masked_rows}


def make_row_change(c: ObjectiveConfig, tokenizer: Tokenizer, seed: int) -> Augment | None:
    """Return the objective's change of token rows; None for most objectives. Raises UserError if
    the tokenizer lacks a special token."""
    return ROW_CHANGES[c.name](c, tokenizer, seed) if c.name in ROW_CHANGES else None


def make_objective(c: ObjectiveConfig, options: LossOptions = LossOptions()) -> Objective:  # noqa: B008
    """Make the objective of a configuration."""
    return OBJECTIVES[c.name](c, options)


__all__ = [
    "NEXT_TOKEN", "OBJECTIVES", "PREFERENCES", "LossOptions", "NextTokenConfig", "Objective",
    "ObjectiveConfig", "StepBatch", "answer_logps", "make_objective", "make_row_change",
]  # fmt: skip
