"""A tiny model behind a live server, and clients of it."""

import asyncio
import contextlib
import socket
import threading
import time

import jax
import openai
import uvicorn
from fake_engine import FakeEngine

from jaxtrain.inference.server.app import make_app
from jaxtrain.inference.server.engine_thread import EngineThread
from jaxtrain.inference.server.load import served_model
from jaxtrain.inference.server.service import Limits, Service
from jaxtrain.inference.server.whole_texts import TextModel

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


@contextlib.contextmanager
def live(saved, limits=LIMITS, keys=(), engine=FakeEngine, **changes):
    """A `Live` server of a saved model."""
    params = jax.device_put(saved.params)
    thread = EngineThread(lambda: engine(saved, params, limits.concurrency))
    thread.start()
    served = served_model(saved, "tiny")._replace(**changes)
    service = Service(served, TextModel(saved.graphdef, params), thread, limits)
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
