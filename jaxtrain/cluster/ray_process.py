"""A command on a node of a Ray cluster, with a subset of the `subprocess.Popen` interface."""

import signal
from collections.abc import Sequence
from typing import Any

from jaxtrain.cluster import ray_worker
from jaxtrain.cluster.ray_cluster import task_result


class RemoteProcess:
    """`python -m module arguments` on any free node, with `gpus` GPUs.

    If its node is lost, the exit code is -SIGKILL.
    """

    def __init__(self, module: str, arguments: Sequence[str], gpus: int = 0):
        import ray

        cls: Any = ray.remote(ray_worker.JobProcess)
        options = {"num_cpus": 0 if gpus else 1, "num_gpus": gpus, "max_concurrency": 2}
        self.actor = cls.options(scheduling_strategy="SPREAD", **options).remote()
        self.reply = self.actor.run.remote(ray_worker.this_caller(), module, list(arguments))
        self.returncode: int | None = None

    def poll(self, timeout: float | None = 0) -> int | None:
        """The exit code, or None while it runs. Raises UserError if the node cannot run it."""
        import ray
        from ray.exceptions import RayActorError

        if self.returncode is None and ray.wait([self.reply], timeout=timeout)[0]:
            try:
                self.returncode = task_result(self.reply, passed_on=RayActorError)
            except RayActorError:
                self.returncode = -signal.SIGKILL
            self.kill()  # free its core
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(timeout=None)

    def send_signal(self, number: int) -> None:
        self.actor.signal.remote(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        import ray

        ray.kill(self.actor)


def gpus_of_cluster() -> int:
    """Number of GPUs of the connected cluster."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))
