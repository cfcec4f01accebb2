"""Programs are compiled in threads, beside each other and beside the engine's work."""

import contextvars
import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

import jax

from jaxtrain.inference.engine.programs import ProgramKey

log = logging.getLogger(__name__)

COMPILERS = 8  # programs at once

Lower = Callable[[ProgramKey], jax.stages.Lowered]


def compile_all(lowered: Iterable[jax.stages.Lowered]) -> int:
    """Some programs at a time, the first ones while the next are still lowered; how many."""
    with ThreadPoolExecutor(COMPILERS) as pool:
        compiled = [pool.submit(one.compile) for one in lowered]
    for one in compiled:
        one.result()
    return len(compiled)


def is_ready(one: Future[object]) -> bool:
    """Whether it was compiled."""
    return one.done() and not one.cancelled() and one.exception() is None


class Compiler:
    """What was begun to be compiled; jit keeps the programs themselves."""

    def __init__(self, mesh: Callable[[], AbstractContextManager[object]]):
        """mesh: in which programs are lowered."""
        self.mesh = mesh
        self.coming: dict[ProgramKey, Future[object]] = {}
        self.failed: set[ProgramKey] = set()  # those that the log has named
        self.pools: list[ThreadPoolExecutor] = []

    def start(
        self, now: Collection[ProgramKey], later: Collection[ProgramKey], lower: Lower
    ) -> None:
        """Begin with these, in their order. Lowering holds Python: the first ones are lowered here,
        the others in a thread. Compiling does not, and is done in threads."""

        def on_mesh(key: ProgramKey) -> jax.stages.Lowered:
            with self.mesh():
                return lower(key)

        lowering, compiling = self.pools = [ThreadPoolExecutor(n) for n in (1, COMPILERS)]
        self.coming = {key: compiling.submit(on_mesh(key).compile) for key in now}
        context = contextvars.copy_context()  # of preferred backends
        lowered = {key: lowering.submit(context.run, on_mesh, key) for key in later}
        finish = lambda one: one.result().compile()
        self.coming |= {key: compiling.submit(finish, one) for key, one in lowered.items()}
        for pool in self.pools:
            pool.shutdown(wait=False)

    def wait(self, keys: Collection[ProgramKey]) -> None:
        """Until these are ready; what failed of one is raised, and the others are left."""
        try:
            for key in keys:
                self.coming[key].result()
        except BaseException:
            self.stop()
            raise

    def pick(self, wanted: ProgramKey) -> ProgramKey:
        """The program to run: the one itself where it is ready; in its place the cheapest that is
        ready and serves; where none does, the one itself, once it is ready.

        A program that was never begun, and one that failed where no other serves, is compiled when
        it is called.
        """
        one = self.coming.get(wanted)
        if one is None or is_ready(one):
            return wanted
        if one.done() and not one.cancelled() and wanted not in self.failed:
            self.failed.add(wanted)
            log.warning("%s was not compiled: %s", wanted, one.exception())
        serving = [key for key, x in self.coming.items() if key.serves(wanted) and is_ready(x)]
        if serving:
            return min(serving, key=lambda key: key.cost)
        wait([one])
        return wanted

    def stop(self) -> None:
        """Leave what was not begun yet."""
        for pool in self.pools:
            pool.shutdown(wait=False, cancel_futures=True)
