"""HTTP helpers: bodies within a size limit, event streams, clients that disconnect."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxtrain.inference.server.bodies import Body
from jaxtrain.inference.server.engine_thread import EngineFailed
from jaxtrain.inference.server.errors import ApiError, invalid_body
from jaxtrain.settings import UserError

LAST_EVENT_SECONDS = 10.0  # for a client to read the error event of a stream that took too long
Json = dict[str, Any]
Chunks = AsyncGenerator[Json]


class ClientGone(Exception):
    """The client has closed the connection, so nobody reads a response."""


async def read_body[B: Body](request: Request, kind: type[B], most: int, seconds: float) -> B:
    """Read and validate the body of a request. most: maximum bytes. seconds: limit to arrive."""
    if "json" not in request.headers.get("content-type", ""):
        raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise ApiError(413, f"the body is larger than {most:,} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} seconds") from None
    except ClientDisconnect:
        raise ClientGone from None
    try:
        return kind.model_validate_json(bytes(data))
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)[0]) from None


async def unless_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`. If the client disconnects, `work` is cancelled and ClientGone is raised."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def as_api_error(error: Exception) -> ApiError:
    """Error that the client receives for an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, EngineFailed):
        return ApiError(500, "the engine failed, and the server ends")
    return ApiError(500, "an error of the server; its log has more")


class EventStream(Response):
    """Server-sent events: each chunk as `data: {...}`, at the end `data: [DONE]`.

    An error in the middle is sent as the last event, and so is the error 408 of a client that has
    not read all events after `seconds`. If it does not read that one within LAST_EVENT_SECONDS
    more, the connection is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, first: Json, rest: Chunks, seconds: float):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.first, self.rest, self.seconds = first, rest, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(data: str, more: bool = True) -> None:
            body = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async def events() -> None:
            async with aclosing(self.rest) as rest, asyncio.timeout(self.seconds):
                await put(json.dumps(self.first))
                async for chunk in rest:
                    await put(json.dumps(chunk))
                await put("[DONE]", more=False)

        async def work() -> None:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                await events()
            except Exception as error:
                if isinstance(error, TimeoutError):
                    message = f"the client did not read the answer within {self.seconds:g} seconds"
                    error = ApiError(408, message, code="timeout")
                await put(json.dumps(as_api_error(error).body()), more=False)
                if not isinstance(error, (ApiError, UserError, EngineFailed)):
                    raise

        with suppress(ClientGone, TimeoutError):
            # `rest` is closed also where `work` ends before its first event.
            async with aclosing(self.rest), asyncio.timeout(self.seconds + LAST_EVENT_SECONDS):
                await unless_gone(receive, work())


async def stream(receive: Receive, chunks: Chunks, seconds: float) -> EventStream:
    """Start a stream once its first chunk is there. An error before it has its own status code."""

    async def first() -> Json:
        return await anext(chunks)

    return EventStream(await unless_gone(receive, first()), chunks, seconds)
