"""Preference files -> pairs of answers (`PreferencePair`), or labelled answers (`KTOExample`).

A pair is a prompt, a chosen and a rejected answer. The prompt may be ShareGPT's `conversations` up
to the answer, or Alpaca's `instruction` and `input`. An example of KTO (arXiv:2402.01306) is a
prompt, a completion and a label; its unrelated answer is the completion of the next line.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxtrain.data.chat.chat import Chat, Document, OnError, raise_error
from jaxtrain.data.chat.messages import (
    check_characters,
    instruction_of,
    messages_of,
    records,
    refuse_media,
    tools_of,
    with_system,
)
from jaxtrain.data.chat.template import TemplateRefused
from jaxtrain.data.records import KTOExample, Message, Preference, PreferencePair
from jaxtrain.settings import UserError

TEXTS = 2  # documents per stored preference

KINDS = {
    False: "a pair (prompt, chosen and rejected)",
    True: "a labeled answer (prompt, completion and label)",
}


class RecordKind(NamedTuple):
    """Kind of a record, an example of KTO or a pair, and its location."""

    is_kto: bool
    where: str


def preferences(text: str, file: str, line: int) -> Iterator[tuple[Preference, str]]:
    """Yield each preference of a JSON text, with its location. All must be of one kind.

    file, line: location of the text. Raises UserError for a record that is not a preference.
    """
    examples: list[tuple[KTOExample, str]] = []
    first: RecordKind | None = None
    for record, where in records(text, file, line):
        is_kto = isinstance(record, dict) and "label" in record and not {*KEYS} & record.keys()
        first = same_kind(first, RecordKind(is_kto, where))
        if is_kto:
            examples.append((_kto_example(record, where), where))
        else:
            yield check_characters(_pair(record, where), where), where
    if len(examples) == 1:
        raise UserError(
            f"{examples[0][1]}: a labelled answer is compared with the next one of the file, and "
            "there is none"
        )
    for (one, where), (other, _) in zip(examples, examples[1:] + examples[:1]):
        yield check_characters(one._replace(unrelated=other.completion), where), where


def same_kind(first: RecordKind | None, this: RecordKind) -> RecordKind:
    """Return the kind of the first record. Raises UserError if this record is of another kind."""
    if first is not None and first.is_kto != this.is_kto:
        raise UserError(
            f"{this.where} is {KINDS[this.is_kto]}, but {first.where} is {KINDS[first.is_kto]}: "
            "the files of a source hold one kind"
        )
    return first or this


def encode_preferences(
    chat: Chat, records: Sequence[Preference], on_error: OnError = raise_error
) -> list[list[Document]]:
    """Encode the two texts of each preference; none if `on_error` was called for it."""
    kept = [i for i, record in enumerate(records) if _has_signal(i, record, on_error)]
    both = [
        (messages, len(records[i].prompt), records[i].tools)
        for i in kept
        for messages in records[i].texts
    ]
    found = chat.answers(both, lambda number, error: on_error(kept[number // 2], error))
    documents: list[list[Document]] = [[] for _ in records]
    for i, one, other in zip(kept, found[::2], found[1::2], strict=True):
        if one is not None and other is not None:
            documents[i] = [one, other]
    return documents


def _has_signal(number: int, record: Preference, on_error: OnError) -> bool:
    """Whether a preference gives any training signal; calls `on_error` if not."""
    first, second = record.texts
    if isinstance(record, PreferencePair) and first == second:
        reason = "chosen and rejected are the same answer, so that neither is better"
    elif not any(message["content"].strip() or len(message) > 2 for message in first):
        reason = "prompt and answer are empty"
    else:
        return True
    prompt = first[0]["content"][:60]
    on_error(number, TemplateRefused(f"{reason} (the prompt begins {prompt!r})"))
    return False


def _pair(record: Any, where: str) -> PreferencePair:
    if not isinstance(record, dict) or not {"chosen", "rejected"} <= record.keys():
        raise _no_preference(record, where)
    refuse_media(record, where)
    prompt, tools = _prompt(record, where), tools_of(record, where)
    chosen, rejected = (messages_of(record[key], "assistant", f"{where}, {key}") for key in KEYS)
    if _continues(chosen) and _continues(rejected):
        if prompt is None:
            raise _no_preference(record, where)
        return PreferencePair(prompt, chosen, rejected, tools)
    if _continues(chosen) or _continues(rejected):
        raise UserError(f"{where}: one of chosen and rejected has the prompt in it, the other not")
    chosen, rejected = (with_system(answer, record, where) for answer in (chosen, rejected))
    asked, most = 0, min(len(chosen), len(rejected)) - 1
    while asked < most and chosen[asked] == rejected[asked]:
        asked += 1
    if not asked:
        raise UserError(f"{where}: chosen and rejected do not begin with the same message")
    return PreferencePair(chosen[:asked], chosen[asked:], rejected[asked:], tools)


KEYS = ("chosen", "rejected")
PROMPTS = ("prompt", "question", "messages", "conversations", "instruction")


def _kto_example(record: dict[str, Any], where: str) -> KTOExample:
    """The example without its unrelated answer."""
    refuse_media(record, where)
    prompt, label = _prompt(record, where), record["label"]
    if prompt is None:
        raise _no_preference(record, where)
    if label not in (True, False):
        raise UserError(f"{where}: the label is {label!r}; it must be true or false")
    if "completion" in record:
        answer = messages_of(record["completion"], "assistant", f"{where}, completion")
    else:
        *prompt, last = prompt
        answer = [last]
        if last["role"] != "assistant" or not prompt:
            raise _no_preference(record, where)
    return KTOExample(prompt, answer, bool(label), [], tools_of(record, where))


def _prompt(record: dict[str, Any], where: str) -> list[Message] | None:
    key = next((key for key in PROMPTS if key in record), None)
    if key is None:
        return None
    given = instruction_of(record, where) if key == "instruction" else record[key]
    return with_system(messages_of(given, "user", f"{where}, {key}"), record, where)


def _continues(messages: list[Message]) -> bool:
    """Whether messages continue a prompt, rather than begin a conversation."""
    return messages[0]["role"] in ("assistant", "tool")


def _no_preference(record: Any, where: str) -> UserError:
    has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    return UserError(
        f"{where} is no preference: expected prompt (or conversations, messages, instruction), "
        "chosen and rejected; prompt, completion and label; or messages that end with an answer, "
        f"and label; it has {has}"
    )
