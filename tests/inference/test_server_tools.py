"""Tool calls: the form that a chat template writes, and what is read of an answer."""

import json

import pytest
from chat_cases import PLAIN, TEMPLATES, make_tokenizer

from jaxtrain.data import make_chat
from jaxtrain.data.tokenizer.tokenizer import huggingface_tokenizer
from jaxtrain.inference.engine.grammars import Grammars
from jaxtrain.inference.server.tool_calls import (
    ASKED,
    ToolFormat,
    arguments_as_objects,
    call_grammar,
    held_back,
    read_calls,
    read_format,
)
from jaxtrain.settings import UserError

TOKENIZER = huggingface_tokenizer(make_tokenizer().encode())
HEAD = "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
TURN = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls %}CALL{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
WRITTEN = {
    "hermes": """{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}""",
    "mistral": """{{ '<think>[{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + ', "id": "' + call.id + '"}]' }}""",
    "llama": """{{ '{"name": "' + call.function.name + '", "parameters": ' }}
{{- call.function.arguments | tojson + '}' }}""",
    "whole": "{{ call | tojson }}",
    "python": "{{ '[' + call.function.name + '()]' }}",
}


def chat_of(form):
    return make_chat(HEAD + TURN.replace("CALL", WRITTEN[form]), PLAIN, TOKENIZER)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("hermes", ToolFormat("<tool_call>", "</tool_call>")),
        ("mistral", ToolFormat("<think>", "")),
        ("llama", ToolFormat("", "")),
        ("whole", ToolFormat("", "")),
    ],
)
def test_the_form_is_read_from_the_template(form, expected):
    assert read_format(chat_of(form))[:2] == expected[:2]


@pytest.mark.parametrize("name", ["qwen2", "gemma"])
def test_a_template_without_tools_is_named(name):
    chat = make_chat(TEMPLATES[name], PLAIN, TOKENIZER)
    with pytest.raises(UserError, match="chat template has no tools"):
        read_format(chat)


def test_a_form_that_is_not_json_is_named():
    with pytest.raises(UserError, match="does not write tool calls as JSON"):
        read_format(chat_of("python"))


ONE = '{"name": "add", "arguments": {"a": 1, "b": "x"}}'
HERMES, BARE = ToolFormat("<tool_call>", "</tool_call>"), ToolFormat("", "")


@pytest.mark.parametrize(
    ("text", "form", "content", "names"),
    [
        (f"<tool_call>\n{ONE}\n</tool_call>", HERMES, "", ["add"]),
        (f"So.\n<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}", HERMES, "So.", ["add", "add"]),
        ("no call", HERMES, "no call", []),
        ("<tool_call>{not json}", HERMES, "<tool_call>{not json}", []),
        ("<tool_call>[]", HERMES, "<tool_call>[]", []),
        (f" {ONE} ", BARE, "", ["add"]),
        (f"[{ONE}, {ONE}]", BARE, "", ["add", "add"]),
        (f"{ONE} and more", BARE, f"{ONE} and more", []),
        ('{"name": "add"}', BARE, '{"name": "add"}', []),
        ("[" * 100_000, BARE, "[" * 100_000, []),
    ],
)
def test_calls_are_read_from_an_answer(text, form, content, names):
    found, calls = read_calls(text, form)
    assert found == content and [call["function"]["name"] for call in calls] == names
    for call in calls:
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "x"}
    assert len({call["id"] for call in calls}) == len(calls)


ADD = {
    "type": "object", "properties": {"a": {"$ref": "#/$defs/N"}}, "required": ["a"],
    "additionalProperties": False, "$defs": {"N": {"enum": [1, 2]}},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
TOOLS += [{"type": "function", "function": {"name": "now"}}]


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama", "whole"])
def test_a_forced_call_is_written_as_the_template_writes_it(form):
    """The grammar takes the template's own text of a call, and no other."""
    chat = chat_of(form)
    found = read_format(chat)
    matches = Grammars(TOKENIZER, [chat.end]).matcher
    call = {"id": "abcdefghi", "type": "function"}
    render = lambda name, given: chat.render(
        [*ASKED, {"role": "assistant", "content": "", "tool_calls": [
            call | {"function": {"name": name, "arguments": given}}
        ]}], False, TOOLS,
    )  # fmt: skip
    asked = chat.render(ASKED, True, TOOLS)

    def taken(name, given):
        (pieces,) = chat.reader.encode([render(name, given).removeprefix(asked)])
        ids = pieces.ids.tolist()
        matcher = matches(call_grammar(found, TOOLS), "a")
        return all(matcher.consume_token(i) for i in ids[: ids.index(chat.end)])

    assert taken("add", {"a": 2}) and taken("now", {"b": [1, "x"]})
    assert not taken("add", {"a": 3}) and not taken("add", {}) and not taken("sub", {"a": 1})


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({}, r"tools\[0\] must have a function"),
        ({"function": {"name": "a", "parameters": 3}}, "schema"),
    ],
)
def test_a_tool_that_cannot_be_called_is_named(tool, message):
    with pytest.raises(UserError, match=message):
        call_grammar(HERMES, [tool])


def test_what_may_become_a_call_is_held_back():
    assert [held_back(text, "<tool>") for text in ("a", "a<to", "a<tool>b", "<b")] == [1, 1, 1, 2]


def test_arguments_are_objects_for_the_template():
    message = {"role": "assistant", "content": None}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    (found,) = arguments_as_objects([message | {"tool_calls": [call]}])
    assert found["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    for wrong in ("[1]", "{", 3):
        bad = call | {"function": {"name": "add", "arguments": wrong}}
        with pytest.raises(UserError, match=r"messages\[0\].tool_calls: a tool call must have"):
            arguments_as_objects([message | {"tool_calls": [bad]}])
    with pytest.raises(UserError, match="must be a list"):
        arguments_as_objects([message | {"tool_calls": 3}])
