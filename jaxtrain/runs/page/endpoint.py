"""Proxy to an OpenAI-compatible server: the browser only talks to its own origin, and never sees
the API key."""

import http.client
import os
from collections.abc import AsyncIterator
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jaxtrain.settings import UserError

KEY = "JAXTRAIN_API_KEY"  # environment variable with the server's API key
MOST = 1 << 20  # bytes of a request
SECONDS = 600  # timeout of a connection without data


class Endpoint(NamedTuple):
    """A chat server: its URL, without /v1."""

    url: SplitResult

    @property
    def shown(self) -> str:
        return self.url.geturl()


def endpoint_at(text: str) -> Endpoint:
    """Parse a server's URL. Raises UserError if it is invalid."""
    url = urlsplit(text.rstrip("/").removesuffix("/v1"))
    if url.scheme not in ("http", "https") or not url.hostname or url.username:
        raise UserError(f"--endpoint {text}: must be a URL, such as http://127.0.0.1:8000")
    return Endpoint(url)


def connect(endpoint: Endpoint) -> http.client.HTTPConnection:
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    url = endpoint.url
    return kinds[url.scheme](url.hostname or "", url.port, timeout=SECONDS)


def failure(code: int, message: str) -> JSONResponse:
    """An error response in OpenAI's format."""
    return JSONResponse({"error": {"message": message, "type": "server_error"}}, code)


async def pass_on(endpoint: Endpoint, request: Request) -> Response:
    """Forward a request, and stream the server's response."""
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
    """Yield data as soon as it arrives. The connection is closed when the reader stops."""
    try:
        while part := await run_in_threadpool(answer.read1, 1 << 16):
            yield part
    finally:
        connection.close()
