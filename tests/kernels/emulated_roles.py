"""Blocks whose warps have roles, as those of `streamed`, in NumPy: see `emulated_threads`.

The roles take turns: one runs until it waits for what is not there, and then the next one does. A
copy to shared memory completes when a thread waits for its barrier and not before, so that all are
as late as they can be.
"""

import re
import threading
from typing import Any

import emulated_threads
import numpy as np
from emulated_threads import WORD, Int, Raw
from jaxtrain_kernels.hopper import emit
from jaxtrain_kernels.matmul.streamed import block, finish, ring
from jaxtrain_kernels.matmul.streamed.plan import NOT_CLAIMED


class Barrier:
    """An mbarrier, which counts arrivals and bytes."""

    def __init__(self, arrivals):
        self.arrivals, self.left, self.bytes, self.ended = arrivals, arrivals, 0, 0

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


class RolesDevice(emulated_threads.Device):
    """Memory, active threads of each role, and barriers."""

    def __init__(self):
        self.active, self.barriers, self.roles = threading.local(), {}, None
        self.freed = None  # addresses of the barriers signalled last
        super().__init__()

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

    def increment(self, address, most):
        """Increment a counter once for each active thread; after `most` comes 0."""
        memory, at = self.element(address)
        for _ in range(self.mask.sum()):
            memory[at] = 0 if 0 <= most <= int(memory.view(WORD)[at]) else memory[at] + 1

    def ask(self, counter, is_first, number, most):
        """Increment a counter in the threads that ask; the value before, or 0."""
        asks, before = self.mask & (is_first.values == 1), np.full(self.mask.shape, 1 << 20)
        outer, self.mask = self.mask, asks & (number.values < most)
        if self.mask.any():
            memory, at = self.element(counter)
            before[self.mask] = memory[at] + np.arange(self.mask.sum())
            memory[at] += self.mask.sum()
        self.mask = outer
        return Raw(before, "i32")

    def settle(self, offset, is_first, panel):
        outer = self.mask
        self.mask = outer & (is_first.values == 1)
        self.access(offset, 4, panel.words[..., None].view(np.uint8).reshape(*outer.shape, 4))
        self.mask = self.mask & (panel.values < 0)
        data = panel.words[..., None].view(np.uint8).reshape(*outer.shape, 4)
        self.access(Raw(offset.values + 4, "i32"), 4, data)
        self.mask = outer & (is_first.values != 1)
        found = self.read_claim(offset, None)
        self.mask = outer
        return Raw(np.where(is_first.values == 1, panel.values, found.values), "i32")

    def read_claim(self, offset, number):
        """Claims in shared memory, when they are there; 0 for negative numbers."""
        outer, found = self.mask, np.zeros(self.mask.shape, np.int64)
        wanted = outer & (number.values >= 0) if number is not None else outer

        def ready():
            self.mask = wanted
            found[:] = self.access(offset, 4).view(np.int32)[..., 0]
            self.mask = outer
            return not (found[wanted] == NOT_CLAIMED).any()

        self.roles.wait(ready)
        return Raw(np.where(wanted, found, 0), "i32")

    def loop_while(self, carried, condition, body):
        outer = self.mask
        while (mask := outer & condition(list(carried)).values & self.mask).any():
            self.mask = mask
            new = zip(body(list(carried)), carried, strict=True)
            carried = [Raw(np.where(mask, x.values, old.values), old.kind) for x, old in new]
            self.mask = outer
        self.mask = outer
        return list(carried)

    def barriers_at(self, address):
        """(block, address) of each active thread."""
        return [
            (int(b), int(address.values[b, t])) for b, t in zip(*np.nonzero(self.mask), strict=True)
        ]

    def wait(self, address, parity):
        """Let other roles run until the barriers' phases have ended. Their copies complete."""
        given = zip(self.barriers_at(address), parity.values[self.mask], strict=True)
        wanted = {(key, int(parity)) for key, parity in given}

        def ready():
            for key, parity in wanted:
                barrier = self.barriers[key]
                while self.queues[key] and barrier.ended & 1 == parity:
                    to, data = self.queues[key].popleft()
                    self.shared[key[0], to : to + len(data)] = data
                    barrier.bytes -= len(data)
                    barrier.settle()
            return all(self.barriers[key].ended & 1 != parity for key, parity in wanted)

        self.roles.wait(ready)

    def poll(self, start, words, offsets):
        """Words of loads from these offsets on, when none of 16 bits is -1."""
        words, size = np.stack([x.words for x in words], -1), len(words) // len(offsets)

        def all_there():
            halves = np.ascontiguousarray(words).view(np.uint16)
            return not (halves[self.mask] == 0xFFFF).any()

        def ready():
            for i, offset in enumerate(offsets):
                found = self.access(Raw(start.values + offset, "i64"), 4 * size)
                words[..., i * size : (i + 1) * size] = found.view(WORD)
            return all_there()

        if not all_there():
            self.roles.wait(ready)
        found = [Raw(words[..., i], "i32") for i in range(words.shape[-1])]
        return found[0] if len(found) == 1 else found

    def ptx(self, code, *args, out="", effects=True, early=False):
        given = [x.value if isinstance(x, Int) else x for x in args]
        op, number = code.split()[0], re.search(r"\[\$0\], (\d+)", code)
        if op.startswith("mbarrier.init"):
            arrivals = int(number[1])
            self.barriers.update({key: Barrier(arrivals) for key in self.barriers_at(given[0])})
        elif op.startswith("mbarrier.arrive"):
            self.freed = given[0].values
            for key in self.barriers_at(given[0]):
                self.barriers[key].arrive(int(number[1]) if "expect_tx" in code else 0)
        elif "try_wait" in code:
            self.wait(*given)
        elif "CHECK" in code:
            offsets = map(int, re.findall(r"\[\$\d+\+(\d+)\]", code))
            return self.poll(given[0], given[1:], list(offsets))
        elif "atom." in code:
            return self.ask(*given, int(re.search(r"q, \$3, (\d+)", code)[1]))
        elif "READ" in code:
            return (self.settle if "st.volatile" in code else self.read_claim)(*given)
        elif op.startswith("red."):
            self.increment(given[0], int(number[1]))
        else:
            return super().ptx(code, *given, out=out, effects=effects, early=early)
        return None


def emulated_roles(monkeypatch, warps):
    """A device in whose place the modules of the kernel run, with blocks of so many warps."""
    monkeypatch.setattr(emulated_threads, "THREADS", 32 * warps)
    monkeypatch.setattr(emulated_threads, "Device", RolesDevice)
    device: Any = emulated_threads.emulated(monkeypatch)
    for module in (block, emit, finish, ring):
        monkeypatch.setattr(module, "loop_while", device.loop_while)
    return device
