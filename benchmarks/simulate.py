"""Host work of a large job, simulated on this machine.

One part is the rendezvous, comparison and heartbeats of many processes. The other is the checksum
list of a checkpoint of 10^5 files.

    python -m benchmarks simulate 64 1024

The processes are threads that each have a real `Coordinator` and a client of JAX's service. They
share the cores, so that seconds are an upper bound of what hosts of their own would take.
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
FILES = 100_000  # of a checkpoint
FILE_BYTES = 64  # small: only the checksum list is measured
TIMEOUT = 480.0  # seconds of a meeting
HEARTBEAT = 120.0  # seconds; the threads of one machine are slower than processes of many
BEATING = 10.0  # seconds in which the processor time of the beats is taken


def bench_simulate(options: Sequence[str], variant: str | None = None) -> dict[str, Any]:
    """Rows of so many processes each (default PROCESSES), and of the checksums."""
    counts = [int(option) for option in options] or [PROCESSES]
    rows = [in_process(count) for count in counts]
    rows.append(checksum_list(FILES))
    workload = {"cores": cores(), "load": os.getloadavg()[0]}
    record = describe("simulate", "host", variant or "", workload=workload)
    return record | {"rows": rows}


def in_process(count: int) -> dict[str, Any]:
    """`coordinate` in a process of its own: threads of JAX's clients outlive their use."""
    words = [sys.executable, "-m", "benchmarks.simulate", str(count)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{count} processes: {' '.join(done.stderr.split())[-300:]}")
    seconds = [float(word) for word in done.stdout.splitlines()[-1].split()]
    names = ("meet_s", "compare_s", "stop_s", "beat_cpu_s_per_s", "cpu_s")
    return {"name": "coordinator", "shape": f"{count:,} processes", **dict(zip(names, seconds))}


def coordinate(count: int) -> list[float]:
    """Seconds to meet, seconds to compare, and seconds from a request to stop until all agree on
    the last step. Then CPU seconds for each second of heartbeats, and CPU seconds in all."""
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    secret = Secret(Path("nowhere"), "", {VARIABLE: "of this simulation"})
    faults: list[str] = []

    def end(message: str, code: int) -> None:
        faults.append(message)

    members = [Coordinator(i, count, heartbeat_timeout=HEARTBEAT, end=end) for i in range(count)]
    threading.stack_size(1 << 19)
    with ThreadPoolExecutor(count) as pool:

        def all_do(work: Callable[[Coordinator], object]) -> float:
            begin = time.perf_counter()
            list(pool.map(work, members))
            return time.perf_counter() - begin

        meet = all_do(lambda one: one.meet(address, TIMEOUT, secret))
        compare = all_do(lambda one: one.compare({"code": "same", "data": "same"}, ""))
        for one in members:
            one.begin(0)
        processor = time.process_time()
        time.sleep(BEATING)
        beats = (time.process_time() - processor) / BEATING
        begin = time.perf_counter()
        members[0].should_stop(0, wanted=True)
        stop = time.perf_counter() - begin
    if faults:
        raise UserError(faults[0])
    return [meet, compare, stop, beats, time.process_time()]


def checksum_list(count: int) -> dict[str, Any]:
    """Seconds to write, read and check the list of checksums of so many files."""
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
    print(*coordinate(int(sys.argv[1])), flush=True)
    os._exit(0)  # nobody leaves: the threads end with the process
