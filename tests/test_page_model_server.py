"""The chat of `jaxtrain ui` with a model that the page has served itself."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from page_cases import make_run, served
from tiny import byte_model, random_run

from jaxtrain.runs.page import model_server
from jaxtrain.runs.page.app import page_app

# What stands for `jaxtrain serve`: it answers with its arguments and its process.
STAND_IN = """
import http.server, json, os, sys, time
run, *more = sys.argv[1:]
if "broken" in run:
    sys.exit("error: the model is damaged")
time.sleep(0.5 if "slow" in run else 0)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = {"run": os.path.basename(run), "more": more, "process": os.getpid()}
        kind, data = "application/json", json.dumps(said)
        if asked.get("stream"):
            said = {"choices": [{"delta": {"content": "Hello from " + said["run"]}}]}
            kind, data = "text/event-stream", f"data: {json.dumps(said)}\\n\\ndata: [DONE]\\n\\n"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"serving x at http://127.0.0.1:{server.server_port}/v1", flush=True)
server.serve_forever()
"""


def stand_in(run_dir, step):
    return [sys.executable, "-c", STAND_IN, str(run_dir), *([str(step)] if step else [])]


@pytest.fixture
def url(tmp_path, monkeypatch):
    """The page's, of a folder with runs."""
    for name in ("first", "slow", "broken", "bare"):
        make_run(tmp_path, name)
    for name in ("first", "slow", "broken"):
        (tmp_path / name / "checkpoints" / "50").mkdir(parents=True)
    (tmp_path / "first" / "model").mkdir()
    (tmp_path / "first" / "model" / "config.yaml").write_text("{}")
    (tmp_path / "first" / "checkpoints" / "100").mkdir()

    monkeypatch.setattr(model_server, "serve_command", stand_in)
    with served(page_app(tmp_path)) as url:
        yield url


def ask(url, run, step="", **body):
    return httpx.post(
        f"{url}/v1/completions?run={run}&step={step}", json={"prompt": "a"} | body, timeout=60
    )


def gone(process):
    for _ in range(500):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_a_model_is_served_from_the_first_message_on_one_at_a_time(url):
    models = httpx.get(f"{url}/api/options").json()["models"]
    assert {"run": "first", "whole": True, "steps": [50, 100]} in models
    assert {"run": "slow", "whole": False, "steps": [50]} in models
    assert "bare" not in [one["run"] for one in models]
    one = ask(url, "first").json()
    assert (one["run"], one["more"]) == ("first", [])
    assert ask(url, "first").json() == one  # the same process
    two = ask(url, "first", 50).json()
    assert two["more"] == ["50"] and gone(one["process"])
    os.kill(two["process"], 9)  # it is started again
    assert ask(url, "first", 50).json()["process"] != two["process"]


@pytest.mark.slow
def test_while_one_loads_another_is_told_to_wait(url):
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ask, url, "slow", 50)
        time.sleep(0.2)
        second = ask(url, "first")
        same = ask(url, "slow", 50)
    assert second.status_code == 400
    assert second.json()["error"] == (
        "busy: slow at step 50 is being loaded; try again when it is ready"
    )
    assert first.result().json() == same.json()
    assert ask(url, "first").json()["run"] == "first"


@pytest.mark.parametrize(
    ("run", "step", "message"),
    [
        ("broken", "50", "broken at step 50 is not served: the model is damaged"),
        ("../etc", "", "no run '../etc'"),
        ("first", "x", "step 'x' must be a whole number"),
    ],
)
def test_what_cannot_be_served_is_one_line(url, run, step, message):
    found = ask(url, run, step)
    assert found.status_code == 400 and message in found.json()["error"]


@pytest.mark.slow
def test_another_site_cannot_start_one(url):
    where = f"{url}/v1/completions?run=first"
    found = httpx.post(where, json={}, headers={"Origin": "http://elsewhere"})
    assert found.status_code == 400 and "not from this page" in found.json()["error"]


@pytest.mark.slow
def test_the_server_ends_with_the_page(tmp_path, monkeypatch):
    make_run(tmp_path, "first")
    monkeypatch.setattr(model_server, "serve_command", stand_in)
    with served(page_app(tmp_path)) as url:
        process = ask(url, "first").json()["process"]
    assert gone(process)


@pytest.mark.slow
def test_a_run_answers(tmp_path):
    random_run(tmp_path / "tiny", byte_model(64))
    (tmp_path / "tiny" / "config.yaml").write_text("{}")
    with served(page_app(tmp_path)) as url:
        found = ask(url, "tiny", max_tokens=3, temperature=0)
        assert found.status_code == 200, found.text
        assert found.json()["usage"]["completion_tokens"] == 3
        with httpx.stream("POST", f"{url}/v1/completions?run=tiny", timeout=60, json={
            "prompt": "To be", "stream": True, "max_tokens": 4,
        }) as answer:  # fmt: skip
            assert answer.read().decode().endswith("data: [DONE]\n\n")
