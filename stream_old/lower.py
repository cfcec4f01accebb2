"""Compile for an H200 without one. argv: a variant's name."""
import os, sys, time
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from shapes import plan_of, abstract
from jaxtrain_kernels.matmul.streamed.kernel import streamed_products
from jaxtrain_kernels.dispatch import on_target
t = topologies.get_topology_desc("1x1x2", platform="cuda", target_config=open("/tmp/castsw/h200.txtpb").read(), topology="1x1x2")
args = sys.argv[1:] or ["int8_1", "int8_8", "int4_1", "int4_8", "int8_3"]
for form in args:
    plan = plan_of(form.split("_")[0], int(form.split("_")[1]))
    with on_target("cuda", (9, 0)):
        a = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(t.devices[0])), abstract(plan))
        s = time.time()
        lo = jax.jit(lambda *a: streamed_products(plan, *a)).trace(*a).lower(lowering_platforms=("cuda",))
        print(form, "lowered", time.time() - s, flush=True)
        c = lo.compile()
        print("compiled", time.time() - s, flush=True)
