"""The page's way to an OpenAI-compatible server: requests are passed on, so that the browser talks
to its own origin alone and sees no key."""

import http.client
import os
from collections.abc import AsyncIterator
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jaxtrain.settings import UserError

KEY = "JAXTRAIN_API_KEY"  # of the server, in the environment
MOST = 1 << 20  # bytes of a request
SECONDS = 600  # of silence


class Endpoint(NamedTuple):
    """Where chats go: a URL up to /v1."""

    url: SplitResult

    @property
    def shown(self) -> str:
        return self.url.geturl()


def endpoint_at(text: str) -> Endpoint:
    """UserError for what is no URL of a server."""
    url = urlsplit(text.rstrip("/").removesuffix("/v1"))
    if url.scheme not in ("http", "https") or not url.hostname or url.username:
        raise UserError(f"--endpoint {text}: must be a URL, as http://127.0.0.1:8000")
    return Endpoint(url)


def connect(endpoint: Endpoint) -> http.client.HTTPConnection:
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    url = endpoint.url
    return kinds[url.scheme](url.hostname or "", url.port, timeout=SECONDS)


def failure(code: int, message: str) -> JSONResponse:
    """An error in OpenAI's form."""
    return JSONResponse({"error": {"message": message, "type": "server_error"}}, code)


async def pass_on(endpoint: Endpoint, request: Request) -> Response:
    """The server's answer to a request, as it comes."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST:
            return failure(413, f"the request is above {MOST:,} bytes")
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    connection = connect(endpoint)
    path = endpoint.url.path + request.url.path

    def ask() -> http.client.HTTPResponse:
        connection.request(request.method, path, body or None, headers)
        return connection.getresponse()

    try:
        answer = await run_in_threadpool(ask)
    except OSError as error:
        reason = error.strerror or str(error)
        return failure(502, f"no server at {endpoint.shown}: {reason}")
    kind = answer.headers.get_content_type()
    if kind not in ("application/json", "text/event-stream"):
        connection.close()
        return failure(502, f"{endpoint.shown} answered with {kind}, not with JSON")
    return StreamingResponse(parts_of(answer, connection), answer.status, media_type=kind)


async def parts_of(
    answer: http.client.HTTPResponse, connection: http.client.HTTPConnection
) -> AsyncIterator[bytes]:
    """What arrives, as soon as it does; the connection ends with whoever reads."""
    try:
        while part := await run_in_threadpool(answer.read1, 1 << 16):
            yield part
    finally:
        connection.close()
