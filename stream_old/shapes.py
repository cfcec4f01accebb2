import jax, jax.numpy as jnp
from jaxtrain_kernels.matmul.streamed.kernel import Phase, StreamPlan
from jaxtrain_kernels.matmul.streamed.order import SLOT_WORDS, slots_across
D, F, KV = 4096, 14336, 1024
PHASES = (Phase(D, D, residual=True), Phase(D, 2 * F, normed=True, gated=True), Phase(F, D, residual=True), Phase(D, D + 2 * KV, normed=True))
SLOTS = {("int8", 1): 6, ("int8", 8): 5, ("int4", 1): 10, ("int4", 8): 9}
def plan_of(form="int8", rows=1, slots=None, blocks=132, **k):
    return StreamPlan(form, rows, PHASES, blocks, slots or SLOTS[form, 8 if rows > 2 else 1], 1e-5, **k)
S = jax.ShapeDtypeStruct
def abstract(plan):
    w = []
    for p in plan.phases:
        c = slots_across(p.K)
        w.append((S((p.N // 16 // c, p.K // 256, c, SLOT_WORDS[plan.form]), jnp.int32), S((p.N,), jnp.float32) if plan.form == "int8" else None, S((p.K,), jnp.bfloat16) if p.normed else None))
    return S((plan.rows, D + 2 * KV), jnp.bfloat16), S((plan.rows, D), jnp.bfloat16), S((8, 32), jnp.int32), w
