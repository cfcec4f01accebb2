"""One job on the nodes of a Ray cluster, a process on each: elastic, within given bounds.

jaxtrain launch --ray head:6379 --nodes 2:8 -- --config gpt_d24 run.directory=/shared/runs

After the loss of a node the job starts again on those that are left, from its last checkpoint, and
on more when they have joined. The batches are those of any other number of processes.
"""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.cluster import ray_worker
from jaxtrain.cluster.ray_cluster import ray_cluster, task_result
from jaxtrain.settings import UserError

LOOK = 1.0  # seconds between two looks at the processes
SETTLE = 60.0  # seconds in which Ray says of all processes how they ended, after the first
GROW = 30.0  # seconds that more nodes must be there before the job moves to them
SAY = 60.0  # seconds between two lines that it waits


class Bounds(NamedTuple):
    """What a job may run on."""

    least: int  # nodes
    most: int
    gpus: int  # of each; 0: nodes with a core

    def count(self, ready: int) -> int:
        """Nodes to take of those that are ready; 0 if they are too few.

        A divisor of `most`, so that a batch that divides over `most` processes divides over these.
        """
        sizes = range(min(ready, self.most), self.least - 1, -1)
        return next((n for n in sizes if self.most % n == 0), 0)


class Attempt(NamedTuple):
    """How the processes ended."""

    codes: list[int]  # of those whose node is still there
    lost: set[str]  # nodes
    moved: bool = False  # they were stopped, to go on on more nodes


class Job:
    """The processes of one attempt, one on each of some nodes."""

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
        place = ["--coordinator", coordinator, "--processes", str(len(nodes)), "--process"]
        self.running = [
            host.run.remote(caller, module, [*arguments, *place, str(i)])
            for i, host in enumerate(self.hosts)
        ]

    def ended(self, seconds: float, all_of_them: bool = False) -> bool:
        """Waits for one process, or for all; whether they have ended."""
        import ray

        wanted = len(self.running) if all_of_them else 1
        return len(ray.wait(self.running, num_returns=wanted, timeout=seconds)[0]) >= wanted

    def stop(self, number: int) -> None:
        """A signal to all processes."""
        for host in self.hosts:
            host.signal.remote(number)

    def result(self, moved: bool = False) -> Attempt:
        """How all ended. What has not ended by now is killed."""
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
    """Runs it to its end, on whatever nodes are there; the exit code.

    UserError for a cluster that cannot be reached, and for what a node cannot run.
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
                until = time.monotonic() + SETTLE  # Ray is the last to hear of a loss
                while attempt.lost & {*ready_nodes(bounds.gpus)} and time.monotonic() < until:
                    time.sleep(LOOK)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def watch_attempt(job: Job, bounds: Bounds, count: int, asked: list[int]) -> Attempt:
    """Waits for the end of an attempt; passes signals on, and stops it for more nodes."""
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
    """The nodes to take, as soon as there are enough; none if a signal came first."""
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
    """The nodes with so many GPUs; without any, those with a core."""
    import ray

    kind, wanted = ("GPU", gpus) if gpus else ("CPU", 1)
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return sorted(node for node, has in alive.items() if has.get(kind, 0) >= wanted)


def say(line: str) -> None:
    print(f"launch   {line}", file=sys.stderr, flush=True)


def read_bounds(text: str) -> tuple[int, int]:
    """N or LEAST:MOST nodes. Raises UserError for other texts."""
    least, colon, most = text.partition(":")
    most = most if colon else least
    if least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most):
        return int(least), int(most)
    raise UserError(f"--nodes {text}: expected N, or LEAST:MOST, as in 2:8")
