"""Tool calls: their format in a chat template, and how they are parsed from an answer.

The format is found by rendering one known call, so that no list of models is needed.
"""

import itertools
import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtrain.data import Chat
from jaxtrain.inference.engine import Grammar
from jaxtrain.inference.server.bodies import function_name
from jaxtrain.settings import UserError

NAME, KEY, VALUE = "probe_function", "probe_key", "probe_value"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": ""}},
            "required": [KEY],
        },
    },
}
CALL = {
    "id": "abcdefghi",  # Mistral's templates want nine letters
    "type": "function",
    "function": {"name": NAME, "arguments": {KEY: VALUE}},
}
# JSON as Jinja's tojson writes it: a forced call looks like the calls in training data.
AS_TEMPLATES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ASKED = [{"role": "user", "content": "a"}]
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


class ToolFormat(NamedTuple):
    """Format of a call: `begin`, JSON of a name and its arguments (or a list of such), `end`.

    `begin` and `end` are without special tokens, as in an answer's text. They may be empty: then a
    call is an answer that is JSON as a whole. before, after: all that the template writes for a
    call of NAME, before and after the arguments, as texts and ids of special tokens.
    """

    begin: str
    end: str
    before: tuple[str | int, ...] = ()
    after: tuple[str | int, ...] = ()


def read_format(chat: Chat) -> ToolFormat:
    """Tool call format of a template. Raises UserError if it has none, or another one."""
    try:
        bare, offered = chat.render(ASKED, True), chat.render(ASKED, True, [TOOL])
        called = chat.render(CALLED, False, [TOOL])
    except UserError as error:
        raise UserError(f"this model's chat template has no tools: {error}") from None
    if bare == offered:
        raise UserError("this model's chat template has no tools; leave tools out")
    begun = _common(offered, called)
    for i in range(begun, len(called)):
        found = decode_json(called, i) if called[i] in "{[" else None
        if found and any(name == NAME for name, _ in calls_in(found[0])):
            ends = _visible(chat, called[begun:i]), _visible(chat, called[found[1] :])
            return ToolFormat(*ends, *_around_arguments(chat, called, begun, found[1]))
    raise UserError(
        "this model's chat template does not write tool calls as JSON with name and arguments, the "
        "only supported format; leave tools out"
    )


def call_grammar(form: ToolFormat, tools: Sequence[dict[str, Any]]) -> Grammar:
    """Grammar of an answer that is one call of one of these tools, in the template's format.

    Raises UserError for a tool without a name.
    """
    rules = ["start: " + " | ".join(f"call{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        name = function_name(tool)
        if name is None:
            raise UserError(f"tools[{i}] must have a function with a name")
        schema = tool["function"].get("parameters") or {}
        if not isinstance(schema, dict):
            raise UserError(f"tools[{i}].function.parameters must be a JSON schema")
        before, after = (_in_lark(part, name) for part in (form.before, form.after))
        schema = {"type": "object"} | schema | {"x-guidance": AS_TEMPLATES}
        rules += [f"call{i}: {before} arguments{i} {after}"]
        rules += [f"arguments{i}: %json {json.dumps(schema)}"]
    return Grammar("lark", "\n".join(rules) + "\n")


def _in_lark(parts: Sequence[str | int], name: str) -> str:
    """Lark rule body of `before` or `after`, with another tool's name in place of NAME."""
    own = json.dumps(name)[1:-1]
    return " ".join(
        f"<[{part}]>" if isinstance(part, int) else json.dumps(part.replace(NAME, own))
        for part in parts
    )


def read_calls(text: str, form: ToolFormat) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into its text and its tool calls, in the API's format.

    Text that begins like a call but is none stays text.
    """
    if not form.begin:
        found = decode_json(text.strip(), 0)
        calls = calls_in(found[0]) if found and found[1] == len(text.strip()) else []
        return ("", as_api(calls)) if calls else (text, [])
    before, *parts = text.split(form.begin)
    calls: list[tuple[str, Any]] = []
    for part in parts:
        found = decode_json(part, len(part) - len(part.lstrip()))
        several = calls_in(found[0]) if found else []
        if not several:
            return text, []
        calls += several
    return before.strip() if calls else text, as_api(calls)


def as_api(calls: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False)},
        }
        for name, given in calls
    ]


def calls_in(value: object) -> list[tuple[str, Any]]:
    """(name, arguments) of each call in a JSON value or list; [] if it is no call."""
    if isinstance(value, list):
        several = [calls_in(one) for one in value]
        return [one for calls in several for one in calls] if all(several) else []
    if not isinstance(value, dict):
        return []
    value = value.get("function", value)
    if not isinstance(value, dict):
        return []
    name, given = value.get("name"), value.get("arguments", value.get("parameters"))
    return [(name, given)] if isinstance(name, str) and isinstance(given, dict) else []


def decode_json(text: str, start: int) -> tuple[Any, int] | None:
    """JSON value that begins at `start`, and its end; None if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def held_back(text: str, begin: str) -> int:
    """Number of characters that may be sent: all but those that may become `begin`."""
    if begin in text:
        return text.index(begin)
    size = next((n for n in range(len(begin) - 1, 0, -1) if text.endswith(begin[:n])), 0)
    return len(text) - size


def arguments_as_objects(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls have arguments as objects, as templates need them, not as JSON text.

    Raises UserError for arguments that are no JSON object.
    """

    def plain(call: object, where: str) -> object:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            raise UserError(f"{where}: a tool call must have a function with name and arguments")
        given = function.get("arguments")
        if isinstance(given, str):
            found = decode_json(given.strip() or "{}", 0)
            given = found[0] if found else None
        if not isinstance(given, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f"{where}: a tool call must have a name, and a JSON object of arguments"
            )
        return call | {"function": function | {"arguments": given}}

    out = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                raise UserError(f"messages[{i}].tool_calls must be a list")
            where = f"messages[{i}].tool_calls"
            message = message | {"tool_calls": [plain(call, where) for call in calls]}
        out.append(message)
    return out


def _common(a: str, b: str) -> int:
    """The length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _around_arguments(
    chat: Chat, called: str, begun: int, ended: int
) -> tuple[tuple[str | int, ...], tuple[str | int, ...]]:
    """`before` and `after` of a ToolFormat. called: a rendered call, whose answer begins at `begun`
    and whose JSON ends at `ended`."""
    places = (i for i in range(begun, ended) if called[i] == "{")
    found = ((i, decode_json(called, i)) for i in places)
    at, end = next((i, x[1]) for i, x in found if x and x[0] == {KEY: VALUE})
    after = _pieces(chat, called[end:])
    # A special token ends the answer; the grammar's text ends before it.
    close = next((i for i, part in enumerate(after) if part == chat.end), len(after))
    return _pieces(chat, called[begun:at]), after[:close]


def _pieces(chat: Chat, text: str) -> tuple[str | int, ...]:
    """Split part of a rendered conversation into texts and ids of special tokens, which answers do
    not show."""
    (read,) = chat.reader.encode([text])
    out: list[str | int] = []
    for special, run in itertools.groupby(
        read.ids.tolist(), lambda i: not chat.tokenizer.pieces[i]
    ):
        ids = list(run)
        out += ids if special else [chat.tokenizer.decode(ids)]
    return tuple(out)


def _visible(chat: Chat, text: str) -> str:
    """Part of a rendered conversation as an answer's text shows it."""
    (pieces,) = chat.reader.encode([text])
    return chat.tokenizer.decode(pieces.ids).strip()
