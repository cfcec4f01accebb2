import os, sys, time
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul.streamed import *
from jaxtrain_kernels.matmul.streamed.order import *
from jaxtrain_kernels.matmul.few_rows import InputNorm
t = topologies.get_topology_desc("1x1x2", platform="cuda", target_config=open("/tmp/castsw/h200.txtpb").read(), topology="1x1x2")
D, F, KV = 4096, 14336, 1024
if os.environ.get("SMALL"): D, F, KV = 2048, 8192, 256
S = lambda *s, d=jnp.bfloat16: jax.ShapeDtypeStruct(s, d, sharding=SingleDeviceSharding(t.devices[0]))
def matrix(form, K, N, norm, act, residual):
    c = slots_across(K)
    return StreamedMatrix(K, S(N // 16 // c, K * c // 512, slot_words(form), d=jnp.int32), S(N, d=jnp.float32) if form == "int8" else None, S(K) if norm else None, act, residual)
for form in ("int8", "int4"):
    for m in (1, 8, 3):
        ms = [matrix(form, D, D, False, None, True), matrix(form, D, 2 * F, True, "swiglu", False), matrix(form, F, D, False, None, True), matrix(form, D, D + 2 * KV, True, None, False)]
        def f(x, s, a, m=m):
            a = [q._replace(codes=c, scales_N=sc, norm=None if g is None else InputNorm(1e-5, g)) for (c, sc, g), q in zip(a, ms)]
            for _ in range(2):
                *_, s, x = streamed_products(form, x, s, a, implementation="hopper")
            return x, s
        with on_target("cuda", (9, 0)):
            b = time.time()
            lo = jax.jit(f).trace(S(m, D + 2 * KV), S(m, D), [(q.codes, q.scales_N, q.norm) for q in ms]).lower(lowering_platforms=("cuda",))
            c = lo.compile(); print(form, m, "compiled", time.time() - b, flush=True)
