"""New tokens in pages: where they go, by XLA and by Triton (interpreted), and its lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels import paged_append
from jaxtrain_kernels.attention.paged import append
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.matmul.few_rows import preferring

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
PAGES, PAGE, W, K = 32, 4, 8, 2
# Of rows: inside a page, over a page's border, at its own end, and idle. There is room for padding,
# too: interpreted, a masked write restores what was there before the other writes of its tile.
STARTS, COUNTS = [5, 2, 9, 4], [1, 19, 15, 0]


def inputs(T=3, H=20, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    pages = tuple(array(PAGES, PAGE, K, H) for _ in range(2))
    new = tuple(array(len(STARTS), T, K, H) for _ in range(2))
    table_BW = jnp.asarray(rng.permutation(PAGES).reshape(-1, W), jnp.int32)
    return pages, new, table_BW, jnp.array(STARTS), jnp.minimum(jnp.array(COUNTS), T)


@pytest.mark.parametrize("T", [1, 3, 19])  # 19: two tiles
@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.quick("xla-3", "triton-19")
def test_each_token_is_in_its_place_and_all_else_stays(backend, T):
    pages, new, table_BW, starts_B, counts_B = arrays = inputs(T)
    options = {"interpret": True} if backend == "triton" else {}
    found = append.BACKENDS[backend](*arrays, **options)
    for old, x, out in zip(pages, new, found, strict=True):
        expected = np.array(old)
        for b, (start, count) in enumerate(zip(starts_B.tolist(), counts_B.tolist())):
            for t in range(count):
                page = table_BW[b, (start + t) // PAGE]
                expected[page, (start + t) % PAGE] = x[b, t]
        np.testing.assert_array_equal(out, expected)


def lowered(name=None, dtype=jnp.bfloat16):
    with on_target("cuda", (9, 0)), preferring(name), jax.sharding.use_abstract_mesh(H200):
        run = jax.jit(lambda *arrays: paged_append(*arrays), donate_argnums=0)
        return run.trace(*inputs(dtype=dtype)).lower(lowering_platforms=("cuda",)).as_text()


def test_keys_and_values_are_one_kernel_in_place():
    text = lowered()
    assert text.count("custom_call") == text.count("@__gpu$xla.gpu.triton") == 1
    assert text.count("#stablehlo.output_operand_alias") == 2 and "scatter" not in text
    for text in (lowered("triton"), lowered(dtype=jnp.float32)):
        assert text.count('"stablehlo.scatter"') == 2


def test_what_triton_serves():
    hopper, x = Target("cuda", (9, 0)), jax.ShapeDtypeStruct((4, 1, 2, 64), jnp.bfloat16)
    assert append.supports(hopper, (x, x)) is None
    wide = jax.ShapeDtypeStruct((4, 1, 2, 128), jnp.bfloat16)
    assert "one size" in (append.supports(hopper, (x, wide)) or "")
    assert "this is cpu" in (append.supports(Target("cpu"), (x,)) or "")
