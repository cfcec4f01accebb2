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
try: from benchmarks.integer_chain import Chain, joined_chain
except Exception as e: print("no joined chain", repr(e))
O = os.environ.get("O", ".")
say = lambda *x: print(f"[{time.time()-T0:5.1f}]", *x, flush=True)
LAYERS, KEPT = 32, 8
CASES = [("int8", 1), ("int4", 1), ("int8", 8), ("int4", 8)]
VARIANTS = {}
for f, m in CASES:
    n = f"{f} rows {m}"
    VARIANTS[n, "base"] = plan_of(f, m)
    for a in (2, 4, 6, 10):
        if a <= VARIANTS[n, "base"].slots: VARIANTS[n, f"ahead {a}"] = plan_of(f, m, ahead=a)
    VARIANTS[n, "no exchange"] = plan_of(f, m, exchange=False)
    VARIANTS[n, "stream only"] = plan_of(f, m, exchange=False, multiply=False)
    if m == 1:
        VARIANTS[n, "no multiply"] = plan_of(f, m, multiply=False)
        VARIANTS[n, "slots 3"] = plan_of(f, m, 3)
VARIANTS["int8 rows 1", "slots 2"] = plan_of("int8", 1, 2)
PHASES = plan_of().phases
BYTES = {"int8": sum(p.K * p.N for p in PHASES), "int4": sum(p.K * p.N // 2 + p.K * p.N // 64 for p in PHASES)}
x0 = lambda m: jax.random.normal(jax.random.key(1), (m, D + 2 * KV), jnp.bfloat16)
s0 = lambda m: jax.random.normal(jax.random.key(2), (m, D), jnp.bfloat16)

def codes_of(form, key):
    out = []
    for p, k in zip(PHASES, jax.random.split(key, 4)):
        a, b, c = jax.random.split(k, 3)
        if form == "int8":
            codes = jax.random.bits(a, (p.K, p.N), jnp.uint8).astype(jnp.int8)
            scales = jax.random.uniform(b, (p.N,), jnp.float32, 0.5, 1.5) / (73 * p.K**0.5)
        else:
            codes = jax.random.bits(a, (p.K // 2, p.N), jnp.uint8)
            scales = (jax.random.uniform(b, (p.K // 128, p.N), jnp.float32, 0.5, 1.5) / (4.6 * p.K**0.5)).astype(jnp.bfloat16)
        gain = (1 + 0.1 * jax.random.normal(c, (p.K,), jnp.float32)).astype(jnp.bfloat16) if p.normed else None
        out.append((codes, scales, gain))
    return out
def layer_of(form, key):
    got = codes_of(form, key)
    new = [(to_stream(form, c, s), s if form == "int8" else None, g) for c, s, g in got]
    old = [y for i in (3, 0, 1, 2) for y in (to_fragments(got[i][0]), got[i][1])]  # joined_chain's order
    return new, old

f32 = lambda a: a.astype(jnp.float32)
def reference(form, key, x, stream):
    outs, x = [], x[:, :D]
    for p, (codes, scales, gain) in zip(PHASES, codes_of(form, key)):
        if form == "int8": w = f32(codes) * scales
        else: w = (f32(jnp.stack([codes & 15, codes >> 4], 1).reshape(p.K, p.N)) - 8) * jnp.repeat(f32(scales), 128, 0)
        y = f32((f32(x) * f32(gain)).astype(jnp.bfloat16)) if p.normed else f32(x)
        y = jnp.matmul(y, w, precision="highest")
        if p.normed: y *= jax.lax.rsqrt(jnp.mean(f32(x) ** 2, -1, keepdims=True) + 1e-5)
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
            following = tuple(layers[(i + 1) % KEPT][j][0] for j in range(2)) if plan.ahead else ()
            _, _, stream, x, *_ = streamed_products(plan, x, stream, state, layers[i % KEPT], following)
        return x, stream
    return run
def old_chain(form, m):
    def run(x, gain, layers):
        s = Chain("", m, LAYERS, D, F, KV, "swiglu")
        return joined_chain(s, form)(x, gain, *[a for i in range(LAYERS) for a in layers[i % KEPT]])
    return run
from jaxtrain_kernels.matmul.streamed import StreamedMatrix, streamed_products as public
from jaxtrain_kernels.matmul.few_rows import InputNorm
def pkg_chain(form):
    def run(x, stream, layers):
        ms = [[StreamedMatrix(c, s, None if g is None else InputNorm(1e-5, g), "swiglu" if p.gated else None, p.residual) for p, (c, s, g) in zip(PHASES, l)] for l in layers]
        for i in range(LAYERS):
            _, _, stream, x = public(form, x, stream, ms[i % KEPT], following=tuple(m.codes for m in ms[(i + 1) % KEPT][:2]))
        return x, stream
    return run
def read(x): return jnp.bitwise_xor(x, 1)

S = lambda t: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), t)
st = jax.ShapeDtypeStruct((8, 32), jnp.int32)
like = {f: jax.eval_shape(lambda k, f=f: layer_of(f, k), jax.random.key(0)) for f in BYTES}
key = jax.eval_shape(lambda: jax.random.key(0))
shape = lambda f, m: jax.eval_shape(lambda: f(m))
low = {}
class Low:
    def __init__(self, f): self.f = jax.jit(f)
    def lower(self, *a): return self.f.trace(*a).lower(lowering_platforms=('cuda',))
def lower(n, f, *a):
    try: low[n] = Low(f).lower(*a)
    except Exception as e: say(n, "FAILED to lower", repr(e)[:600])
for f in BYTES: lower(("layer", f), lambda k, f=f: layer_of(f, k), key)
for f, m in CASES:
    n, args = f"{f} rows {m}", (shape(x0, m), shape(s0, m), st, like[f][0])
    lower(("one", n), lambda *a, f=f, m=m: streamed_products(plan_of(f, m), *a), *args)
    lower(("ref", n), lambda k, x, s, f=f: reference(f, k, x, s), key, *args[:2])
    lower(("old", n), old_chain(f, m), shape(s0, m), jax.ShapeDtypeStruct((D,), jnp.bfloat16), [like[f][1]] * KEPT)
for f in BYTES: lower(("stamps", f"{f} rows 1"), lambda *a, f=f: streamed_products(plan_of(f, 1, stamps=True), *a), shape(x0, 1), shape(s0, 1), st, like[f][0])
lower(("stamps", "int8 rows 8"), lambda *a: streamed_products(plan_of("int8", 8, stamps=True), *a), shape(x0, 8), shape(s0, 8), st, like["int8"][0])
for (n, v), p in VARIANTS.items():
    lower((n, v), chain(p), shape(x0, p.rows), shape(s0, p.rows), st, [like[p.form][0]] * KEPT)
for f, m in CASES: lower(("pkg", f"{f} rows {m}"), pkg_chain(f), shape(x0, m), shape(s0, m), [like[f][0]] * KEPT)
lower("copy", read, jax.ShapeDtypeStruct((1 << 28,), jnp.int32))
say("lowered", len(low))
if os.environ.get("LOWER_ONLY"): sys.exit()
def comp(n):
    b = time.time()
    try: return low[n].compile()
    except Exception as e: return repr(e)[:2000]
with ThreadPoolExecutor(16) as pool:
    futures = {n: pool.submit(comp, n) for n in low}
    layers, olds = {}, {}
    for f in BYTES:
        make = futures["layer", f].result()
        layers[f], olds[f] = map(list, zip(*[make(jax.random.key(i)) for i in range(KEPT)]))
    jax.block_until_ready((layers, olds)); say("data")
    done = {n: f.result() for n, f in futures.items()}
say("compiled", {n: f[:300] for n, f in done.items() if isinstance(f, str)})
res = {}
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
res["copy_gbps"] = rate; del big
floor = {f: BYTES[f] / rate / 1e3 for f in BYTES}
say(f"copy {rate:.0f} GB/s, floor of a layer", floor); save()
def attempt(n, f):
    try: f()
    except Exception as e: say(n, "FAILED", repr(e)[:1500]); res[str(n)] = repr(e)[:2000]; save()
far = lambda a, b: float(jnp.abs(f32(a) - f32(b)).max() / jnp.abs(f32(b)).max())
good = {}
zeros = lambda: jnp.zeros((8, 32), jnp.int32)
def check(f, m):
    n, state = f"{f} rows {m}", zeros()
    ref = done["ref", n](jax.random.key(0), x0(m), s0(m))
    for i in range(3):
        out = jax.block_until_ready(done["one", n](x0(m), s0(m), state, layers[f][0]))
        flag = int(state[7, 0])
        say(n, "counters", np.asarray(state[:7, 0]), "TIMED OUT" if flag else "", "errors", [f"{far(a, b):.1e}" for a, b in zip(out, ref)])
        res[f"errors {n} {i}"] = [far(a, b) for a, b in zip(out, ref)]
        if flag: break
    good[n] = not flag; save()
def old(f, m):
    n = f"{f} rows {m}"
    t = times(lambda: done["old", n](s0(m), jnp.ones(D, jnp.bfloat16), olds[f]))
    res[f"{n} old"] = t; say(f"{n} joined products: {t[0]:.0f} us, {t[0]/LAYERS:.2f} a layer, of copy {floor[f]*LAYERS/t[0]:.3f}"); save()
def one(n, v):
    p, state = VARIANTS[n, v], zeros()
    if not good.get(n) and p.exchange: return
    x, s = x0(p.rows), s0(p.rows)
    t = times(lambda: done[n, v](x, s, state, layers[p.form]))
    res[f"{n} {v}"] = t; say(f"{n} {v}: {t[0]:.0f} us (min {t[1]:.0f}), {t[0]/LAYERS:.2f} a layer, of copy {floor[p.form]*LAYERS/t[0]:.3f}", "TIMED OUT" if int(state[7, 0]) else ""); save()
def pkg(f, m):
    n = f"{f} rows {m}"
    if not good.get(n): return
    x, s = x0(m), s0(m)
    t = times(lambda: done["pkg", n](x, s, layers[f]))
    same = [far(a, b) for a, b in zip(done["pkg", n](x, s, layers[f]), done[n, "base"](x, s, zeros(), layers[f]))]
    res[f"{n} package"] = t; say(f"{n} package: {t[0]:.0f} us (min {t[1]:.0f}), {t[0]/LAYERS:.2f} a layer, of copy {floor[f]*LAYERS/t[0]:.3f}; far from base {same}"); save()
def stamps(n):
    f, _, m = n.split(); m = int(m); state = zeros()
    if not good.get(n): return
    for i in range(4): out = done["stamps", n](x0(m), s0(m), state, layers[f][i])
    a = np.asarray(out[4]).reshape(132, 32, 2); np.save(f"{O}/stamps {n}.npy".replace(" ", "_"), a)
    c = a[:, :, 0].astype(np.int64) & 0xFFFFFFFF; g = a[:, :, 1].astype(np.int64) & 0xFFFFFFFF
    g0 = g[:, 0].min()
    names = ["start"] + [f"{p} {q}" for p in range(4) for q in (["begin", "multiplied", "sync", "stored", "signalled"] + (["waited"] if p < 3 else []))]
    for i, q in enumerate(names):
        since = (c[:, i] - c[:, 0]) & 0xFFFFFFFF; abs_ = (g[:, i] - g0)
        say(f"  {n} {q:12s} clocks since start min {since.min():7d} median {int(np.median(since)):7d} max {since.max():7d}; ns {abs_.min():7d} {int(np.median(abs_)):7d} {abs_.max():7d}")
for f, m in CASES: attempt(("check", f, m), lambda: check(f, m))
for n, v in VARIANTS:
    if v == "base": attempt((n, v), lambda: one(n, v))
for f, m in CASES: attempt(("old", f, m), lambda: old(f, m))
for n, v in VARIANTS:
    if v != "base": attempt((n, v), lambda: one(n, v))
for f, m in CASES: attempt(("pkg", f, m), lambda: pkg(f, m))
for n in ("int8 rows 1", "int4 rows 1", "int8 rows 8"): attempt(("stamps", n), lambda: stamps(n))
save()
