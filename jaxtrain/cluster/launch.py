"""Several processes as one job: on this host, or on the nodes of a Ray cluster.

jaxtrain launch --processes 2 [--devices-per-process 4] -- --config gpt_d12 key=value ...
jaxtrain launch --processes 2 --command evaluate -- runs/NAME --tasks core
jaxtrain launch --ray head:6379 --nodes 2:8 --gpus 8 -- --config gpt_d12 key=value ...

Arguments after `--` go to `jaxtrain train`, or to the command that --command names. Each output
line is prefixed with its process's index. Signals are forwarded. If a process dies, all end, with
its exit code.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO

from jaxtrain.cluster.ray_job import Bounds, read_bounds, run_job
from jaxtrain.cluster.started_by import TYPED, command_line
from jaxtrain.settings import Parser, UserError, command, whole

# Multi-process commands and their modules. All other commands are a single process.
COMMANDS = {"train": "jaxtrain.main", "evaluate": "jaxtrain.evaluation.evaluate"}
GRACE = 20.0  # seconds for the other processes to notice a death, report it and end
# Seconds that a killed process may take to exit after its connections have closed. The others see
# the closed connections at once, and end.
DYING = 1.0


def launch_parser() -> Parser:
    """Parser of the arguments before `--`."""
    parser = Parser(
        "jaxtrain launch",
        usage="%(prog)s (--processes N | --ray HOST --nodes N) [OPTIONS] -- ARGS",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--processes", type=whole(1, 4096), help="number of processes on this host")
    parser.add_argument(
        "--devices-per-process",
        type=whole(1, 4096),
        help="GPUs per process, or virtual CPU devices",
    )
    parser.add_argument(
        "--command",
        default="train",
        choices=list(COMMANDS),
        help="command that the processes run (default train)",
    )
    parser.add_argument(
        "--port", type=whole(1, 65535), help="port of the coordinator; default a free one"
    )
    parser.add_argument("--ray", metavar="ADDRESS|local", help="a Ray cluster: HOST:PORT or auto")
    parser.add_argument(
        "--nodes",
        metavar="N|LEAST:MOST",
        help="Ray nodes, one process on each; LEAST:MOST is elastic",
    )
    parser.add_argument(
        "--gpus", type=whole(0, 4096), default=8, help="GPUs per Ray node (default 8)"
    )
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    """Launch the job. Returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    asked = launch_parser().parse_args(arguments[:cut])
    if asked.ray:
        if asked.processes or asked.devices_per_process or asked.port or not asked.nodes:
            raise UserError(
                "--ray takes --nodes and --gpus; leave out the other options, which are "
                "for this host alone"
            )
        bounds = Bounds(*read_bounds(asked.nodes), asked.gpus)
        return run_job(asked.ray, bounds, COMMANDS[asked.command], arguments[cut + 1 :])
    if not asked.processes:
        raise UserError("--processes is required; or --ray and --nodes; see --help")
    outer = os.environ | {TYPED: command_line("launch")}
    environments = [
        process_environment(i, asked.processes, asked.devices_per_process, outer)
        for i in range(asked.processes)
    ]
    given = os.environ.get("JAXTRAIN_SECRET")  # with it the processes authenticate each other
    secret = {"JAXTRAIN_SECRET": given or secrets.token_hex(32)}
    environments = [one | secret for one in environments]
    each = ["--coordinator", f"localhost:{asked.port or free_port()}"]
    each += ["--processes", str(asked.processes), "--process"]
    line = [sys.executable, "-u", "-m", COMMANDS[asked.command], *arguments[cut + 1 :], *each]
    return run_processes([[*line, str(i)] for i in range(asked.processes)], environments)


def process_environment(
    index: int, count: int, devices: int | None, outer: Mapping[str, str]
) -> dict[str, str]:
    """Environment of process `index`: its visible GPUs, or its number of virtual CPU devices."""
    gpus = visible_gpus(outer)
    if not gpus:
        return dict(outer) | ({} if devices is None else {"JAX_NUM_CPU_DEVICES": str(devices)})
    each = devices or len(gpus) // count
    if not each or each * count > len(gpus):
        raise UserError(
            f"{count} processes of {max(each, 1)} GPUs, but this host has {len(gpus)} GPUs"
        )
    mine = gpus[index * each : (index + 1) * each]
    return dict(outer) | {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def visible_gpus(outer: Mapping[str, str]) -> list[str]:
    if outer.get("JAX_PLATFORMS") == "cpu":
        return []
    if "CUDA_VISIBLE_DEVICES" in outer:
        return [name for name in outer["CUDA_VISIBLE_DEVICES"].split(",") if name]
    try:
        return [str(i) for i in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    except OSError:
        return []


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def run_processes(commands: list[list[str]], environments: list[dict[str, str]]) -> int:
    """Start the commands and wait for all. Returns the first failure's exit code, else 0."""
    jobs: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    # Handlers are set before the first process starts, which may signal this one at once.
    pass_on = lambda number, _: [job.send_signal(number) for job in jobs if job.poll() is None]
    before = {n: signal.signal(n, pass_on) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        for index, (line, variables) in enumerate(zip(commands, environments)):
            # Each has its own session: otherwise it would receive Ctrl-C in a terminal twice.
            job = subprocess.Popen(
                line, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            jobs.append(job)
            if job.stdout:
                readers.append(threading.Thread(target=show, args=(index, job.stdout)))
                readers[-1].start()
        return wait(jobs)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
        for reader in readers:
            reader.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def show(index: int, lines: IO[bytes]) -> None:
    """Copy the output of a process line by line, prefixed with its index."""
    with lines:
        for line in lines:
            if line.startswith(b"[Gloo] Rank"):  # a line for each communicator that XLA creates
                continue
            sys.stdout.write(f"[{index}] {line.decode(errors='replace').rstrip()}\n")
            sys.stdout.flush()


def wait(jobs: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all end, or GRACE seconds after the first failure. Returns the exit code."""
    failed: dict[int, float] = {}  # process index -> when its failure was noticed
    while True:
        codes, now = [job.poll() for job in jobs], time.monotonic()
        failed |= {i: now for i, code in enumerate(codes) if code and i not in failed}
        if None not in codes or (failed and now > min(failed.values()) + GRACE):
            break
        time.sleep(0.05)
    if not failed:
        return 0
    first = [i for i, seen in failed.items() if seen <= min(failed.values()) + DYING]
    culprit = min(first, key=lambda i: jobs[i].returncode > 0)
    code = jobs[culprit].returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    print(f"launch: process {culprit} {how}; the job has ended", file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
