"""RoPE and norm of new queries and keys, written to pages with the values by one Triton kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels import Rotation, quantize, rope_append, supports_rope_append
from jaxtrain_kernels.attention.paged import append
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul.few_rows import preferring

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
BF16 = jnp.bfloat16
PAGES, PAGE, W, N, K = 24, 4, 8, 4, 2
# Of sequences: inside a page and over its border; all padding but one token; idle.
STARTS, COUNTS = [5, 2, 9], [3, 1, 0]


def inputs(T=3, H=16, dtype=jnp.float32, eps=None, gained=False, tables=3):
    rng, B = np.random.default_rng(0), len(STARTS)
    array = lambda *shape, dtype=dtype: jnp.asarray(rng.normal(size=shape), dtype)
    cos, sin = (array(tables, T, H, dtype=jnp.float32) for _ in range(2))
    gains = (array(H), array(H)) if gained else None
    pages = tuple(array(PAGES, PAGE, K, H) for _ in range(2))
    table_BW = jnp.asarray(rng.permutation(PAGES).reshape(-1, W), jnp.int32)
    where = table_BW, jnp.array(STARTS), jnp.minimum(jnp.array(COUNTS), T)
    heads = array(B, T, N, H), (array(B, T, K, H), array(B, T, K, H))
    return *heads, Rotation(cos, sin, eps, gains), pages, *where


def norm_and_rope(x_BTNH, rotation, gain_H):
    """The separate operations, with their roundings."""
    cos, sin = (x[:, :, None] for x in rotation[:2])
    x32, eps = x_BTNH.astype(jnp.float32), rotation.eps
    scale = 1.0 if eps is None else jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + eps)
    if gain_H is not None:
        x32, scale = (
            (x32 * scale * gain_H[None, None, None]).astype(x_BTNH.dtype).astype(jnp.float32),
            1.0,
        )
    swapped = jnp.roll(x32, x32.shape[-1] // 2, axis=-1)
    return ((x32 * cos + swapped * sin) * scale).astype(x_BTNH.dtype)


def separately(q_BTNH, new, rotation, pages, *where):
    q_gain, k_gain = rotation.gains or (None, None)
    k_BTKH = norm_and_rope(new[0], rotation, k_gain)
    return norm_and_rope(q_BTNH, rotation, q_gain), append.xla(pages, (k_BTKH, new[1]), *where)


def check(arrays, interpret=True):
    found, expected = rope_append(*arrays, interpret=interpret), separately(*arrays)
    atol = 1e-5 if arrays[0].dtype == jnp.float32 else 0.03  # one bfloat16 of a large number
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=atol)
        assert (a == b).mean() > 0.98 or arrays[0].dtype == jnp.float32


@pytest.mark.parametrize("H", [16, 24])
@pytest.mark.parametrize(("eps", "gained"), [(None, False), (1e-2, False), (1e-2, True)])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["float32", "bfloat16"])
def test_equals_the_separate_operations(H, eps, gained, dtype):
    check(inputs(3, H, dtype, eps, gained))


def supported(name=None, dtype=BF16, T=1, store=lambda x: x):
    q, new, _, pages, *_ = inputs(T, dtype=dtype)
    with on_target("cuda", (9, 0)), preferring(name):
        return supports_rope_append(q, new, tuple(map(store, pages)))


def test_what_it_supports():
    assert supported() and supported("fused")
    assert not supported("triton") and not supported(dtype=jnp.float32) and not supported(T=8)
    assert not supported(store=functools.partial(quantize, dtype=jnp.int8))
    q, new, _, pages, *_ = inputs(dtype=BF16)
    assert not supports_rope_append(q, new, pages)  # a CPU


def test_it_is_one_kernel_in_place():
    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(H200):
        q, new, (cos, sin, *_), pages, *where = inputs(dtype=BF16)
        run = lambda pages: rope_append(q, new, Rotation(cos, sin, 1e-5), pages, *where)
        traced = jax.jit(run, donate_argnums=0).trace(pages)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call") == text.count("@__gpu$xla.gpu.triton") == 1
    assert text.count("#stablehlo.output_operand_alias") == 2 and "scatter" not in text


@pytest.mark.gpu
@pytest.mark.parametrize(("eps", "gained"), [(None, False), (1e-2, False), (1e-2, True)])
def test_on_a_gpu(eps, gained):
    for T, H, tables in ((1, 128, 1), (3, 80, 3)):
        check(inputs(T, H, BF16, eps, gained, tables), interpret=False)
