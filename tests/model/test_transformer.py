"""The Transformer's invariants: what must not change the numbers, and what must."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import LLAMA, VOCAB, T, build, close, resolved, tokens

from jaxtrain.model import Decode, Forward, Prefill, Transformer, initialize, split
from jaxtrain.model.layers import rms_norm

# Five layers: a period of two twice, value embeddings on some, and an odd one at the end.
DEEP = {"depth": 5, "window_pattern": "SL"}
FAMILIES = {
    "speedrun": {},
    "gqa": {"kv_heads": 2, "ffn": "geglu", "attention_softcap": 5.0},
    "llama": LLAMA,
    "gemma3": LLAMA | {
        "qk_norm": True, "qk_norm_gain": True, "post_norm": True, "attention_scale": 0.3,
        "window_pattern": "SLS", "last_layer_full": False, "rope_base_short": 100.0,
        "rope_scaling": {"name": "linear", "factor": 2.0}, "embed_scale": 3.0,
    },
    "narrow keys": {"qk_head_dim": 6, "kv_heads": 2},
    "gpt2": LLAMA | {
        "ffn": "gelu", "norm": "layer", "position_embedding": "learned", "qkv_bias": True,
        "out_bias": True, "ffn_bias": True,
    },
}  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def logits(graphdef, params, tokens_BT, positions_BT=None, segments_BT=None, key=None):
    model = nnx.merge(graphdef, params)
    x_BTD = model(tokens_BT, positions_BT, segments_BT, Forward(key)).states
    flat_BV = model.logits(x_BTD.reshape(-1, x_BTD.shape[-1]))
    return flat_BV.reshape(*tokens_BT.shape, -1)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(graphdef, params, tokens_BT):
    def loss(p):
        return jnp.mean(jnp.square(logits(graphdef, p, tokens_BT)))

    return jax.value_and_grad(loss)(params)


# ---- execution choices change nothing --------------------------------------------------------


BOTH = pytest.param({"scan_layers": True, "remat": "block"}, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "changes", [{"scan_layers": True}, {"remat": "block"}, BOTH], ids=["scan", "remat", "both"]
)
@pytest.mark.slow
def test_scan_and_remat_give_the_same_numbers_and_gradients(changes):
    _, plain, _, params = build(**DEEP)
    _, other, _, _ = build(**DEEP, **changes)
    assert plain != other
    expected = loss_and_gradient(plain, params, tokens())
    close(loss_and_gradient(other, params, tokens()), expected, rtol=2e-4, atol=2e-5)


def test_scan_compiles_repeated_layers_once():
    def dots(**changes):
        _, graphdef, _, params = build(depth=8, window_pattern="L", **changes)
        return str(jax.make_jaxpr(logits, static_argnums=0)(graphdef, params, tokens())).count(
            "dot_general"
        )

    assert dots(scan_layers=True) < 0.5 * dots()


# ---- causality -------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.quick("speedrun")
def test_a_token_changes_no_output_before_it(changes):
    _, graphdef, _, params = build(**changes)
    before = tokens()
    a = logits(graphdef, params, before)
    for at in (0, 1, 17, T - 1):
        after = before.copy()
        after[:, at] = (after[:, at] + 1) % VOCAB
        b = logits(graphdef, params, after)
        np.testing.assert_array_equal(a[:, :at], b[:, :at])
        assert (np.abs(a - b)[:, at:].max(-1) > 0).all()  # and every output from it on


def test_a_window_hides_what_lies_further_back():
    off = {"window_pattern": "L", "smear": False, "value_embeddings": False, "depth": 1}
    # The last layer always sees everything: two layers, of which the first is short.
    _, graphdef, _, params = build(**off | {"depth": 2, "window_pattern": "S", "short_window": 3})
    params["blocks"]["attention"]["out"] = params["blocks"]["attention"]["out"].at[1].set(0.0)
    before = tokens()
    after = before.copy()
    after[:, 10] = (after[:, 10] + 1) % VOCAB
    changed = np.abs(logits(graphdef, params, before) - logits(graphdef, params, after)).max((0, 2))
    assert [t for t in range(T) if changed[t] > 0] == [10, 11, 12, 13]


# ---- documents -------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["speedrun", "llama"])
@pytest.mark.quick("llama")
def test_packed_documents_are_as_if_alone(changes):
    _, graphdef, _, params = build(document_mask=True, **changes)
    lengths, row = (11, 1, 20), tokens(1)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].astype(np.int32)
    segments = np.repeat(np.arange(1, 4), lengths)[None].astype(np.int32)
    packed = logits(graphdef, params, row, positions, segments)[0]
    for start, length in zip(np.cumsum((0, *lengths)), lengths):
        # The document at the row's start, behind it anything: causality hides that.
        alone = logits(graphdef, params, np.roll(row, -start, axis=1), *alone_in_row(length))[0]
        close(packed[start : start + length], alone[:length], rtol=1e-4, atol=1e-5)


def alone_in_row(length):
    positions = np.arange(T, dtype=np.int32)[None]
    return positions, (positions < length).astype(np.int32)


@pytest.mark.slow
def test_without_document_mask_segments_do_nothing():
    _, graphdef, _, params = build()
    row, segments = tokens(1), np.repeat([1, 2], T // 2)[None].astype(np.int32)
    positions = np.arange(T, dtype=np.int32)[None]
    plain = logits(graphdef, params, row, positions, None)
    np.testing.assert_array_equal(logits(graphdef, params, row, positions, segments), plain)


# ---- decoding --------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.quick("speedrun")
def test_decode_is_the_full_forward(changes):
    """Prompts of different lengths in one batch, padded with anything, then token by token."""
    _, graphdef, _, params = build(**changes)
    rows, lengths = tokens(), np.array([1, 7, 12, 15], np.int32)
    full = np.asarray(logits(graphdef, params, rows))
    model = lambda p: nnx.merge(graphdef, p)
    prefill = jax.jit(lambda p, t, n: model(p)(t, mode=Prefill(n, T)))
    decode = jax.jit(lambda p, t, cache: model(p)(t, mode=Decode(cache)))
    head = jax.jit(lambda p, x: model(p).logits(x))
    x_BD, _, cache = prefill(params, rows[:, :16], lengths)
    every = np.arange(4)
    for _ in range(T - 16):
        close(head(params, x_BD), full[every, lengths - 1], rtol=2e-3, atol=2e-4)
        x_BD, _, cache = decode(params, rows[every, lengths][:, None], cache)
        lengths = lengths + 1
        np.testing.assert_array_equal(cache.lengths_B, lengths)


@pytest.mark.slow
def test_decoding_looks_back_no_further_than_the_context():
    """In text longer than the training length, full layers see that length."""
    _, graphdef, _, params = build(depth=1, context_length=8)
    model, rows = nnx.merge(graphdef, params), jnp.asarray(tokens(2))
    prefill = jax.jit(lambda t, n: model(t, mode=Prefill(n, 20)).cache)
    cache = prefill(rows[:, :16], jnp.array([16, 16]))
    k_BSKH, v_BSKH = cache.kv[0]
    decode = jax.jit(lambda cache: model(rows[:, 16, None], mode=Decode(cache)).states)
    expected = decode(cache)

    def changed(at):
        values = v_BSKH.at[:, at].set(9.0)
        state = decode(cache._replace(kv=((k_BSKH, values),)))
        return bool(np.abs(state - expected).max() > 0)

    assert [changed(at) for at in (0, 8, 9, 15)] == [False, False, True, True]


# ---- switches --------------------------------------------------------------------------------

SWITCHES = {
    "ffn gelu": {"ffn": "gelu"},
    "ffn swiglu": {"ffn": "swiglu"},
    "ffn geglu": {"ffn": "geglu"},
    "hidden": {"hidden": 48},
    "heads": {"heads": 2},
    "gqa": {"kv_heads": 2},
    "mqa": {"kv_heads": 1},
    "rope_base": {"rope_base": 100.0},
    "qk_norm": {"qk_norm": False},
    "qk_scale": {"qk_scale": 2.0},
    "window_pattern": {"window_pattern": "LS"},
    "short_window": {"short_window": 2},
    "norm_eps": {"norm_eps": 0.1},
    "embed_norm": {"embed_norm": False},
    "tied_head": {"tied_head": True},
    "logit_softcap": {"logit_softcap": None},
    "attention_softcap": {"attention_softcap": 0.5},
    "value_embeddings": {"value_embeddings": False},
    "residual_scales": {"residual_scales": False},
    "smear": {"smear": False},
    "backout": {"backout": False},
    "norm_gain": {"norm_gain": True},
    "document_mask": {"document_mask": True},
}


@pytest.fixture(scope="module")
def plain_logits():
    return run_switched({})


def run_switched(changes):
    _, graphdef, _, params = build(depth=2, **changes)
    segments = jnp.repeat(jnp.array([1, 2]), T // 2)[None].repeat(2, 0)
    positions = jnp.arange(T)[None].repeat(2, 0)
    # Not as one program: most of the operations are those of the other switches.
    return np.asarray(
        logits.__wrapped__(graphdef, params, jnp.asarray(tokens(2)), positions, segments)
    )


@pytest.mark.parametrize("changes", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.quick("gqa", "window_pattern", "value_embeddings", "smear", "backout", "document_mask")
def test_each_switch_changes_the_output(changes, plain_logits):
    out = run_switched(changes)
    assert out.shape == plain_logits.shape == (2, T, VOCAB)
    assert np.isfinite(out).all()
    assert np.abs(out - plain_logits).max() > 1e-3


def test_tied_head_is_the_embedding_and_has_no_head():
    _, graphdef, specs, params = build(**LLAMA)
    assert "head" not in specs
    np.testing.assert_array_equal(nnx.merge(graphdef, params).head_DV(), params["embed"].T)


def test_padded_vocabulary_is_not_in_the_logits():
    _, graphdef, specs, params = build(vocab_multiple=64)
    assert specs["embed"].shape[0] == specs["head"].shape[1] == 64
    assert nnx.merge(graphdef, params).logits(jnp.ones((2, 32))).shape == (2, VOCAB)


def test_softcap_bounds_the_logits():
    _, graphdef, _, params = build(logit_softcap=2.0)
    out = nnx.merge(graphdef, params).logits(100 * jnp.ones((1, 32)))
    assert np.abs(out).max() <= 2.0


@pytest.mark.slow
def test_at_its_start_every_block_is_the_identity():
    """Zero output matrices: the logits are those of the embedding alone."""
    c = resolved(depth=2, smear=False, backout=False, residual_scales=False)
    graphdef, specs = split(Transformer(c, VOCAB))
    params = jax.jit(lambda: initialize(specs, 0))()
    alone = rms_norm(rms_norm(params["embed"][tokens()], eps=1e-6), eps=1e-6)
    expected = nnx.merge(graphdef, params).logits(alone.reshape(-1, c.width))
    close(logits(graphdef, params, tokens()), expected.reshape(*tokens().shape, VOCAB))


def test_rotation_makes_scores_depend_on_distance_alone():
    _, graphdef, _, params = build()
    row, shifted = tokens(1), np.arange(T, dtype=np.int32)[None] + 1000
    a = logits(graphdef, params, row, shifted - 1000, None)
    close(logits(graphdef, params, row, shifted, None), a, rtol=1e-2, atol=1e-3)
    stretched = logits(graphdef, params, row, 3 * (shifted - 1000), None)
    assert np.abs(stretched - a).max() > 1e-2


@pytest.mark.slow
def test_every_parameter_takes_part():
    """The tests above could not fail for a parameter that no gradient reaches."""
    _, graphdef, _, params = build(**DEEP)
    _, gradient = loss_and_gradient(graphdef, params, tokens())
    dead = [p for p, g in jax.tree_util.tree_leaves_with_path(gradient) if not np.abs(g).max() > 0]
    assert dead == []
