"""model.token_dropping: middle layers take a share of the tokens; evaluation uses them all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import (
    MESHES,
    VOCAB,
    T,
    assert_same_metrics,
    batch,
    build,
    close,
    make_spec,
    resolved,
    tokens,
)

from jaxtrain.model import Forward
from jaxtrain.model.token_dropping import draw_tokens, kept_tokens
from jaxtrain.objectives.next_token import next_token_loss

PLAIN = {"window_pattern": "L", "value_embeddings": False, "backout": False, "smear": False}
FIELDS = {"depth": 3, **PLAIN}
KEY = jax.random.key(3)


def states(graphdef, params, rows, key=None, *texts):
    run = lambda p, key, *texts: nnx.merge(graphdef, p)(*texts, mode=Forward(key)).states
    return np.asarray(jax.jit(run)(params, key, jnp.asarray(rows), *texts))


def test_a_row_keeps_a_share_in_order():
    assert [kept_tokens(2048, rate) for rate in (0.5, 0.3, 0.99)] == [1024, 1536, 128]
    places = draw_tokens(KEY, jnp.int32(1), 5, T, 0.5)
    assert places.shape == (5, 16) and (np.diff(places) > 0).all()
    assert (
        len({*map(tuple, places.tolist()), *map(tuple, draw_tokens(KEY, 2, 5, T, 0.5).tolist())})
        == 10
    )


@pytest.mark.slow
def test_a_dropped_token_is_as_if_its_middle_layer_were_absent():
    """Only what a dropped token has of its own: attention in the last layer is switched off."""
    _, graphdef, _, params = build(**FIELDS, token_dropping=0.5, residual_scales=False)
    out = params["blocks"]["attention"]["out"]
    params["blocks"]["attention"]["out"] = out.at[2].set(0.0)
    plain = build(**FIELDS, residual_scales=False)[1]
    np.testing.assert_array_equal(
        states(graphdef, params, tokens()), states(plain, params, tokens())
    )
    absent = jax.tree.map(lambda x: x, params)
    absent["blocks"] = jax.tree.map(lambda x: x, params["blocks"])
    for part, name in (("attention", "out"), ("ffn", "down")):
        w = absent["blocks"][part][name]
        absent["blocks"][part] = {**absent["blocks"][part], name: w.at[1].set(0.0)}
    with_key, without = states(graphdef, params, tokens(), KEY), states(plain, absent, tokens())
    kept = np.zeros((4, T), bool)
    np.put_along_axis(kept, np.asarray(draw_tokens(KEY, 1, 4, T, 0.5)), True, axis=1)
    np.testing.assert_allclose(with_key[~kept], without[~kept], rtol=1e-4, atol=1e-4)
    assert (np.abs(with_key - without).max(-1)[kept] > 1e-3).all()


def test_a_kept_token_takes_its_middle_layer_as_ever():
    """Attention behind the first layer is switched off: a token has its own channels alone."""
    _, graphdef, _, params = build(**FIELDS, token_dropping=0.5)
    out = params["blocks"]["attention"]["out"]
    params["blocks"]["attention"]["out"] = out.at[1:].set(0.0)
    dropped, whole = (states(graphdef, params, tokens(), key) for key in (KEY, None))
    kept = np.zeros((4, T), bool)
    np.put_along_axis(kept, np.asarray(draw_tokens(KEY, 1, 4, T, 0.5)), True, axis=1)
    np.testing.assert_allclose(dropped[kept], whole[kept], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"value_embeddings": True, "scan_layers": True}])
@pytest.mark.slow
def test_order_and_documents_hold_in_training(changes):
    fields = {"depth": 4, **PLAIN, "token_dropping": 0.4, "document_mask": True} | changes
    _, graphdef, _, params = build(**fields)
    positions = np.r_[:20, :12][None].repeat(4, 0).astype(np.int32)
    segments = np.r_[[1] * 20, [2] * 12][None].repeat(4, 0).astype(np.int32)
    before, at = tokens(), 8
    after = before.copy()
    after[:, at] = (after[:, at] + 1) % VOCAB
    a, b = (states(graphdef, params, x, KEY, positions, segments) for x in (before, after))
    moved = np.abs(a - b).max(-1) > 0
    assert not moved[:, :at].any() and not moved[:, 20:].any() and moved[:, at].all()
    assert moved[:, at + 1 : 20].any()


@pytest.mark.slow
def test_scan_is_unroll_and_a_skipped_token_costs_nothing():
    fields = {"depth": 6, **PLAIN, "token_dropping": 0.5}
    _, graphdef, _, params = build(**fields)
    scanned = build(**fields, scan_layers=True)[1]
    close(
        states(scanned, params, tokens(), KEY), states(graphdef, params, tokens(), KEY), 1e-4, 1e-4
    )
    one = jax.tree.map(jnp.asarray, batch(4))

    def flops(graphdef):
        loss = jax.jit(jax.grad(lambda p: next_token_loss(graphdef, p, one, key=KEY)))
        return loss.lower(params).cost_analysis()["flops"]

    assert flops(graphdef) < 0.8 * flops(build(depth=6, **PLAIN)[1])


@pytest.mark.slow
def test_a_sharded_step_is_that_of_one_device():
    spec, hyperparams = make_spec(resolved(**FIELDS, token_dropping=0.5))
    assert_same_metrics(spec, hyperparams, ("loss", "grad_norm"), MESHES[:1], micro=8)
