"""Threads of the kernel of `decode_layers.hopper` in NumPy: see `emulated_threads`.

All blocks are at the same place of the code, so that each word that a thread polls must be there.
"""

import collections
import re
import types
from typing import Any

import emulated_threads
import numpy as np
from emulated_threads import WORD, Int, Raw
from jaxtrain_kernels.decode_layers.hopper import attend, block, exchange, keys, registers, ring
from jaxtrain_kernels.hopper import words

PLACE = r"\[\$\d+\+(\d+)\]"


class LayersDevice(emulated_threads.Device):
    """warps: that multiply, which all wait for the same loads."""

    warps = 0

    def __init__(self):
        super().__init__()
        self.phases, self.started = collections.Counter(), collections.defaultdict(list)

    def ptx(self, code, *args, out="", effects=True):
        given = [x.value if isinstance(x, Int) else x for x in args]
        if "try_wait" in code:
            offsets = map(int, re.findall(PLACE, code))
            barriers = [Raw(given[0].values + x, "i32") for x in offsets]
            return self.complete_all(zip(barriers, given[1:], strict=True))
        if "expect_tx" in code:
            return self.expect(*given)
        if "cp.async.cg" in code:
            return self.copy(code, *given)
        if "arrive.noinc" in code:
            return self.arrive(*given)
        if "vote.sync" in code:
            return self.poll(code, given)
        if "cp.async" not in code and (offset := re.search(PLACE, code)):
            at = 0 if "st." in code else len(given) - 1
            given[at] = Raw(given[at].values + int(offset[1]), given[at].kind)
        if "st.relaxed" in code:
            return self.store(code, [Raw(x.values, x.kind) for x in given])
        if code.startswith("max.f32"):
            return Raw(np.maximum(given[0].values, given[1].values), "f32")
        if code.startswith("mov.b32") and out == "f":
            return Raw(given[0].words.view(np.float32), "f32")
        return super().ptx(code, *given, out=out, effects=effects)

    def expect(self, barrier, size):
        """Begin a phase of a barrier, of so many bytes."""
        for b, t in zip(*np.nonzero(self.mask), strict=True):
            self.queues[b, int(barrier.values[b, t])].append((int(size.values[b, t]), []))

    def copy(self, code, target, source, *barrier):
        """Queue a load, of a barrier's phase or of what a warp's next `arrive` is for."""
        size = int(re.search(r"\[\$1\], (\d+)", code)[1])
        for b, t in zip(*np.nonzero(self.mask), strict=True):
            at, to = int(source.values[b, t]), int(target.values[b, t])
            memory, at = self.arrays[at >> 40], at & (1 << 40) - 1
            assert at % 16 == 0 and to % 16 == 0 and at + size <= len(memory)
            mine = (
                self.queues[b, int(barrier[0].values[b, t])][-1][1] if barrier else self.started[b]
            )
            mine.append((to, memory[at : at + size]))
            self.copied += size

    def arrive(self, barrier):
        """A warp's threads signal a barrier when what they began to load is there."""
        for b in np.flatnonzero(self.mask.any(1)):
            assert self.mask[b].sum() == 32
            [key] = set(barrier.values[b][self.mask[b]].tolist())
            mine = self.started.pop(b, [])
            self.queues[b, key].append((sum(len(data) for _, data in mine), mine))

    def complete_all(self, barriers):
        """Complete the next phase of each barrier that a block's warps wait for, whose parity the
        warps must know."""
        blocks = self.mask[:, : 32 * self.warps].any(1)
        for barrier, parity in barriers:
            for b in np.flatnonzero(blocks):
                [key] = set(barrier.values[b][self.mask[b]].tolist())
                assert set(parity.values[b][self.mask[b]].tolist()) == {self.phases[b, key] % 2}
                self.phases[b, key] += 1
                size, loads = self.queues[b, key].popleft()
                assert sum(len(data) for _, data in loads) == size
                for to, data in loads:
                    self.shared[b, to : to + len(data)] = data

    def poll(self, code, given):
        """Words at each place, which must have the tag."""
        *places, tag, left = given
        offsets, found = map(int, re.findall(PLACE, code)), []
        for at, offset in zip(places, offsets, strict=True):
            pair = self.access(Raw(at.values + offset, "i64"), 16).view(WORD)
            for i in (0, 2):
                is_there = (pair[..., i + 1] == tag.words) | ~self.mask
                assert is_there.all(), "a block would wait for ever"
                found.append(Raw(pair[..., i], "i32"))
        return [*found, left]


def emulated_layers(monkeypatch, blocks, warpgroups, warps) -> Any:
    """A device in whose place the modules of the kernel run."""
    names = ("Int", "address", "const", "int_type", "loop", "float_const", "ptx", "select")
    names += ("run_if", "zero", "arith", "mgpu", "gpu", "ir")
    stand_ins, nothing = types.SimpleNamespace(**dict.fromkeys(names)), types.SimpleNamespace()
    settings = {
        "BLOCKS": blocks, "THREADS": 128 * warpgroups, "Device": LayersDevice,
        "block": stand_ins, "ring": nothing, "registers": nothing,
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setattr(emulated_threads, name, value)
    device: Any = emulated_threads.emulated(monkeypatch)
    device.warps = warps
    choose = lambda c, a, b: Raw(np.where(c.values, a.values, b.values), a.kind)
    stand_ins.arith.select = staticmethod(choose)
    stand_ins.arith.ori = staticmethod(lambda a, b: Raw(a.values | b.values, "i1"))
    for module in (attend, block, exchange, keys, registers, ring, words):
        for name in names:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(stand_ins, name))
    return device
