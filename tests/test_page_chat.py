"""The chat of `jaxtrain ui`: requests passed on to a server with OpenAI's API."""

import asyncio
import json
import threading

import httpx
import pytest
from page_cases import make_run, served
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from jaxtrain.runs.page.app import page_app
from jaxtrain.runs.page.command import listening
from jaxtrain.runs.page.endpoint import endpoint_at
from jaxtrain.settings import UserError


@pytest.fixture
def runs(tmp_path):
    """A folder with a run."""
    make_run(tmp_path, "first")
    return tmp_path


def fake_server():
    """What answers as OpenAI's API does, with what it was asked."""

    async def models(request):
        return JSONResponse({"data": [{"id": "tiny"}], "key": request.headers.get("authorization")})

    async def completions(request):
        asked = await request.json()
        if asked["model"] != "tiny":
            return JSONResponse({"error": {"message": "no such model"}}, 404)

        async def parts():
            for word in ("Hello", " you"):
                delta = {"delta": {"content": word}} if "messages" in asked else {"text": word}
                yield f"data: {json.dumps({'choices': [delta]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
        ]
    )


def test_a_chat_is_passed_on_with_a_key_that_the_page_does_not_see(runs, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_API_KEY", "secret")
    with served(fake_server()) as url:
        client = TestClient(page_app(runs, [endpoint_at(f"{url}/v1")]), base_url="http://127.0.0.1")
        assert client.get("/v1/models").json() == {"data": [{"id": "tiny"}], "key": "Bearer secret"}
        assert "secret" not in client.get("/api/options").text
        asked = {"model": "tiny", "messages": [], "stream": True}
        found = client.post("/v1/chat/completions", json=asked)
        assert found.headers["content-type"].startswith("text/event-stream")
        assert '"Hello"' in found.text and found.text.endswith("[DONE]\n\n")
        found = client.post("/v1/chat/completions", json=asked | {"model": "other"})
        assert (found.status_code, found.json()["error"]["message"]) == (404, "no such model")
        found = client.post("/v1/chat/completions", content="{}")
        assert found.status_code == 400


def test_a_client_that_leaves_ends_the_answer_at_the_server(runs):
    left = threading.Event()

    async def endless(request):
        async def parts():
            try:
                while True:
                    yield "data: {}\n\n"
                    await asyncio.sleep(0.02)
            finally:
                left.set()

        return StreamingResponse(parts(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", endless, methods=["POST"])])
    with served(app) as chat, served(page_app(runs, [endpoint_at(chat)])) as url:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={}, timeout=60) as answer:
            assert next(answer.iter_lines()) == "data: {}" and not left.is_set()
        assert left.wait(20)


def test_a_server_that_is_not_there_is_said_in_one_line(runs):
    client = TestClient(page_app(runs), base_url="http://127.0.0.1")
    assert "--endpoint" in client.get("/v1/models").json()["error"]
    with listening(0) as listener:
        port = listener.getsockname()[1]
    client = TestClient(
        page_app(runs, [endpoint_at(f"http://127.0.0.1:{port}")]), base_url="http://127.0.0.1"
    )
    found = client.get("/v1/models")
    assert found.status_code == 502 and "no server at" in found.json()["error"]["message"]


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "file:///etc", "http://", "http://a@b"])
def test_an_endpoint_is_a_url(url):
    with pytest.raises(UserError, match="must be a URL"):
        endpoint_at(url)
