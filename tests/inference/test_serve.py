"""The command `jaxtrain serve`: what it refuses, and the process from its start to its end."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest
from tiny import FEW_PARTS, assignments, byte_model, random_run

from jaxtrain.cli import main
from jaxtrain.inference.server import serve
from jaxtrain.inference.server.load import served_name

CONTEXT = 512


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    fields = byte_model(CONTEXT, "model.depth=1", *assignments(**FEW_PARTS))
    return random_run(tmp_path_factory.mktemp("runs") / "shakespeare", fields)


# ---- what it refuses -----------------------------------------------------------------------------


def error_of(capsys, *words):
    """The one line of a command that ends with 2."""
    assert main(["serve", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def test_a_port_in_use_is_one_line(run_dir, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = error_of(capsys, run_dir, "--port", port)
    assert line.startswith(f"127.0.0.1:{port}: another program listens there")


def test_an_address_that_is_not_of_this_machine_is_named(run_dir, capsys):
    assert error_of(capsys, run_dir, "--host", "192.0.2.1", "--port", 0).startswith("192.0.2.1:0: ")


def test_what_is_no_run_is_named(tmp_path, capsys):
    line = error_of(capsys, tmp_path, "--port", 0)
    assert line.startswith(f"{tmp_path} is not a run directory or a model folder")


def test_keys_are_read_and_never_shown(tmp_path, capsys, monkeypatch):
    file = tmp_path / "keys"
    line = error_of(capsys, tmp_path, "--api-key-file", file)
    assert line == f"--api-key-file: there is no file {file}"
    file.write_text("\n \n")
    assert error_of(capsys, tmp_path, "--api-key-file", file).endswith("holds no key")
    file.write_text("s3 cret\n")
    line = error_of(capsys, tmp_path, "--api-key-file", file)
    assert "s3" not in line and "printable ASCII" in line
    file.write_text("one\n\ntwo\n")
    assert serve.read_api_keys(file, None) == ["one", "two"]
    monkeypatch.setenv("A_KEY", "three")
    assert serve.read_api_keys(None, "A_KEY") == ["three"] and serve.read_api_keys(None, None) == []
    line = error_of(capsys, tmp_path, "--api-key-env", "NO_KEY")
    assert line == "--api-key-env NO_KEY: it holds no key"


def test_the_extra_is_named_when_it_is_missing(tmp_path, capsys, monkeypatch):
    there = lambda name: None if name == "uvicorn" else find_spec(name)
    monkeypatch.setattr(serve.importlib.util, "find_spec", there)
    assert error_of(capsys, tmp_path).startswith("jaxtrain serve needs uvicorn, of the extra serve")


def test_the_command_loads_jax_and_the_extra_when_it_has_an_address():
    code = "import sys, jaxtrain.inference.server.serve; "
    code += "sys.exit(bool({'jax', 'starlette', 'uvicorn', 'prometheus_client'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_else_imports_the_extra():
    package = Path(serve.__file__).parents[2]
    users = Path(serve.__file__).parent, package / "runs" / "page"  # loaded by their commands alone
    files = [x for x in package.rglob("*.py") if x.parent not in users]
    extra = re.compile(r"\b(import|from) (starlette|uvicorn|prometheus_client)\b")
    assert len(files) > 100 and not [x for x in files if extra.search(x.read_text())]


def test_the_name_is_that_of_the_run(tmp_path):
    assert served_name(tmp_path / "a") == served_name(tmp_path / "a" / "model") == "a"


# ---- the process ---------------------------------------------------------------------------------


@contextlib.contextmanager
def served(run_dir, *words, code=""):
    """(process, URL) of the command. code: Python that the process runs before."""
    start = f"import sys; from jaxtrain.cli import main\n{code}\nsys.exit(main())"
    command = [
        sys.executable,
        "-c",
        start,
        "serve",
        str(run_dir),
        "--port",
        "0",
        "--no-warm-up",
        *words,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"serving shakespeare at (http://127\.0\.0\.1:\d+)/v1\n", line)
            assert found, (line, process.communicate(timeout=60))
            yield process, found[1]
        finally:
            process.kill()


def status_of(url, body):
    """The status code of a completion."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


ASKED = {"model": "shakespeare", "prompt": "To be", "temperature": 0}
LONG = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
UNHURRIED = """
import time
from jaxtrain.inference.engine import Engine
step = Engine.step
Engine.step = lambda self: (time.sleep(0.1), step(self))[1]
"""


@pytest.mark.slow
def test_sigterm_lets_answers_end_and_refuses_new_ones(run_dir):
    begun = served(run_dir, code=UNHURRIED)
    with begun as (process, url), openai.OpenAI(base_url=f"{url}/v1", api_key="x") as ask:
        stream = ask.completions.create(stream=True, **ASKED, **LONG)
        text = next(stream).choices[0].text
        process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 30
        while (status := status_of(url, ASKED | {"max_tokens": 1})) == 200:
            assert time.monotonic() < end
        assert status == 503
        chunks = list(stream)
        text += "".join(one.choices[0].text for one in chunks)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert process.wait(30) == 0 and process.stderr.read() == ""


@pytest.mark.slow
def test_a_second_signal_ends_at_once(run_dir):
    begun = served(run_dir, code=UNHURRIED)
    with begun as (process, url), openai.OpenAI(base_url=f"{url}/v1", api_key="x") as ask:
        stream = ask.completions.create(stream=True, **ASKED, **LONG)
        next(stream)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 1, process.stderr.read()
        assert process.stderr.read().startswith("error: 1 requests were cut off")
        with pytest.raises(openai.APIError, match="the server ends"):
            list(stream)


BREAK = """
from jaxtrain.inference.engine import Engine
step = Engine.step
def broken(self):
    if self.steps > 5:
        raise RuntimeError("the device is gone")
    return step(self)
Engine.step = broken
"""


@pytest.mark.slow
def test_an_engine_that_fails_ends_the_process_with_a_line(run_dir):
    with served(run_dir, code=BREAK) as (process, url):
        assert status_of(url, ASKED | {"max_tokens": 100, "ignore_eos": True}) == 500
        assert process.wait(30) == 1, process.stderr.read()
        lines = process.stderr.read().splitlines()
        assert lines[-1] == "error: the engine failed: RuntimeError: the device is gone"
