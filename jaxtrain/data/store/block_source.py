"""Blocks of one store at a URL, from the local cache or by range requests of its objects."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from jaxtrain.data.store.block_cache import BlockCache, Changed
from jaxtrain.data.store.blocks import blocks_of, record_offsets
from jaxtrain.settings import UserError
from jaxtrain.storage.objects import RemoteFolder

OBJECT_BLOCKS = 64  # blocks of an object: 128 MiB of 2-byte tokens
FETCHERS = 16  # concurrent block fetches of a process, enough to hide 20 ms of latency
OPEN = 1024  # blocks that a process keeps open
IN_MEMORY = 64  # blocks that it keeps in memory, if the cache cannot be written
TOUCH = 256  # reads of a block between updates of its last use
DIGITS = 8  # of a checksum


def object_name(block: int) -> str:
    """Name of the object that holds a block."""
    return f"tokens/{block // OBJECT_BLOCKS:05d}"


class OpenBlock:
    """A block that a process has open. offsets: starts of its records, in tokens."""

    def __init__(self, tokens: np.ndarray, first_record: int, offsets: np.ndarray, filed: bool):
        self.tokens, self.first_record, self.offsets = tokens, first_record, offsets
        self.filed, self.reads = filed, 0

    def record(self, number: int) -> bytes:
        at = number - self.first_record
        return self.tokens[self.offsets[at] : self.offsets[at + 1]].tobytes()


class BlockSource:
    """The blocks that a process has open; each is fetched once, even if several readers wait."""

    def __init__(
        self,
        remote: RemoteFolder,
        name: str,
        lengths: np.ndarray,
        first_record: np.ndarray,
        dtype: np.dtype,
        sums: str,
        cache: BlockCache,
    ):
        self.remote, self.name, self.lengths, self.dtype = remote, name, lengths, dtype
        self.first_record, self.sums, self.cache = first_record, sums, cache
        self.blocks = blocks_of(lengths, first_record)
        self.waits = self.fetched = 0  # blocks that readers waited for; blocks from the URL
        self.wait_s = 0.0  # seconds that readers waited for blocks
        self._open: OrderedDict[int, OpenBlock] = OrderedDict()
        self._coming: dict[int, Future[OpenBlock]] = {}
        self._guard = threading.Lock()
        self._pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="blocks")

    def __len__(self) -> int:
        return len(self.blocks.tokens) - 1

    def is_here(self, number: int) -> bool:
        """Whether this host has a block cached; marks the block as used."""
        return self.cache.touch(self._file(number))

    def prefetch(self, number: int) -> Future[OpenBlock] | None:
        """Start to fetch a block. Returns None if this process has it open."""
        with self._guard:
            if number in self._open:
                return None
            if number not in self._coming:
                self._coming[number] = self._pool.submit(self._load, number)
            return self._coming[number]

    def read(self, numbers: Sequence[int]) -> dict[int, OpenBlock]:
        """Return these blocks; the missing ones are fetched concurrently."""
        found: dict[int, OpenBlock] = {}
        coming: dict[int, Future[OpenBlock]] = {}
        for number in numbers:
            with self._guard:
                block = self._open.get(number)
                if block is not None:
                    self._open.move_to_end(number)
            if block is not None:
                found[number] = block
            elif (future := self.prefetch(number)) is not None:
                coming[number] = future
            else:  # another thread opened it in between
                found[number] = self._load(number)
        self.waits += sum(not future.done() for future in coming.values())
        begin = time.perf_counter()
        found |= {number: future.result() for number, future in coming.items()}
        self.wait_s += time.perf_counter() - begin
        for number, block in found.items():
            block.reads += 1
            if block.filed and block.reads % TOUCH == 0:
                self.cache.touch(self._file(number))
        return found

    def bytes_of(self, number: int) -> int:
        size = self.blocks.tokens[number + 1] - self.blocks.tokens[number]
        return int(size) * self.dtype.itemsize

    def _load(self, number: int) -> OpenBlock:
        crc32 = self.sums[DIGITS * number : DIGITS * (number + 1)]
        try:
            data, filed = self.cache.read(
                self._file(number), self.bytes_of(number), crc32, partial(self._fetch, number)
            )
            records = self.blocks.records[number : number + 2].tolist()
            offsets = record_offsets(self.lengths, self.first_record, *records)
            block = OpenBlock(data.view(self.dtype), records[0], offsets, filed)
            with self._guard:
                self._keep(number, block)
            return block
        except Changed as error:
            raise UserError(
                f"{self.remote.url}/{object_name(number)}: block {number} is not as it was written "
                f"(CRC-32): the object was changed or is damaged; delete {self.remote.url} to have "
                "it prepared again"
            ) from error
        finally:
            with self._guard:
                self._coming.pop(number, None)

    def _keep(self, number: int, block: OpenBlock) -> None:
        self._open[number] = block
        if not block.filed:
            memory = [n for n, other in self._open.items() if not other.filed]
            for old in memory[:-IN_MEMORY]:
                del self._open[old]
        while len(self._open) > OPEN:
            self._open.popitem(last=False)

    def _fetch(self, number: int) -> bytes:
        first = number // OBJECT_BLOCKS * OBJECT_BLOCKS
        start = int(self.blocks.tokens[number] - self.blocks.tokens[first]) * self.dtype.itemsize
        self.fetched += 1
        return self.remote.read_range(object_name(number), start, start + self.bytes_of(number))

    def _file(self, number: int) -> str:
        return f"{self.name}/{number:07d}"
