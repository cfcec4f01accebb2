import os, sys, time
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"; os.environ["LOWER_ONLY"]="1"
import jax
jax.config.update("jax_platforms", "cpu")
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxtrain_kernels.dispatch import on_target
t = topologies.get_topology_desc("1x1x2", platform="cuda", target_config=open("/tmp/castsw/h200.txtpb").read(), topology="1x1x2")
src = open("/work/wt/stream/stream_old/main.py").read().replace("os.path.abspath(__file__)", "'/work/wt/stream/stream_old/x'").split("st = jax.Shape")[0]
with on_target("cuda", (9, 0)):
    exec(src)
    put = lambda a: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(t.devices[0])), a)
    new1 = jax.eval_shape(lambda k: layer_of("int8", k)[0], jax.random.key(0))
    xs, ss, st = put(jax.eval_shape(lambda: x0(1))), put(jax.eval_shape(lambda: s0(1))), put(jax.ShapeDtypeStruct((8, 32), jax.numpy.int32))
    b = time.time()
    lo = jax.jit(chain(plan_of(ahead=4))).trace(xs, ss, st, [put(new1)] * KEPT).lower(lowering_platforms=("cuda",))
    c = lo.compile(); print("chain compiled", time.time() - b)
    open("/tmp/streamdump/chain.hlo", "w").write(c.as_text())
    lo = jax.jit(lambda *a: streamed_products(plan_of(stamps=True), *a)).trace(xs, ss, st, put(new1)).lower(lowering_platforms=("cuda",)).compile()
    print("stamps", time.time() - b)
