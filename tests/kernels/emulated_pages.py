"""Threads of a few CUDA blocks in NumPy, which run the kernel of attention over pages for Hopper.

As `emulated_threads`, whose device it extends. Blocks wait for each other, so they run in lockstep.
"""

import types

import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels.attention.paged.hopper import block, join, ring, scores
from jaxtrain_kernels.matmul.streamed import registers
from jaxtrain_kernels.matmul.streamed import ring as streamed_ring

from tests.kernels import emulated_threads
from tests.kernels.emulated_threads import WORD, Int, Raw, floats, to_word


class PageDevice(emulated_threads.Device):
    """Also instructions between lanes. No load is delayed: it is complete when it is issued."""

    def lanes(self, x):
        return x.reshape(emulated_threads.BLOCKS, -1, 32)

    def raw(self, x, kind):
        return Raw(x.reshape(emulated_threads.BLOCKS, -1), kind)

    def ptx(self, code, *args, out="", effects=True):
        given = [x.value if isinstance(x, Int) else x for x in args]
        op = code.split()[0]
        if "ld.acquire" in code:
            count = self.access(given[0], 4).view(np.int32)[..., 0]
            assert (count >= given[1].values)[self.mask].all(), "a block would wait for ever"
            return None
        if "expect_tx" in code:
            return self.expect(code, given[0])
        if op.startswith("shfl"):
            lane = self.lanes(given[1].values) % 32
            return self.raw(np.take_along_axis(self.lanes(given[0].values), lane, -1), "i32")
        if op.startswith("redux"):
            x = self.lanes(given[0].values)
            return self.raw(np.broadcast_to(x.sum(-1, keepdims=True), x.shape), "i32")
        if op.startswith("movmatrix"):
            return self.raw(self.turned(self.lanes(given[0].words)), "i32")
        if op.startswith("ldmatrix"):
            return self.matrices(given[0])
        if op.startswith("prmt"):
            low = code.endswith("0x5410;")
            a, b = given[0].words, given[1].words
            if low:
                return Raw((a & WORD(0xFFFF)) | (b << WORD(16)), "i32")
            return Raw((a >> WORD(16)) | (b & WORD(0xFFFF0000)), "i32")
        if op.startswith(("st.shared", "st.global", "st.relaxed")) and "], 0;" in code:
            return self.store(code, given)
        if op.startswith("cvt"):
            return Raw(to_word(np.stack([x.values for x in given[::-1]], -1)[..., ::-1]), "i32")
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
            self.queues[b, key][-1].append((to, memory[at : at + size]))

    def expect(self, code, barrier):
        """Begin a load of so many bytes."""
        for b, t in zip(*np.nonzero(self.mask), strict=True):
            self.queues[b, int(barrier.values[b, t])].append([])

    def complete(self, barrier):
        """Complete the next load of the barrier for which the warps that multiply wait."""
        for b in np.nonzero(self.mask[:, : self.threads].any(1))[0]:
            thread = np.nonzero(self.mask[b])[0][0]
            for to, data in self.queues[b, int(barrier.values[b, thread])].popleft():
                self.shared[b, to : to + len(data)] = data


def emulated(monkeypatch, blocks, threads, multiply):
    """A device in whose place the modules of the kernel run."""
    monkeypatch.setattr(emulated_threads, "BLOCKS", blocks)
    monkeypatch.setattr(emulated_threads, "THREADS", threads)
    device = PageDevice()
    device.threads = multiply
    real = lambda f: staticmethod(lambda a, b: Raw(np.float32(f(a.values, b.values)), "f32"))

    class Arithmetic:
        addf, mulf, subf = real(np.add), real(np.multiply), real(np.subtract)
        maxnumf = real(np.maximum)
        andi = staticmethod(lambda a, b: Raw(a.values & b.values, "i1"))
        xori = staticmethod(lambda a, b: Raw(a.values ^ b.values, "i1"))
        index_cast = staticmethod(lambda _, x: x)
        bitcast = staticmethod(lambda _, x: Raw(x.words.view(np.float32), "f32"))
        select = staticmethod(lambda c, a, b: Raw(np.where(c.values, a.values, b.values), a.kind))

    def shuffled(x, distance):
        lanes = x.values.reshape(blocks, -1, 32)[..., np.arange(32) ^ distance]
        return Raw(lanes.reshape(blocks, threads), "f32")

    thread, space = np.arange(threads)[None], types.SimpleNamespace
    utils = space(
        thread_idx=lambda: Raw(thread, "i32"),
        warp_idx=lambda: Raw(thread // 32, "i32"),
        shfl_bfly=shuffled,
    )
    stand_ins = {
        "Int": Int,
        "address": lambda x: x,
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
            block_id=lambda _: Raw(np.arange(blocks)[:, None], "i32"), Dimension=space(x=0)
        ),
        "ir": space(F32Type=space(get=lambda: None)),
    }
    for module in (block, join, ring, scores, registers, streamed_ring):
        for name, value in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    return device


__all__ = ["emulated", "floats", "jnp"]
