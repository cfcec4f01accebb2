"""`jaxtrain serve` over HTTP, asked by the real openai client."""

import json
import re
import shlex
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from flax import nnx
from server_cases import HI, TEMPLATE, alone, live, post
from tiny import FEW_PARTS, build

from jaxtrain.data import make_chat
from jaxtrain.inference.engine import Engine
from jaxtrain.inference.server.tool_calls import read_format
from jaxtrain.inference.server.whole_texts import TextModel, prompt_logprobs


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")


@pytest.mark.slow
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


@pytest.mark.slow
def test_seeds_and_stops(client, saved):
    asked = {"model": "tiny", "prompt": "To be", "max_tokens": 12, "temperature": 1.0}
    texts = [client.completions.create(seed=seed, **asked).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    several = client.completions.create(seed=1, n=2, **asked).choices
    assert [one.text for one in several] == [texts[0], texts[2]]
    whole = alone(saved, [256, *b"To be"], 12)
    stop = whole[5:7]
    found = client.completions.create(stop=[stop], **asked | {"temperature": 0}).choices[0]
    assert found.text == whole[: whole.index(stop)] and found.finish_reason == "stop"


@pytest.mark.slow
def test_an_answer_has_the_format_that_was_asked_for(client):
    schema = {"enum": ["yes", "no"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    asked = {"model": "tiny", "messages": HI, "max_tokens": 40, "temperature": 1.0}
    for seed in range(3):
        found = client.chat.completions.create(response_format=form, seed=seed, **asked).choices[0]
        assert json.loads(found.message.content) in ("yes", "no")
        assert found.finish_reason == "stop"


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

    @jax.jit
    def run(params, ids):
        model = nnx.merge(saved.graphdef, params)
        return jax.nn.log_softmax(model.logits(model(ids[None]).states[0]))

    params = jax.device_put(saved.params)
    return lambda ids: np.asarray(run(params, jnp.asarray(ids, jnp.int32)))


def test_a_prompts_log_probabilities_are_those_of_its_own_tokens():
    few = {name.removeprefix("model__"): value for name, value in FEW_PARTS.items()}
    _, graphdef, _, params = build(depth=1, **few)
    ids = np.array([3, 17, 5, 60, 5, 9])

    @jax.jit
    def table(params):
        model = nnx.merge(graphdef, params)
        return jax.nn.log_softmax(model.logits(model(jnp.asarray(ids)[None]).states[0]))

    told, expected = prompt_logprobs(TextModel(graphdef, params), ids, 2), table(params)
    assert [one[0] for one in told] == ids[1:].tolist()
    wanted = np.asarray(expected)[np.arange(5), ids[1:]]
    np.testing.assert_allclose([one[1] for one in told], wanted, rtol=1e-4)
    assert [one[2][0][0] for one in told] == np.argmax(expected[:-1], axis=-1).tolist()


@pytest.mark.slow
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


@pytest.mark.slow
def test_chat_logprobs(client):
    asked = {"model": "tiny", "messages": HI, "max_tokens": 4, "temperature": 0}
    found = client.chat.completions.create(logprobs=True, top_logprobs=1, **asked).choices[0]
    content = found.logprobs.content
    assert len(content) == 4 and content[0].logprob == content[0].top_logprobs[0].logprob
    chunks = client.chat.completions.create(logprobs=True, stream=True, **asked)
    told = [x for one in chunks if (p := one.choices[0].logprobs) for x in p.content]
    assert [x.token for x in told] == [x.token for x in content]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.quick("mean")
def test_embeddings_are_the_pooled_final_states(saved, pooling):
    ids = [256, *b"To be"]
    run = jax.jit(lambda params, rows: nnx.merge(saved.graphdef, params)(rows).states[0])
    states = np.asarray(run(jax.device_put(saved.params), jnp.array([ids])), np.float32)
    expected = states.mean(0) if pooling == "mean" else states[-1]
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


def test_a_text_begins_with_bos_if_the_named_model_does(server, client, monkeypatch):
    base = server.service.served
    plain = base._replace(name="plain", prompting=base.prompting._replace(bos=False))
    monkeypatch.setitem(server.service.models, "plain", plain)
    for name, bos in (("tiny", [256]), ("plain", [])):
        asked = {"model": name, "prompt": "To be"}
        assert post(server, "/tokenize", asked)[1]["tokens"] == [*bos, *b"To be"]
        found = client.completions.create(max_tokens=1, **asked)
        assert found.usage.prompt_tokens == len(bos) + 5
        found = client.embeddings.create(model=name, input="To be")
        assert found.usage.prompt_tokens == len(bos) + 5


# ---- tools ---------------------------------------------------------------------------------------

TOOLS_TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}"
    "{{ m['role'][0] + ':' + m['content'] }}{% for call in m.tool_calls %}"
    """{{ '<tool>{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{ call.function.arguments | tojson + '}</tool>' }}{% endfor %};"
    "{{ eos_token if m['role'] == 'assistant' }}{% endfor %}{{ 'a:' if add_generation_prompt }}"
)
SAID = 'Sure. <tool>{"name": "add", "arguments": {"a": 1}}</tool>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class ScriptedEngine(Engine):
    """Says SAID, some characters a step, whatever the model says."""

    said = 0

    def steps_at_once(self, todo):
        return 1

    def add(self, request):
        endless = request.sampling._replace(ignore_stop=True)  # what SAID needs many steps for
        super().add(request._replace(sampling=endless))

    def step(self):
        out = []
        for update in super().step():
            if update.finish_reason == "cancelled":
                continue
            piece, self.said = SAID[self.said : self.said + 5], self.said + 5
            finish = "stop" if self.said >= len(SAID) else None
            out.append(update._replace(text=piece, finish_reason=finish))
            if finish:
                self.cancel(update.id)
                self.said = 0
        return out


def test_tool_calls_are_read_whole_and_from_a_stream(saved):
    chat = make_chat(TOOLS_TEMPLATE, {}, saved.tokenizer)
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "call_1", "content": "2"}]
    asked = {"model": "tiny", "messages": messages, "tools": [ADD], "max_tokens": 20}
    with live(saved, kind=ScriptedEngine, chat=chat, tools=read_format(chat)) as one:
        client = one.client()
        found = client.chat.completions.create(**asked).choices[0]
        chunks = list(client.chat.completions.create(stream=True, **asked))
        plain = client.chat.completions.create(tool_choice="none", **asked).choices[0]
    assert found.finish_reason == "tool_calls" and found.message.content == "Sure."
    (told,) = found.message.tool_calls
    assert (told.function.name, told.function.arguments) == ("add", '{"a": 1}')
    deltas = [one.choices[0].delta for one in chunks]
    assert "".join(one.content or "" for one in deltas).strip() == "Sure."
    (told,) = [call for one in deltas for call in one.tool_calls or []]
    assert (told.function.name, told.function.arguments) == ("add", '{"a": 1}')
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert plain.message.content == SAID and not plain.message.tool_calls


def function(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    schema |= {"additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.slow
def test_a_call_is_forced(saved):
    """By a model with random weights, which would say anything else."""
    chat = make_chat(TOOLS_TEMPLATE, {}, saved.tokenizer)
    tools = [function("add", a={"enum": [1, 22]}, b={"type": "boolean"}), function("now")]
    asked = {"model": "tiny", "messages": HI, "tools": tools, "seed": 3}
    named = {"type": "function", "function": {"name": "add"}}
    with live(saved, chat=chat, tools=read_format(chat)) as one:
        client = one.client()
        for choice in ("required", named):
            found = client.chat.completions.create(tool_choice=choice, **asked).choices[0]
            (told,) = found.message.tool_calls
            given = json.loads(told.function.arguments)
            assert found.finish_reason == "tool_calls" and not found.message.content
            assert told.function.name in (("add",) if choice == named else ("add", "now"))
            if told.function.name == "add":
                assert given["a"] in (1, 22) and isinstance(given["b"], bool)
        stream = client.chat.completions.create(tool_choice=named, stream=True, **asked)
        deltas = [chunk.choices[0].delta for chunk in stream]
        (told,) = [call for delta in deltas for call in delta.tool_calls or []]
        assert told.function.name == "add"
        other = {"type": "function", "function": {"name": "other"}}
        with pytest.raises(openai.BadRequestError, match="a tool that is not in tools"):
            client.chat.completions.create(tool_choice=other, **asked)


def test_biases_of_logits_force_and_forbid_tokens(client, saved):
    ask = dict(model="tiny", prompt="To be", max_tokens=6, temperature=0)
    plain = client.completions.create(**ask).choices[0].text
    assert plain == alone(saved, [256, *b"To be"], 6)
    forced = client.completions.create(logit_bias={"65": 100}, **ask).choices[0].text
    assert forced == "A" * 6
    first = client.completions.create(**ask | {"max_tokens": 1, "logprobs": 1})
    (top,) = first.choices[0].logprobs.top_logprobs[0]
    ids = saved.tokenizer.encode(top)
    banned = client.completions.create(logit_bias={str(i): -100 for i in ids}, **ask)
    assert banned.choices[0].text[:1] != plain[:1]
    assert client.completions.create(**ask).choices[0].text == plain
    with pytest.raises(openai.BadRequestError, match=r"token 257; the vocabulary is 0 \.\. 256"):
        client.completions.create(logit_bias={"257": 1}, **ask)


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
