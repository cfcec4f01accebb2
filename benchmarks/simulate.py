"""Simulation of a large job's host work on this machine.

One part is the rendezvous, comparison and heartbeats of many processes. The other is the checksum
list of a checkpoint with 10^5 files.

    python -m benchmarks simulate 64 1024 --note "other jobs ran on the same cores"

The job's processes are threads, `EACH` of them in one process of this machine. Each has a real
`Coordinator` and a client of JAX's coordination service. They share the cores, so the seconds are
an upper bound of those on separate hosts.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.record import describe
from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.cluster.secret import VARIABLE, Secret
from jaxtrain.data.pool import cores
from jaxtrain.settings import UserError
from jaxtrain.storage import checksums

PROCESSES = 1024
EACH = 128  # threads per process: with 1,024 JAX clients in one, the OS kernel takes all time
FILES = 100_000  # files of a checkpoint
FILE_BYTES = 64  # small, since only the checksum list is measured
TIMEOUT = 480.0  # timeout of the rendezvous in seconds
HEARTBEAT = 120.0  # timeout in seconds; threads of one machine are slower than separate hosts
BEATING = 10.0  # seconds over which the CPU time of heartbeats is measured


def bench_simulate(
    options: Sequence[str], variant: str | None = None, note: str | None = None
) -> dict[str, Any]:
    """A row per number of processes in `options` (default PROCESSES), and one of the checksums."""
    counts = [int(option) for option in options] or [PROCESSES]
    workload: dict[str, Any] = {"cores": cores(), "load": os.getloadavg()[0], "each": EACH}
    workload |= {"note": note} if note else {}
    rows = [coordinate(count) for count in counts]
    rows.append(checksum_list(FILES))
    record = describe("simulate", "host", variant or "", workload=workload)
    return record | {"rows": rows}


class Members:
    """A local process that simulates some of the job's processes and follows commands."""

    def __init__(self, first: int, last: int, count: int, address: str):
        words = [sys.executable, "-m", "benchmarks.simulate", *map(str, (first, last, count))]
        self.process = subprocess.Popen(
            [*words, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)

    def answer(self) -> float:
        """Wait until the work is done; returns the process's CPU seconds since its start."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.strip():
            raise UserError("a process of the simulation ended, see above")
        return float(line)


def coordinate(count: int) -> dict[str, Any]:
    """Seconds of the rendezvous, of comparing facts, and of agreeing on a last step on request.

    Also the CPU seconds per second of heartbeats, and in total.
    """
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    bounds = [(first, min(first + EACH, count)) for first in range(0, count, EACH)]
    parts = [Members(*bound, count, address) for bound in bounds]

    def all_do(what: str, of: Sequence[Members] = parts) -> tuple[float, float]:
        """Send a command to all; returns seconds, and their CPU seconds since the start."""
        begin = time.perf_counter()
        for part in of:
            part.tell(what)
        spent = sum(part.answer() for part in of)
        return time.perf_counter() - begin, spent

    try:
        _, loaded = all_do("load")
        meet, _ = all_do("meet")
        compare, _ = all_do("compare")
        _, before = all_do("begin")
        time.sleep(BEATING)
        _, after = all_do("rest")
        stop, _ = all_do("stop", parts[:1])
        _, spent = all_do("rest")
    finally:
        for part in parts:
            part.process.kill()
            part.process.communicate()
    return {
        "name": "coordinator",
        "shape": f"{count:,} processes",
        "meet_s": meet,
        "compare_s": compare,
        "stop_s": stop,
        "beat_cpu_s_per_s": (after - before) / BEATING,
        "cpu_s": spent - loaded,
    }


def be_members(first: int, last: int, count: int, address: str) -> None:
    """Simulate processes first..last of a job; each line of stdin is a command for all of them."""
    secret = Secret(Path("nowhere"), "", {VARIABLE: "of this simulation"})
    members = [Coordinator(i, count, heartbeat_timeout=HEARTBEAT) for i in range(first, last)]
    threading.stack_size(1 << 19)
    work: dict[str, Callable[[Coordinator], object]] = {
        "meet": lambda one: one.meet(address, TIMEOUT, secret),
        "compare": lambda one: one.compare({"code": "same", "data": "same"}, ""),
        "begin": lambda one: one.begin(0),
    }
    with ThreadPoolExecutor(len(members)) as pool:
        for line in sys.stdin:
            what = line.strip()
            if what == "stop":
                members[0].should_stop(0, wanted=True)
            elif what in work:
                list(pool.map(work[what], members))
            print(time.process_time(), flush=True)


def checksum_list(count: int) -> dict[str, Any]:
    """Seconds to write, read and check the checksum list of `count` files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i in range(count):
            part = folder / f"{i // 1000:03d}"
            part.mkdir(exist_ok=True)
            (part / f"{i:06d}").write_bytes(i.to_bytes(8) * (FILE_BYTES // 8))
        files, begin = checksums.files_below(folder), time.perf_counter()
        checksums.write_list(folder / checksums.LIST, files, {})
        written, begin = time.perf_counter() - begin, time.perf_counter()
        checksums.check_files(folder)
        checked = time.perf_counter() - begin
        size = (folder / checksums.LIST).stat().st_size
    return {
        "name": "checksums of a checkpoint",
        "shape": f"{count:,} files of {FILE_BYTES} bytes",
        "write_s": written,
        "check_s": checked,
        "list_bytes": size,
    }


if __name__ == "__main__":
    first, last, count = map(int, sys.argv[1:4])
    be_members(first, last, count, sys.argv[4])
