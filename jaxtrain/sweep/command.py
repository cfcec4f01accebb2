"""`jaxtrain sweep SWEEP.yaml`: one command starts, joins, resumes and reports a sweep."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from jaxtrain.cluster.ray_cluster import ray_cluster
from jaxtrain.cluster.ray_process import RemoteProcess, gpus_of_cluster
from jaxtrain.cluster.ray_worker import missing_on_node
from jaxtrain.settings import UserError, command
from jaxtrain.sweep.arguments import sweep_parser
from jaxtrain.sweep.config import SweepConfig

WORKER = "jaxtrain.sweep.command"  # the module that a worker runs
Worker = subprocess.Popen | RemoteProcess
MORE = 3  # exit code of a worker that has run its one trial


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 2 after one line on what the user can fix, 130, or MORE (worker)."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    a = sweep_parser().parse_intermixed_args(words)
    check_installed()
    from jaxtrain.cluster.runtime import start
    from jaxtrain.sweep.finish import finish_sweep
    from jaxtrain.sweep.folder import open_folder
    from jaxtrain.sweep.load import find_sweep, load_sweep
    from jaxtrain.sweep.work import open_queues, work

    c = load_sweep(find_sweep(a.sweep), a.overrides)
    check_sampler(c)
    if a.ray and a.worker and not (c.folder / "sweep.yaml").is_file():
        shared = "directory=... must be on a disk that all nodes share, whatever storage is"
        raise missing_on_node("folder", c.folder.absolute(), shared)
    open_folder(c)
    queues = open_queues(c)
    try:
        if a.worker:
            start()
            return MORE if work(c, queues, once=c.isolated) else 0
        code = 0
        if not a.report and a.ray:
            with ray_cluster(a.ray, show=True):
                gpus = min(1, gpus_of_cluster()) if a.gpus is None else a.gpus
                code = supervise(c, lambda: RemoteProcess(WORKER, [*words, "--worker"], gpus))
        elif not a.report and (c.workers > 1 or c.isolated):
            line = [sys.executable, "-m", WORKER, *words, "--worker"]
            code = supervise(c, lambda: subprocess.Popen(line))
        elif not a.report:
            start()
            work(c, queues)
        if code == 0:
            finish_sweep(queues)
        return code
    except KeyboardInterrupt:
        print("interrupted; the same command resumes the sweep", file=sys.stderr)
        return 130
    finally:
        queues.close()


def check_installed() -> None:
    """Raise UserError if Optuna is not installed."""
    if find_spec("optuna") is None:
        raise UserError(
            "jaxtrain sweep needs the package optuna, which is not installed: uv sync --extra "
            "sweep, or install the wheel with [sweep]"
        )


def check_sampler(c: SweepConfig) -> None:
    """Raise UserError for a sampler whose package is missing."""
    for sampler, package in (("gp", "torch"), ("cmaes", "cmaes")):
        if c.sampler.name == sampler and find_spec(package) is None:
            raise UserError(
                f"sampler.name={sampler} needs the package {package}, which is not installed: "
                f"pip install {package}, or take sampler.name=tpe"
            )


# ---- several processes -------------------------------------------------------------------------


def supervise(c: SweepConfig, begin: Callable[[], Worker]) -> int:
    """Keep `c.workers` workers alive until no trial is left. Returns the exit code.

    begin: starts a worker. The trial of a worker that died is queued again, and a new worker
    replaces the dead one.
    """
    ours = [begin() for _ in range(c.workers)]
    code = 0

    def stop(*_: object) -> None:
        nonlocal code
        code = code or 130
        for one in ours:
            one.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        while ours:
            time.sleep(0.1)
            for one in [one for one in ours if one.poll() is not None]:
                ours.remove(one)
                if one.returncode in (2, 130):
                    code = code or one.returncode
                    for other in ours:
                        other.send_signal(signal.SIGINT)
                elif one.returncode != 0 and not code:
                    say_dead(one)
                    ours.append(begin())
    except KeyboardInterrupt:
        for one in ours:
            if isinstance(one, RemoteProcess):  # the terminal sends it to the others
                one.send_signal(signal.SIGINT)
        while any([one.poll() is None for one in ours]):  # a worker may start while another ends
            time.sleep(0.1)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        for one in ours:
            one.kill()
    return code


def say_dead(dead: Worker) -> None:
    """Report a worker that died without a message. Another worker takes over its trial."""
    if dead.returncode != MORE:
        print(
            f"sweep    a worker died (exit code {dead.returncode}); its trial is queued again",
            file=sys.stderr, flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
