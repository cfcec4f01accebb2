import os, sys, time
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"; os.environ["LOWER_ONLY"]="1"
import jax
jax.config.update("jax_platforms", "cpu")
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxtrain_kernels.dispatch import on_target
t = topologies.get_topology_desc("1x1x2", platform="cuda", target_config=open("/tmp/castsw/h200.txtpb").read(), topology="1x1x2")
src = open("/work/wt/stream/stream_old/main3.py").read().split("st = jax.ShapeDtypeStruct")[0]
with on_target("cuda", (9, 0)):
    exec(src)
    put = lambda a: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(t.devices[0])), a)
    st = put(jax.ShapeDtypeStruct((8, 32), jax.numpy.int32)); big = put(jax.ShapeDtypeStruct((1 << 14,), jax.numpy.int32))
    for f, m in CASES:
        new = put(jax.eval_shape(lambda k: layer_of(f, k)[0], jax.random.key(0)))
        xs, ss = put(jax.eval_shape(lambda: x0(m))), put(jax.eval_shape(lambda: s0(m)))
        for early in (False, True):
            b = time.time()
            c = jax.jit(stamped(plan(f, m, "stamped", early=early))).trace(xs, ss, [big] * 4, [new] * 4).lower(lowering_platforms=("cuda",)).compile()
            print("stamped", f, m, early, time.time() - b)
        for k in KINDS:
            if k != "stamped": jax.jit(chain(k, plan(f, m, k))).trace(xs, ss, st, [new] * KEPT).lower(lowering_platforms=("cuda",)).compile()
