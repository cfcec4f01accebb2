"""`jaxtrain serve` over HTTP, asked by the real openai client."""

import json
import re
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from flax import nnx
from server_cases import LIMITS, live, until
from tiny import byte_model, random_run

from jaxtrain.inference.engine import Engine
from jaxtrain.inference.generate import Sampling, stream_tokens
from jaxtrain.runs.saved import load_saved

T = 128
HI = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ';' }}"
    "{{ eos_token if m['role'] == 'assistant' }}{% endfor %}{{ 'a:' if add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random model of bytes that has a chat template."""
    folder = tmp_path_factory.mktemp("run")
    template = folder / "model" / "huggingface" / "chat_template.jinja"
    template.parent.mkdir(parents=True)
    template.write_text(TEMPLATE)
    return load_saved(random_run(folder, byte_model(T)))


@pytest.fixture(scope="module")
def server(saved):
    with live(saved) as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def alone(saved, prompt, tokens):
    """The greedy continuation of token ids, decoded by itself."""
    params = jax.device_put(saved.params)
    ids = stream_tokens(
        saved.graphdef, params, np.array(prompt), Sampling(tokens, 0.0), saved.prompting.stops
    )
    return saved.tokenizer.decode(list(ids))


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")


def test_completions_of_text_lists_and_ids_are_those_of_the_lone_model(client, saved):
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    ids = [256, *b"To be"]
    expected = alone(saved, ids, 8)
    for prompt in ("To be", ["To be"], ids, [ids]):
        found = client.completions.create(prompt=prompt, **asked)
        assert [one.text for one in found.choices] == [expected]
        assert found.usage.prompt_tokens == 6 and found.usage.total_tokens <= 14
    two = client.completions.create(prompt=["To be", "or"], n=2, **asked)
    other = alone(saved, [256, *b"or"], 8)
    assert [one.text for one in two.choices] == [expected, expected, other, other]
    assert [one.index for one in two.choices] == [0, 1, 2, 3]


def test_a_stream_is_the_whole_answer(client, saved):
    asked = {"model": "tiny", "prompt": "To be", "max_tokens": 8, "temperature": 0}
    options = {"include_usage": True}
    chunks = list(client.completions.create(stream=True, stream_options=options, **asked))
    text = "".join(one.choices[0].text for one in chunks if one.choices)
    assert text == alone(saved, [256, *b"To be"], 8)
    assert chunks[-1].usage.prompt_tokens == 6 and not chunks[-1].choices
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")


def test_chat_and_its_stream(client, saved):
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    expected = alone(saved, [256, *b"u:Hi;a:"], 8)
    found = client.chat.completions.create(**asked)
    assert found.choices[0].message.content == expected
    assert found.usage.prompt_tokens == 8
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant"


def test_metrics_and_health(server, client):
    read = lambda path: urllib.request.urlopen(server.url + path).read().decode()
    assert json.loads(read("/health")) == {"status": "ok"}
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
    page = read("/metrics")
    assert 'jaxtrain_http_requests_total{path="/v1/completions",status="200"}' in page
    assert "jaxtrain_engine_pages_total 32.0" in page


# ---- logprobs, echo, embeddings ------------------------------------------------------------------


@pytest.fixture(scope="module")
def logprobs_of(saved):
    """token ids -> log-probabilities [T, V] of the token after each."""

    def run(ids):
        model = nnx.merge(saved.graphdef, jax.device_put(saved.params))
        states = model(jnp.asarray(ids, jnp.int32)[None]).states[0]
        return np.asarray(jax.nn.log_softmax(model.logits(states)))

    return run


def test_echoed_prompts_have_the_models_logprobs(client, saved, logprobs_of):
    """What lm-evaluation-harness asks for."""
    ids = [256, *b"To be, or"]
    asked = {"model": "tiny", "echo": True, "logprobs": 2, "temperature": 0}
    found = client.completions.create(prompt=ids, max_tokens=0, **asked).choices[0]
    assert found.text == "To be, or" and found.finish_reason == "length"
    told, table = found.logprobs, logprobs_of(ids)
    assert told.tokens[:3] == ["<|bos|>", "T", "o"] and told.text_offset[1] == len("<|bos|>")
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    expected = [table[i, token] for i, token in enumerate(ids[1:])]
    np.testing.assert_allclose(told.token_logprobs[1:], expected, rtol=1e-4)
    assert max(told.top_logprobs[4].values()) == pytest.approx(table[3].max(), rel=1e-4)
    more = client.completions.create(prompt="To be, or", max_tokens=3, **asked).choices[0]
    assert more.text == "To be, or" + alone(saved, ids, 3)
    assert more.logprobs.tokens[: len(ids)] == told.tokens
    assert len(more.logprobs.token_logprobs) == len(more.logprobs.tokens) > len(ids)


def test_chat_logprobs(client):
    asked = {"model": "tiny", "messages": HI, "max_tokens": 4, "temperature": 0}
    found = client.chat.completions.create(logprobs=True, top_logprobs=1, **asked).choices[0]
    content = found.logprobs.content
    assert len(content) == 4 and content[0].logprob == content[0].top_logprobs[0].logprob
    chunks = client.chat.completions.create(logprobs=True, stream=True, **asked)
    told = [x for one in chunks if (p := one.choices[0].logprobs) for x in p.content]
    assert [x.token for x in told] == [x.token for x in content]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_pooled_final_states(saved, pooling):
    ids = [256, *b"To be"]
    states = nnx.merge(saved.graphdef, jax.device_put(saved.params))(jnp.array([ids])).states[0]
    expected = np.asarray(states.mean(0) if pooling == "mean" else states[-1], np.float32)
    expected = expected / np.linalg.norm(expected)
    with live(saved, pooling=pooling) as one:
        found = one.client().embeddings.create(model="tiny", input=["To be", "or"])
        plain = one.client().embeddings.create(model="tiny", input=ids, encoding_format="float")
    np.testing.assert_allclose(found.data[0].embedding, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(plain.data[0].embedding, expected, rtol=1e-4, atol=1e-6)
    assert [one.index for one in found.data] == [0, 1] and found.usage.prompt_tokens == 9


@pytest.mark.slow
def test_two_devices_answer_as_one(client, saved):
    asked = {"model": "tiny", "prompt": "To be", "echo": True, "logprobs": 1, "temperature": 0}
    with live(saved, tensor=2) as two:
        other = two.client().completions.create(max_tokens=8, **asked).choices[0]
        vector = two.client().embeddings.create(model="tiny", input="To be").data[0].embedding
    found = client.completions.create(max_tokens=8, **asked).choices[0]
    assert other.text == found.text
    given = (one.logprobs.token_logprobs[1:] for one in (other, found))
    np.testing.assert_allclose(*given, rtol=1e-3)
    lone = client.embeddings.create(model="tiny", input="To be").data[0].embedding
    np.testing.assert_allclose(vector, lone, rtol=1e-3, atol=1e-5)


def test_the_tokenizer_is_told(server):
    text = "Hi<|bos|>"
    assert post(server, "/tokenize", {"prompt": text})[1]["tokens"] == [256, *b"Hi", 256]
    plain = {"prompt": "Hi", "add_special_tokens": False}
    assert post(server, "/tokenize", plain)[1]["tokens"] == [*b"Hi"]
    assert post(server, "/detokenize", {"tokens": [256, *b"Hi"]})[1] == {"prompt": "Hi"}
    with urllib.request.urlopen(f"{server.url}/tokenizer_info") as answer:
        told = json.loads(answer.read())
    assert told["eos_token"] == "<|bos|>" and told["chat_template"] == TEMPLATE


# ---- what is refused -----------------------------------------------------------------------------


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


COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
REFUSED = [
    (COMPLETION, {"prompt": "a", "model": "gpt-4"}, 404, "model", "there is no model 'gpt-4'"),
    (COMPLETION, {}, 400, "prompt", "prompt is missing"),
    (COMPLETION, {"prompt": "a", "max_token": 3}, 400, "max_token", "no such field"),
    (COMPLETION, {"prompt": "a", "temperature": -1}, 400, "temperature", "greater than"),
    (COMPLETION, {"prompt": "a", "temperature": True}, 400, "temperature", "number"),
    (COMPLETION, {"prompt": "a", "top_p": 0}, 400, "top_p", "greater than 0"),
    (COMPLETION, {"prompt": "a", "max_tokens": 65}, 400, "max_tokens", "allows 64"),
    (COMPLETION, {"prompt": "a" * 128}, 400, "prompt", "context is 128 tokens"),
    (COMPLETION, {"prompt": "a" * 100, "max_tokens": 40}, 400, "prompt", "context is 128 tokens"),
    (COMPLETION, {"prompt": [257]}, 400, "prompt", "not in 0..256"),
    (COMPLETION, {"prompt": []}, 400, "prompt", "empty"),
    (COMPLETION, {"prompt": [[]]}, 400, "prompt", "without tokens"),
    (COMPLETION, {"prompt": {"a": 1}}, 400, "prompt", "string"),
    (COMPLETION, {"prompt": "a", "n": 100}, 400, None, "asks for 100 answers"),
    (COMPLETION, {"prompt": "a", "stop": ["a"] * 17}, 400, None, "at most 16"),
    (COMPLETION, {"prompt": "a", "stop": ""}, 400, None, "none of them empty"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"1": 2}}, 400, None, "logit_bias"),
    (COMPLETION, {"prompt": "a", "best_of": 3}, 400, None, "best_of"),
    (COMPLETION, {"prompt": "a", "suffix": "b"}, 400, None, "suffix"),
    (COMPLETION, {"prompt": "a", "stream_options": {}}, 400, None, "stream=true"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, 400, None, "wizard"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, None, "content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None,
     "image_url"),
    (CHAT, {"messages": "HI", "tools": []}, 400, "messages", "array"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools", "no tools"),
    (CHAT, {"tool_choice": "required"}, 400, None, "tool_choice"),
    (CHAT, {"top_logprobs": 3}, 400, None, "logprobs=true"),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format", "json_schema"),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format", "grammar"),
    ("/v1/embeddings", {"input": "a", "dimensions": 3}, 400, "dimensions", "dimensions"),
    ("/v1/embeddings", {"input": "a" * 200}, 400, "input", "context is 128"),
    ("/v1/audio", {}, 404, None, "not found"),
    ("/v1/models", {}, 405, None, "method not allowed"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), REFUSED)
def test_a_bad_request_is_one_clear_error(server, path, body, status, param, words):
    given = {"messages": HI} if path == CHAT else {}
    code, answer = post(server, path, given | body)
    assert (code, answer["error"]["param"]) == (status, param), answer
    assert words in answer["error"]["message"] and "\n" not in answer["error"]["message"]
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert answer["error"]["type"] == kind


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 400), (b"{", 400), (b"[1]", 400), (b"\xff\xfe", 400), (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400), (b"[" * 50_000, 400),
        (b'{"prompt": "' + b"a" * 100_000 + b'"}', 413),
    ],
)  # fmt: skip
def test_garbage_is_refused(server, data, status):
    code, answer = post(server, COMPLETION, data, raw=True)
    assert code == status and answer["error"]["type"] == "invalid_request_error", answer


def test_a_body_that_is_not_called_json_is_refused(server):
    """As a page of another site could send it without being asked."""
    code, _ = post(server, COMPLETION, {"prompt": "a"}, {"Content-Type": "text/plain"})
    assert code == 415


def test_a_model_without_a_template_answers_no_chats(saved):
    with live(saved, chat=None, no_chat="it has no chat template") as one:
        code, answer = post(one, CHAT, {"messages": HI})
    assert code == 400 and answer["error"]["code"] == "no_chat_template"


def test_a_key_is_asked_for(saved):
    with live(saved, keys=("first", "s3cret")) as one:
        for key in ("none", "s3cre", "s3cretx"):
            with pytest.raises(openai.AuthenticationError) as found:
                one.client(key).models.list()
            assert key not in str(found.value)
        assert post(one, COMPLETION, {"prompt": "a"})[0] == 401
        for key in ("first", "s3cret"):
            assert [model.id for model in one.client(key).models.list()] == ["tiny"]
        assert urllib.request.urlopen(f"{one.url}/health").status == 200


# ---- the manual ----------------------------------------------------------------------------------


PAGE = Path(__file__).parents[2] / "docs" / "howto" / "serve.md"
CURL = re.findall(r"^curl .*$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def documented(saved):
    with live(saved, name="sft_small") as one:
        yield one


@pytest.mark.parametrize("line", CURL)
def test_the_pages_curl_lines_are_answered(documented, line):
    words = shlex.split(line.replace("http://127.0.0.1:8000", documented.url))
    answer = subprocess.run([*words, "--silent", "--fail"], check=True, capture_output=True).stdout
    if b'"stream": true' in line.encode():
        assert answer.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(answer)["object"] in ("chat.completion", "list")


def test_the_pages_python_runs(documented, capsys):
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names = {}
    exec(code.replace("http://127.0.0.1:8000", documented.url), names)
    names["client"].close()
    assert capsys.readouterr().out


def test_the_pages_table_has_all_paths(documented):
    shown = re.findall(r"^\| (`/.*?) \|", PAGE.read_text(), re.MULTILINE)
    shown = {path for cell in shown for path in re.findall(r"`(.*?)`", cell)}
    paths = documented.server.config.app.paths - {"/v1/models/{name:path}"}
    assert shown == paths


# ---- load, and clients that leave ----------------------------------------------------------------


def test_many_clients_get_their_own_answers(server, saved):
    texts = [f"{i}: the" for i in range(12)]
    ask = lambda text: server.client().completions.create(
        model="tiny", prompt=text, max_tokens=12, temperature=0
    )
    with ThreadPoolExecutor(12) as pool:
        found = [one.choices[0].text for one in pool.map(ask, texts)]
    assert found == [alone(saved, [256, *text.encode()], 12) for text in texts]


class SlowEngine(Engine):
    """Takes its time for each step."""

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


@pytest.mark.parametrize("stream", [False, True])
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
def test_a_request_has_its_time(saved, stream):
    with live(saved, LIMITS._replace(timeout=0.3), kind=SlowEngine) as one:
        if stream:
            with pytest.raises(openai.APIError, match="within 0.3 seconds"):
                list(one.client().completions.create(stream=True, **asked(LONG)))
        else:
            code, answer = post(one, COMPLETION, LONG)
            assert code == 408 and answer["error"]["code"] == "timeout"
        until(lambda: not one.service.thread.stats.running)


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
