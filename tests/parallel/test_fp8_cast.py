"""Casts to float8 under a mesh: each device casts its own rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul.fp8 import E4M3, E5M2, fp8_matmul, fp8_quantize_function
from jaxtrain_kernels.matmul.fp8.functions import itself, relu2_grad

from jaxtrain.parallel.fp8_cast import ShardedCast, cast_backend
from jaxtrain.parallel.mesh import AXES, MeshConfig, make_mesh

ROWS = ("data", "fsdp", "expert")


def mesh_of(**sizes):
    return make_mesh(MeshConfig.model_validate({"data": 1} | sizes))


@pytest.mark.parametrize("amax", [None, 3.0], ids=["current", "delayed"])
def test_sharded_casts_are_those_of_one_device(amax):
    """Values, both layouts, the scale, and the amax of all rows, the largest on the last device."""
    x_MK = jax.random.normal(jax.random.key(0), (256, 128), jnp.bfloat16).at[-1, 0].set(9)
    arrays, given = (x_MK, x_MK[::-1]), amax and jnp.float32(amax)
    run = lambda how: lambda *a: fp8_quantize_function(relu2_grad, a, E5M2, given, how)
    wanted, seen = run("reference")(*arrays)
    with jax.set_mesh(mesh := mesh_of(data=2, fsdp=4)):
        arrays = jax.device_put(arrays, NamedSharding(mesh, P(ROWS, None)))
        found, most = jax.jit(run(ShardedCast(ROWS, "reference")))(*arrays)
        assert found.q_KM.sharding.spec == P(None, ("data", "fsdp"))
    for one, other in zip([*found, most], [*wanted, seen], strict=True):
        if one is not None:
            np.testing.assert_array_equal(np.float32(one), np.float32(other))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data": 2, "fsdp": 4}, ShardedCast(ROWS)),
        ({"data": 4, "tensor": 2}, "xla"),
        ({"data": 4, "context": 2}, "xla"),
    ],
)
def test_xla_casts_where_a_mesh_divides_more_than_rows(sizes, expected):
    assert cast_backend() is None
    with jax.set_mesh(mesh_of(**sizes)):
        assert cast_backend() == expected


def test_every_product_under_fsdp_casts_by_our_kernel():
    """Three casts: the input, the matrix, and the gradient of the output."""
    shapes = [jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16), jnp.zeros((256, 128), jnp.bfloat16)]

    def run(x_MK, w_KN):
        how = cast_backend()
        w_fp8, _ = fp8_quantize_function(itself, (w_KN,), E4M3, None, "xla")
        y, pull = jax.vjp(lambda x: fp8_matmul(x, w_KN, w_fp8=w_fp8, implementation=how), x_MK)
        return pull(y)

    with jax.set_mesh(mesh_of(fsdp=8)), on_target("cuda", (9, 0)):
        text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2 and "tensor<512x256xbf16>" in text


def test_rows_that_devices_do_not_share_equally_are_cast_by_xla():
    with jax.set_mesh(mesh_of(data=8)):
        x_MK, by = jnp.ones((12, 128), jnp.bfloat16), ShardedCast(ROWS, "reference")
        found, _ = fp8_quantize_function(itself, (x_MK,), E4M3, None, by)
    assert found.q_KM.shape == (128, 12) and set(ROWS) < set(AXES)
