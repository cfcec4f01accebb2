"""Frozen reference and teacher models, whose outputs are added to the batch.

The frozen model is a separate program that runs on the batch before each step; the host does not
wait for it. The step gets a few more arrays: losses of labels (`selective`), or a teacher's last
hidden states and head (`distill`).
"""

from collections.abc import Callable
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
from jaxtrain.objectives.distill import TaughtBatch, Teacher
from jaxtrain.parallel import constrain
from jaxtrain.runs.saved import Saved, load_saved, place_params
from jaxtrain.settings import UserError
from jaxtrain.storage.location import local
from jaxtrain.weights.params import Params


def label_losses(graphdef: nnx.GraphDef, params: Params, batch: DeviceBatch) -> Array:
    """Return the loss of each label in nats, float32 [B, T]."""
    model: Transformer = nnx.merge(graphdef, params)
    x_BTD = model(batch.tokens_BT, batch.positions_BT, batch.segments_BT, Forward()).states
    return parallel.token_losses(
        x_BTD,
        model.head_DV().astype(x_BTD.dtype),
        batch.targets_BT,
        softcap=model.config.logit_softcap,
        valid_vocab=model.vocab_size,
    )


def load_frozen(
    key: str, run: str, tokenizer: Tokenizer, mesh: Mesh, dtype: jnp.dtype
) -> tuple[Saved, Params]:
    """Load a saved model, with its weights on the mesh in `dtype`; key: of the configuration.

    Raises UserError for a model with another tokenizer, or one that is not causal.
    """
    saved = load_saved(local(run))
    check_decoder(saved.config.model)
    if saved.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{key}={run}: its tokenizer differs from this run's; set "
            f"data.tokenizer.path={saved.tokenizer_dir}"
        )
    params = place_params(saved, mesh)
    return saved, jax.jit(lambda p: cast(p, saved.specs, dtype))(params)


def make_reference(
    run: str, tokenizer: Tokenizer, mesh: Mesh, dtype: jnp.dtype
) -> Callable[[Any], Any]:
    """Return a function that adds `reference_BT` [A, B, T] to microbatches; dtype: for compute."""
    saved, params = load_frozen("objective.reference", run, tokenizer, mesh, dtype)
    losses = jax.jit(
        lambda params, batch: jax.lax.map(lambda b: label_losses(saved.graphdef, params, b), batch)
    )
    return lambda batch: batch._replace(reference_BT=losses(params, batch))


def make_teacher(
    run: str, tokenizer: Tokenizer, mesh: Mesh, dtype: jnp.dtype
) -> Callable[[Any], TaughtBatch]:
    """Return a function that adds a teacher's hidden states and head to microbatches [A, B, T]."""
    saved, params = load_frozen("objective.teacher", run, tokenizer, mesh, dtype)
    cap = saved.config.model.logit_softcap

    @jax.jit
    def taught(params: Params, batch: DeviceBatch) -> Teacher:
        model: Transformer = nnx.merge(saved.graphdef, params)

        def states(one: DeviceBatch) -> Array:
            return model(one.tokens_BT, one.positions_BT, one.segments_BT, Forward()).states

        states_ABTE = jax.lax.map(states, batch)
        head_EV = model.head_DV().astype(states_ABTE.dtype)
        states_ABTE = constrain(states_ABTE, None, "batch", "tokens", None)
        return Teacher(states_ABTE, head_EV, None if cap is None else jnp.float32(cap))

    return lambda batch: TaughtBatch(
        batch.tokens_BT, batch.targets_BT, batch.weights_BT, batch.segments_BT,
        batch.positions_BT, taught(params, batch),
    )  # fmt: skip
