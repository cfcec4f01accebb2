"""Records of chat and preference files, as they pass between the modules of data/."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

Message = dict[str, Any]  # role, content, and other fields of the file: tool_calls, name, ...
Tools = list[dict[str, Any]] | None  # JSON schemas of the functions that a template lists

# Labels in a batch: PAIR for a preference pair, which has no label; the others for KTO examples.
PAIR, DESIRABLE, UNDESIRABLE = 0, 1, 2


class Conversation(NamedTuple):
    """Messages of a conversation, the assistant's answers included."""

    messages: list[Message]
    tools: Tools = None

    def chat_text(self) -> str:
        """The contents of the messages, for a tokenizer to train on."""
        return _contents(self.messages)

    def canonical_json(self) -> str:
        """The record as JSON: its hash decides whether it is held out."""
        bare = self.tools is None
        return _json(self.messages if bare else {"messages": self.messages, "tools": self.tools})


class PreferencePair(NamedTuple):
    """A prompt with a chosen and a rejected answer."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: Tools = None

    @property
    def texts(self) -> tuple[list[Message], list[Message]]:
        """The two conversations that are compared."""
        return self.prompt + self.chosen, self.prompt + self.rejected

    def chat_text(self) -> str:
        return _contents([*self.texts[0], self.rejected[-1]])

    def canonical_json(self) -> str:
        return _preference_json(self, PAIR)


class KTOExample(NamedTuple):
    """A prompt, an answer, and whether the answer is desirable (arXiv:2402.01306).

    unrelated: the answer of another example, from which KTO estimates its reference point.
    """

    prompt: list[Message]
    completion: list[Message]
    label: bool
    unrelated: list[Message]
    tools: Tools = None

    @property
    def texts(self) -> tuple[list[Message], list[Message]]:
        """The two conversations that are compared."""
        return self.prompt + self.completion, self.prompt + self.unrelated

    def chat_text(self) -> str:
        return _contents([*self.texts[0], self.unrelated[-1]])

    def canonical_json(self) -> str:
        return _preference_json(self, DESIRABLE if self.label else UNDESIRABLE)


Preference = PreferencePair | KTOExample
Record = Conversation | Preference


def _contents(messages: Iterable[Message]) -> str:
    return "\n\n".join(message["content"] for message in messages)


def _preference_json(record: Preference, label: int) -> str:
    tools = {} if record.tools is None else {"tools": record.tools}
    return _json({"texts": record.texts, "asked": len(record.prompt), "note": label} | tools)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
