"""Background compilation: programs are compiled in threads, in parallel, while others run."""

import contextvars
import logging
from collections.abc import Callable, Collection, Hashable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

import jax

from jaxtrain.inference.engine.programs import ProgramKey

log = logging.getLogger(__name__)

COMPILERS = 8  # programs compiled at once


def compile_all(lowered: Iterable[jax.stages.Lowered]) -> int:
    """Compile programs in parallel, while further ones are lowered. Returns their number."""
    with ThreadPoolExecutor(COMPILERS) as pool:
        compiled = [pool.submit(one.compile) for one in lowered]
    for one in compiled:
        one.result()
    return len(compiled)


def is_ready(one: Future[object]) -> bool:
    """Whether a program was compiled without error."""
    return one.done() and not one.cancelled() and one.exception() is None


class Compiler[Key: Hashable]:
    """Compilations that were started, by key; jit keeps the programs themselves."""

    def __init__(self, mesh: Callable[[], AbstractContextManager[object]]):
        """mesh: context in which programs are lowered."""
        self.mesh = mesh
        self.coming: dict[Key, Future[object]] = {}
        self.failed: set[Key] = set()  # keys whose error was logged
        self.pools: list[ThreadPoolExecutor] = []

    def start(
        self,
        now: Collection[Key],
        later: Collection[Key],
        lower: Callable[[Key], jax.stages.Lowered],
    ) -> None:
        """Start compiling these programs, in their order. Lowering holds the GIL: `now` is lowered
        here, `later` in a thread. Compiling releases it and runs in threads."""

        def on_mesh(key: Key) -> jax.stages.Lowered:
            with self.mesh():
                return lower(key)

        lowering, compiling = pools = [ThreadPoolExecutor(n) for n in (1, COMPILERS)]
        self.pools += pools
        self.coming |= {key: compiling.submit(on_mesh(key).compile) for key in now}
        context = contextvars.copy_context()  # includes the preferred backends
        lowered = {key: lowering.submit(context.run, on_mesh, key) for key in later}
        finish = lambda one: one.result().compile()
        self.coming |= {key: compiling.submit(finish, one) for key, one in lowered.items()}
        for pool in pools:
            pool.shutdown(wait=False)

    def wait(self, keys: Collection[Key]) -> None:
        """Wait until these are ready. If one failed, raise its error and cancel the rest."""
        try:
            for key in keys:
                self.coming[key].result()
        except BaseException:
            self.stop()
            raise

    def is_settled(self, key: Key) -> bool:
        """Whether a call of the program need not wait: it is ready, failed, or not started."""
        return key not in self.coming or self.coming[key].done()

    def settle(self, key: Key) -> None:
        """Wait until a program is settled. A failure is logged; a call of the program raises it."""
        if (one := self.coming.get(key)) is None:
            return
        wait([one])
        if not one.cancelled() and one.exception() is not None and key not in self.failed:
            self.failed.add(key)
            log.warning("%s was not compiled: %s", key, one.exception())

    def wait_for_one(self, keys: Collection[Key]) -> None:
        """Wait until one of these programs is settled."""
        if not any(map(self.is_settled, keys)):
            wait([self.coming[key] for key in keys], return_when=FIRST_COMPLETED)

    def stop(self) -> None:
        """Cancel what has not started yet."""
        for pool in self.pools:
            pool.shutdown(wait=False, cancel_futures=True)


class EngineCompiler(Compiler[ProgramKey]):
    """Compiler of an engine's programs, which may replace one another."""

    def pick(self, wanted: ProgramKey) -> ProgramKey:
        """Return the program to run: the wanted one if it is ready, or else the cheapest ready one
        that covers it. If none does, wait for the wanted one.

        A wanted program that was never started, or that failed, is then compiled when it is called.
        """
        one = self.coming.get(wanted)
        if one is not None and is_ready(one):
            return wanted
        if one is not None and one.done():
            self.settle(wanted)
        serving = [key for key, x in self.coming.items() if key.covers(wanted) and is_ready(x)]
        if serving:
            return min(serving, key=lambda key: key.cost)
        self.settle(wanted)
        return wanted
