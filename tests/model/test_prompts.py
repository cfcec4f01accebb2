"""Prompts that begin, as whole rows: the states and pages of one part after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import build

from jaxtrain.model import PagedCache
from jaxtrain.model.kv_cache import page_shapes
from jaxtrain.model.modes import Paged

PAGE, T = 4, 12
COUNTS = (12, 5, 0)  # of a whole row, a padded and an idle one
MODELS = {
    "gpt": {},
    "windows": {"window_pattern": "SL", "short_window": 3, "bigram_rows": 64},
    "latent": {"mla": {"kv_rank": 12, "rope_dim": 4}, "qk_norm": False, "value_embeddings": False},
    "shared": {"share_kv": "adjacent"},
}


@pytest.mark.parametrize(
    "name", ["gpt", *(pytest.param(x, marks=pytest.mark.slow) for x in list(MODELS)[1:])]
)
def test_rows_that_begin_have_the_states_and_pages_of_the_general_way(name):
    c, graphdef, _, params = build(depth=2, **MODELS[name])
    model = nnx.merge(graphdef, params)
    rng = np.random.default_rng(0)
    tokens_BT = jnp.asarray(rng.integers(0, 64, (len(COUNTS), T)), jnp.int32)
    empty = lambda x: jnp.zeros((len(COUNTS) * T // PAGE, *x.shape[1:]), x.dtype)
    kv = jax.tree.map(empty, page_shapes(c, jnp.dtype(jnp.float32), PAGE))
    table_BW = jnp.arange(len(COUNTS) * T // PAGE, dtype=jnp.int32)[::-1].reshape(len(COUNTS), -1)
    zeros_B, counts_B = jnp.zeros(len(COUNTS), jnp.int32), jnp.array(COUNTS, jnp.int32)
    cache = PagedCache(kv, table_BW, zeros_B, counts_B, zeros_B)
    run = jax.jit(
        lambda first_chunk: model(tokens_BT, mode=Paged(cache, first_chunk=first_chunk)),
        static_argnums=0,
    )
    one, other = run(True), run(False)
    seen_BT = np.arange(T)[None] < np.array(COUNTS)[:, None]
    np.testing.assert_allclose(one.states[seen_BT], other.states[seen_BT], rtol=2e-4, atol=2e-5)
    for x, y in zip(jax.tree.leaves(one.cache.kv), jax.tree.leaves(other.cache.kv), strict=True):
        assert np.abs(x).max() > 0
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
