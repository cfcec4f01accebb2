"""Many clients, clients that leave, limits, and an engine that fails."""

import asyncio
import json
import queue
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import openai
import pytest
from server_cases import COMPLETION, LIMITS, alone, live, post, until

from jaxtrain.inference.engine import Engine
from jaxtrain.inference.server.engine_thread import EngineThread, UpdateStream

# ---- load, and clients that leave ----------------------------------------------------------------


@pytest.mark.slow
def test_many_clients_get_their_own_answers(server, saved):
    texts = [f"{i}: the" for i in range(12)]
    ask = lambda text: server.client().completions.create(
        model="tiny", prompt=text, max_tokens=12, temperature=0
    )
    with ThreadPoolExecutor(12) as pool:
        found = [one.choices[0].text for one in pool.map(ask, texts)]
    assert found == [alone(saved, [256, *text.encode()], 12) for text in texts]


class SlowEngine(Engine):
    """Takes its time for each token."""

    def steps_at_once(self, todo):
        return 1

    def step(self):
        time.sleep(0.02)
        return super().step()


LONG = {"model": "tiny", "prompt": "a", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def send_raw(server, body):
    """A connection with a request on it that was not answered yet."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n"
    connection = socket.create_connection(server.socket.getsockname())
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    return connection


def test_what_a_client_that_leaves_still_waits_for_is_cancelled():
    """Of its two requests one has ended."""
    thread, engine = object.__new__(EngineThread), Mock(spec=Engine)
    answers = Mock(spec=UpdateStream, indices={"ended": 0, "open": 1}, open={"open"})
    thread.answers, thread.jobs = {"open": answers, "other": answers}, queue.SimpleQueue()
    thread.forget(answers)
    assert thread.answers == {"other": answers}
    thread.jobs.get_nowait()(engine)
    engine.cancel.assert_called_once_with("open")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.quick("True")
def test_a_client_that_leaves_frees_its_place(saved, stream):
    with live(saved, kind=SlowEngine) as one:
        engine = one.service.thread
        with send_raw(one, LONG | {"stream": stream, "n": 2}) as connection:
            until(lambda: engine.stats.running == 2)
            if stream:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
        until(lambda: not engine.stats.running and not engine.answers)
        until(lambda: not one.service.in_flight)
        counted = one.service.metrics.text().decode()
        assert 'jaxtrain_http_requests_total{path="/v1/completions",status="499"} 1.0' in counted
        assert post(one, COMPLETION, LONG | {"max_tokens": 2})[0] == 200


def test_what_is_more_than_the_queue_is_refused(saved):
    limits = LIMITS._replace(concurrency=1, queue=1)
    with live(saved, limits, kind=SlowEngine) as one:
        with send_raw(one, LONG), send_raw(one, LONG):
            until(lambda: one.service.thread.stats.waiting == 1)
            with pytest.raises(openai.RateLimitError):
                one.client().completions.create(model="tiny", prompt="a")
        until(lambda: not one.service.in_flight)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.quick("True")
def test_a_request_has_its_time(saved, stream):
    with live(saved, LIMITS._replace(timeout=0.3), kind=SlowEngine) as one:
        if stream:
            with pytest.raises(openai.APIError, match="within 0.3 seconds"):
                list(one.client().completions.create(stream=True, **asked(LONG)))
        else:
            code, answer = post(one, COMPLETION, LONG)
            assert code == 408 and answer["error"]["code"] == "timeout"
        until(lambda: not one.service.thread.stats.running)


def slow_client(one, body, seconds):
    """(events of a stream, http messages) for a client that reads nothing for some seconds after
    the response has begun, and then all."""
    sent, begun = [], time.monotonic()

    async def receive():
        if not sent and not receive.body:
            receive.body = True
            return {"type": "http.request", "body": json.dumps(body).encode()}
        await asyncio.Event().wait()

    receive.body = False

    async def send(message):
        """Waits before it sends, as a server does: a cancelled message is not sent."""
        if sent:
            await asyncio.sleep(max(0.0, begun + seconds - time.monotonic()))
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": COMPLETION, "query_string": b""}
    scope["headers"] = [(b"content-type", b"application/json")]
    call = one.server.config.loaded_app(scope, receive, send)
    asyncio.run_coroutine_threadsafe(call, one.service.thread.loop).result(60)
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body"]
    events = b"".join(bodies).decode().split("\n\n")
    return [event.removeprefix("data: ") for event in events if event], sent


def test_a_slow_client_gets_an_error_event_in_the_end(saved, monkeypatch):
    with live(saved, kind=SlowEngine) as one:
        service, body = one.service, LONG | {"stream": True}
        assert post(one, COMPLETION, LONG | {"max_tokens": 2})[0] == 200  # compiles
        service.limits = LIMITS._replace(timeout=0.4)
        events, messages = slow_client(one, body, 0.6)
        error = json.loads(events[-1])["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "timeout")
        assert error["message"] == "the client did not read the answer within 0.4 seconds"
        assert messages[-1]["more_body"] is False and "[DONE]" not in events
        until(lambda: not service.thread.stats.running and not service.thread.answers)
        count = 'jaxtrain_http_requests_total{path="/v1/completions",status="%d"} %d.0'
        assert not service.in_flight and count % (200, 2) in service.metrics.text().decode()
        # A client that does not read that event either.
        monkeypatch.setattr("jaxtrain.inference.server.http.LAST_EVENT_SECONDS", 0.1)
        assert slow_client(one, body, 30.0)[0] == []
        until(lambda: not service.thread.stats.running and not service.thread.answers)
        assert not service.in_flight and count % (499, 1) in service.metrics.text().decode()


def asked(body):
    """A body as arguments of the openai client."""
    own = {"ignore_eos": body["ignore_eos"]}
    return {k: v for k, v in body.items() if k not in own} | {"extra_body": own}


class BrokenEngine(Engine):
    """Fails at its fifth step."""

    steps = 0

    def step(self):
        self.steps += 1
        if self.steps == 5:
            raise RuntimeError("the device is gone")
        return super().step()


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_fails_its_requests(saved, stream):
    with live(saved, kind=BrokenEngine) as one:
        if stream:
            with pytest.raises(openai.APIError, match="the engine failed"):
                list(one.client().completions.create(stream=True, **asked(LONG)))
        else:
            code, answer = post(one, COMPLETION, LONG)
            assert code == 500 and answer["error"]["type"] == "server_error"
        assert post(one, COMPLETION, LONG)[0] == 500  # at once
        with pytest.raises(urllib.error.HTTPError, match="503") as found:
            urllib.request.urlopen(f"{one.url}/health")
        found.value.close()


def test_a_crowd_is_refused_unread(saved, monkeypatch):
    monkeypatch.setattr("jaxtrain.inference.server.service.MOST_REFUSED", -1)
    limits = LIMITS._replace(concurrency=1, queue=1)
    with live(saved, limits, kind=SlowEngine) as one, send_raw(one, LONG):
        until(lambda: one.service.in_flight == 1)
        code, answer = post(one, COMPLETION, b"this is no JSON", raw=True)
        assert code == 429 and answer["error"]["code"] == "queue_full"
