"""Requests that the server refuses, each with one clear error."""

import urllib.error
import urllib.request

import openai
import pytest
from server_cases import CHAT, COMPLETION, HI, live, post

from jaxtrain.inference.server.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    SamplingBody,
)

# ---- what is refused -----------------------------------------------------------------------------


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
    (COMPLETION, {"prompt": "a", "logit_bias": {"1": 101}}, 400, None, "from -100 to 100"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"a": 1}}, 400, None, "token id: bias"),
    (COMPLETION, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(301)}}, 400, None,
     "at most 300"),
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
    (CHAT, {"tool_choice": "required"}, 400, None, "not in tools"),
    (CHAT, {"tool_choice": "maybe"}, 400, None, "auto, none, required or"),
    (CHAT, {"top_logprobs": 3}, 400, None, "logprobs=true"),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format", "json_schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
     400, None, "grammar json_schema: type must be"),
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


STRANGE = [
    None, True, -1, 0, 10**30, 1e300, "", "a", "\0", [], [None], [[]], [[1], "a"], [1, "a"], {},
    {"a": {"b": [1]}}, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    [{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": [1]}],
]  # fmt: skip
# The fields that bodies share are read by one base class: they are tried in chats alone.
FIELDS = [
    *((COMPLETION, x) for x in CompletionBody.model_fields if x not in SamplingBody.model_fields),
    *((CHAT, name) for name in ChatBody.model_fields),
    *(("/v1/embeddings", x) for x in EmbeddingBody.model_fields if x not in Body.model_fields),
]


@pytest.mark.parametrize(("path", "field"), FIELDS, ids=lambda x: x.removeprefix("/v1/"))
@pytest.mark.quick("chat/completions-messages", "embeddings-input")
def test_no_value_of_a_field_is_an_error_of_the_server(server, path, field):
    plain = {COMPLETION: {"prompt": "a"}, CHAT: {"messages": HI}}.get(path, {"input": "a"})
    short = {} if path == "/v1/embeddings" else {"max_tokens": 2}
    for value in STRANGE:
        if field == "stream" and value is True:
            continue  # no JSON comes back
        code, answer = post(server, path, plain | short | {field: value})
        assert code in (200, 400, 404), (value, answer)
