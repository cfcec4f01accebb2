"""Models on a Ray cluster: one process per node. Each process loads the model once.

The work of a lost node goes to the others. A node that joins gets a process as well.
"""

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxtrain.cluster import ray_worker
from jaxtrain.cluster.ray_cluster import PROBE, RETRIES, task_result
from jaxtrain.settings import UserError

AHEAD = 2  # calls per process: one running, one queued


@dataclass
class NodeProcess:
    """The process of one node."""

    node: str
    actor: Any
    calls: int = 0  # unanswered calls


@dataclass
class NodeCall:
    """A call that was sent to a process."""

    thing: bytes
    shared: tuple[Any, ...]  # arguments common to all calls of one `map`
    process: NodeProcess
    reply: Any
    lost: int = 0  # processes lost while they ran this call


class NodeModels:
    """The nodes' processes. `make` (pickled) loads a model and returns a function that uses it."""

    def __init__(self, make: Callable[[], Callable[..., Any]]):
        import ray

        self.packed = ray.put(pickle.dumps(make, pickle.HIGHEST_PROTOCOL))
        self.caller = ray_worker.this_caller()
        self.processes: dict[str, NodeProcess] = {}  # by node

    def map(self, things: Iterable[Any], *shared: Any) -> Iterator[Any]:
        """Yield the function's results in order; things are consumed lazily. Raises UserError if a
        call loses more than RETRIES processes. The function's errors are raised here.

        shared: further arguments, the same for all things, sent to each node once.
        """
        import ray

        kept = tuple(ray.put(pickle.dumps(one, pickle.HIGHEST_PROTOCOL)) for one in shared)
        waiting: deque[NodeCall] = deque()
        for thing in things:
            waiting.append(self.give(pickle.dumps(thing, pickle.HIGHEST_PROTOCOL), kept))
            if len(waiting) >= AHEAD * len(self.processes):
                yield self.answer_of(waiting.popleft())
        while waiting:
            yield self.answer_of(waiting.popleft())

    def give(self, thing: bytes, shared: tuple[Any, ...], lost: int = 0) -> NodeCall:
        """Send a call to the process with the fewest unanswered calls."""
        self.join()
        process = min(self.processes.values(), key=lambda one: one.calls)
        process.calls += 1
        reply = process.actor.call.remote(self.caller, thing, *shared)
        return NodeCall(thing, shared, process, reply, lost)

    def answer_of(self, call: NodeCall) -> Any:
        """Wait for a call's result. If its process is lost, send the call to another."""
        from ray.exceptions import RayActorError

        while True:
            call.process.calls -= 1
            try:
                return task_result(call.reply, passed_on=RayActorError)
            except RayActorError as lost:
                if call.lost == RETRIES:
                    raise UserError(
                        f"--ray: {call.lost + 1} processes died on the same task; if memory ran "
                        "out, lower eval.batch_size. What is done is kept"
                    ) from lost
                if self.processes.get(call.process.node) is call.process:
                    del self.processes[call.process.node]
            call = self.give(call.thing, call.shared, call.lost + 1)

    def join(self) -> None:
        """Start a process on each node that has none. If any node has GPUs, only on nodes with
        GPUs, with all of them."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        begin = time.monotonic()
        while True:
            alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
            kind = "GPU" if any(has.get("GPU") for has in alive.values()) else "CPU"
            for gone in self.processes.keys() - alive.keys():
                del self.processes[gone]
            for node, has in alive.items():
                if has.get(kind) and node not in self.processes:
                    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
                    cls = ray.remote(num_cpus=0, num_gpus=has.get("GPU", 0))(ray_worker.ModelWorker)
                    actor = cls.options(scheduling_strategy=strategy).remote(self.packed)
                    self.processes[node] = NodeProcess(node, actor)
            if self.processes:
                return
            if time.monotonic() - begin > PROBE:
                raise UserError("--ray: no node is left; the same command resumes from its files")
            time.sleep(0.5)
