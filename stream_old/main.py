"""Times and errors of the streamed layer. Writes $O/stream.json."""
import sys, os, json, time
from concurrent.futures import ThreadPoolExecutor
T0 = time.time()
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from shapes import plan_of, abstract, D, F, KV
from jaxtrain_kernels.matmul.streamed.kernel import streamed_products
from jaxtrain_kernels.matmul.streamed.order import to_stream
from jaxtrain_kernels.matmul.integers import to_fragments
from benchmarks.integer_chain import Chain, joined_chain
O = os.environ.get("O", ".")
say = lambda *x: print(f"[{time.time()-T0:5.1f}]", *x, flush=True)
LAYERS, KEPT = 32, 8
plan = plan_of("int8")
VARIANTS = {
    "base": plan_of(slots=5), "slots 3": plan_of(slots=3), "slots 2": plan_of(slots=2), "slots 1": plan_of(slots=1),
    "no exchange": plan_of(exchange=False), "no multiply": plan_of(multiply=False),
    "stream only": plan_of(exchange=False, multiply=False),
}
BYTES = sum(p.K * p.N for p in plan.phases)
x0 = lambda: jax.random.normal(jax.random.key(1), (1, D), jnp.bfloat16)
s0 = lambda: jax.random.normal(jax.random.key(2), (1, D), jnp.bfloat16)

def codes_of(key):
    out = []
    for p, k in zip(plan.phases, jax.random.split(key, 4)):
        a, b, c = jax.random.split(k, 3)
        codes = jax.random.randint(a, (p.K, p.N), -127, 128, jnp.int8)
        scales = jax.random.uniform(b, (p.N,), jnp.float32, 0.5, 1.5) / (73 * p.K**0.5)
        gain = 1 + 0.1 * jax.random.normal(c, (p.K,), jnp.float32) if p.normed else None
        out.append((codes, scales, None if gain is None else gain.astype(jnp.bfloat16)))
    return out
def layer_of(key):
    got = codes_of(key)
    new = [(to_stream(c), s, g) for c, s, g in got]
    order = (3, 0, 1, 2)  # joined_chain's
    old = [y for i in order for y in (to_fragments(got[i][0]), got[i][1][None])]
    return new, old

def reference(x, stream, w):
    outs = []
    f32 = lambda a: a.astype(jnp.float32)
    for p, (codes, scales, gain) in zip(plan.phases, w):
        if p.normed:
            inv = jax.lax.rsqrt(jnp.mean(f32(x) ** 2) + 1e-5)
            y = (f32((f32(x) * f32(gain)).astype(jnp.bfloat16)) @ f32(codes)) * scales * inv
        else:
            y = (f32(x) @ f32(codes)) * scales
        y = f32(y.astype(jnp.bfloat16))
        if p.gated:
            g, u = y[:, ::2], y[:, 1::2]
            y = g / (1 + jnp.exp(-g)) * u
        if p.residual:
            y = stream = (f32(stream) + y).astype(jnp.bfloat16)
        x = y.astype(jnp.bfloat16)
        outs.append(x)
    return outs

def chain(plan):
    def run(x, stream, state, layers):
        for i in range(LAYERS):
            _, _, stream, qkv, *_ = streamed_products(plan, x, stream, state, layers[i % KEPT])
            x = qkv[:, :D]
        return x, stream
    return run
def old_chain(x, gain, layers):
    s = Chain("", 1, LAYERS, D, F, KV, "swiglu")
    return joined_chain(s, "int8")(x, gain, *[a for i in range(LAYERS) for a in layers[i % KEPT]])
def read(x): return jnp.bitwise_xor(x, 1)

S = lambda t: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), t)
new1, old1 = jax.eval_shape(layer_of, jax.random.key(0))
xs, ss, st = S(jax.eval_shape(x0)), S(jax.eval_shape(s0)), jax.ShapeDtypeStruct((8, 32), jnp.int32)
low = {}
class Low:
    def __init__(self, f): self.f = jax.jit(f)
    def lower(self, *a): return self.f.trace(*a).lower(lowering_platforms=('cuda',))
low["layer"] = Low(layer_of).lower(jax.eval_shape(lambda: jax.random.key(0)))
low["one"] = Low(lambda *a: streamed_products(VARIANTS["base"], *a)).lower(xs, ss, st, new1)
low["stamps"] = Low(lambda *a: streamed_products(plan_of(stamps=True), *a)).lower(xs, ss, st, new1)
for n, p in VARIANTS.items():
    try: low[n] = Low(chain(p)).lower(xs, ss, st, [new1] * KEPT)
    except Exception as e: say(n, "FAILED to lower", repr(e)[:900])
try: low["old"] = Low(old_chain).lower(xs, jax.ShapeDtypeStruct((D,), jnp.bfloat16), [old1] * KEPT)
except Exception as e: say("old FAILED to lower", repr(e)[:300])
low["copy"] = Low(read).lower(jax.ShapeDtypeStruct((1 << 28,), jnp.int32))
say("lowered", len(low))
if os.environ.get("LOWER_ONLY"): sys.exit()
def comp(n):
    b = time.time()
    try: return low[n].compile()
    except Exception as e: return repr(e)[:2000]
with ThreadPoolExecutor(16) as pool:
    futures = {n: pool.submit(comp, n) for n in low}
    make = futures["layer"].result()
    layers, olds = zip(*[make(jax.random.key(i)) for i in range(KEPT)])
    ref = jax.jit(lambda k, x, s: reference(x, s, codes_of(k)))(jax.random.key(0), x0(), s0())
    jax.block_until_ready((layers, olds, ref)); say("data")
    done = {n: f.result() for n, f in futures.items()}
say("compiled", {n: f for n, f in done.items() if isinstance(f, str)})
res = {"bytes": BYTES}
def times(f, n=10, reps=7):
    jax.block_until_ready(f()); t = []
    for _ in range(reps):
        b = time.perf_counter()
        for _ in range(n): r = f()
        jax.block_until_ready(r); t.append((time.perf_counter() - b) / n)
    return float(np.median(t)) * 1e6, float(min(t)) * 1e6
def save(): json.dump(res, open(f"{O}/stream.json", "w"), indent=1)
big = jnp.zeros(1 << 28, jnp.int32)
t = times(lambda: done["copy"](big)); rate = 2 * big.nbytes / t[0] / 1e3
res["copy_gbps"] = rate; floor = BYTES / rate / 1e3; del big
say(f"copy {rate:.0f} GB/s, floor of a layer {floor:.2f} us"); save()
def attempt(n, f):
    try: f()
    except Exception as e: say(n, "FAILED", repr(e)[:1500]); res[n] = repr(e)[:2000]; save()
far = lambda a, b: float(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max() / jnp.abs(b.astype(jnp.float32)).max())
good = [False]
def check():
    state = jnp.zeros((8, 32), jnp.int32)
    for i in range(3):
        out = jax.block_until_ready(done["one"](x0(), s0(), state, layers[0]))
        flag = int(state[7, 0])
        say("counters", np.asarray(state[:, 0]), "TIMED OUT" if flag else "", "errors", [f"{far(a, b):.1e}" for a, b in zip(out, ref)])
        res[f"errors {i}"] = [far(a, b) for a, b in zip(out, ref)]
    good[0] = not flag; save()
attempt("check", check)
def old():
    t = times(lambda: done["old"](x0(), jnp.ones(D, jnp.bfloat16), olds))
    res["old"] = t; say(f"joined products: {t[0]:.0f} us, {t[0]/LAYERS:.2f} a layer, of copy {floor*LAYERS/t[0]:.3f}"); save()
def one(n):
    state, x, s = jnp.zeros((8, 32), jnp.int32), x0(), s0()
    if not good[0] and VARIANTS[n].exchange: return
    t = times(lambda: done[n](x, s, state, layers))
    res[n] = t; say(f"{n}: {t[0]:.0f} us (min {t[1]:.0f}), {t[0]/LAYERS:.2f} a layer, of copy {floor*LAYERS/t[0]:.3f}", "TIMED OUT" if int(state[7, 0]) else ""); save()
def stamps():
    state = jnp.zeros((8, 32), jnp.int32)
    for i in range(4): out = done["stamps"](x0(), s0(), state, layers[i])
    a = np.asarray(out[4]).reshape(132, 32, 2); np.save(f"{O}/stamps.npy", a)
    c = a[:, :, 0].astype(np.int64) & 0xFFFFFFFF; g = a[:, :, 1].astype(np.int64) & 0xFFFFFFFF
    g0 = g[:, 0].min()
    names = ["start"] + [f"{p}{q}" for p in range(4) for q in (["begin", "multiplied", "sync", "stored", "signalled"] + (["waited"] if p < 3 else []))]
    for i, n in enumerate(names):
        since = (c[:, i] - c[:, 0]) & 0xFFFFFFFF; abs_ = (g[:, i] - g0)
        say(f"  {n:12s} clocks since start min {since.min():7d} median {int(np.median(since)):7d} max {since.max():7d}; ns {abs_.min():7d} {int(np.median(abs_)):7d} {abs_.max():7d}")
attempt("old", old)
if good[0]: attempt("stamps", stamps)
for n in VARIANTS: attempt(n, lambda: one(n))
save()
