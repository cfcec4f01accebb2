"""Routes, and the middleware before all of them: API key, drain and request metrics."""

import asyncio
import hmac
import time
import uuid
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxtrain.inference.server.bodies import Body, ChatBody, CompletionBody, EmbeddingBody
from jaxtrain.inference.server.chat_completions import ChatCompletion
from jaxtrain.inference.server.completions import Completion
from jaxtrain.inference.server.embeddings import embeddings
from jaxtrain.inference.server.engine_thread import EngineFailed
from jaxtrain.inference.server.errors import ApiError
from jaxtrain.inference.server.http import (
    ClientGone,
    Json,
    as_api_error,
    read_body,
    stream,
    unless_gone,
)
from jaxtrain.inference.server.service import Served, Service
from jaxtrain.inference.server.tokenization import (
    DetokenizeBody,
    TokenizeBody,
    detokenize,
    tokenize,
    tokenizer_info,
)
from jaxtrain.settings import UserError

HEALTH = "/health"  # needs no key
CLIENT_LEFT = 499  # nginx's status for a connection that the client closed


class Endpoints:
    """Handlers of all paths. Texts are tokenized in threads: a long one does not block other
    streams."""

    def __init__(self, service: Service):
        self.service = service

    async def health(self, request: Request) -> Response:
        if self.service.thread.failure is not None or self.service.draining:
            status = "draining" if self.service.thread.failure is None else "failed"
            return JSONResponse({"status": status}, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        def shown(one: Served) -> Json:
            model: Json = {"id": one.name, "object": "model", "created": self.service.created}
            model |= {"owned_by": "jaxtrain", "max_model_len": one.context}
            return model | ({"parent": self.service.served.name} if one.adapter else {})

        if name := request.path_params.get("name"):
            return JSONResponse(shown(self.service.model_of(Body(model=name))))
        models = [shown(one) for one in self.service.models.values()]
        return JSONResponse({"object": "list", "data": models})

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def read[B: Body](self, request: Request, kind: type[B]) -> B:
        limits = self.service.limits
        body = await read_body(request, kind, limits.body_bytes, limits.timeout)
        self.service.model_of(body)
        return body

    async def answered(self, request: Request, call: Completion | ChatCompletion) -> Response:
        if call.body.stream:
            return await stream(request.receive, call.chunks(), self.service.limits.timeout)
        return JSONResponse(await unless_gone(request.receive, call.whole()))

    async def complete(self, request: Request) -> Response:
        body = await self.read(request, CompletionBody)
        id = f"cmpl-{uuid.uuid4().hex}"
        return await self.answered(
            request, await asyncio.to_thread(Completion, self.service, body, id)
        )

    async def chat(self, request: Request) -> Response:
        body = await self.read(request, ChatBody)
        id = f"chatcmpl-{uuid.uuid4().hex}"
        return await self.answered(
            request, await asyncio.to_thread(ChatCompletion, self.service, body, id)
        )

    async def embed(self, request: Request) -> Response:
        body = await self.read(request, EmbeddingBody)
        return JSONResponse(await unless_gone(request.receive, embeddings(self.service, body)))

    async def to_tokens(self, request: Request) -> Response:
        body = await self.read(request, TokenizeBody)
        return JSONResponse(await asyncio.to_thread(tokenize, self.service, body))

    async def to_text(self, request: Request) -> Response:
        body = await self.read(request, DetokenizeBody)
        return JSONResponse(await asyncio.to_thread(detokenize, self.service, body))

    async def tokenizer(self, request: Request) -> Response:
        return JSONResponse(tokenizer_info(self.service))


async def failed(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_LEFT)
    found = as_api_error(error)
    headers = {"retry-after": "1"} if found.status in (429, 503) else None
    return JSONResponse(found.body(), found.status, headers)


async def no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    found = ApiError(error.status_code, message)
    return JSONResponse(found.body(), found.status, error.headers)


def make_app(service: Service, keys: Sequence[str] = ()) -> ASGIApp:
    """keys: any of them gives access; without keys, the server is open to all who reach it."""
    of = Endpoints(service)
    routes = [
        Route(HEALTH, of.health),
        Route("/metrics", of.metrics),
        Route("/v1/models", of.models),
        Route("/v1/models/{name:path}", of.models),
        Route("/v1/chat/completions", of.chat, methods=["POST"]),
        Route("/v1/completions", of.complete, methods=["POST"]),
        Route("/v1/embeddings", of.embed, methods=["POST"]),
        Route("/tokenize", of.to_tokens, methods=["POST"]),
        Route("/detokenize", of.to_text, methods=["POST"]),
        Route("/tokenizer_info", of.tokenizer),
    ]
    told = (ApiError, UserError, EngineFailed, ClientGone)
    handlers = {HTTPException: no_such, Exception: failed} | dict.fromkeys(told, failed)
    app = Starlette(routes=routes, exception_handlers=handlers)
    return AccessMiddleware(app, service, keys, {route.path for route in routes})


class AccessMiddleware:
    """Checks the key and the drain before each request, and counts it afterwards.

    Requests for /health and other scopes (uvicorn's lifespan) pass through.
    """

    def __init__(self, app: ASGIApp, service: Service, keys: Sequence[str], paths: set[str]):
        self.app, self.service, self.paths = app, service, paths
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == HEALTH:
            return await self.app(scope, receive, send)
        begun, status, ended = time.monotonic(), CLIENT_LEFT, False

        async def counted(message: Message) -> None:
            nonlocal status, ended
            status = message.get("status", status)
            await send(message)
            ended |= message["type"] == "http.response.body" and not message.get("more_body")

        self.service.in_flight += 1
        try:
            if error := self.refusal(scope):
                headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
                headers |= {"connection": "close"} if error.status == 503 else {}
                headers |= {"retry-after": "1"} if error.status == 429 else {}
                refused = JSONResponse(error.body(), error.status, headers)
                await refused(scope, receive, counted)
            else:
                await self.app(scope, receive, counted)
        finally:
            self.service.in_flight -= 1
            metrics, path = self.service.metrics, scope["path"]
            path = path if path in self.paths else "other"
            metrics.requests.labels(path, status if ended else CLIENT_LEFT).inc()
            metrics.duration.labels(path).observe(time.monotonic() - begun)

    def refusal(self, scope: Scope) -> ApiError | None:
        """Error for a request that is refused before it is read; None otherwise."""
        if self.service.draining:
            return ApiError(503, "the server is about to end", code="draining")
        if self.service.thread.failure is not None:
            return ApiError(500, "the engine failed, and the server ends")
        if self.service.is_crowded:
            return ApiError(429, "too many requests at a time; try again", code="queue_full")
        if not self.keys:
            return None
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), one) for one in self.keys]
        if kind.lower() == b"bearer" and any(matches):
            return None
        message = "a key is needed: Authorization: Bearer KEY"
        return ApiError(401, message, code="invalid_api_key")
