"""Masked language modelling (BERT, Devlin et al. 2018, arXiv:1810.04805).

Some tokens of each row are hidden, and an encoder (`model.causal=false`) predicts them from both
sides. Which ones is decided on the host, by (seed, step, row) alone: the targets of a batch are the
tokens themselves, with weight 1 where they are hidden, so that the loss is that of `next_token`.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from jaxtrain.data import Tokenizer
from jaxtrain.data.batches.augment import MASK, STREAM, Augment, AugmentRow, special_id
from jaxtrain.objectives.base import LossOptions, Objective
from jaxtrain.objectives.next_token import make_next_token
from jaxtrain.settings import Settings


class MaskedLMConfig(Settings):
    """Hidden tokens, predicted from both sides."""

    name: Literal["masked_lm"] = "masked_lm"
    rate: float = Field(0.15, gt=0, le=1, description="share of a row's text tokens to predict")
    random: float = Field(
        0.1, ge=0, le=0.5, description="share of them that become a random token, not <mask>"
    )
    kept: float = Field(0.1, ge=0, le=0.5, description="share of them that stay as they are")


def make_masked_lm(c: MaskedLMConfig, options: LossOptions) -> Objective:
    """The mean negative log-likelihood of the hidden tokens, in nats."""
    return make_next_token(None, options)


def masked_rows(c: MaskedLMConfig, tokenizer: Tokenizer, seed: int) -> Augment:
    """(step, first row of the process, which, row): hides tokens of a row in place.

    Hidden are `rate` of its learned tokens, one at least; BOS and padding never. UserError for a
    tokenizer without `<mask>`.
    """
    mask = special_id(tokenizer, MASK)
    text = np.flatnonzero(tokenizer.token_bytes() > 0).astype(np.int32)

    def change(step: int, first: int, number: int, row: AugmentRow) -> None:
        random = np.random.default_rng((seed, STREAM, step, first + number))
        T = len(row.inputs)
        learned = np.zeros(T, bool)
        for begin, end in row.pieces:
            learned[begin:end] = True
        learned[1:] &= row.weights[:-1] > 0  # weights[t] is that of token t + 1
        places = np.flatnonzero(learned)
        chosen = random.permutation(places)[: max(1, round(c.rate * len(places)))]
        how = random.random(len(chosen))
        shown = np.where(how < c.random, random.choice(text, len(chosen)), mask)
        row.ids[1:] = row.ids[:-1].copy()  # the targets: the tokens at the same places
        row.inputs[chosen] = np.where(how >= 1 - c.kept, row.inputs[chosen], shown)
        row.weights[:] = 0
        row.weights[chosen] = 1

    return change
