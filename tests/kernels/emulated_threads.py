"""Threads of a few CUDA blocks in NumPy, which run the kernel of `streamed` without a GPU.

All blocks run in lockstep: an array has a value for each block and thread, and a mask says which
threads are active. The roles of a block's warps take turns: one runs until it waits for what is
not there, and then the next one does. A copy to shared memory completes when a thread waits for
its barrier and not before, so that all are as late as they can be.
"""

import collections
import re
import threading
import types

import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels.matmul.streamed import block, emit, exchange, finish, registers, ring

BLOCKS = 5
SHARED = 1 << 18
WORD, HALF = np.uint32, 0xFFFF0000
KINDS = {"r": "i32", "f": "f32"}


class Raw:
    """Values [blocks, threads] of a kind: i1, i32, i64 or f32."""

    threads = 0  # of a block

    def __init__(self, values, kind):
        values = np.asarray(values)
        if kind == "i32":
            values = (values.astype(np.int64) + 2**31) % 2**32 - 2**31
        self.values, self.kind = np.broadcast_to(values, (BLOCKS, Raw.threads)), kind

    @property
    def words(self):
        if self.kind == "f32":
            return self.values.astype(np.float32).view(WORD)
        return (self.values & 0xFFFFFFFF).astype(WORD)


class Int(emit.Int):
    """Stands in for `emit.Int`."""

    def __init__(self, value):
        self.value = value

    def _run(self, operation, x):
        x = x.value.values if isinstance(x, Int) else x
        return Int(Raw(operation(self.value.values, x), self.value.kind))

    def __rshift__(self, x):
        return self._run(lambda a, b: (a & 0xFFFFFFFF) >> b, x)

    def compare(self, how, x):
        x = x.value.values if isinstance(x, Int) else x
        operation = {"slt": np.less, "sge": np.greater_equal, "eq": np.equal}[how]
        return Raw(operation(self.value.values, x), "i1")

    def __lt__(self, x):
        return self.compare("slt", x)

    def equals(self, x):
        return self.compare("eq", x)

    def wide(self):
        return Int(Raw(self.value.values, "i64"))


for name, operation in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide,
    "mod": np.mod, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "lshift": np.left_shift,
}.items():  # fmt: skip
    setattr(Int, f"__{name}__", lambda self, x, operation=operation: self._run(operation, x))


def floats(words):
    """Words of two bfloat16 -> float32 [..., 2], the lower first."""
    return np.stack(
        [(words << WORD(16)).view(np.float32), (words & WORD(HALF)).view(np.float32)], -1
    )


def rounded(values):
    return np.asarray(values).astype(jnp.bfloat16).astype(np.float32)


def to_word(pairs):
    bits = rounded(pairs).view(WORD)
    return (bits[..., 0] >> WORD(16)) | (bits[..., 1] & WORD(HALF))


def dequantized(code, word):
    """`registers._bf16` and `_bf16_of_4`, by their masks."""
    shift = re.search(r"shr\.u32 t, \$1, (\d+)", code)
    t = word >> WORD(int(shift[1]) if shift else 0)
    operands = re.findall(r"lop3\.b32 \S+ t, (\w+), (\w+), 0xEA", code)
    values = [floats(t & WORD(int(mask, 16)) | WORD(int(base, 16))) for mask, base in operands]
    return to_word(values[0] - (values[1] if len(values) > 1 else 0))


def mma(operands):
    """m16n8k16 with PTX's layout of the operands, of each warp."""
    warps = BLOCKS, Raw.threads // 32, 8, 4
    a, b = np.zeros((*warps[:2], 16, 4, 2, 2)), np.zeros((*warps[:2], 8, 4, 2, 2))
    for i, x in enumerate(operands[:4]):
        a[:, :, 8 * (i % 2) : 8 * (i % 2) + 8, :, i // 2] = floats(x.words).reshape(*warps, 2)
    for i, x in enumerate(operands[4:6]):
        b[..., i, :] = floats(x.words).reshape(*warps, 2)
    inputs = lambda x: x.transpose(0, 1, 2, 4, 3, 5).reshape(*x.shape[:3], 16)
    d = np.einsum("bwmk,bwnk->bwmn", inputs(a), inputs(b)).reshape(*warps[:2], 2, 8, 4, 2)
    parts = [d[:, :, i // 2, :, :, i % 2].reshape(BLOCKS, -1) for i in range(4)]
    return [Raw(np.float32(x + c.values), "f32") for x, c in zip(parts, operands[6:], strict=True)]


ARITHMETIC = {
    "fma.rn.f32 $0, $1, $1": lambda a, c: a * a + c,
    "fma.rn.f32 $0, $1, $2": lambda a, b, c: a * b + c,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "ex2": np.exp2,
    "div": np.divide,
}


class Barrier:
    """An mbarrier, which counts arrivals and bytes."""

    def __init__(self, arrivals):
        self.arrivals, self.left, self.bytes, self.ended = arrivals, arrivals, 0, 0
        self.copies = collections.deque()

    def arrive(self, size=0):
        assert self.left > 0, "more arrivals than a phase has"
        self.left, self.bytes = self.left - 1, self.bytes + size
        self.settle()

    def settle(self):
        if self.left == 0 and self.bytes == 0:
            self.left, self.ended = self.arrivals, self.ended + 1


class Roles:
    """Threads that take turns."""

    def __init__(self, bodies):
        self.turns = [threading.Semaphore(0) for _ in bodies]
        self.waits, self.ended, self.error = [False] * len(bodies), [False] * len(bodies), None
        self.threads = [
            threading.Thread(target=self.start, args=(n, body)) for n, body in enumerate(bodies)
        ]
        self.current = threading.local()

    def run(self):
        for thread in self.threads:
            thread.start()
        self.turns[0].release()
        for thread in self.threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def start(self, n, body):
        self.current.n = n
        self.turns[n].acquire()
        try:
            if self.error is None:
                body()
        except Exception as error:  # raised where all threads have ended
            self.error = self.error or error
        self.ended[n], self.waits[n] = True, False
        self.give(n)

    def give(self, n):
        others = [*range(n + 1, len(self.turns)), *range(n + 1)]
        for other in others:
            if not self.ended[other]:
                self.turns[other].release()
                return

    def wait(self, ready):
        """Let the others run until ready()."""
        n = self.current.n
        while not ready():
            self.waits[n] = True
            stuck = all(a or b for a, b in zip(self.waits, self.ended, strict=True))
            assert not stuck, "all roles would wait for ever"
            self.give(n)
            self.turns[n].acquire()
            if self.error is not None:
                raise self.error
        self.waits = [False] * len(self.waits)


class Device:
    """Memory and active threads. Addresses in device memory have the array's number in the upper
    bits; those in shared memory begin at 0 in each block."""

    def __init__(self):
        self.arrays, self.active = [], threading.local()
        self.mask = np.ones((BLOCKS, Raw.threads), bool)
        self.shared = np.zeros((BLOCKS, SHARED), np.uint8)
        self.barriers, self.copied, self.roles = {}, 0, None
        self.block_z, self.freed = 0, None  # %ctaid.z; addresses of the barriers signalled last

    @property
    def mask(self):
        return self.active.mask

    @mask.setter
    def mask(self, mask):
        self.active.mask = mask

    def concurrently(self, *roles):
        def role(condition, body, outer):
            self.mask = outer
            self.run_if(condition, body)

        bodies = [lambda c=c, b=b, outer=self.mask: role(c, b, outer) for c, b in roles]
        self.roles = Roles(bodies)
        self.roles.run()

    def put(self, array):
        """Address of an array's copy in device memory."""
        self.arrays.append(np.frombuffer(np.asarray(array).tobytes(), np.uint8).copy())
        return Int(Raw(len(self.arrays) - 1 << 40, "i64"))

    def run_if(self, condition, body):
        outer, self.mask = self.mask, self.mask & condition.values
        body()
        self.mask = outer

    def loop(self, count, carried, body):
        outer = self.mask
        for i in range(int(count.value.values[outer].max(initial=0))):
            self.mask = outer & (i < count.value.values)
            new = zip(body(Int(Raw(i, "i32")), list(carried)), carried, strict=True)
            carried = [Raw(np.where(self.mask, x.values, old.values), old.kind) for x, old in new]
        self.mask = outer
        return list(carried)

    def element(self, address):
        """(array, offset) of an address that all active threads share."""
        number, *others = set(address.values[self.mask].tolist())
        assert not others
        return self.arrays[number >> 40].view(np.int32), (number & (1 << 40) - 1) // 4

    def access(self, address, size, data=None):
        """Bytes [blocks, threads, size] that the active threads read, or write."""
        found = np.zeros((BLOCKS, Raw.threads, size), np.uint8)
        for b, t in zip(*np.nonzero(self.mask), strict=True):
            at = int(address.values[b, t])
            memory = self.arrays[at >> 40] if address.kind == "i64" else self.shared[b]
            at &= (1 << 40) - 1
            assert at % size == 0 and at + size <= len(memory), "bad address"
            if data is None:
                found[b, t] = memory[at : at + size]
            else:
                memory[at : at + size] = data[b, t]
        return found

    def increment(self, address, most):
        """Increment a counter once for each active thread; after `most` comes 0."""
        memory, at = self.element(address)
        for _ in range(self.mask.sum()):
            memory[at] = 0 if 0 <= most <= int(memory.view(WORD)[at]) else memory[at] + 1

    def barriers_at(self, address):
        """(block, address) of each active thread."""
        return [
            (int(b), int(address.values[b, t])) for b, t in zip(*np.nonzero(self.mask), strict=True)
        ]

    def wait(self, address, parity):
        """Let other roles run until the barriers' phases have ended. Their copies complete."""
        given = zip(self.barriers_at(address), parity.values[self.mask], strict=True)
        wanted = {(self.barriers[key], int(parity)) for key, parity in given}

        def ready():
            for barrier, parity in wanted:
                while barrier.copies and barrier.ended & 1 == parity:
                    block, to, data = barrier.copies.popleft()
                    self.shared[block, to : to + len(data)] = data
                    barrier.bytes -= len(data)
                    barrier.settle()
            return all(barrier.ended & 1 != parity for barrier, parity in wanted)

        self.roles.wait(ready)

    def poll(self, start, words):
        """Words of each 64 bytes from `start` on, when none of 16 bits is -1."""
        words = np.stack([x.words for x in words], -1)

        def all_there():
            halves = np.ascontiguousarray(words).view(np.uint16)
            return not (halves[self.mask] == 0xFFFF).any()

        def ready():
            size = min(words.shape[-1], 4)
            for i in range(0, words.shape[-1], size):
                at = Raw(start.values + 16 * i, "i64")
                words[..., i : i + size] = self.access(at, 4 * size).view(WORD)
            return all_there()

        if not all_there():
            self.roles.wait(ready)
        found = [Raw(words[..., i], "i32") for i in range(words.shape[-1])]
        return found[0] if len(found) == 1 else found

    def ptx(self, code, *args, out="", effects=True, early=False):
        given = [x.value if isinstance(x, Int) else x for x in args]
        op = code.split()[0]
        if op.startswith("mbarrier.init"):
            arrivals = int(re.search(r"\[\$0\], (\d+)", code)[1])
            self.barriers.update({key: Barrier(arrivals) for key in self.barriers_at(given[0])})
            return None
        if op.startswith("mbarrier.arrive"):
            self.freed = given[0].values
            size = int(re.search(r"\[\$0\], (\d+)", code)[1]) if "expect_tx" in code else 0
            for key in self.barriers_at(given[0]):
                self.barriers[key].arrive(size)
            return None
        if "try_wait" in code:
            return self.wait(*given)
        if "CHECK" in code:
            return self.poll(*given[:1], given[1:])
        if op.startswith(("fence", "bar.")):
            return None
        if "%ctaid.z" in code:
            return Raw(self.block_z, "i32")
        if op.startswith("cp.async.bulk"):
            return self.copy(code, *given)
        if op.startswith("red."):
            return self.increment(given[0], int(re.search(r"\[\$0\], (\d+)", code)[1]))
        if op.startswith("ld."):
            words = self.access(given[0], 4 * len(out)).view(WORD)
            kinds = [(words[..., i], KINDS[x]) for i, x in enumerate(out)]
            found = [Raw(w.view(np.float32) if k == "f32" else w, k) for w, k in kinds]
            return found[0] if len(out) == 1 else found
        if "st." in code:
            return self.store(code, given)
        if op.startswith("mma"):
            return mma(given)
        if "lop3" in code:
            return Raw(dequantized(code, given[0].words), "i32")
        if op.startswith("mul.rn.bf16x2"):
            return Raw(to_word(floats(given[0].words) * floats(given[1].words)), "i32")
        if op.startswith("cvt"):
            return Raw(to_word(np.stack([x.values for x in given], -1)), "i32")
        if op == "mov.b32":
            return Raw(given[0].words, "i32")
        if op in ("shl.b32", "and.b32"):
            bits = floats(given[0].words)[..., int(op == "and.b32")]
            return Raw(bits.view(WORD), "i32")
        [run] = [run for begin, run in ARITHMETIC.items() if code.startswith(begin)]
        with np.errstate(all="ignore"):  # of inactive threads
            return Raw(np.float32(run(*[x.values for x in given])), "f32")

    def copy(self, code, target, source, barrier):
        size = int(re.search(r"\[\$1\], (\d+)", code)[1])
        for b, t in zip(*np.nonzero(self.mask), strict=True):
            at, to, key = (int(x.values[b, t]) for x in (source, target, barrier))
            memory, at = self.arrays[at >> 40], at & (1 << 40) - 1
            assert at % 16 == 0 and to % 16 == 0 and at + size <= len(memory)
            self.barriers[int(b), key].copies.append((b, to, memory[at : at + size]))
            self.copied += size

    def store(self, code, given):
        address, *values = given
        if "cvt.rn.bf16.f32" in code:
            data = (rounded(values[0].values).view(WORD) >> WORD(16)).astype(np.uint16)[..., None]
        else:
            values = values * (4 if "v4" in code and len(values) == 1 else 1)
            data = np.stack([x.words for x in values], -1)
        data = np.ascontiguousarray(data).view(np.uint8)
        self.access(address, data.shape[-1], data)


def emulated(monkeypatch, warps):
    """A device in whose place the modules of the kernel run, with blocks of so many warps."""
    monkeypatch.setattr(Raw, "threads", 32 * warps)
    device = Device()
    real = lambda f: staticmethod(lambda a, b: Raw(np.float32(f(a.values, b.values)), "f32"))

    class Arithmetic:
        addf, mulf = real(np.add), real(np.multiply)
        andi = staticmethod(lambda a, b: Raw(a.values & b.values, "i1"))
        index_cast = staticmethod(lambda _, x: x)
        bitcast = staticmethod(lambda _, x: Raw(x.words.view(np.float32), "f32"))

    thread = np.arange(Raw.threads)[None]

    def shuffled(x, distance):
        lanes = x.values.reshape(BLOCKS, -1, 32)[..., np.arange(32) ^ distance]
        return Raw(lanes.reshape(BLOCKS, -1), "f32")

    space = types.SimpleNamespace
    utils = space(
        thread_idx=lambda: Raw(thread, "i32"),
        warp_idx=lambda: Raw(thread // 32, "i32"),
        shfl_bfly=shuffled,
    )
    stand_ins = {
        "Int": Int,
        "address": lambda x: x,
        "concurrently": device.concurrently,
        "const": lambda x: Int(Raw(x, "i32")),
        "int_type": lambda: None,
        "loop": device.loop,
        "float_const": lambda x: Raw(np.float32(x), "f32"),
        "ptx": device.ptx,
        "select": lambda c, yes, no: Int(
            Raw(np.where(c.values, yes.value.values, no.value.values), yes.value.kind)
        ),
        "run_if": device.run_if,
        "zero": lambda: Raw(np.float32(0), "f32"),
        "arith": Arithmetic,
        "mgpu": space(utils=utils),
        "gpu": space(
            block_id=lambda _: Raw(np.arange(BLOCKS)[:, None], "i32"), Dimension=space(x=0)
        ),
        "ir": space(F32Type=space(get=lambda: None)),
    }
    for module in (block, emit, exchange, finish, registers, ring):
        for name, value in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    return device
