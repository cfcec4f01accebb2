"""Stochastic depth: a training step skips some layers (Huang et al. 2016, arXiv:1603.09382).

Layer i of L, counted from 1, is skipped with probability i / L x `model.stochastic_depth`; what a
layer adds is divided by the probability that it is kept, so that evaluation uses all layers as
they are. A skipped layer costs no time: the choice is a branch of the program, one draw for all
rows of a microbatch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.fused_ops import Stream

Run = Callable[[Stream, Any], tuple[Stream, Any]]


def keep_probabilities(c: ResolvedModel) -> np.ndarray:
    """[L], falling linearly from 1 - rate / L to 1 - rate."""
    return 1 - c.stochastic_depth * np.arange(1, c.depth + 1, dtype=np.float32) / c.depth


def skippable(run: Run, key: Array, pick: Callable[[Any], dict[str, Any]]) -> Run:
    """`run(stream, source)` of a layer, or the stream as it came; keys and values are dropped.

    key: of the step. pick: of a source, the layer's `index` and its probability `keep`.
    """

    def kept(stream: Stream, source: Any) -> Stream:
        out, keep = run(stream, source)[0], pick(source)["keep"]
        added = (out.x_BTD - stream.x_BTD).astype(jnp.float32) / keep
        return out._replace(x_BTD=stream.x_BTD + added.astype(stream.x_BTD.dtype))

    def layer(stream: Stream, source: Any) -> tuple[Stream, Any]:
        own = pick(source)
        alive = jax.random.bernoulli(jax.random.fold_in(key, own["index"]), own["keep"])
        return jax.lax.cond(alive, kept, lambda stream, _: stream, stream, source), None

    return layer
