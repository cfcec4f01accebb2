"""Exchanges between two GPUs: layers of experts and of tensor parallelism equal those of one GPU.

Run it with NCCL_CTA_POLICY=2 and with 0 in the environment: with 2, as in training, copy engines
send what is in symmetric memory. NCCL reads that once, so one process cannot try both.
"""

import functools

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
import numpy as np
import pytest
from tiny import mesh_of

from jaxtrain import parallel

SYMMETRIC = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
B, T, D, F, E = 16, 1024, 768, 1536, 8


def arrays(*shapes):
    """bfloat16 arrays; matrices keep the variance of what they multiply."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    scale = lambda shape: 1 if shape[:2] == (B, T) else shape[-2] ** -0.5
    return [
        jax.random.normal(key, s, jnp.bfloat16) * scale(s)
        for key, s in zip(keys, shapes, strict=True)
    ]


def expert_layer(x, up, down, first=0):
    """first: no token chooses an expert before it."""
    key = jax.random.key(1)
    chosen = jax.random.randint(key, (B, T, 2), first, E)
    weights = jax.random.uniform(key, (B, T, 2))

    def network(rows, weights, ups, down, sizes):
        return kernels.grouped_feed_forward_relu2(rows, ups[0], down, weights, sizes)

    y, _ = parallel.moe_dispatch_combine(network, x, chosen, weights, [up], down)
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


def tensor_layer(x, q, out, up, down):
    (h,) = parallel.tensor_matmuls(x, (q,), ("embed", "heads"))
    (y,) = parallel.tensor_matmuls(jnp.sin(h), (out,), ("heads", "embed"))
    z = parallel.feed_forward_relu2(parallel.constrain(y, "batch", "sequence", None), up, down)
    return jnp.sum(jnp.sin(z.astype(jnp.float32)))


MATRICES = (E, D, F), (E, F, D)
LAYERS = {
    "even": ("expert", expert_layer, ((B, T, D), *MATRICES)),
    # The second device has all rows, and the branch that runs what the first pass leaves.
    "uneven": ("expert", functools.partial(expert_layer, first=E // 2), ((B, T, D), *MATRICES)),
    "tensor": ("tensor", tensor_layer, ((B, T, D), (D, D), (D, D), (D, 2 * F), (2 * F, D))),
}


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [False, True], ids=["plain", "symmetric"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_over_two_gpus_is_that_of_one(kind, symmetric):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    axis, layer, shapes = LAYERS[kind]
    given = arrays(*shapes)
    run = jax.value_and_grad(layer, tuple(range(len(given))))
    expected = jax.jit(run)(*given)
    with jax.set_mesh(mesh_of(**{axis: 2})):
        over_two = jax.jit(run, compiler_options={SYMMETRIC: symmetric})
        for _ in range(3):  # later calls use the buffers of earlier ones again
            found = over_two(*given)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)
