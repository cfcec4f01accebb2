"""Stochastic depth: a training step skips some layers (Huang et al. 2016, arXiv:1603.09382).

Layer i of L, counted from 1, is skipped with probability i / L x `model.stochastic_depth`. A
layer's contribution is divided by its keep probability, so that evaluation uses all layers
unchanged. A skipped layer costs no time: the choice is a conditional (`lax.cond`), drawn once for
all rows of a microbatch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.fused_ops import Stream
from jaxtrain.weights.contract import computed

Run = Callable[[Stream, Any], tuple[Stream, Any]]


def keep_probabilities(c: ResolvedModel) -> np.ndarray:
    """Keep probability of each layer, [L], from 1 - rate / L down to 1 - rate linearly."""
    return 1 - c.stochastic_depth * np.arange(1, c.depth + 1, dtype=np.float32) / c.depth


def skippable(run: Run, key: Array, pick: Callable[[Any], dict[str, Any]]) -> Run:
    """Make a layer's `run(stream, source)` skippable: if skipped, it returns the stream unchanged.

    It returns no keys and values. key: of the step. pick(source): the layer's `index` and `keep`
    probability.
    """

    def kept(stream: Stream, source: Any) -> Stream:
        out, keep = run(stream, source)[0], pick(source)["keep"]
        before = computed(stream.x_BTD)
        added = (computed(out.x_BTD) - before).astype(jnp.float32) / keep
        return out._replace(x_BTD=before + added.astype(before.dtype))

    def layer(stream: Stream, source: Any) -> tuple[Stream, Any]:
        own = pick(source)
        alive = jax.random.bernoulli(jax.random.fold_in(key, own["index"]), own["keep"])
        return jax.lax.cond(alive, kept, lambda stream, _: stream, stream, source), None

    return layer
