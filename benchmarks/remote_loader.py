"""Benchmark of the loader on a token store on disk, and at a URL with a latency of 20 ms.

The remote store is a folder behind an fsspec file system that sleeps before it reads. So only our
code is measured (blocks, cache, read-ahead), and no server shares the cores.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from benchmarks.loader import ROWS, SEQUENCE, random_store
from benchmarks.record import describe
from jaxtrain.data import DataConfig, TokenStore, train_batches
from jaxtrain.data.pool import cores
from jaxtrain.data.store.remote_store import RemoteRecords, open_remote, publish_store
from jaxtrain.storage.objects import RemoteFolder

LATENCY = 0.02  # seconds before the first byte of a response
DOCUMENTS = 200_000
WINDOW = 16  # blocks shuffled together
SHARE = 0.5  # share of the store that the small cache holds
EPOCH = 0.9  # share of an epoch that is read
PACE = 5e6  # most tokens per second that the simulated training consumes
BATCH = ROWS * SEQUENCE


class LatencyFileSystem(LocalFileSystem):
    """Local files with a latency of LATENCY seconds."""

    protocol = "latency"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("latency://"))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        time.sleep(LATENCY)
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else end - (start or 0))


def bench_remote_loader(variant: str | None = None, documents: int = DOCUMENTS) -> dict[str, Any]:
    """A row per location, order and cache size: at full speed, and at PACE tokens per second."""
    fsspec.register_implementation("latency", LatencyFileSystem, clobber=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = random_store(root / "local", documents)
        LatencyFileSystem(auto_mkdir=True)
        remote = RemoteFolder(f"latency://{root}/bucket/train", explained=True)
        remote.filesystem.auto_mkdir = True
        publish_store(store, remote, lambda *_: None)
        total = store.tokens * store.dtype.itemsize
        rows = [measure("disk, global", store, {"name": "global"})]
        blocks = {"name": "blocks", "window": WINDOW}
        rows.append(measure("disk, blocks", store, blocks))
        for order, shuffle, most in (
            ("blocks, half the store in the cache", blocks, int(total * SHARE)),
            ("blocks", blocks, 2 * total),
            ("global", {"name": "global"}, 2 * total),
        ):
            cache = root / f"cache {order}"
            for state in ("cold", "warm"):
                far = open_remote(remote, cache, most)
                rows.append(measure(f"URL, {order}, {state}", far, shuffle, most))
        far = open_remote(remote, root / "paced", int(total * SHARE))
        name = "URL, blocks, half the store in the cache, cold, at 5M tokens/s"
        rows.append(measure(name, far, blocks, int(total * SHARE), pace=PACE))
    workload = {"cores": cores(), "load": os.getloadavg()[0], "latency_ms": LATENCY * 1000}
    workload |= {"store_tokens": store.tokens, "batch_size": ROWS, "sequence_length": SEQUENCE}
    record = describe("remote_loader", "random", variant or "", workload=workload)
    return record | {"rows": rows}


def measure(
    name: str,
    store: TokenStore,
    shuffle: dict[str, Any],
    max_bytes: int | None = None,
    *,
    pace: float | None = None,
) -> dict[str, Any]:
    """Tokens per second over most of an epoch, in wall-clock and CPU time; seconds to the first
    batch; number of blocks that readers waited for, and the seconds waited."""
    fields: dict[str, Any] = {"packing": {"name": "best_fit"}, "shuffle": shuffle}
    if max_bytes is not None:
        fields["local_cache"] = {"max_bytes": max_bytes}
    config = DataConfig.model_validate(fields)
    steps = int(store.tokens * EPOCH / BATCH)
    begin = time.perf_counter()
    with train_batches(store, config=config, batch_size=ROWS, sequence_length=SEQUENCE) as batches:
        next(batches)
        first = time.perf_counter() - begin
        before = waits_of(store)
        clock, processor, waited = time.perf_counter(), time.process_time(), 0.0
        for step in range(steps):
            next(batches)
            waited += batches.wait_s
            if pace is not None:
                due = clock + (step + 1) * BATCH / pace
                time.sleep(max(0.0, due - time.perf_counter()))
        seconds, processor = time.perf_counter() - clock, time.process_time() - processor
    blocks, block_s, fetched = (b - a for a, b in zip(before, waits_of(store)))
    return {
        "name": name,
        "shape": f"T={SEQUENCE}, {ROWS} rows, {steps} steps",
        "tokens_per_s": steps * BATCH / seconds,
        "tokens_per_cpu_s": steps * BATCH / processor,
        "first_batch_s": first,
        "wait_s": waited,
        "waited_blocks": blocks,
        "waited_blocks_s": block_s,
        "fetched_blocks": fetched,
    }


def waits_of(store: TokenStore) -> tuple[int, float, int]:
    """(Blocks that readers waited for, seconds waited, blocks fetched)."""
    if not isinstance(store.records, RemoteRecords):
        return 0, 0.0, 0
    source = store.records.source
    return source.waits, source.wait_s, source.fetched
