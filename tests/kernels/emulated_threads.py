"""Threads of a few CUDA blocks in NumPy, which run the kernel of `streamed` without a GPU.

All blocks run in lockstep: an array has a value for each block and thread, and a mask says which
threads are active. Loads to shared memory are queued until a thread waits for their barrier.
"""

import collections
import re
import types

import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels.hopper import emit, words
from jaxtrain_kernels.matmul.streamed import (
    block,
    claims,
    exchange,
    finish,
    fixed,
    inputs,
    registers,
    ring,
)

BLOCKS, THREADS = 5, 0  # threads of a block: set by each test
SHARED = 1 << 18
WORD, HALF = np.uint32, 0xFFFF0000
KINDS = {"r": "i32", "f": "f32"}


class Raw:
    """Values [blocks, threads] of a kind: i1, i32, i64 or f32."""

    def __init__(self, values, kind):
        values = np.asarray(values)
        if kind == "i32":
            values = (values.astype(np.int64) + 2**31) % 2**32 - 2**31
        self.values, self.kind = np.broadcast_to(values, (BLOCKS, THREADS)), kind

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
        operation = {
            "slt": np.less, "sge": np.greater_equal, "sgt": np.greater, "eq": np.equal,
        }[how]  # fmt: skip
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
    """`registers.bf16_of_int8` and `_bf16_of_4`, by their masks."""
    shift = re.search(r"shr\.u32 t, \$1, (\d+)", code)
    t = word >> WORD(int(shift[1]) if shift else 0)
    operands = re.findall(r"lop3\.b32 \S+ t, (\w+), (\w+), 0xEA", code)
    values = [floats(t & WORD(int(mask, 16)) | WORD(int(base, 16))) for mask, base in operands]
    return to_word(values[0] - (values[1] if len(values) > 1 else 0))


def mma(operands):
    """m16n8k16 with PTX's layout of the operands, of each warp."""
    warps = BLOCKS, THREADS // 32, 8, 4
    a, b = np.zeros((*warps[:2], 16, 4, 2, 2)), np.zeros((*warps[:2], 8, 4, 2, 2))
    for i, x in enumerate(operands[:4]):
        a[:, :, 8 * (i % 2) : 8 * (i % 2) + 8, :, i // 2] = floats(x.words).reshape(*warps, 2)
    for i, x in enumerate(operands[4:6]):
        b[..., i, :] = floats(x.words).reshape(*warps, 2)
    inputs = lambda x: x.transpose(0, 1, 2, 4, 3, 5).reshape(*x.shape[:3], 16)
    d = np.einsum("bwmk,bwnk->bwmn", inputs(a), inputs(b)).reshape(*warps[:2], 2, 8, 4, 2)
    parts = [d[:, :, i // 2, :, :, i % 2].reshape(BLOCKS, THREADS) for i in range(4)]
    return [Raw(np.float32(x + c.values), "f32") for x, c in zip(parts, operands[6:], strict=True)]


def integer_mma(operands):
    """m16n8k32 of unsigned and signed bytes, with PTX's layout of the operands, of each warp."""
    warps, n = (BLOCKS, THREADS // 32, 8, 4), BLOCKS * THREADS // 32
    a, b = np.zeros((n, 2, 8, 2, 4, 4), np.int64), np.zeros((n, 8, 2, 4, 4), np.int64)
    for i, x in enumerate(operands[:4]):  # row: half and g; byte: half, t and place
        a[:, i % 2, :, i // 2] = bytes_of(x.words, np.uint8).reshape(n, *warps[2:], 4)
    for i, x in enumerate(operands[4:6]):
        b[:, :, i] = bytes_of(x.words, np.int8).reshape(n, *warps[2:], 4)
    d = np.einsum("wrk,wck->wrc", a.reshape(n, 16, 32), b.reshape(n, 8, 32))
    d = d.reshape(n, 2, 8, 4, 2)
    parts = [d[:, i // 2, :, :, i % 2].reshape(BLOCKS, -1) for i in range(4)]
    return [Raw(x + c.values, "i32") for x, c in zip(parts, operands[6:], strict=True)]


def bytes_of(words, kind):
    return np.ascontiguousarray(words)[..., None].view(kind)


def permuted(a, b, selector):
    """prmt.b32: bytes of a and b."""
    source = np.concatenate([bytes_of(a, np.uint8), bytes_of(b, np.uint8)], -1)
    chosen = [source[..., int(selector) >> 4 * i & 7] for i in range(4)]
    return np.stack(chosen, -1).view(WORD)[..., 0]


WORDS = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "xor.b32": np.bitwise_xor,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "add.s32": np.add,
    "sub.s32": np.subtract,
    "sub.u32": np.subtract,
    "max.u32": np.maximum,
    "setp.eq.u32": np.equal,
    "selp.b32": lambda a, b, p: np.where(p, a, b),
    "fma.rn.f32": lambda a, b, c: fused(*(x.view(np.float32) for x in (a, b, c))),
    "redux.sync.max.u32": lambda a, _: a.reshape(BLOCKS, -1, 32).max(-1).repeat(32, 1),
}


def fused(a, b, c):
    return (a.astype(np.float64) * b + c).astype(np.float32).view(WORD)


def straight_line(code, args, out):
    """Results of PTX without branches, whose registers are words."""
    registers = {f"${len(out) + i}": x.words for i, x in enumerate(args)}
    lines = [line.strip().removeprefix("{ ") for line in code.split("\n")[1].split(";")]

    def value(x):
        if x in registers:
            return registers[x]
        number = int(x[2:], 16) if x.startswith("0f") else int(x, 0)
        return np.full((BLOCKS, THREADS), number & 0xFFFFFFFF, WORD)

    with np.errstate(over="ignore", invalid="ignore"):
        for line in lines:
            if line and not line.startswith((".reg", "}")):
                op, rest = line.split(" ", 1)
                target, *operands = [x.strip() for x in rest.split(",")]
                if op == "prmt.b32":
                    *words, selector = operands
                    registers[target] = permuted(*map(value, words), int(selector, 16))
                else:
                    registers[target] = WORDS[op](*map(value, operands))
    found = [np.ascontiguousarray(registers[f"${i}"]) for i in range(len(out))]
    kinds = zip(found, out, strict=True)
    return [Raw(x.view(np.float32) if k == "f" else x, KINDS[k]) for x, k in kinds]


ARITHMETIC = {
    "fma.rn.f32 $0, $1, $1": lambda a, c: a * a + c,
    "fma.rn.f32 $0, $1, $2": lambda a, b, c: a * b + c,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "ex2": np.exp2,
    "div": np.divide,
}


class Device:
    """Memory and active threads. Addresses in device memory have the array's number in the upper
    bits; those in shared memory begin at 0 in each block."""

    def __init__(self):
        self.arrays, self.mask = [], np.ones((BLOCKS, THREADS), bool)
        self.shared = np.zeros((BLOCKS, SHARED), np.uint8)
        self.queues, self.copied = collections.defaultdict(collections.deque), 0
        self.block_z = 0  # %ctaid.z

    def put(self, array):
        """Address of an array's copy in device memory."""
        self.arrays.append(np.frombuffer(np.asarray(array).tobytes(), np.uint8).copy())
        return Int(Raw(len(self.arrays) - 1 << 40, "i64"))

    def run_if(self, condition, body):
        outer, self.mask = self.mask, self.mask & condition.values
        body()
        self.mask = outer

    def concurrently(self, *roles):
        for condition, body in roles:
            self.run_if(condition, body)

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
        found = np.zeros((BLOCKS, THREADS, size), np.uint8)
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

    def ptx(self, code, *args, out="", effects=True, early=False):
        given = [x.value if isinstance(x, Int) else x for x in args]
        op = code.split()[0]
        if op.startswith(("mbarrier", "fence", "bar.")):
            return None
        if "%ctaid.z" in code:
            return Raw(self.block_z, "i32")
        if op.startswith("cp.async.bulk"):
            return self.copy(code, *given)
        if op.startswith("ld."):
            words = self.access(given[0], 4 * len(out)).view(WORD)
            kinds = [(words[..., i], KINDS[x]) for i, x in enumerate(out)]
            found = [Raw(w.view(np.float32) if k == "f32" else w, k) for w, k in kinds]
            return found[0] if len(out) == 1 else found
        if "st." in code:
            return self.store(code, given)
        if op.startswith("mma"):
            return (integer_mma if "u8.s8" in code else mma)(given)
        if code.startswith("// "):
            return straight_line(code, given, out)
        if "0x0F0F0F0F" in code:
            return Raw(given[0].words & WORD(0x0F0F0F0F), "i32")
        if "lop3" in code:
            return Raw(dequantized(code, given[0].words), "i32")
        if op.startswith("mul.rn.bf16x2"):
            return Raw(to_word(floats(given[0].words) * floats(given[1].words)), "i32")
        if op.startswith("cvt"):
            return Raw(to_word(np.stack([x.values for x in given], -1)), "i32")
        if op.startswith("shfl.sync.idx"):
            lanes = given[1].values & 31 | np.arange(THREADS) & ~31
            return Raw(np.take_along_axis(given[0].values, lanes, 1), "i32")
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
            self.queues[b, key].append((to, memory[at : at + size]))
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


def emulated(monkeypatch):
    """A device in whose place the modules of the kernel run."""
    device = Device()
    real = lambda f: staticmethod(lambda a, b: Raw(np.float32(f(a.values, b.values)), "f32"))

    class Arithmetic:
        addf, subf, mulf = real(np.add), real(np.subtract), real(np.multiply)
        andi = staticmethod(lambda a, b: Raw(a.values & b.values, "i1"))
        ori = staticmethod(lambda a, b: Raw(a.values | b.values, "i1"))
        index_cast = staticmethod(lambda _, x: x)
        bitcast = staticmethod(lambda _, x: Raw(x.words.view(np.float32), "f32"))

    thread = np.arange(THREADS)[None]

    def shuffled(x, distance):
        lanes = x.values.reshape(BLOCKS, -1, 32)[..., np.arange(32) ^ distance]
        return Raw(lanes.reshape(BLOCKS, THREADS), "f32")

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
    for module in (block, claims, emit, exchange, finish, fixed, inputs, registers, ring, words):
        for name, value in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    return device
