"""Generation with the keys and values kept in int8 or float8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtrain_kernels import Quantized
from tiny import T, build, tokens

from jaxtrain.inference import generate
from jaxtrain.model import Decode, Prefill


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        ("int8", jnp.int8, 0.02),
        pytest.param("float8", jnp.float8_e4m3fn, 0.06, marks=pytest.mark.slow),
    ],
)
def test_decoding_from_8_bits_stays_close(name, dtype, most):
    """Token by token, of given texts."""
    _, graphdef, _, params = build(kv_heads=2, attention_softcap=5.0)
    model, rows = nnx.merge(graphdef, params), jnp.asarray(tokens(2))
    lengths = jnp.array([3, 8])

    def logits(cache_dtype):
        mode = Prefill(lengths, T, cache_dtype)
        cache = jax.jit(lambda tokens: model(tokens, mode=mode))(rows[:, :8]).cache
        decode = jax.jit(lambda tokens, cache: model(tokens, mode=Decode(cache)))
        head, out = jax.jit(model.logits), []
        for i in range(8, 20):
            x_BD, _, cache = decode(rows[:, i, None], cache)
            out.append(head(x_BD))
        return np.stack(out), cache

    plain, kept = logits(None)
    close, kept8 = logits(name)
    k_BSKH, _ = kept8.kv[0]
    assert isinstance(k_BSKH, Quantized) and k_BSKH.values_BSKH.dtype == dtype
    assert isinstance(kept.kv[0][0], jax.Array)
    off = np.linalg.norm(close - plain) / np.linalg.norm(plain)
    assert 0 < off < most


@pytest.mark.slow
def test_the_command_line_takes_it(whole, capsys):
    command = [str(whole), "--tokens", "8", "--temperature", "0", "--cache-dtype", "int8"]
    assert generate.main(command) == 0
    assert len(capsys.readouterr().out) > 1
