"""Layers of one kernel in a model: the same numbers as layer by layer, and which models have it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtrain_kernels.dispatch import on_target

from benchmarks.decode_models import random_weights
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import resolve, vocab_size_of
from jaxtrain.model import Paged, PagedCache, Transformer, split
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.kv_cache import StackedPages, page_shapes
from jaxtrain.model.packed import ANY, NEEDED, kernel_of, pack_layers, why_not_packed
from jaxtrain.model.stack import take_apart

PAGE, PAGES = 8, 12
SMALL = ["model.depth=4", "model.width=256", "model.head_dim=64", "train.sequence_length=64"]


def model_of(*overrides):
    """The configuration, the graph, and parameters in bfloat16, layers apart."""
    more = ["data.tokenizer={name: bytes}", "train.batch_size=8", "train.device_batch_size=1"]
    config = load_config(find_config("gpt_d12"), [*overrides, *more])
    vocab_size = vocab_size_of(config.data)
    c = resolve(config, vocab_size).model
    graphdef, specs = split(Transformer(c, vocab_size))
    params = random_weights(specs, jnp.dtype(jnp.bfloat16))
    params["smear_scale"], params["backout_scale"] = jnp.float32(0.5), jnp.float32(0.3)
    take_apart(params, specs)
    return c, graphdef, params


def reason(c, params):
    shape = (c.depth, PAGES, PAGE, c.kv_heads, c.head_dim)
    one = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with on_target("cuda", (9, 0)):
        return why_not_packed(c, params, (one, one))


def check_tokens(kernel, c, graphdef, params, prompt, new):
    """Logits of a prompt and of more tokens, with the pages apart and with one kernel."""
    packed = pack_layers(kernel, graphdef, params)
    layers = page_shapes(c, jnp.bfloat16, PAGE)
    pages = -(-(prompt + new) // PAGE)
    apart = jax.tree.map(lambda x: jnp.zeros((pages, *x.shape[1:]), x.dtype), layers)
    table_1W = jnp.arange(pages, dtype=jnp.int32)[None, ::-1]
    tokens = np.random.default_rng(0).integers(0, 256, prompt + new)

    @jax.jit
    def run(cache, tokens_1T, packed):
        model = nnx.merge(graphdef, params)
        out = model(tokens_1T, mode=Paged(cache, packed))
        return model.logits(out.states), out.cache.kv

    caches, at = [(apart, None), (StackedPages.of(apart), packed)], 0
    for count in (prompt, *(1,) * new):
        tokens_1T = jnp.asarray(tokens[at : at + count])[None]
        where = (jnp.array([x]) for x in (at, count, tokens[max(at - 1, 0)]))
        start, counts, before = where
        found = [
            run(PagedCache(kv, table_1W, start, counts, before), tokens_1T, with_)
            for kv, with_ in caches
        ]
        (plain, kept), (one, stacked) = found
        np.testing.assert_allclose(one, plain, atol=0.03 * np.abs(plain).max())
        for x, y in zip(jax.tree.leaves(kept), jax.tree.leaves(stacked.apart()), strict=True):
            x, y = (np.asarray(a, np.float32) for a in (x, y))
            np.testing.assert_allclose(x, y, atol=0.02 * max(1, np.abs(x).max()))
        caches, at = [(kept, None), (stacked, packed)], at + count


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "kv_heads"), [("hopper", 4), ("triton", 4), ("triton", 1)])
def test_new_tokens_are_those_of_layers_one_by_one(kernel, kv_heads):
    check_tokens(kernel, *model_of(*SMALL, f"model.kv_heads={kv_heads}"), prompt=37, new=5)


@pytest.mark.gpu
@pytest.mark.parametrize("overrides", [[], ["model.depth=24"], ["model.kv_heads=1"]], ids=str)
def test_on_a_gpu_gpt_gives_the_same_logits(overrides):
    c, graphdef, params = model_of(*overrides)
    one = jax.ShapeDtypeStruct((c.depth, 1, PAGE, c.kv_heads, c.head_dim), jnp.bfloat16)
    kernel, _ = kernel_of(c, params, (one, one))
    assert kernel == ("triton" if c.kv_heads == 1 else "hopper")
    check_tokens(kernel, c, graphdef, params, prompt=600, new=8)


def test_each_field_of_a_model_is_known():
    assert set(ResolvedModel.model_fields) == NEEDED.keys() | ANY | {"init"}
    assert not NEEDED.keys() & ANY


def test_which_models_have_one_kernel():
    c, _, params = model_of(*SMALL)
    assert reason(c, params) is None
    change = lambda **fields: reason(c.model_copy(update=fields), params) or ""
    assert "model.ffn=relu2" in change(ffn="swiglu")
    assert "model.qkv_bias=False" in change(qkv_bias=True)
    assert "model.init=rezero" in change(init="rezero")
    assert "multiple of 256" in change(width=320)
    float32 = {"embed": params["embed"].astype(jnp.float32)}
    assert "bfloat16" in (reason(c, params | float32) or "")
