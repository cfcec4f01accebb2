"""Preferences as people store them -> two conversations with one beginning, and a note.

A pair is a prompt, the answer that was chosen and the one that was rejected; the prompt may be
ShareGPT's `conversations` up to there, or Alpaca's `instruction` and `input`. A judged answer (KTO,
arXiv:2402.01306) is a prompt, a completion and whether it was wanted; the second conversation is
then the same prompt with the completion of the next line, which KTO compares with.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.chat.chat import Chat, Document, OnError, raise_error
from jaxtrain.data.chat.messages import (
    Message,
    Tools,
    checked,
    instruction_of,
    messages_of,
    records,
    refuse_media,
    tools_of,
    with_system,
)
from jaxtrain.data.chat.template import TemplateRefused
from jaxtrain.settings import UserError

PAIR, WANTED, UNWANTED = 0, 1, 2  # what the note says
TEXTS = 3  # documents that a preference is stored as: two texts, and as many tokens as the note is


KINDS = {
    False: "a pair (prompt, chosen and rejected)",
    True: "a judged answer (prompt, completion and label)",
}


class RecordKind(NamedTuple):
    """Whether a preference is a judged answer or a pair, and where it stands."""

    judged: bool
    place: str


class KTOExample(NamedTuple):
    """A prompt and an answer, what was said of it, and where it stands."""

    prompt: list[Message]
    said: list[Message]
    note: int
    tools: Tools
    place: str


def preferences(text: str, file: str, line: int) -> Iterator[tuple[str, str]]:
    """Each preference of a text as JSON of {texts: [messages, messages], asked, note, tools}, with
    its place. They are of one kind.

    asked: messages that both have, the prompt. file, line: where the text stands. Raises UserError
    for what is no preference.
    """
    judged: list[KTOExample] = []
    first: RecordKind | None = None
    for record, place in records(text, file, line):
        alone = isinstance(record, dict) and "label" in record and not {*KEYS} & record.keys()
        first = same_kind(first, RecordKind(alone, place))
        if alone:
            judged.append(_judged(record, place))
        else:
            texts, asked = _pair(record, place)
            yield _json(texts, asked, PAIR, tools_of(record, place), place), place
    if len(judged) == 1:
        raise UserError(
            f"{judged[0].place}: a judged answer is compared with the next one of the file, and "
            "there is no other"
        )
    for one, other in zip(judged, judged[1:] + judged[:1]):
        texts = [one.prompt + one.said, one.prompt + other.said]
        yield _json(texts, len(one.prompt), one.note, one.tools, one.place), one.place


def same_kind(first: RecordKind | None, this: RecordKind) -> RecordKind:
    """The first of several preferences. Raises UserError if this one is of another kind."""
    if first is not None and first.judged != this.judged:
        raise UserError(
            f"{this.place} is {KINDS[this.judged]}, but {first.place} is {KINDS[first.judged]}: "
            "the files of a source hold one kind"
        )
    return first or this


def preference_text(text: str) -> str:
    """What is said in a preference (its JSON), for a tokenizer to train on."""
    first, second = json.loads(text)["texts"]
    return "\n\n".join(message["content"] for message in [*first, second[-1]])


def texts_of_preferences(
    chat: Chat, texts: Sequence[str], on_error: OnError = raise_error
) -> list[list[Document]]:
    """The documents of each preference (its JSON): the two texts, and the note as its length; none
    where `on_error` lets a text pass that cannot be used."""
    records = [json.loads(text) for text in texts]
    kept = [i for i, record in enumerate(records) if _says_something(i, record, on_error)]
    both = [
        (messages, records[i]["asked"], records[i].get("tools"))
        for i in kept
        for messages in records[i]["texts"]
    ]
    found = chat.answers(both, lambda number, error: on_error(kept[number // 2], error))
    documents: list[list[Document]] = [[] for _ in records]
    for i, one, other in zip(kept, found[::2], found[1::2], strict=True):
        if one is not None and other is not None:
            note = np.zeros(records[i]["note"], np.int64)
            documents[i] = [one, other, Document(note, note.astype(bool), 0)]
    return documents


def _says_something(number: int, record: dict[str, Any], on_error: OnError) -> bool:
    """Whether there is anything to learn from a preference; if not, `on_error` is told."""
    first, second = record["texts"]
    if record["note"] == PAIR and first == second:
        reason = "chosen and rejected are the same answer, so that neither is better"
    elif not any(message["content"].strip() or len(message) > 2 for message in first):
        reason = "prompt and answer are empty"
    else:
        return True
    on_error(number, TemplateRefused(f"{reason} (the prompt begins {first[0]['content'][:60]!r})"))
    return False


def _json(texts: list[list[Message]], asked: int, note: int, tools: Tools, place: str) -> str:
    told = {} if tools is None else {"tools": tools}
    return checked({"texts": texts, "asked": asked, "note": note} | told, place)


def _pair(record: Any, place: str) -> tuple[list[list[Message]], int]:
    """The two conversations of a pair, and how many messages their prompt has."""
    if not isinstance(record, dict) or not {"chosen", "rejected"} <= record.keys():
        raise _no_preference(record, place)
    refuse_media(record, place)
    prompt = _prompt(record, place)
    answers = [messages_of(record[key], "assistant", f"{place}, {key}") for key in KEYS]
    if all(_continues(answer) for answer in answers):
        if prompt is None:
            raise _no_preference(record, place)
        return [prompt + answer for answer in answers], len(prompt)
    if any(map(_continues, answers)):
        raise UserError(f"{place}: one of chosen and rejected has the prompt in it, the other not")
    answers = [with_system(answer, record, place) for answer in answers]
    asked, most = 0, min(map(len, answers)) - 1
    while asked < most and answers[0][asked] == answers[1][asked]:
        asked += 1
    if not asked:
        raise UserError(f"{place}: chosen and rejected do not begin with the same message")
    return answers, asked


KEYS = ("chosen", "rejected")
PROMPTS = ("prompt", "question", "messages", "conversations", "instruction")


def _judged(record: dict[str, Any], place: str) -> KTOExample:
    refuse_media(record, place)
    prompt, label = _prompt(record, place), record["label"]
    if prompt is None:
        raise _no_preference(record, place)
    if label not in (True, False):
        raise UserError(f"{place}: the label is {label!r}; it must be true or false")
    if "completion" in record:
        answer = messages_of(record["completion"], "assistant", f"{place}, completion")
    else:
        *prompt, last = prompt
        answer = [last]
        if last["role"] != "assistant" or not prompt:
            raise _no_preference(record, place)
    note = WANTED if label else UNWANTED
    return KTOExample(prompt, answer, note, tools_of(record, place), place)


def _prompt(record: dict[str, Any], place: str) -> list[Message] | None:
    key = next((key for key in PROMPTS if key in record), None)
    if key is None:
        return None
    given = instruction_of(record, place) if key == "instruction" else record[key]
    return with_system(messages_of(given, "user", f"{place}, {key}"), record, place)


def _continues(messages: list[Message]) -> bool:
    """Whether messages are what follows a prompt, not a conversation from its beginning."""
    return messages[0]["role"] in ("assistant", "tool")


def _no_preference(record: Any, place: str) -> UserError:
    has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    return UserError(
        f"{place} is no preference: expected prompt (or conversations, messages, instruction), "
        "chosen and rejected; prompt, completion and label; or messages that end with an answer, "
        f"and label; it has {has}"
    )
