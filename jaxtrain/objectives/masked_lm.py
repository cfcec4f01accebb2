"""Masked language modelling (BERT, Devlin et al. 2018, arXiv:1810.04805).

Some tokens of each row are masked, and an encoder (`model.causal=false`) predicts them from both
sides. The host chooses them by (seed, step, row). A batch's targets are its tokens, with weight 1
at masked positions, so that the loss is that of `next_token`.
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
    """Masked language modelling: predicts masked tokens from both sides (BERT)."""

    name: Literal["masked_lm"] = "masked_lm"
    rate: float = Field(
        0.15, gt=0, le=1, description="fraction of a sequence's text tokens to predict"
    )
    random: float = Field(
        0.1,
        ge=0,
        le=0.5,
        description="fraction of these that become a random token instead of <mask>",
    )
    kept: float = Field(0.1, ge=0, le=0.5, description="fraction of these that keep their token")


def make_masked_lm(c: MaskedLMConfig, options: LossOptions) -> Objective:
    """Make the objective: the mean negative log-likelihood of the masked tokens, in nats."""
    return make_next_token(None, options)


def masked_rows(c: MaskedLMConfig, tokenizer: Tokenizer, seed: int) -> Augment:
    """Return a function of (step, first row of the process, row index, row) that masks in place.

    It masks a share `rate` of the row's learned tokens, at least one; never BOS or padding. Raises
    UserError for a tokenizer without `<mask>`.
    """
    mask = special_id(tokenizer, MASK)
    text = np.flatnonzero(tokenizer.token_bytes() > 0).astype(np.int32)

    def change(step: int, first: int, number: int, row: AugmentRow) -> None:
        random = np.random.default_rng((seed, STREAM, step, first + number))
        T = len(row.inputs)
        learned = np.zeros(T, bool)
        for begin, end in row.pieces:
            learned[begin:end] = True
        learned[1:] &= row.weights[:-1] > 0  # weights[t] belongs to token t + 1
        places = np.flatnonzero(learned)
        chosen = random.permutation(places)[: max(1, round(c.rate * len(places)))]
        how = random.random(len(chosen))
        shown = np.where(how < c.random, random.choice(text, len(chosen)), mask)
        row.ids[1:] = row.ids[:-1].copy()  # the targets: the tokens at the same positions
        row.inputs[chosen] = np.where(how >= 1 - c.kept, row.inputs[chosen], shown)
        row.weights[:] = 0
        row.weights[chosen] = 1

    return change
