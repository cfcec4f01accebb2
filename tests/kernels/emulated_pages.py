"""Threads of the kernel of `attention.paged.hopper` in NumPy: see `emulated_threads`.

All blocks are at the same place of the code, so that the parts that a block joins must be there.
"""

import types
from typing import Any

import emulated_threads
import numpy as np
from emulated_threads import WORD, Int, Raw
from jaxtrain_kernels.attention.paged.hopper import block, join, ring, scores
from jaxtrain_kernels.hopper import words


class PageDevice(emulated_threads.Device):
    """Also instructions between lanes, and loads of several copies. multiply: threads that wait
    for the same loads."""

    multiply = 0

    def lanes(self, x):
        return x.reshape(emulated_threads.BLOCKS, -1, 32)

    def raw(self, x, kind):
        return Raw(x.reshape(emulated_threads.BLOCKS, -1), kind)

    def ptx(self, code, *args, out="", effects=True):
        given = [x.value if isinstance(x, Int) else x for x in args]
        op = code.split()[0]
        if code.startswith("{") and "try_wait" in code:
            return self.complete(given[0])
        if op.startswith(("red.", "atom.")):
            return self.add(given[0])
        if "ld.acquire" in code:
            count = self.access(given[0], 4).view(np.int32)[..., 0]
            assert (count >= given[1].values)[self.mask].all(), "a block would wait for ever"
            return None
        if "expect_tx" in code:
            return self.expect(int(code.split("[$0], ")[1][:-1]), given[0])
        if op.startswith("st.") and "], 0;" in code:
            return self.store(code, [*given, Raw(0, "i32")])
        if op.startswith("redux"):
            x = self.lanes(given[0].values)
            return self.raw(np.broadcast_to(x.sum(-1, keepdims=True), x.shape), "i32")
        if op.startswith("movmatrix"):
            return self.raw(self.turned(self.lanes(given[0].words)), "i32")
        if op.startswith("ldmatrix"):
            return self.matrices(given[0])
        if op.startswith("prmt"):
            a, b = given[0].words, given[1].words
            if "0x5410" in code:
                return Raw((a & WORD(0xFFFF)) | (b << WORD(16)), "i32")
            return Raw((a >> WORD(16)) | (b & WORD(0xFFFF0000)), "i32")
        return super().ptx(code, *args, out=out, effects=effects)

    def turned(self, words):
        """8 x 8 values of 16 bits, of each warp: its words with rows and columns exchanged."""
        halves = np.stack([words & WORD(0xFFFF), words >> WORD(16)], -1)
        square = halves.reshape(*words.shape[:2], 8, 8).swapaxes(-1, -2)
        pair = square.reshape(*words.shape[:2], 32, 2)
        return (pair[..., 0] | (pair[..., 1] << WORD(16))).astype(WORD)

    def matrices(self, address):
        rows = self.access(address, 16).view(WORD)  # [blocks, threads, 4]
        rows = rows.reshape(emulated_threads.BLOCKS, -1, 4, 8, 4)  # warp, matrix, row, word
        return [
            self.raw(self.turned(rows[:, :, m].reshape(*rows.shape[:2], 32)), "i32")
            for m in range(4)
        ]

    def add(self, address):
        """Increment a counter once for each active thread; return the values before."""
        before = np.zeros(self.mask.shape, np.int64)
        for b, t in zip(*np.nonzero(self.mask), strict=True):
            at = int(address.values[b, t])
            memory = self.arrays[at >> 40].view(np.int32)
            before[b, t] = memory[(at & (1 << 40) - 1) // 4]
            memory[(at & (1 << 40) - 1) // 4] += 1
        return Raw(before, "i32")

    def copy(self, code, target, source, barrier):
        size = int(code.split("[$1], ")[1].split(",")[0])
        for b, t in zip(*np.nonzero(self.mask), strict=True):
            at, to, key = (int(x.values[b, t]) for x in (source, target, barrier))
            memory, at = self.arrays[at >> 40], at & (1 << 40) - 1
            assert at % 16 == 0 and to % 16 == 0 and at + size <= len(memory)
            self.queues[b, key][-1][1].append((to, memory[at : at + size]))

    def expect(self, size, barrier):
        """Begin a load of so many bytes."""
        for b, t in zip(*np.nonzero(self.mask), strict=True):
            self.queues[b, int(barrier.values[b, t])].append((size, []))

    def complete(self, barrier):
        """Complete the next load of the barrier for which the warps that multiply wait."""
        for b in np.nonzero(self.mask[:, : self.multiply].any(1))[0]:
            thread = np.nonzero(self.mask[b])[0][0]
            size, loads = self.queues[b, int(barrier.values[b, thread])].popleft()
            assert sum(len(data) for _, data in loads) == size
            for to, data in loads:
                self.shared[b, to : to + len(data)] = data


def emulated_pages(monkeypatch, blocks, warpgroups, multiply) -> Any:
    """A device in whose place the modules of the kernel run. multiply: threads that do."""
    names = ("Int", "address", "const", "int_type", "loop", "float_const", "ptx", "select")
    names += ("run_if", "zero", "arith", "mgpu", "gpu", "ir")
    stand_ins, nothing = types.SimpleNamespace(**dict.fromkeys(names)), types.SimpleNamespace()
    settings = {
        "BLOCKS": blocks, "THREADS": 128 * warpgroups, "Device": PageDevice,
        "block": stand_ins, "ring": nothing, "registers": nothing,
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setattr(emulated_threads, name, value)
    device: Any = emulated_threads.emulated(monkeypatch)
    device.multiply = multiply
    real = lambda f: staticmethod(lambda a, b: Raw(np.float32(f(a.values, b.values)), "f32"))
    choose = lambda c, a, b: Raw(np.where(c.values, a.values, b.values), a.kind)
    more = {
        "subf": real(np.subtract), "maxnumf": real(np.maximum), "select": staticmethod(choose),
        "xori": staticmethod(lambda a, b: Raw(a.values ^ b.values, "i1")),
    }  # fmt: skip
    for name, value in more.items():
        setattr(stand_ins.arith, name, value)
    for module in (block, join, ring, scores, words):
        for name in names:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(stand_ins, name))
    return device
