"""Sampling a token: temperature, top-k and top-p by what they leave of a distribution."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import resolved

from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.inference.engine.rows import SlotTable
from jaxtrain.inference.engine.sampling import Sampler, sample_rows
from jaxtrain.inference.generate import Sampling, kv_bytes_per_token

P_V = np.array([0.4, 0.3, 0.2, 0.07, 0.03])


def shares(temperature=1.0, top_p=1.0, top_k=None, draws=4000):
    """How often each token is drawn."""
    logits_BV = jnp.tile(jnp.log(jnp.asarray(P_V, jnp.float32)), (draws, 1))
    how = Sampling(1, temperature, top_k, top_p)
    table = SlotTable(draws, len(P_V))
    texts = jnp.zeros((draws, 4), jnp.int32), jnp.ones(draws, jnp.int32)
    for i in range(draws):
        table.put(i, how.params(i), prompt=1)
    slots = table.inputs()
    tokens_B = jax.jit(sample_rows, static_argnums=4)(logits_BV, slots, *texts, Sampler.ALL)
    return np.bincount(tokens_B.token_B, minlength=len(P_V)) / draws


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 1}, [0]),
        ({"top_p": 0.65}, [0, 1]),
        ({"top_p": 0.75}, [0, 1, 2]),  # the first that reaches the share is in
        ({"top_p": 0.01}, [0]),
        ({"top_k": 4, "top_p": 0.75}, [0, 1, 2]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_what_is_kept_is_drawn_by_its_probability(how, kept):
    wanted_V = np.zeros(len(P_V))
    wanted_V[kept] = P_V[kept] ** (1 / how.get("temperature", 1.0))
    np.testing.assert_allclose(shares(**how), wanted_V / wanted_V.sum(), atol=0.03)


def test_temperature_zero_takes_the_best():
    assert shares(temperature=0.0)[0] == 1


def test_bytes_of_a_token_in_the_cache():
    """Of 4 layers with 4 heads of 8 channels, in bfloat16: keys and values, or what is kept."""
    latent = {"mla": {"kv_rank": 12, "rope_dim": 4}, "qk_norm": False, "value_embeddings": False}
    sizes = [(4 * 2 * 32, {}), (4 * 2 * 8, {"kv_heads": 1})]
    sizes += [(2 * 2 * 32, {"share_kv": "adjacent"}), (4 * 16, latent)]
    for channels, fields in sizes:
        assert (
            kv_bytes_per_token(resolved(depth=4, **fields), jnp.dtype("bfloat16")) == 2 * channels
        )


@pytest.mark.slow
def test_the_bytes_of_the_page_on_sharing():
    page = (Path(__file__).parents[1] / "docs" / "howto" / "sharing.md").read_text()
    table = page.split("## Bytes of the KV cache")[1].split("|---|---|---|---|")[1]
    lines = table.strip().split("\n\n")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert len(rows) == 7
    for switches, *sizes in rows:
        overrides = switches.strip("`").split("` `") if "`" in switches else []
        c = resolve(load_config(find_config("gpt_d12"), overrides), 32768)
        for cache_dtype, size in zip((None, "int8"), sizes[:2], strict=True):
            found = kv_bytes_per_token(c.model, jnp.dtype("bfloat16"), cache_dtype)
            assert f"{found:,}" == size, (switches, cache_dtype)
