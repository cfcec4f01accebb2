"""Prefetching of blocks of stores at a URL, before the batches need them.

The next documents are known, because the order is a function of the key and the position. A thread
asks the planners for the documents of the next slots and fetches their blocks, a few at a time, so
that a block that a batch waits for never stands in a long queue.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from jaxtrain.data.batches.planning import Planner
from jaxtrain.data.config import DataConfig
from jaxtrain.data.store.blocks import BLOCK_TOKENS
from jaxtrain.data.store.remote_store import RemoteRecords
from jaxtrain.data.store.store import TokenStore
from jaxtrain.settings import UserError

SLOTS = 32  # slots of the order that are prefetched: seconds of data at 5M tokens per second
AT_ONCE = 12  # concurrent prefetches; the other FETCHERS are for blocks that a batch waits for
POLL = 0.02  # seconds between polls of the planners' positions


class ReadAhead:
    """Prefetches the next blocks to this host until it is closed."""

    def __init__(self, stores: Mapping[str, TokenStore], planners: Mapping[str, Planner]):
        self.far = [
            (store, store.records, planners[name])
            for name, store in stores.items()
            if isinstance(store.records, RemoteRecords) and store.pairs is None
        ]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
        if self.far:
            self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self.far:
            self._thread.join()

    def _run(self) -> None:
        places: dict[int, Any] = {}
        while not self._closing.wait(POLL):
            for number, (store, records, planner) in enumerate(self.far):
                ahead = planner.ahead(SLOTS)
                if places.get(number) != ahead.epoch_slot:
                    places[number] = ahead.epoch_slot
                    # The batch that needs a block reports that it cannot be fetched.
                    with suppress(UserError):
                        self._fetch(store, records, ahead.documents)

    def _fetch(
        self, store: TokenStore, records: RemoteRecords, documents: list[tuple[int, int]]
    ) -> None:
        coming: deque[Future[Any]] = deque()
        for future in _prefetched(store, records, documents):
            coming.append(future)
            while len(coming) >= AT_ONCE:
                wait([coming[0]])
                coming.popleft()
            if self._closing.is_set():
                return


def _prefetched(
    store: TokenStore, records: RemoteRecords, documents: list[tuple[int, int]]
) -> Iterator[Future[Any]]:
    for first, last in documents:
        begin, end = int(store.first_record[first]), int(store.first_record[last])
        if begin < end:
            yield from records.prefetch(begin, end)


def check_local_cache(config: DataConfig, stores: Mapping[str, TokenStore]) -> None:
    """Raise UserError if the local cache is too small for the blocks that are mixed."""
    far = [store for store in stores.values() if isinstance(store.records, RemoteRecords)]
    total = sum(store.tokens * store.dtype.itemsize for store in far)
    needed = total
    if config.shuffle.name == "blocks":
        blocks = 2 * config.shuffle.window + SLOTS
        needed = min(total, sum(blocks * BLOCK_TOKENS * store.dtype.itemsize for store in far))
    if needed <= config.local_cache.max_bytes:
        return
    what = (
        f"two windows of data.shuffle.window={config.shuffle.window} blocks take"
        if config.shuffle.name == "blocks"
        else "with data.shuffle.name=global a batch needs documents from anywhere in"
    )
    smaller = "a smaller window" if config.shuffle.name == "blocks" else "data.shuffle.name=blocks"
    raise UserError(
        f"data.local_cache.max_bytes={config.local_cache.max_bytes:,} is too little: {what} "
        f"{needed:,} bytes, which would be fetched again and again; take {smaller}, or "
        f"max_bytes={needed}"
    )
