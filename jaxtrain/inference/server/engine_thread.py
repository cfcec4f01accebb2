"""The thread that owns the engine: requests come in from the event loop, updates go back to it."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from jaxtrain.inference.engine import Engine, EngineStats, Request, Update
from jaxtrain.settings import UserError

PATIENCE = 30.0  # seconds to wait for the last step, which may be compiling
log = logging.getLogger(__name__)
Job = Callable[[Engine], None]


class EngineFailed(Exception):
    """The engine's thread has ended with an error; no request is answered any more."""


class UpdateStream:
    """Updates of some requests as they come: (index of the request, update).

    Iterating ends when each request has its finish reason, or raises TimeoutError. `close` cancels
    unfinished requests, and must be called in the end.
    """

    def __init__(self, thread: "EngineThread", requests: Sequence[Request], seconds: float):
        self.thread, self.deadline = thread, asyncio.get_running_loop().time() + seconds
        self.indices = {request.id: i for i, request in enumerate(requests)}
        self.open = set(self.indices)
        self.updates: asyncio.Queue[Update | Exception] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        while self.open:
            async with asyncio.timeout_at(self.deadline):
                found = await self.updates.get()
            if isinstance(found, Exception):
                raise found
            if found.finish_reason is not None:
                self.open.discard(found.id)
            yield self.indices[found.id], found

    def close(self) -> None:
        self.thread.forget(self)


class EngineThread:
    """Loads an engine and steps it, all in one thread."""

    def __init__(self, load: Callable[[], Engine]):
        """load: makes the engine. It is called in the thread, where programs are compiled, too."""
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.stats = EngineStats(*([0] * len(EngineStats._fields)))
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self.answers: dict[str, UpdateStream] = {}  # by request; only the event loop uses it
        self.results: set[Future[Any]] = set()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.loaded: Future[Engine] = Future()
        self.thread = threading.Thread(target=self._main, args=(load,), name="engine", daemon=True)

    # ---- of the event loop ---------------------------------------------------------------------

    def start(self) -> Engine:
        """Start the thread, and return the engine once it is loaded. Raises what loading raises."""
        self.thread.start()
        return self.loaded.result()

    def attach(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], object]) -> None:
        """Set the event loop of updates. on_failure: called in it, once, if the engine raises."""
        self.loop, self.on_failure = loop, on_failure

    def stop(self) -> None:
        """End the thread after the current step. Requests in flight get no answer."""
        self.jobs.put(None)
        self.thread.join(PATIENCE)

    def submit(self, requests: Sequence[Request], seconds: float) -> UpdateStream:
        """Add requests to the engine. An error of adding them is raised when the answers are read.

        seconds: time limit for all answers.
        """
        self._check()
        answers = UpdateStream(self, requests, seconds)
        self.answers |= {request.id: answers for request in requests}

        def add(engine: Engine) -> None:
            try:
                for request in requests:
                    engine.add(request)
            except UserError as error:
                words = str(error).removeprefix(f"request {request.id}: ")
                self._tell(answers.updates.put_nowait, UserError(words))

        self.jobs.put(add)
        return answers

    def forget(self, answers: UpdateStream) -> None:
        """Cancel the unfinished requests of a stream."""
        for id in answers.indices:
            self.answers.pop(id, None)
        gone, answers.open = answers.open, set()

        def cancel(engine: Engine) -> None:
            for id in gone:
                engine.cancel(id)

        if gone:
            self.jobs.put(cancel)

    async def run[T](self, function: Callable[[Engine], T]) -> T:
        """Call function(engine) between two steps, and return its result."""
        self._check()
        result: Future[Any] = Future()
        self.results.add(result)

        def call(engine: Engine) -> None:
            if result.done():
                return
            try:
                found, error = function(engine), None
            except Exception as raised:
                found, error = None, raised
            with suppress(InvalidStateError):  # interrupted, or the caller was cancelled
                result.set_exception(error) if error else result.set_result(found)

        self.jobs.put(call)
        try:
            return await asyncio.wrap_future(result)
        finally:
            self.results.discard(result)

    def _check(self) -> None:
        if self.failure is not None:
            raise EngineFailed(str(self.failure))

    def _deliver(self, updates: Sequence[Update]) -> None:
        for update in updates:
            if answers := self.answers.get(update.id):
                answers.updates.put_nowait(update)
                if update.finish_reason is not None:
                    del self.answers[update.id]

    def interrupt(self, error: Exception) -> None:
        """End all requests in flight with an error."""
        for answers in set(self.answers.values()):
            answers.updates.put_nowait(error)
        for result in tuple(self.results):
            if not result.done():
                result.set_exception(error)

    def _fail(self, failure: BaseException) -> None:
        self.failure = failure
        self.interrupt(EngineFailed(f"{type(failure).__name__}: {failure}"))
        self.on_failure()

    # ---- of the engine's thread ----------------------------------------------------------------

    def _tell(self, function: Callable[..., object], *arguments: object) -> None:
        assert self.loop is not None
        if not self.loop.is_closed():  # closed at the end: nobody waits any more
            self.loop.call_soon_threadsafe(function, *arguments)

    def _main(self, load: Callable[[], Engine]) -> None:
        try:
            engine = load()
        except BaseException as error:
            self.loaded.set_exception(error)
            return
        self.stats = engine.stats()
        self.loaded.set_result(engine)
        try:
            while self._work(engine):
                pass
        except BaseException as error:
            log.exception("the engine failed")
            self._tell(self._fail, error)
        finally:
            engine.compiler.stop()

    def _work(self, engine: Engine) -> bool:
        """Run the queued jobs, then one engine step. Returns False at the end."""
        wait = not engine.busy
        while wait or not self.jobs.empty():
            if (job := self.jobs.get()) is None:
                return False
            job(engine)
            wait = False
        if engine.busy and (updates := engine.step()):
            self._tell(self._deliver, updates)
        self.stats = engine.stats()
        return True
