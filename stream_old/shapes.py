import jax, jax.numpy as jnp
from jaxtrain_kernels.matmul.streamed.kernel import Phase, StreamPlan
D, F, KV = 4096, 14336, 1024
PHASES = (Phase(D, D, residual=True), Phase(D, 2 * F, normed=True, gated=True), Phase(F, D, residual=True), Phase(D, D + 2 * KV, normed=True))
def plan_of(form="int8", slots=5, blocks=132, **k):
    return StreamPlan(PHASES, blocks, slots, 1e-5, **k)
S = jax.ShapeDtypeStruct
def abstract(plan):
    w = [(S((p.N // 16, p.K // 32, 128), jnp.int32), S((p.N,), jnp.float32), S((p.K,), jnp.bfloat16) if p.normed else None) for p in plan.phases]
    return S((1, D), jnp.bfloat16), S((1, D), jnp.bfloat16), S((8, 32), jnp.int32), w
