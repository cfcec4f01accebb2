"""`jaxtrain serve` over HTTP, asked by the real openai client."""

import json

import jax
import numpy as np
import openai
import pytest
from server_cases import live
from tiny import byte_model, random_run

from jaxtrain.inference.generate import Sampling, stream_tokens
from jaxtrain.runs.saved import load_saved

T = 128
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
    import urllib.request

    read = lambda path: urllib.request.urlopen(server.url + path).read().decode()
    assert json.loads(read("/health")) == {"status": "ok"}
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
    page = read("/metrics")
    assert 'jaxtrain_http_requests_total{path="/v1/completions",status="200"}' in page
    assert "jaxtrain_engine_pages_total 4.0" in page
