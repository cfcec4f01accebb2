"""A frozen model beside the one that trains: its loss of each label joins a batch (`selective`).

It is a program of its own that runs before the step, on what the step is given; nothing waits for
it on the host, and the step's program has one more array of numbers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from jaxtrain import parallel
from jaxtrain.data import Tokenizer
from jaxtrain.model import Forward, Transformer, cast
from jaxtrain.model.config import check_decoder
from jaxtrain.objectives.base import DeviceBatch
from jaxtrain.runs.saved import load_saved, place_params
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Params


def label_losses(graphdef: nnx.GraphDef, params: Params, batch: DeviceBatch) -> Array:
    """Nats of each label, float32 [B, T]."""
    model: Transformer = nnx.merge(graphdef, params)
    x_BTD = model(batch.tokens_BT, batch.positions_BT, batch.segments_BT, Forward()).states
    return parallel.token_losses(
        x_BTD,
        model.head_DV().astype(x_BTD.dtype),
        batch.targets_BT,
        softcap=model.config.logit_softcap,
        valid_vocab=model.vocab_size,
    )


def make_reference(
    run: str, tokenizer: Tokenizer, mesh: Mesh, dtype: jnp.dtype
) -> Callable[[Any], Any]:
    """Microbatches [A, B, T] -> the same with `reference_BT`, [A, B, T]; dtype: of the compute.

    Raises UserError for a model of another tokenizer, or one that is not causal.
    """
    saved = load_saved(Path(run))
    check_decoder(saved.config.model)
    if saved.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"objective.reference={run}: it was trained with another tokenizer than this run; set "
            f"data.tokenizer.path={saved.tokenizer_dir}"
        )
    params = place_params(saved, mesh)
    params = jax.jit(lambda p: cast(p, saved.specs, dtype))(params)
    losses = jax.jit(
        lambda params, batch: jax.lax.map(lambda b: label_losses(saved.graphdef, params, b), batch)
    )
    return lambda batch: batch._replace(reference_BT=losses(params, batch))
