"""Attention over pages under a mesh: each device has its heads, by the kernel if it can."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels.dispatch import on_target

from jaxtrain import parallel


def lowered(tensor, K):
    sizes = {"tensor": tensor, "fsdp": 1}
    mesh = parallel.make_mesh(parallel.MeshConfig(**sizes), jax.devices()[:tensor])
    kind = AbstractDevice("NVIDIA H200", 132, "gpu")
    there = AbstractMesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=kind)
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    numbers = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((2, 16), (2,), (2,))]
    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(there):
        pages = array(64, 32, K, 64)
        traced = jax.jit(parallel.paged_attention).trace(array(2, 1, 8, 64), pages, pages, *numbers)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_each_device_runs_the_kernel_on_its_heads():
    text = lowered(2, 4)
    assert "@__gpu$xla.gpu.triton" in text and "tensor<64x32x2x64xbf16>" in text


def test_heads_that_devices_do_not_share_are_left_to_xla():
    assert "@__gpu$xla.gpu.triton" not in lowered(2, 1)
