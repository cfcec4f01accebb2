"""Conversations as people store them -> messages, each with a role and a content."""

import json
from collections.abc import Iterator
from typing import Any

from jaxtrain.settings import UserError

Message = dict[str, Any]

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
BEGIN, END = "\ufdd0", "\ufdd1"  # no characters: free to mark what a template's blocks put out


def conversations(text: str, file: str, line: int) -> Iterator[str]:
    """Each conversation of a text as JSON of its messages; arguments as in `records`."""
    return (conversation(record, place) for record, place in records(text, file, line))


def records(text: str, file: str, line: int) -> Iterator[tuple[Any, str]]:
    """What a text holds, one object a line or a JSON array, each with the name of its place.

    file, line: where the text stands. Raises UserError for what is not JSON.
    """
    if text.lstrip().startswith("["):
        try:
            array = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{file} is not valid JSON: {error}") from error
        for number, record in enumerate(array, 1):
            yield record, f"{file} entry {number}"
        return
    for number, one in enumerate(text.split("\n"), line):
        if one.strip():
            try:
                record = json.loads(one)
            except json.JSONDecodeError as error:
                raise UserError(f"{file} line {number} is not valid JSON: {error}") from error
            yield record, f"{file} line {number}"


def conversation(record: Any, place: str) -> str:
    """JSON of the messages of {messages: [{role, content}]}, of ShareGPT's {conversations: [{from,
    value}]}, or of Alpaca's {instruction, input, output}.

    What the assistant says before anyone else is left out: it answers nothing, and most templates
    refuse it. Raises UserError, which names the place, for other shapes, and for a conversation
    without an answer.
    """
    turns = _turns(record) if isinstance(record, dict) else None
    if not isinstance(turns, list):
        has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise UserError(
            f"{place} is no conversation: expected messages, conversations, or instruction and "
            f"output; it has {has}"
        )
    messages = [message_of(turn, f"{place}, message {i}") for i, turn in enumerate(turns, 1)]
    asked = False
    kept = []
    for message in messages:
        asked |= message["role"] not in ("system", "assistant")
        if asked or message["role"] == "system":
            kept.append(message)
    if not any(message["role"] == "assistant" for message in kept):
        raise UserError(f"{place} has no answer of the assistant: there is nothing to learn")
    return checked(kept, place)


def checked(value: Any, place: str) -> str:
    """A value as JSON. Raises UserError for characters that no text or template may have."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise UserError(f"{place} has a character that is no Unicode") from error
    if BEGIN in text or END in text:
        raise UserError(f"{place} has U+FDD0 or U+FDD1, which are no characters")
    return text


def plain(text: str) -> str:
    """What is said in a conversation (JSON of its messages), for a tokenizer to train on."""
    return "\n\n".join(message["content"] for message in json.loads(text))


def _turns(record: dict[str, Any]) -> Any:
    if "instruction" in record and "output" in record:
        user = instruction_of(record)
        system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
        answer = {"role": "assistant", "content": record["output"]}
        return [*system, {"role": "user", "content": user}, answer]
    return record.get("messages", record.get("conversations"))


def instruction_of(record: dict[str, Any]) -> str:
    """What Alpaca's `instruction` and `input` ask together."""
    asked = [record["instruction"], *([record["input"]] if record.get("input") else [])]
    return "\n\n".join(map(str, asked))


def message_of(turn: Any, place: str) -> Message:
    """One message in any of the spellings. Raises UserError, which names the place."""
    if not isinstance(turn, dict):
        raise UserError(f"{place} is {type(turn).__name__}, not an object")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{place}: role {role!r} is not known; there are {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    if content is None and turn.get("tool_calls"):
        content = ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        content = "".join(part.get("text", "") for part in content)
    if not isinstance(content, str):
        raise UserError(f"{place}: the content is {type(content).__name__}, not a string")
    kept = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value")}
    return {"role": ROLES[role], "content": content} | kept
