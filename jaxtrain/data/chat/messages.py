"""Conversations in common file formats -> messages, each with a role and a content."""

from collections.abc import Iterator
from typing import Any

from jaxtrain.data.records import Conversation, Message, Record, Tools
from jaxtrain.settings import UserError, parse_json

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
OWN = ("role", "from", "content", "value", "weight", "train")  # keys of a message, read here
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
BEGIN, END = "\ufdd0", "\ufdd1"  # noncharacters: they mark the output of generation blocks


def conversations(text: str, file: str, line: int) -> Iterator[tuple[Conversation, str]]:
    """Yield each conversation of a JSON text with its location; arguments as in `records`."""
    return ((conversation(record, where), where) for record, where in records(text, file, line))


def records(text: str, file: str, line: int) -> Iterator[tuple[Any, str]]:
    """Yield the JSON values of a text, one per line or in an array, each with its location.

    file, line: location of the text. Raises UserError for invalid JSON.
    """
    if text.lstrip().startswith("["):
        for number, record in enumerate(parse_json(text, file), 1):
            yield record, f"{file} entry {number}"
        return
    for number, one in enumerate(text.split("\n"), line):
        if one.strip():
            yield parse_json(one, f"{file} line {number}"), f"{file} line {number}"


def conversation(record: object, where: str) -> Conversation:
    """Convert a JSON value to a conversation.

    Formats: {messages: [{role, content}]}, ShareGPT's {conversations: [{from, value}]}, Alpaca's
    {instruction, input, output, history}, Dolly's {instruction, context, response}, and TRL's
    {prompt, completion}, each a string or messages; there, only the completion is learned.

    Assistant messages before the first user or tool message are left out: they answer nothing, and
    most templates refuse them. Raises UserError, which names the location, for other formats and
    for a conversation without an answer.
    """
    turns = _turns(record, where) if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(turns, list):
        has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise UserError(
            f"{where} is not a conversation: expected messages, conversations, instruction and "
            f"output (or response), or prompt and completion; it has {has}"
        )
    messages = [message_of(turn, f"{where}, message {i}") for i, turn in enumerate(turns, 1)]
    asked = False
    kept = []
    for message in with_system(messages, record, where):
        asked |= message["role"] not in ("system", "assistant")
        if asked or message["role"] == "system":
            kept.append(message)
    if not any(message["role"] == "assistant" for message in kept):
        raise UserError(f"{where} has no answer of the assistant: there is nothing to learn")
    return check_characters(Conversation(kept, tools_of(record, where)), where)


def check_characters[R: Record](record: R, where: str) -> R:
    """Return the record. Raises UserError for lone surrogates, and for BEGIN and END."""
    text = record.canonical_json()
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise UserError(f"{where} has a character that is not Unicode") from error
    if BEGIN in text or END in text:
        raise UserError(f"{where} has U+FDD0 or U+FDD1, which are not characters")
    return record


# ---- other fields of a record -----------------------------------------------------------------


def with_system(messages: list[Message], record: dict[str, Any], where: str) -> list[Message]:
    """Prepend the record's `system` to its messages. Raises UserError if they have another one."""
    system = string_of(record, "system", where, optional=True)
    said = [message["content"] for message in messages if message["role"] == "system"]
    if not system or said == [system]:
        return messages
    if said:
        raise UserError(
            f"{where} has a field system and a different system message; keep one of them"
        )
    return [{"role": "system", "content": system}, *messages]


def tools_of(record: dict[str, Any], where: str) -> Tools:
    """Return the record's `tools`, which may be a JSON string."""
    given = tools = record.get("tools")
    if isinstance(given, str) and given.strip():
        tools = parse_json(given, f"{where}: tools is a string that")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: tools must be a list of objects, or JSON of one")
    return tools


def refuse_media(record: dict[str, Any], where: str) -> None:
    """Raises UserError for images, audio and video: text about them would be learned."""
    for key in MEDIA:
        if record.get(key):
            raise UserError(f"{where} has {key}: models here read text only, leave the record out")


def string_of(record: dict[str, Any], key: str, where: str, *, optional: bool = False) -> str:
    """Return a field that must be a string; an optional one may be null or missing."""
    value = record.get(key)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: {key} is {kind_of(value)}, not a string")
    return value


def kind_of(value: object) -> str:
    """The type of a JSON value in words."""
    return "null" if value is None else type(value).__name__


# ---- messages --------------------------------------------------------------------------------


def _turns(record: dict[str, Any], where: str) -> Any:
    refuse_media(record, where)
    answer = next((key for key in ("output", "response") if key in record), None)
    if "instruction" in record and answer:
        said = [instruction_of(record, where), string_of(record, answer, where)]
        said = _history(record, where) + said
        return [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(said)]
    if {"prompt", "completion"} <= record.keys() and not {"messages", "conversations"} & {*record}:
        return _prompted(record, where)
    return record.get("messages", record.get("conversations"))


def _prompted(record: dict[str, Any], where: str) -> list[Message]:
    """TRL's `prompt` and `completion`."""
    if isinstance(record.get("label"), bool):
        raise UserError(
            f"{where} has prompt, completion and label: labeled answers are for "
            "data.train.name=preference and objective.name=kto"
        )
    prompt = messages_of(record["prompt"], "user", f"{where}, prompt")
    for message in prompt:
        if message["role"] == "assistant":
            message["train"] = False
    return prompt + messages_of(record["completion"], "assistant", f"{where}, completion")


def instruction_of(record: dict[str, Any], where: str) -> str:
    """The field `instruction`, followed by Alpaca's `input` or Dolly's `context`."""
    more = [string_of(record, key, where, optional=True) for key in ("input", "context")]
    return "\n\n".join([string_of(record, "instruction", where), *filter(None, more)])


def _history(record: dict[str, Any], where: str) -> list[str]:
    """Alpaca's `history`, [[user, answer], ...], as one list of texts."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and [type(said) for said in pair] == [str, str] for pair in history
    ):
        raise UserError(f"{where}: history must be a list of pairs of strings, [user, answer]")
    return [said for pair in history for said in pair]


def messages_of(given: object, role: str, where: str) -> list[Message]:
    """Convert a string (of that role), a message or a list to messages; an answer must be last."""
    turns = [{"role": role, "content": given}] if isinstance(given, str) else given
    turns = [turns] if isinstance(turns, dict) else turns
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where} is {kind_of(given)}, not a string or a list of messages")
    messages = [message_of(turn, f"{where}, message {i}") for i, turn in enumerate(turns, 1)]
    if role == "assistant" and messages[-1]["role"] != "assistant":
        raise UserError(f"{where} does not end with an answer of the assistant")
    return messages


def message_of(turn: object, where: str) -> Message:
    """Normalize a message in any of the formats. An answer that is not learned gets `train: False`.
    Raises UserError, which names the location."""
    if not isinstance(turn, dict):
        raise UserError(f"{where} is {type(turn).__name__}, not an object")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{where}: role {role!r} is not known; there are {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    if content is None and turn.get("tool_calls"):
        content = ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        content = "".join(_text_of(part, where) for part in content)
    if not isinstance(content, str):
        raise UserError(f"{where}: the content is {kind_of(content)}, not a string")
    refuse_media(turn, where)
    kept = {k: v for k, v in turn.items() if k not in OWN}
    message = {"role": ROLES[role], "content": content} | kept
    if not _is_learned(turn, where) and message["role"] == "assistant":
        message["train"] = False
    return message


def _text_of(part: dict[str, Any], where: str) -> str:
    """Return the text of a content part. Raises UserError if the part is not text."""
    if (kind := part.get("type", "text")) not in ("text", "input_text", "output_text"):
        raise UserError(
            f"{where}: the content has a part of type {kind!r}: models here read text only, leave "
            "the record out"
        )
    return string_of(part, "text", f"{where}, a part of the content")


def _is_learned(turn: dict[str, Any], where: str) -> bool:
    """Whether a message is learned, by OpenAI's `weight` and axolotl's `train`; default: yes."""
    for key, right in (("weight", "0 or 1"), ("train", "true or false")):
        if turn.get(key) not in (None, True, False):
            raise UserError(f"{where}: {key} is {turn[key]!r}; it must be {right}")
    return all(turn.get(key) in (None, True) for key in ("weight", "train"))
