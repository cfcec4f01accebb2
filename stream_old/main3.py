"""Times and errors of the streamed layer, third version. Writes $O/stream.json."""
import sys, os, json, time
from concurrent.futures import ThreadPoolExecutor
T0 = time.time()
import jax, jax.numpy as jnp, numpy as np
from jaxtrain_kernels.matmul.streamed import hopper, block, order, to_stream
from jaxtrain_kernels.matmul.streamed.plan import StreamPhase, StreamPlan, WARPS
from jaxtrain_kernels.matmul.streamed.emit import const, ptx, run_if as when
from jaxtrain_kernels.matmul.integers import to_fragments
try: from benchmarks.integer_chain import Chain, joined_chain
except Exception as e: print("no joined chain", repr(e))
O = os.environ.get("O", "."); PART = os.environ.get("PART", "")
say = lambda *x: print(f"[{time.time()-T0:5.1f}]", *x, flush=True)
D, F, KV, BLOCKS = 4096, 14336, 1024, 132
Phase = StreamPhase
PHASES = (StreamPhase(D, D, residual=True), StreamPhase(D, 2 * F, True, "swiglu"), StreamPhase(F, D, residual=True), StreamPhase(D, D + 2 * KV, True, parts=(D, KV, KV)))
LAYERS, KEPT = 32, 2
CASES = [("int8", 1), ("int4", 1), ("int8", 8), ("int4", 8)]
BYTES = {"int8": sum(p.K * p.N for p in PHASES), "int4": sum(p.K * p.N // 2 + p.K * p.N // 64 for p in PHASES)}
class NoExchange(block.StreamBlock):
    def wait(self, p): pass
class NoMultiply(block.StreamBlock):
    def use_slot(self, position, inputs, offsets, sums):
        self.ring.await_slot(position, self.warp)
        return self.ring.release(position, self.warp, self.lane.equals(0), const(0)), sums
class StreamOnly(NoMultiply, NoExchange): pass
class Stamped(block.StreamBlock):
    def __init__(self, plan, operands, memory):
        super().__init__(plan, operands, memory); self.n = 0
        from jaxlib.mlir.dialects import arith, gpu
        from jaxtrain_kernels.matmul.streamed.emit import Int, int_type as i32
        self.block = Int(arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x)))
    def stamp(self, inside=False):
        clock = ptx("mov.u32 $0, %clock;", out="r"); t = ptx("mov.u32 $0, %globaltimer_lo;", out="r")
        at = self.counters + (self.block * 256 + (1024 + self.n * 8)).wide(); self.n += 1
        put = lambda: ptx("st.global.v2.b32 [$0], {$1, $2};", at, clock, t)
        put() if inside else when(self.is_first, put)
    def compute(self): self.stamp(); super().compute()
    def multiply(self, *a): self.stamp(); r = super().multiply(*a); self.stamp(); return r
    def multiply_wide(self, *a): self.stamp(); r = super().multiply_wide(*a); self.stamp(); return r
    def finish(self, *a): self.stamp(); super().finish(*a)
    def signal(self, p): self.stamp(True); super().signal(p); self.stamp(True)
    def wait(self, p): super().wait(p); self.stamp(True)
    def end(self): self.stamp(True); super().end(); self.stamp(True)
NAMES = ["start"]
for p in range(4): NAMES += [f"{p} {x}" for x in (["begin", "multiplied", "sync", "stored", "signalled", "waited"] if p < 3 else ["begin", "multiplied", "sync", "stored", "ended"])]
KINDS = {"base": block.StreamBlock, "no exchange": NoExchange, "no multiply": NoMultiply, "stream only": StreamOnly, "stamped": Stamped}
def plan(f, m, kind="base", slots=None, flight=None, early=None):
    p = hopper.plan_of(f, m, PHASES, BLOCKS, 1e-5 * (1 + 1e-4 * list(KINDS).index(kind)))
    return p._replace(slots=min(p.slots, slots or p.slots), flight=flight or p.flight)
# The class is looked up when the kernel is lowered.
hopper.StreamBlock = lambda p, *a: list(KINDS.values())[round((p.eps / 1e-5 - 1) * 1e4)](p, *a)
def call(kind, p, *a): return hopper.call_streamed(p, *a)
V = {}
for f, m in CASES:
    for fl in ((1, 2, 3, 4) if f == "int8" else (2, 3, 4, 6)):
        if fl <= 2 * plan(f, m).slots: V[f, m, f"flight {fl}"] = ("base", plan(f, m, flight=fl))
    fl = {"int8": 2, "int4": 3}[f]
    for k in ("no exchange", "stream only"): V[f, m, k] = (k, plan(f, m, k))
    if False: V[f, m, "fewer slots"] = ("base", plan(f, m, slots=plan(f, m).slots - 1))
x0 = lambda m: jax.random.normal(jax.random.key(1), (m, D), jnp.bfloat16)
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
        if p.activation:
            g, u = y[:, ::2], y[:, 1::2]
            y = g / (1 + jnp.exp(-g)) * u
        if p.residual: y = stream = (f32(stream) + y).astype(jnp.bfloat16)
        x = y.astype(jnp.bfloat16); outs += [x] if not p.parts else jnp.split(x, [D, D + KV], -1)
    return outs
def chain(kind, p):
    def run(x, stream, counters, layers):
        for i in range(LAYERS): _, _, stream, x, *_ = call(kind, p, x, stream, counters, layers[i % KEPT])
        return x, stream
    return run
def stamped(p):
    def run(x, stream, counters, layers):
        for i in range(4): _, _, stream, x, *_ = call("stamped", p, x, stream, counters[i], layers[i])
        return x, stream
    return run
def old_chain(form, m):
    def run(x, gain, layers):
        return joined_chain(Chain("", m, LAYERS, D, F, KV, "swiglu"), form)(x, gain, *[a for i in range(LAYERS) for a in layers[i % KEPT]])
    return run
st = jax.ShapeDtypeStruct((8, 32), jnp.int32); big_st = jax.ShapeDtypeStruct((1 << 14,), jnp.int32)
like = {f: jax.eval_shape(lambda k, f=f: layer_of(f, k), jax.random.key(0)) for f in BYTES}
key = jax.eval_shape(lambda: jax.random.key(0)); shape = lambda f, m: jax.eval_shape(lambda: f(m))
low = {}
def lower(n, f, *a):
    try: low[n] = jax.jit(f).trace(*a).lower(lowering_platforms=("cuda",))
    except Exception as e: say(n, "FAILED to lower", repr(e)[:600])
for f in BYTES: lower(("layer", f), lambda k, f=f: layer_of(f, k), key)
for f, m in CASES:
    args = shape(x0, m), shape(s0, m), st, like[f][0]
    for v, (k, p) in [(v, x) for (g, n, v), x in V.items() if (g, n) == (f, m) and "flight" in v]:
        lower(("one", f, m, v), lambda *a, p=p: call("base", p, *a), *args)
    lower(("ref", f, m), lambda k, x, s, f=f: reference(f, k, x, s), key, *args[:2])
    if False: lower(("old", f, m), old_chain(f, m), shape(s0, m), jax.ShapeDtypeStruct((D,), jnp.bfloat16), [like[f][1]] * KEPT)
    for early in (): lower(("stamps", f, m, early), stamped(plan(f, m, "stamped", early=early)), *args[:2], [big_st] * 4, [like[f][0]] * 4)
for (f, m, v), (k, p) in V.items(): lower((f, m, v), chain(k, p), shape(x0, m), shape(s0, m), st, [like[f][0]] * KEPT)
lower("copy", lambda x: jnp.bitwise_xor(x, 1), jax.ShapeDtypeStruct((1 << 28,), jnp.int32))
say("lowered", len(low))
if os.environ.get("LOWER_ONLY"): sys.exit()
def comp(n):
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
def times(f, n=10, reps=9):
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
def attempt(n, f, *a):
    try: f(*a)
    except Exception as e: say(n, "FAILED", repr(e)[:1500]); res[str(n)] = repr(e)[:2000]; save()
far = lambda a, b: float(jnp.abs(f32(a) - f32(b)).max() / jnp.abs(f32(b)).max())
zeros = lambda: jnp.zeros((8, 32), jnp.int32)
def check(f, m):
    ref = done["ref", f, m](jax.random.key(0), x0(m), s0(m))
    for v in [n[3] for n in low if n[:3] == ("one", f, m)]:
        first, differ, worst, c = None, 0, None, zeros()
        for i in range(25):
            junk = [jnp.full((m, n), jnp.nan, jnp.bfloat16) for n in (D, D, F, F, F, KV, KV) * 3]
            jax.block_until_ready(junk); del junk
            out = jax.block_until_ready(done["one", f, m, v](x0(m), s0(m), c, layers[f][0]))
            first = first or out
            differ += not all(bool(jnp.array_equal(a, b)) for a, b in zip(out, first))
            errors = [far(a, b) for a, b in zip(out, ref)]
            worst = errors if worst is None else [max(a, b) if a == a and b == b else float("nan") for a, b in zip(worst, errors)]
        say(f, m, v, "worst errors of 25", [f"{e:.1e}" for e in worst], "differ", differ, "counters", int(jnp.abs(c).sum()))
        res[f"errors {f} {m} {v}"] = [worst, differ]; save()
base = {}
def one(f, m, v):
    c, x, s = zeros(), x0(m), s0(m)
    run = lambda: done[f, m, v](x, s, c, layers[f])
    t = times(run); res[f"{f} {m} {v}"] = t; k, p = V[f, m, v]
    if k == "base":
        out = run(); base.setdefault((f, m), out)
        same = all(bool(jnp.array_equal(a, b)) for a, b in zip(out, base[f, m]))
    else: same = ""
    say(f"{f} rows {m} {v:18s} slots {p.slots} flight {p.flight}: {t[0]:.0f} us (min {t[1]:.0f}), {t[0]/LAYERS:.2f} a layer, of copy {floor[f]*LAYERS/t[0]:.3f} {'' if same == '' else 'same' if same else 'NOT SAME'}"); save()
def old(f, m):
    t = times(lambda: done["old", f, m](s0(m), jnp.ones(D, jnp.bfloat16), olds[f]))
    res[f"{f} {m} old"] = t; say(f"{f} rows {m} joined products: {t[0]:.0f} us, {t[0]/LAYERS:.2f} a layer, of copy {floor[f]*LAYERS/t[0]:.3f}"); save()
def stamps(f, m, early):
    cs = [jnp.zeros(1 << 14, jnp.int32) for _ in range(4)]
    for i in range(2):
        cs = [jnp.zeros(1 << 14, jnp.int32) for _ in range(4)]; jax.block_until_ready(cs)
        jax.block_until_ready(done["stamps", f, m, early](x0(m), s0(m), cs, layers[f][:4]))
    a = np.stack([np.asarray(c)[256:256 + 132 * 64].reshape(132, 32, 2) for c in cs]); np.save(f"{O}/stamps_{f}_{m}_{early}.npy", a)
    g = a[..., 1].astype(np.int64) & 0xFFFFFFFF; last = len(NAMES) - 1
    say(f"stamps {f} rows {m} early {early}: gaps between layers", [int(g[i + 1, :, 0].min() - g[i, :, last].max()) for i in range(3)], "layers", [int(g[i + 1, :, 0].min() - g[i, :, 0].min()) for i in range(3)])
    g = g[2] - g[2, :, 0].min()
    for i, q in enumerate(NAMES): say(f"    {q:12s} ns {g[:, i].min():7d} {int(np.median(g[:, i])):7d} {g[:, i].max():7d}")
for f, m in CASES: attempt(("check", f, m), check, f, m)
order_of = lambda v: (0 if "flight" in v else 1 if v in ("early", "stream only") else 2)
for rank in range(3):
    for n in V:
        if order_of(n[2]) == rank: attempt(n, one, *n)
    if rank == 0:
        pass
    if rank == 1:
        pass
save(); say("end")
