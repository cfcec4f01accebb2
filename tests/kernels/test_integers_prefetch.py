"""Which codes and scales a product with integer codes prefetches into the L2 cache."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul import integers
from jaxtrain_kernels.matmul.integers import to_fragments, triton, w4a16_matmul
from jaxtrain_kernels.matmul.integers.triton import kernels

# Pallas asks for the device when it lowers.
H100 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100", None, "gpu"))


def matrix(form, K, N):
    """Shapes of codes in fragments and scales."""
    shape = jax.ShapeDtypeStruct
    if form == "int8":
        codes, scales = shape((K, N), jnp.int8), shape((N,), jnp.float32)
    else:
        codes, scales = shape((K // 2, N), jnp.uint8), shape((K // 64, N), jnp.bfloat16)
    return jax.eval_shape(to_fragments, codes), scales


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize(("capability", "columns", "prefetched"), [
    ((9, 0), 160, 1), ((9, 0), 480, 3), ((9, 0), 64, 1), ((9, 0), 0, 0), ((8, 0), 160, 0),
])  # fmt: skip
def test_it_prefetches_codes_of_later_steps_and_of_the_next_product(
    form, capability, columns, prefetched, monkeypatch
):
    """480 columns are 15 panels, for which 5 programs of 32 columns ask; 64 are 2 panels."""
    sizes, lines = [], []
    noted = lambda ref, begin, size, threads: sizes.append((size, threads))
    monkeypatch.setattr(kernels, "prefetch_rows", noted)
    monkeypatch.setattr(kernels, "prefetch_each", lambda ref, indices: lines.append(len(indices)))
    jax.clear_caches()
    x, arrays = jax.ShapeDtypeStruct((1, 4096), jnp.bfloat16), matrix(form, 4096, 160)
    following = matrix(form, 4096, columns) if columns else None
    asked = lambda x, codes, scales, following: integers.joined_integer_matmul(
        form, x, codes, scales, (160,), following=following, implementation="triton"
    )
    with on_target("cuda", capability), jax.sharding.use_abstract_mesh(H100):
        jax.jit(asked).trace(x, *arrays, following).lower(lowering_platforms=("cuda",))
    jax.clear_caches()
    blocks = 4096 // (16 if form == "int8" else 32)
    tile = triton.fragment_tile(16 * blocks, 160, None if form == "int8" else 64, whole=True)
    own = tile.ahead + 1 if capability >= triton.HOPPER else 0  # before the loop, and in it
    programs = 2 if columns == 64 else 1  # that ask for a panel of the next product
    threads, piece = 32 * tile.warps, blocks * 512 // (programs * tile.warps)
    rest = sizes[own + prefetched :]
    assert tile.ahead > 0 and sizes[:own] == [(512 * tile.loads, threads)] * own
    assert sizes[own : own + prefetched] == [(piece, threads)] * prefetched
    if form == "int4":  # 64 groups; each warp of 5 programs has a piece of the next product's
        whole = 64 * columns * 2 // (5 * tile.warps) if prefetched else 0
        assert rest == [(whole // 16 * 16, threads)] * (prefetched > 0)
    assert lines == [threads] * (form == "int4" and own > 0)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "expected"), [((9, 0), True), ((8, 0), False)])
def test_prefetches_are_in_the_program(capability, expected):
    x, arrays = jax.ShapeDtypeStruct((1, 256), jnp.bfloat16), matrix("int4", 256, 96)
    asked = functools.partial(w4a16_matmul, implementation="triton")
    jax.clear_caches()
    with on_target("cuda", capability), jax.sharding.use_abstract_mesh(H100):
        text = jax.jit(asked).trace(x, *arrays).lower(lowering_platforms=("cuda",)).as_text()
    jax.clear_caches()
    assert ("cp.async.bulk.prefetch.L2" in text) is expected
    assert ("prefetch.global.L2 [$1]" in text) is expected
