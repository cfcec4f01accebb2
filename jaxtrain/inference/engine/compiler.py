"""Programs are compiled in threads, beside each other and beside those that run."""

import contextvars
import logging
from collections.abc import Callable, Collection, Hashable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

import jax

from jaxtrain.inference.engine.programs import ProgramKey

log = logging.getLogger(__name__)

COMPILERS = 8  # programs at once


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


class Compiler[Key: Hashable]:
    """What was begun to be compiled; jit keeps the programs themselves."""

    def __init__(self, mesh: Callable[[], AbstractContextManager[object]]):
        """mesh: in which programs are lowered."""
        self.mesh = mesh
        self.coming: dict[Key, Future[object]] = {}
        self.failed: set[Key] = set()  # those that the log has named
        self.pools: list[ThreadPoolExecutor] = []

    def start(
        self,
        now: Collection[Key],
        later: Collection[Key],
        lower: Callable[[Key], jax.stages.Lowered],
    ) -> None:
        """Begin with these, in their order, beside what was begun before. Lowering holds Python:
        the first ones are lowered here, the others in a thread. Compiling does not, and is done in
        threads."""

        def on_mesh(key: Key) -> jax.stages.Lowered:
            with self.mesh():
                return lower(key)

        lowering, compiling = pools = [ThreadPoolExecutor(n) for n in (1, COMPILERS)]
        self.pools += pools
        self.coming |= {key: compiling.submit(on_mesh(key).compile) for key in now}
        context = contextvars.copy_context()  # of preferred backends
        lowered = {key: lowering.submit(context.run, on_mesh, key) for key in later}
        finish = lambda one: one.result().compile()
        self.coming |= {key: compiling.submit(finish, one) for key, one in lowered.items()}
        for pool in pools:
            pool.shutdown(wait=False)

    def wait(self, keys: Collection[Key]) -> None:
        """Until these are ready; what failed of one is raised, and the others are left."""
        try:
            for key in keys:
                self.coming[key].result()
        except BaseException:
            self.stop()
            raise

    def is_settled(self, key: Key) -> bool:
        """Whether a call of the program waits for no thread: it is ready, failed, or not begun."""
        return key not in self.coming or self.coming[key].done()

    def settle(self, key: Key) -> None:
        """Wait until it is. What failed is named in the log, and raises when it is called."""
        if (one := self.coming.get(key)) is None:
            return
        wait([one])
        if not one.cancelled() and one.exception() is not None and key not in self.failed:
            self.failed.add(key)
            log.warning("%s was not compiled: %s", key, one.exception())

    def wait_for_one(self, keys: Collection[Key]) -> None:
        """Until one of them is settled."""
        if not any(map(self.is_settled, keys)):
            wait([self.coming[key] for key in keys], return_when=FIRST_COMPLETED)

    def stop(self) -> None:
        """Leave what was not begun yet."""
        for pool in self.pools:
            pool.shutdown(wait=False, cancel_futures=True)


class EngineCompiler(Compiler[ProgramKey]):
    """An engine's programs; one may run in the place of another."""

    def pick(self, wanted: ProgramKey) -> ProgramKey:
        """The program to run: the one itself where it is ready; in its place the cheapest that is
        ready and serves; where none does, the one itself, once it is ready.

        Where none does, a program that was never begun, or failed, is compiled when it is called.
        """
        one = self.coming.get(wanted)
        if one is not None and is_ready(one):
            return wanted
        if one is not None and one.done():
            self.settle(wanted)
        serving = [key for key, x in self.coming.items() if key.serves(wanted) and is_ready(x)]
        if serving:
            return min(serving, key=lambda key: key.cost)
        self.settle(wanted)
        return wanted
