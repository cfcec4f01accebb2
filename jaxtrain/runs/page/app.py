"""Routes of the page: static files, JSON about runs, metrics rows as server-sent events."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxtrain.config import shipped_names
from jaxtrain.runs.compare import compare, comparison_tree, differing, plain_values, read_run
from jaxtrain.runs.page.details import details_of, sample_of
from jaxtrain.runs.page.dry_run import RUN, answer_of, arguments_of, dry_run
from jaxtrain.runs.page.endpoint import Endpoint, pass_on
from jaxtrain.runs.page.folder import RunFolder
from jaxtrain.runs.page.model_server import ModelServer, servable_models
from jaxtrain.runs.page.tail import Tail
from jaxtrain.settings import UserError, parse_json

STATIC = Path(__file__).with_name("static")
HOSTS = ["127.0.0.1", "localhost"]  # a request with another Host comes from another site
LOOK = 0.5  # seconds between two polls of the files
FRESH = 1.0  # seconds for which a list of runs is cached
LIST = 4  # polls of the files per poll of the list of runs
ALIVE = 30  # polls without news until a comment keeps the stream alive
MAX_ROWS = 2000  # rows per event
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Handler = Callable[[Request], Awaitable[Response]]


class SafeHeaders:
    """Middleware that adds security headers to every response: no other origins, no inline scripts
    or styles, no caching."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                more = {"Content-Security-Policy": POLICY} | HEADERS
                message["headers"] = [*message["headers"]] + [
                    (name.lower().encode(), value.encode())
                    for name, value in more.items()
                    if name.lower().encode() not in given
                ]
            await send(message)

        await self.app(scope, receive, send_with)


def answered(handler: Handler) -> Handler:
    """Wrap a handler: a UserError becomes a one-line response of status 400."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except UserError as error:
            return JSONResponse({"error": str(error).splitlines()[0]}, 400)

    return handle


async def posted(request: Request) -> dict[str, Any]:
    """The JSON object of a POST request. Raises UserError if another site may have sent it."""
    origin = request.headers.get("origin")
    if request.headers.get("content-type", "").split(";")[0] != "application/json":
        raise UserError("the request must be application/json")
    if origin and origin.partition("://")[2] != request.headers.get("host"):
        raise UserError(f"the request comes from {origin}, not from this page")
    found = parse_json(await request.body(), "the request")
    if not isinstance(found, dict):
        raise UserError("the request must be an object, {...}")
    return found


class Page:
    """The handlers, over one folder of runs."""

    def __init__(self, folder: RunFolder, endpoints: Sequence[Endpoint] = ()):
        self.folder, self.endpoints, self.server = folder, endpoints, ModelServer(folder)
        self.estimating = asyncio.Lock()  # a dry run fills the cores
        self.listing = threading.Lock()
        self.list: tuple[float, list[dict[str, Any]]] = -FRESH, []

    async def index(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def static(self, request: Request) -> Response:
        files = {path.name: path for path in STATIC.iterdir()}
        path = files.get(request.path_params["name"])
        return FileResponse(path) if path else Response("not found", 404)

    async def runs(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self.listed))

    def listed(self) -> list[dict[str, Any]]:
        """The list of runs, cached for FRESH seconds."""
        with self.listing:
            if time.monotonic() - self.list[0] > FRESH:
                self.list = time.monotonic(), [one._asdict() for one in self.folder.summaries()]
            return self.list[1]

    async def options(self, request: Request) -> Response:
        """Options of the page's forms: configs, chat endpoints and servable models."""
        names = await run_in_threadpool(self.folder.names)
        has = lambda name: self.folder.path(name, "config.yaml").is_file()
        return JSONResponse({
            "folder": str(self.folder.shown),
            "configs": [*shipped_names(), *(RUN + name for name in names if has(name))],
            "endpoints": [one.shown for one in self.endpoints],
            "models": await run_in_threadpool(servable_models, self.folder),
        })  # fmt: skip

    async def details(self, request: Request) -> Response:
        return JSONResponse(
            await run_in_threadpool(details_of, self.folder, request.query_params.get("run", ""))
        )

    async def samples(self, request: Request) -> Response:
        """The steps that have samples, or the sample of `step`."""
        name, step = request.query_params.get("run", ""), request.query_params.get("step")
        if step is None:
            return JSONResponse({"steps": list(self.folder.samples(name))})
        text = sample_of(self.folder, name, int(step)) if step.isdecimal() else None
        if text is None:
            return JSONResponse({"error": f"{name} has no sample of step {step}"}, 404)
        return JSONResponse({"text": text})

    async def compare(self, request: Request) -> Response:
        names = request.query_params.getlist("run")
        return JSONResponse(await run_in_threadpool(self.compared, names))

    def compared(self, names: list[str]) -> dict[str, Any]:
        runs = []
        for name in names:
            files = ("config.yaml", "env.json", "metrics.jsonl")
            [run_dir] = {self.folder.path(name, file).parent for file in files}
            runs.append(read_run(run_dir)._replace(name=name))
        try:
            return comparison_tree(compare(runs))
        except UserError as error:  # not trained yet: the settings can still be compared
            reason = str(error)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
            reason = "a metrics.jsonl or config.yaml of these runs is damaged"
        return {"error": reason, "names": names, "differences": plain_values(differing(runs))}

    async def report(self, request: Request) -> Response:
        text = self.folder.text(request.query_params.get("run", ""), "report.html", limit=1 << 26)
        if text is None:
            return Response("this run has no report yet", 404)
        return HTMLResponse(text, headers={"Content-Security-Policy": REPORT_POLICY})

    async def estimate(self, request: Request) -> Response:
        arguments = arguments_of(self.folder, await posted(request))
        async with self.estimating:
            return JSONResponse(answer_of(await dry_run(arguments)))

    async def chat(self, request: Request) -> Response:
        if request.method == "POST":
            await posted(request)
            if run := request.query_params.get("run"):
                step = request.query_params.get("step", "")
                return await pass_on(await self.server.endpoint_of(run, step), request)
        asked = request.query_params.get("endpoint", "0")
        if not asked.isdecimal() or int(asked) >= len(self.endpoints):
            raise UserError("no such chat server: start the page with --endpoint URL")
        return await pass_on(self.endpoints[int(asked)], request)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Stop the model server when the page ends."""
        try:
            yield
        finally:
            await run_in_threadpool(self.server.close)

    async def events(self, request: Request) -> Response:
        """Stream the rows of the named runs, existing and new ones, and the list of runs."""
        names = request.query_params.getlist("run")
        tails = {name: Tail(self.folder.path(name, "metrics.jsonl")) for name in names}
        return StreamingResponse(self.news(tails), media_type="text/event-stream")

    async def news(self, tails: dict[str, Tail]) -> AsyncIterator[str]:
        listed, quiet, fresh = None, 0, set(tails)
        for look in range(1 << 62):
            if look % LIST == 0:
                found = await run_in_threadpool(self.listed)
                if found != listed:
                    listed, quiet = found, 0
                    yield event("runs", found)
            more = False
            for name, tail in tails.items():
                news = await run_in_threadpool(tail.look)
                reset = news.reset or name in fresh
                fresh.discard(name)
                for i in range(0, len(news.rows) or int(reset), MAX_ROWS):
                    part = {"run": name, "reset": reset and i == 0, "damaged": news.damaged}
                    yield event("rows", part | {"rows": news.rows[i : i + MAX_ROWS]})
                    quiet = 0
                more = more or news.more
            if look == 0 and not more:
                yield event("ready", {})
            quiet += 1
            if quiet % ALIVE == 0:
                yield ": alive\n\n"
            await asyncio.sleep(0 if more else LOOK)


def event(kind: str, value: object) -> str:
    """One server-sent event; JSON has no line feeds."""
    return f"event: {kind}\ndata: {json.dumps(value, allow_nan=False)}\n\n"


def page_app(root: Path, endpoints: Sequence[Endpoint] = ()) -> Starlette:
    """The app for a folder of runs. endpoints: servers to chat with, in addition to its models.

    Raises UserError if `root` is not a folder.
    """
    page = Page(RunFolder(root), endpoints)
    get = {
        "/": page.index, "/static/{name}": page.static, "/report": page.report,
        "/api/runs": page.runs, "/api/options": page.options, "/api/details": page.details,
        "/api/samples": page.samples, "/api/compare": page.compare, "/api/events": page.events,
        "/v1/models": page.chat,
    }  # fmt: skip
    post = {"/api/estimate": page.estimate, "/v1/chat/completions": page.chat}
    post["/v1/completions"] = page.chat  # for models without a chat template
    routes = [Route(path, answered(handler)) for path, handler in get.items()]
    routes += [Route(path, answered(handler), methods=["POST"]) for path, handler in post.items()]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)
    middleware = [Middleware(SafeHeaders), hosts]
    return Starlette(routes=routes, middleware=middleware, lifespan=page.lifespan)
