"""A tiny model behind a live server, and clients of it."""

import asyncio
import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import openai
import uvicorn

from jaxtrain.inference import generate
from jaxtrain.inference.engine import Engine, EngineOptions, Request, SamplingParams
from jaxtrain.inference.engine.load import engine_of
from jaxtrain.inference.server.app import make_app
from jaxtrain.inference.server.engine_thread import EngineThread
from jaxtrain.inference.server.load import served_adapter, served_model
from jaxtrain.inference.server.service import Limits, Service

T = 128
HI = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ';' }}"
    "{{ eos_token if m['role'] == 'assistant' }}{% endfor %}{{ 'a:' if add_generation_prompt }}"
)
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
LIMITS = Limits(max_tokens=64, concurrency=4, queue=60, body_bytes=100_000, timeout=60.0)


class Live:
    """A server in a thread of this process."""

    def __init__(self, service, keys=()):
        self.service, self.clients = service, []
        config = uvicorn.Config(
            make_app(service, keys), log_level="warning", lifespan="off", access_log=False
        )
        self.server, self.socket = uvicorn.Server(config), socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=asyncio.run, args=(self.main(),), daemon=True)

    async def main(self):
        self.service.thread.attach(asyncio.get_running_loop(), lambda: None)
        await self.server.serve([self.socket])

    def client(self, key="none", **options):
        options = {"max_retries": 0, "timeout": 60.0} | options
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)
        self.clients.append(client)
        return client


def make_engine(saved, limits=LIMITS, kind=Engine, tensor=1, adapters=()):
    """An engine of a saved model. kind: Engine, or a class made of it."""
    options = EngineOptions(
        slots=limits.concurrency, page_size=16, chunk=32, tensor=tensor,
        max_queue=limits.concurrency + limits.queue, adapters=adapters,
    )  # fmt: skip
    one = engine_of(saved, options)
    one.__class__ = kind
    return one


@contextlib.contextmanager
def live(saved, limits=LIMITS, keys=(), kind=Engine, tensor=1, adapters=(), **changes):
    """A `Live` server of a saved model. changes: of what is served."""
    thread = EngineThread(lambda: make_engine(saved, limits, kind, tensor, adapters))
    thread.start()
    served = served_model(saved, "tiny")._replace(**changes)
    more = [served_adapter(saved, served, *one) for one in adapters]
    service = Service(served, thread, limits, more)
    one = Live(service, keys)
    one.thread.start()
    while not one.server.started:
        time.sleep(0.01)
    try:
        yield one
    finally:
        for client in one.clients:
            client.close()
        one.server.should_exit = True
        one.thread.join()
        thread.stop()


def until(condition, seconds=20.0):
    """Wait for a condition; AssertionError if it does not come to hold."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.01)


def alone(saved, prompt, tokens):
    """The greedy continuation of token ids, decoded by itself."""
    request = Request("alone", tuple(prompt), SamplingParams(tokens, temperature=0.0))
    engine = generate.make_engine(generate.model_of(saved), [request])
    return generate.run_requests(engine, [request])[0]


def post(server, path, body, headers=(), raw=False):
    """(status, the JSON of the answer) of a POST."""
    data = body if raw else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | dict(headers)
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
