"""The hashed embedding of pairs of tokens: which pairs there are, and that it starts at nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import VOCAB, random_params, resolved, tokens

from jaxtrain.model import Transformer, initialize, split
from jaxtrain.model.bigram import tokens_before

ROWS = 101


def states(params, graphdef, rows, *texts):
    return np.asarray(nnx.merge(graphdef, params)(jnp.asarray(rows), *texts).states)


@pytest.mark.slow
def test_the_table_starts_as_no_change():
    plain = split(Transformer(resolved(depth=1), VOCAB))
    graphdef, specs = split(Transformer(resolved(depth=1, bigram_rows=ROWS), VOCAB))
    params, rows = initialize(specs, 0), tokens(2, 12)
    assert not np.any(params["bigram"]["table"])
    assert params["bigram"]["table"].shape == (ROWS, 32)
    same = states(initialize(plain[1], 0), plain[0], rows)
    np.testing.assert_array_equal(states(params, graphdef, rows), same)


def test_a_token_is_paired_with_the_one_before_it_in_its_document():
    segments = jnp.asarray([[1, 1, 2, 2], [1, 2, 2, 2]])
    rows = jnp.asarray([[5, 6, 7, 8], [9, 10, 11, 12]])
    assert tokens_before(rows, None, None, False).tolist() == [[0, 5, 6, 7], [0, 9, 10, 11]]
    assert tokens_before(rows, segments, None, False).tolist() == [[0, 5, 0, 7], [0, 0, 10, 11]]


def test_the_order_of_a_pair_counts():
    """With one layer that sees no other token, the last state knows the pair and nothing else."""
    c = resolved(depth=1, bigram_rows=ROWS, smear=False, short_window=1, window_pattern="S",
                 last_layer_full=False)  # fmt: skip
    graphdef, specs = split(Transformer(c, VOCAB))
    params = random_params(specs)
    embed = jax.jit(lambda p, row: nnx.merge(graphdef, p).embed_tokens(row[None], None)[0][0, -1])
    embedded = lambda *row: np.asarray(embed(params, jnp.asarray(row)))
    assert np.abs(embedded(3, 4) - embedded(5, 4)).max() > 1e-3
    assert np.abs(embedded(3, 4) - embedded(4, 3)).max() > 1e-3
    np.testing.assert_array_equal(embedded(1, 3, 4), embedded(2, 3, 4))
