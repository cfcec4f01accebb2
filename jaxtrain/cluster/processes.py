"""Multi-process jobs: find this process's index, and join the other processes and JAX's runtime.

SLURM's and Open MPI's launchers set the index and the count in the environment. By hand, and in the
templates for Kubernetes and Ray, --coordinator, --processes and --process set them.
"""

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
from pydantic import Field

from jaxtrain.cluster.coordinator import LINGER, Coordinator
from jaxtrain.cluster.secret import Secret
from jaxtrain.settings import Settings, UserError

PORTS = range(61440, 65536)  # the coordinator's, chosen by the SLURM job id: jobs share nodes


class ProcessesConfig(Settings):
    """Timeouts of a multi-process job. They have no effect on a single process."""

    start_timeout: float = Field(
        300, gt=0, description="seconds to wait at the start until all processes have connected"
    )
    heartbeat_timeout: float = Field(
        10, ge=1, description="seconds without a heartbeat after which a process counts as lost"
    )
    step_timeout: float | None = Field(
        1800,
        gt=0,
        description="seconds without a finished step after which the job counts as hung and ends; "
        "validation and saving count as part of a step. null: never",
    )


class ProcessRank(NamedTuple):
    """This process's index in the job, and the coordinator's address."""

    index: int
    count: int
    coordinator: str  # host:port
    devices: tuple[int, ...] | None = None  # this host's devices for this process; None: all


# Environment variables of launchers: process count, index, index on this host, count on this host.
# SLURM's are those of a step (srun): a batch script itself is a single process.
LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    (
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)  # fmt: skip


def check_alone(command: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if a launcher has started several processes of a single-process command."""
    for name, *_ in LAUNCHERS:
        if int(environment.get(name, 1)) > 1:
            raise UserError(
                f"{command} runs in one process, but {name} is {environment[name]}: start it "
                "without the launcher, or with one task"
            )


def find_rank(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> ProcessRank | None:
    """This process's rank, from the command line, then the launcher's environment. None for a
    single process. Raises UserError if a value is missing.
    """
    count, index, devices = processes, process, None
    for names in LAUNCHERS:
        if names[0] in environment and names[1] in environment:
            count = int(environment[names[0]]) if count is None else count
            index = int(environment[names[1]]) if index is None else index
            rank, ranks = environment.get(names[2]), environment.get(names[3])
            devices = local_devices(rank, ranks, environment)
            break
    if coordinator is None and processes is None and process is None and count in (None, 1):
        return None
    if coordinator is None and "SLURM_STEP_NODELIST" in environment:
        port = PORTS.start + int(environment.get("SLURM_JOB_ID", 0)) % len(PORTS)
        coordinator = f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}"
    given = {"--coordinator": coordinator, "--processes": count, "--process": index}
    missing = [name for name, value in given.items() if value is None]
    if coordinator is None or count is None or index is None:
        raise UserError(
            f"{' and '.join(missing)} missing: processes started without a launcher need "
            "--coordinator HOST:PORT --processes N --process I"
        )
    if not 0 <= index < count:
        raise UserError(f"--process {index}: must be 0 to {count - 1}, for --processes {count}")
    return ProcessRank(index, count, coordinator, devices)


def local_devices(
    rank: str | None, ranks: str | None, environment: Mapping[str, str]
) -> tuple[int, ...] | None:
    """One device for each of several processes on a host, unless the launcher has assigned them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    several = re.match(r"\d+", ranks or "")  # SLURM writes 4(x2) for 4 on each of 2 hosts
    if rank is None or not several or several[0] == "1" or (len(visible) == 1 and visible[0]):
        return None
    return (int(rank),)


def first_host(nodes: str) -> str:
    """The first node of SLURM's list: `a[003-4,7],b1` -> `a003`."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    return "".join(filter(None, match.groups())) if match else nodes


@contextlib.contextmanager
def joined(
    rank: ProcessRank | None, config: ProcessesConfig, facts: Mapping[str, object], folder: Path
) -> Iterator[Coordinator]:
    """Connect all processes, compare their facts, and yield the coordinator.

    facts: must be equal in all processes. folder: shared by all, for the job's secret during the
    rendezvous, unless JAXTRAIN_SECRET is set. Raises UserError if a process is missing or differs.
    An error that leaves the context ends all processes. This process exits without an orderly
    shutdown, which would wait forever for the others.
    """
    if rank is None or rank.count == 1:
        yield Coordinator()
        return
    coordinator = Coordinator(
        rank.index,
        rank.count,
        heartbeat_timeout=config.heartbeat_timeout,
        step_timeout=config.step_timeout,
    )
    secret = Secret(folder, rank.coordinator)
    coordinator.meet(rank.coordinator, config.start_timeout, secret)
    try:
        coordinator.compare(facts, "all processes need the same code, packages and configuration")
        # Our coordinator decides when all processes stop, not JAX's preemption service.
        jax.config.update("jax_enable_preemption_service", False)
        if rank.devices is not None:
            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, rank.devices)))
        coordinator.share_with_jax()
        yield coordinator
        coordinator.leave()
    except BaseException as error:
        sys.stdout.flush()
        if not isinstance(error, UserError | KeyboardInterrupt):
            # If this error follows another process's death, the coordinator reports that death and
            # ends this process while it waits here.
            time.sleep(config.heartbeat_timeout + LINGER)
        code, text = told(error)
        coordinator.fail(text, code)
        os._exit(code)


def told(error: BaseException) -> tuple[int, str]:
    """Print an error. Returns its exit code and a one-line message."""
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130, "interrupted"
    traceback.print_exception(error)
    return 1, f"{type(error).__name__}: {error}".splitlines()[0]
