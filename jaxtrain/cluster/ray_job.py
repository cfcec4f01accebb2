"""An elastic job on the nodes of a Ray cluster: one process per node, within given bounds.

jaxtrain launch --ray head:6379 --nodes 2:8 -- --config gpt_d24 run.directory=/shared/runs

When a node is lost, the job restarts from its last checkpoint on the remaining nodes; it moves to
more nodes when they have joined. The batches do not depend on the number of processes.
"""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.cluster import ray_worker
from jaxtrain.cluster.ray_cluster import ray_cluster, task_result
from jaxtrain.settings import UserError

LOOK = 1.0  # seconds between two checks of the processes
SETTLE = 60.0  # seconds after the first process has ended in which Ray reports all exit codes
GROW = 30.0  # seconds that additional nodes must be ready before the job moves to them
SAY = 60.0  # seconds between two "waiting" lines


class Bounds(NamedTuple):
    """Bounds of the nodes that a job may run on."""

    least: int  # nodes
    most: int
    gpus: int  # per node; 0: nodes with a CPU core

    def count(self, ready: int) -> int:
        """Number of nodes to use if `ready` are ready; 0 if they are too few.

        A divisor of `most`: a batch that divides over `most` processes then also divides over it.
        """
        sizes = range(min(ready, self.most), self.least - 1, -1)
        return next((n for n in sizes if self.most % n == 0), 0)


class Attempt(NamedTuple):
    """Result of one attempt: exit codes and lost nodes."""

    codes: list[int]  # exit codes of the processes whose node is still alive
    lost: set[str]  # lost nodes
    moved: bool = False  # the processes were stopped, to resume on more nodes


class Job:
    """The processes of one attempt, one per node."""

    def __init__(self, module: str, arguments: Sequence[str], nodes: Sequence[str], gpus: int):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.nodes = nodes
        cls: Any = ray.remote(ray_worker.JobProcess)
        options = {"num_cpus": 0, "num_gpus": gpus, "max_concurrency": 2}
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        self.hosts = [cls.options(scheduling_strategy=at, **options).remote() for at in places]
        caller = ray_worker.this_caller()
        coordinator = task_result(self.hosts[0].address.remote(caller))
        each = ["--coordinator", coordinator, "--processes", str(len(nodes)), "--process"]
        self.running = [
            host.run.remote(caller, module, [*arguments, *each, str(i)])
            for i, host in enumerate(self.hosts)
        ]

    def ended(self, seconds: float, all_of_them: bool = False) -> bool:
        """Wait up to `seconds` for one process, or for all. Returns whether they have ended."""
        import ray

        wanted = len(self.running) if all_of_them else 1
        return len(ray.wait(self.running, num_returns=wanted, timeout=seconds)[0]) >= wanted

    def stop(self, number: int) -> None:
        """Send a signal to all processes."""
        for host in self.hosts:
            host.signal.remote(number)

    def result(self, moved: bool = False) -> Attempt:
        """Wait up to SETTLE seconds for all processes, kill the remaining ones, and return how all
        ended."""
        import ray
        from ray.exceptions import RayActorError

        left = ray.wait(self.running, num_returns=len(self.running), timeout=SETTLE)[1]
        for number, one in enumerate(self.running):
            if one in left:
                ray.kill(self.hosts[number])
        codes, lost = [], set[str]()
        for node, one in zip(self.nodes, self.running):
            try:
                codes.append(task_result(one, passed_on=RayActorError))
            except RayActorError:
                if one not in left:
                    lost.add(node)
        return Attempt(codes, lost, moved)

    def close(self) -> None:
        """Free the nodes' GPUs."""
        import ray

        for host in self.hosts:
            ray.kill(host)


def run_job(address: str, bounds: Bounds, module: str, arguments: Sequence[str]) -> int:
    """Run the job to its end on the available nodes. Returns the exit code.

    Raises UserError if the cluster cannot be reached or a node cannot run the job.
    """
    asked: list[int] = []
    before: Mapping[int, Any] = {}
    with ray_cluster(address, show=True):
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {n: signal.signal(n, lambda number, _: asked.append(number)) for n in numbers}
        try:
            while True:
                nodes = wait_for_nodes(bounds, asked)
                if not nodes:
                    return 128 + asked[0]
                job = Job(module, arguments, nodes, bounds.gpus)
                try:
                    attempt = watch_attempt(job, bounds, len(nodes), asked)
                finally:
                    job.close()
                code = max(map(abs, attempt.codes), default=0)
                if asked or not (attempt.lost or attempt.moved):
                    return code
                why = f"{len(attempt.lost)} lost" if attempt.lost else "more are there"
                say(f"of {len(nodes)} nodes {why}; the job goes on from its last checkpoint")
                until = time.monotonic() + SETTLE  # Ray may list a lost node as alive for a while
                while attempt.lost & {*ready_nodes(bounds.gpus)} and time.monotonic() < until:
                    time.sleep(LOOK)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def watch_attempt(job: Job, bounds: Bounds, count: int, asked: list[int]) -> Attempt:
    """Wait for the end of an attempt. Forward signals; stop it if the job can grow."""
    more_since, told = None, 0
    while not job.ended(LOOK):
        if len(asked) > told:
            told = len(asked)
            job.stop(asked[-1])
        if bounds.count(len(ready_nodes(bounds.gpus))) <= count:
            more_since = None
        elif more_since is None:
            more_since = time.monotonic()
        elif time.monotonic() - more_since > GROW and not asked:
            job.stop(signal.SIGTERM)
            return job.result(moved=True)
    return job.result()


def wait_for_nodes(bounds: Bounds, asked: list[int]) -> list[str]:
    """Wait for enough nodes, and return those to use; empty if a signal came first."""
    said = -SAY
    while not asked:
        nodes = ready_nodes(bounds.gpus)
        if count := bounds.count(len(nodes)):
            say(f"{count} processes, on {count} of {len(nodes)} nodes")
            return nodes[:count]
        if time.monotonic() - said > SAY:
            said = time.monotonic()
            kind = f"with {bounds.gpus} GPUs " if bounds.gpus else ""
            say(f"waiting for nodes {kind}({len(nodes)} of at least {bounds.least})")
        time.sleep(LOOK)
    return []


def ready_nodes(gpus: int) -> list[str]:
    """Live nodes with at least `gpus` GPUs; for 0, with at least one CPU."""
    import ray

    kind, wanted = ("GPU", gpus) if gpus else ("CPU", 1)
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return sorted(node for node, has in alive.items() if has.get(kind, 0) >= wanted)


def say(line: str) -> None:
    print(f"launch   {line}", file=sys.stderr, flush=True)


def read_bounds(text: str) -> tuple[int, int]:
    """Parse N or LEAST:MOST nodes. Raises UserError for other strings."""
    least, colon, most = text.partition(":")
    most = most if colon else least
    if least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most):
        return int(least), int(most)
    raise UserError(f"--nodes {text}: expected N, or LEAST:MOST, as in 2:8")
