"""model.mla: the paper's equations by hand, the cache of latents, and which sizes are padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_by_hand import PLAIN, causal_attention, states_by_hand
from flax import nnx
from pydantic import ValidationError
from tiny import VOCAB, T, build, close, resolved, tokens

from jaxtrain.config import load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.model import Decode, Prefill, Transformer, flops_per_token, split
from jaxtrain.model.layers import rms_norm, rotary, rotate
from jaxtrain.settings import UserError

SMALL = {"kv_rank": 12, "rope_dim": 4}
WIDE = {"kv_rank": 12, "q_rank": 20, "rope_dim": 4, "nope_dim": 8}  # queries of 12, values of 8
NARROW = {"kv_rank": 12, "rope_dim": 2, "nope_dim": 2}
ALL = {"as wide": SMALL, "wide": WIDE, "narrow": NARROW}


@pytest.mark.parametrize("mla", ALL.values(), ids=ALL)
@pytest.mark.quick("wide")
def test_it_is_the_papers_attention(mla):
    c, graphdef, _, params = build(**PLAIN, mla=mla)
    rows, heads = jnp.asarray(tokens(2)), lambda x: x.reshape(*x.shape[:2], c.heads, -1)
    rope, r = rotary(jnp.arange(T)[None], mla["rope_dim"], c.rope_base), mla["rope_dim"]

    def attend(i, h):
        w = jax.tree.map(lambda x: x[i], params["blocks"]["attention"])
        normed = lambda x, gain: rms_norm(x, gain, eps=c.norm_eps)
        q = heads(normed(h @ w["q_down"], w["q_gain"]) @ w["q_up"] if "q_up" in w else h @ w["q"])
        down = h @ w["kv_down"]
        latent, key = normed(down[..., :-r], w["kv_gain"]), rotate(down[..., None, -r:], rope, None)
        every = jnp.repeat(key, c.heads, axis=2)
        k = jnp.concatenate([heads(latent @ w["k_up"]), every], axis=-1)
        q = jnp.concatenate([q[..., :-r], rotate(q[..., -r:], rope, None)], axis=-1)
        return causal_attention(q, k, heads(latent @ w["v_up"]), k.shape[-1] ** -0.5)

    states = jax.jit(lambda params: nnx.merge(graphdef, params)(rows).states)(params)
    by_hand = jax.jit(lambda: states_by_hand(c, params, rows, attend))()
    close(states, by_hand, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.quick("None")
def test_decoding_keeps_latents_and_rotated_keys_alone(dtype):
    _, graphdef, _, params = build(**PLAIN | {"depth": 2}, mla=WIDE)
    model, rows = nnx.merge(graphdef, params), jnp.asarray(tokens(2, 8))

    @jax.jit
    def run(rows):
        cache = model(rows[:, :7], mode=Prefill(jnp.array([7, 7]), 8, dtype)).cache
        return model(rows[:, 7:], mode=Decode(cache))

    out = run(rows)
    shapes = {x.shape for x in jax.tree.leaves(out.cache.kv)}
    assert shapes == {(2, 8, 1, 16)} | ({(2, 8, 1)} if dtype else set())
    far = np.abs(out.states - model(rows).states[:, -1]).max()
    assert far < (0.1 if dtype else 1e-4)


def test_flops_count_both_sizes_of_heads():
    def attention(mla):
        c = resolved(**PLAIN, mla=mla)
        specs = split(Transformer(c, VOCAB))[1]
        return flops_per_token(c, specs, 2 * T) - flops_per_token(c, specs, T)

    assert attention(WIDE) == pytest.approx(6 * T * 4 * 4 * (12 + 8))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValidationError, match="leave out kv_heads"):
        resolved(**PLAIN, kv_heads=2, mla=SMALL)
    with pytest.raises(ValidationError, match="set mla.nope_dim"):
        resolved(**PLAIN, mla={"rope_dim": 8})
    c = load_config(None, ["model.mla.kv_rank=64", "data.tokenizer.name=bytes"])
    with pytest.raises(UserError, match=r"set model.qk_norm=false[\s\S]*model.value_embeddings"):
        resolve(c, 257)
