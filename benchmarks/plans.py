"""Benchmark of planning a corpus of 10^8 documents: memory, seconds to the first batch, documents
per second. Each row runs in its own process, which maps the lengths and reads no text.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.loader import MEDIAN, PACKINGS, ROWS, SEQUENCE, SPREAD
from benchmarks.packing import lengths_only
from benchmarks.record import describe
from jaxtrain.data import DataConfig
from jaxtrain.data.batches.loader import make_batch_plan
from jaxtrain.data.pool import cores
from jaxtrain.data.store.blocks import first_records
from jaxtrain.settings import UserError

DOCUMENTS = 10**8
AT_ONCE = 10**7  # lengths drawn at a time
STEPS = 20  # steps planned after the first
CASES = [
    (packing, shuffle)
    for shuffle in ("global", "blocks")
    for packing in ("best_fit", "concat", "padded")
]

LARGE = [("best_fit", "global"), ("best_fit", "blocks")]  # cases for more than DOCUMENTS


def bench_plans(options: Sequence[str], variant: str | None = None) -> dict[str, Any]:
    """A row per packing and order; options: numbers of documents, such as 1e8 (default), 1e9."""
    counts = [int(float(option)) for option in options] or [DOCUMENTS]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            path = Path(folder) / f"{count}.npy"
            write_lengths(path, count)
            rows += [in_process(path, *case) for case in (CASES if count <= DOCUMENTS else LARGE)]
            path.unlink()
    workload = {"cores": cores(), "load": os.getloadavg()[0], "batch_size": ROWS}
    record = describe("plans", "random", variant or "", workload=workload)
    return record | {"rows": rows}


def write_lengths(path: Path, count: int) -> None:
    """Write log-normal document lengths, as in web text."""
    lengths = np.lib.format.open_memmap(path, "w+", np.dtype("<u4"), (count,))
    random = np.random.default_rng(0)
    for start in range(0, count, AT_ONCE):
        part = lengths[start : start + AT_ONCE]
        drawn = random.standard_normal(len(part), np.float32) * SPREAD + np.log(MEDIAN)
        part[:] = np.maximum(np.exp(drawn), 1)
    lengths.flush()


def in_process(path: Path, packing: str, shuffle: str) -> dict[str, Any]:
    """Run `planned` in its own process."""
    command = [sys.executable, "-m", "benchmarks.plans", str(path), packing, shuffle]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{packing}, {shuffle}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def planned(path: Path, packing: str, shuffle: str) -> dict[str, Any]:
    """Open lengths as a store does, plan the first batch and STEPS more, then restart from the
    middle of the epoch as a resumed run does."""
    before = own_memory()
    begin, processor = time.perf_counter(), time.process_time()
    lengths = np.load(path, mmap_mode="r")
    store = lengths_only(lengths, first_records(lengths))
    fields = {"packing": PACKINGS[packing], "shuffle": {"name": shuffle}}
    plan = make_batch_plan({"train": store}, DataConfig.model_validate(fields), ROWS, SEQUENCE)
    opened = time.process_time() - processor
    next(plan)
    first, first_cpu = time.perf_counter() - begin, time.process_time() - processor
    processor = time.process_time()
    for _ in range(STEPS):
        next(plan)
    rate = STEPS * ROWS * SEQUENCE / (time.process_time() - processor)
    state = plan.get_state()
    source = state["sources"]["train"]
    source["drawn"], source["waiting"] = source["drawn"] // 2 + store.documents // 2, []
    processor = time.process_time()
    plan.set_state(state)
    next(plan)
    resumed = time.process_time() - processor
    retained = own_memory() - before
    return {
        "name": f"{packing}, {shuffle}",
        "shape": f"{store.documents:,} documents, {store.tokens:,} tokens",
        "first_batch_s": first,
        "first_batch_cpu_s": first_cpu,
        "open_cpu_s": opened,
        "resume_cpu_s": resumed,
        "held_bytes_per_document": retained / store.documents,
        "peak_bytes_per_document": (peak_memory() - before) / store.documents,
        "plan_tokens_per_cpu_s": rate,
    }


def own_memory() -> int:
    """Resident bytes of this process that are not file-backed."""
    found = psutil.Process().memory_info()
    return found.rss - found.shared


def peak_memory() -> int:
    """Peak resident bytes of this process, including mapped pages of the file of lengths."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    print(json.dumps(planned(Path(sys.argv[1]), *sys.argv[2:4])))
