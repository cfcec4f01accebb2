"""Conversations rendered by a chat template and tokenized, with a loss mask on the answers.

The loss counts only the marked tokens, which include an answer's end-of-turn token. The span of an
answer is found by rendering the conversation up to it, with and without it, so that templates need
no generation blocks.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import sentencepiece
import tokenizers

from jaxtrain.data.chat.messages import BEGIN, END
from jaxtrain.data.chat.template import Render, TemplateRefused, make_render
from jaxtrain.data.records import Conversation, Message, Tools
from jaxtrain.data.tokenizer.sentencepiece_model import piece_offsets, sentencepiece_facts
from jaxtrain.data.tokenizer.tokenizer import Tokenizer
from jaxtrain.settings import UserError

Span = tuple[int, int]  # (start, stop) in characters of a text
MarkedText = tuple[str, list[Span]]  # a rendered text, and the spans of its learned answers

PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
OWN_MARKS = "mark what is learned in it with {% generation %} ... {% endgeneration %}"


# ---- texts and their learned spans -----------------------------------------------------------


def texts_and_answers(
    messages: Sequence[Message], render: Render, learned: Sequence[int]
) -> list[MarkedText]:
    """Return the texts to train on, each with the spans of its `learned` answers; [] without any.

    It is one text if shorter parts of the conversation are rendered as prefixes of the whole. Else
    it is one text per answer, as the model will see it (Qwen 3 drops earlier turns' thinking).
    """
    if not learned:
        return []
    last = learned[-1]
    messages = messages[: last + 1]
    whole = render(messages, False)
    if BEGIN in whole:
        text, spans = _generated(whole)
        if list(learned) != _answers(messages):
            # The generation blocks of a message are those that it adds to the text before it.
            count = lambda size: render(messages[:size], False).count(BEGIN)
            spans = [span for i in learned for span in spans[count(i) : count(i + 1)]]
        return [(text, spans)]
    answers, texts = [], []
    for i in learned:
        text = whole if i == last else render(messages[: i + 1], False)
        before = render(messages[:i], True)
        begun = _common(before, text)
        # Only a text that goes on otherwise needs the third rendering.
        if begun != before and not begun.startswith(_common(before, render(messages[:i], False))):
            raise UserError(
                "the chat template writes messages differently once they are answered, so that "
                f"answers cannot be located in its text; {OWN_MARKS}"
            )
        answers.append((len(begun), len(text)))
        texts.append(text)
    if all(whole.startswith(text) for text in texts):
        return [(whole, answers)]
    return [(text, [answer]) for text, answer in zip(texts, answers)]


def learned_answers(messages: Sequence[Message], render: Render) -> list[int]:
    """Indices of the learned messages: the assistant's, except if `train: false` or empty."""
    asked = (i for i in _answers(messages) if messages[i].get("train", True))
    return [i for i in asked if not _is_empty(messages[: i + 1], render)]


def _answers(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _is_empty(messages: Sequence[Message], render: Render) -> bool:
    """Whether the last message has no content, and the template writes nothing else of it."""
    *before, last = messages
    if last["content"].strip():
        return False
    bare = {"role": last["role"], "content": last["content"]}
    return last == bare or render([*before, bare], False) == render(messages, False)


def check_tool_calls(messages: Sequence[Message], render: Render) -> None:
    """Raises TemplateRefused if messages have tool_calls and the template leaves them out."""
    if not any(message.get("tool_calls") for message in messages):
        return
    whole = render(messages, False)
    bare = [{k: v for k, v in one.items() if k != "tool_calls"} for one in messages]
    try:
        ignored = render(bare, False) == whole
    except TemplateRefused:  # the template reads them
        return
    if ignored:
        raise TemplateRefused(
            "the chat template leaves out the tool_calls of the conversation that begins "
            f"{messages[0]['content'][:60]!r}: use one that writes them"
        )


def _common(a: str, b: str) -> str:
    """The common prefix of two texts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return a[:low]


def _generated(marked: str) -> tuple[str, list[Span]]:
    """Return a text without BEGIN and END, and the spans between them."""
    text, spans, start = "", [], 0
    for part in re.split(f"([{BEGIN}{END}])", marked):
        if part == BEGIN:
            start = len(text)
        elif part == END:
            spans.append((start, len(text)))
        else:
            text += part
    return text, spans


# ---- text to tokens --------------------------------------------------------------------------


class Pieces(NamedTuple):
    """Token ids and their offsets in the text, in characters or in bytes."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Reader(NamedTuple):
    """Encoder of text in which special tokens are written out.

    `special` are bos_token and eos_token, unless a source sets others. `encode` takes many texts at
    once, because each call of a tokenizer starts threads. `at(text, i)` is the offset of character
    i of a text, in the unit of the pieces.
    """

    special: dict[str, str]
    encode: Callable[[Sequence[str]], list[Pieces]]
    at: Callable[[str, int], int]


def make_reader(tokenizer: Tokenizer) -> Reader:
    """A `Reader` of rendered templates for a tokenizer."""
    if tokenizer.name == "huggingface":
        # A byte-level post-processor would leave spaces out of the offsets of tokens.
        model = json.loads(tokenizer.model) | {"post_processor": None}
        inner = tokenizers.Tokenizer.from_str(json.dumps(model))
        inner.no_truncation()
        inner.no_padding()

        def pieces(one: tokenizers.Encoding) -> Pieces:
            offsets = np.array(one.offsets, np.int64).reshape(-1, 2)
            return Pieces(np.array(one.ids, np.int64), *offsets.T)

        def encode(texts: Sequence[str]) -> list[Pieces]:
            return [pieces(one) for one in inner.encode_batch(texts, add_special_tokens=False)]

        name = inner.id_to_token(tokenizer.bos_id) or ""
        return Reader({"bos_token": name, "eos_token": name}, encode, lambda text, i: i)
    names = tokenizer.specials
    special = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    split = re.compile(f"({special})")
    name = next(name for name, index in names.items() if index == tokenizer.bos_id)
    plain = tokenizer.name == "bytes" or sentencepiece_facts(tokenizer.model).plain
    sizes_V = tokenizer.token_bytes().astype(np.int64) if plain else None
    placed = partial(_placed, tokenizer.model)
    return Reader(
        {"bos_token": name, "eos_token": name},
        partial(_encode_between, tokenizer, names, sizes_V, split, placed),
        lambda text, i: len(text[:i].encode()),
    )


def _placed(model: bytes, text: str) -> Pieces:
    """Encode a text with sentencepiece, which also gives the byte offsets of the tokens."""
    return Pieces(*(np.array(x, np.int64) for x in piece_offsets(_processor(model), text)))


@lru_cache(maxsize=2)
def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def _encode_between(
    tokenizer: Tokenizer,
    names: dict[str, int],
    sizes_V: np.ndarray | None,
    split: re.Pattern[str],
    placed: Callable[[str], Pieces],
    texts: Sequence[str],
) -> list[Pieces]:
    """Encode special tokens, and the text between them with offsets from the sizes of its tokens.

    sizes_V: bytes of each token; None if the tokenizer changes text. Then, or if the sizes do not
    add up (a letter is unknown), `placed` gives the offsets.
    """
    parts = [[part for part in split.split(text) if part] for text in texts]
    between = [part for text in parts for part in text if part not in names]
    encoded = iter(tokenizer.encode_batch(between))

    def pieces(part: str) -> Pieces:
        size = len(part.encode())
        if part in names:
            return Pieces(np.array([names[part]]), np.array([0]), np.array([size]))
        ids = next(encoded).astype(np.int64)
        if sizes_V is None:
            return placed(part)
        sizes = sizes_V[ids]
        sizes[:1] -= len(tokenizer.prefix)
        if sizes.sum() != size:
            return placed(part)
        ends = np.cumsum(sizes)
        return Pieces(ids, ends - sizes, ends)

    def joined(text: Sequence[str]) -> Pieces:
        offsets = np.cumsum([0, *(len(part.encode()) for part in text)])
        found = [pieces(part) for part in text]
        nothing = Pieces(*(np.zeros(0, np.int64) for _ in range(3)))
        moved = [Pieces(p.ids, p.starts + b, p.ends + b) for p, b in zip(found, offsets)]
        return Pieces(*map(np.concatenate, zip(nothing, *moved)))

    return [joined(text) for text in parts]


def marks_of(pieces: Pieces, spans: Sequence[Span], tokenizer: Tokenizer) -> np.ndarray:
    """bool [tokens]: loss mask of the answers, without the whitespace after an end of turn."""
    marks = np.zeros(len(pieces.ids), bool)
    for start, stop in spans:
        inside = np.flatnonzero((pieces.ends > start) & (pieces.starts < stop))
        special = [i for i in inside if not tokenizer.pieces[pieces.ids[i]]]
        if special and not tokenizer.decode(pieces.ids[special[-1] + 1 : inside[-1] + 1]).strip():
            inside = inside[inside <= special[-1]]
        marks[inside] = True
    return marks


# ---- a template and a tokenizer together -----------------------------------------------------


class Document(NamedTuple):
    """A text to train on: its tokens after the start token, their loss mask, its UTF-8 bytes."""

    ids: np.ndarray
    marks: np.ndarray
    size: int


def _no_answer(messages: Sequence[Message]) -> TemplateRefused:
    first = messages[0]["content"][:60]
    return TemplateRefused(
        "nothing is learned of the last answer in the conversation that begins "
        f"{first!r}: the chat template leaves it out, or it has weight 0 or train false"
    )


Asked = tuple[Sequence[Message], int, Tools]  # messages, how many of them are the prompt, tools


OnError = Callable[[int, UserError], None]  # (index of a text that cannot be used, the reason)


def raise_error(number: int, error: UserError) -> None:
    raise error


def _each[T, R](things: Sequence[T], read: Callable[[T], R], on_error: OnError) -> list[R | None]:
    """read(thing) of each thing; None where it raised UserError and `on_error` returned."""
    found: list[R | None] = []
    for number, thing in enumerate(things):
        try:
            found.append(read(thing))
        except UserError as error:
            on_error(number, error)
            found.append(None)
    return found


@dataclass(frozen=True)
class Chat:
    """A chat template with a tokenizer, which encodes conversations as token ids.

    `documents` and `answers` call `on_error` for a conversation that cannot be used. If the call
    returns, the conversation is left out.
    """

    tokenizer: Tokenizer
    reader: Reader
    render: Render
    start: int  # the token before every text, BOS for most
    end: int  # the token after every answer

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> np.ndarray:
        """Return the tokens of a prompt, up to the answer of the assistant."""
        (pieces,) = self.reader.encode([self.render(messages, True, tools)])
        started = pieces.ids[0] == self.start
        return pieces.ids if started else np.concatenate([[self.start], pieces.ids])

    def documents(
        self, conversations: Sequence[Conversation], on_error: OnError = raise_error
    ) -> list[list[Document]]:
        """Encode the texts to train on of each conversation; none if it has no learned answer."""
        rendered = _each(conversations, self._all_answers, on_error)
        found = iter(self._read([one for texts in rendered for one in texts or []]))
        several = [[next(found) for _ in texts or []] for texts in rendered]
        return [[one for one in some if one.marks.any()] for some in several]

    def answers(
        self, asked: Sequence[Asked], on_error: OnError = raise_error
    ) -> list[Document | None]:
        """Encode each conversation with a loss mask on the answers after its prompt alone."""
        rendered = _each(asked, self._last_answers, on_error)
        read = iter(self._read([one for one in rendered if one is not None]))
        found = [None if one is None else next(read) for one in rendered]
        for number, document in enumerate(found):
            if document is not None and not document.marks.any():
                on_error(number, _no_answer(asked[number][0]))
                found[number] = None
        return found

    def _read(self, texts: Sequence[MarkedText]) -> list[Document]:
        documents = []
        for (ids, marks), (whole, _) in zip(
            encode_marked(texts, self.tokenizer, self.reader), texts
        ):
            skip = int(ids[0] == self.start)
            documents.append(Document(ids[skip:], marks[skip:], len(whole.encode())))
        return documents

    def _all_answers(self, conversation: Conversation) -> list[MarkedText]:
        messages, tools = conversation
        render = partial(self.render, tools=tools)
        check_tool_calls(messages, render)
        return texts_and_answers(messages, render, learned_answers(messages, render))

    def _last_answers(self, asked: Asked) -> MarkedText:
        messages, size, tools = asked
        render = partial(self.render, tools=tools)
        check_tool_calls(messages, render)
        learned = [i for i in _answers(messages) if i >= size and messages[i].get("train", True)]
        if not learned:
            raise _no_answer(messages)
        whole, spans = texts_and_answers(messages, render, learned)[-1]
        before = re.sub(f"[{BEGIN}{END}]", "", render(messages[:size], True))
        begun = len(_common(before, whole))
        return whole, [span for span in spans if span[1] > begun]


def make_chat(template: str, special: dict[str, str], tokenizer: Tokenizer) -> Chat:
    """Make a `Chat` from a Jinja template. Raises UserError for a template that cannot be used."""
    reader = make_reader(tokenizer)
    render = make_render(template, reader.special | special)
    probe = texts_and_answers(PROBE, render, [1])[0]
    ((ids, marks),) = encode_marked([probe], tokenizer, reader)
    end = int(ids[marks][-1]) if marks.any() else -1
    if end < 0 or tokenizer.pieces[end]:
        raise UserError(
            f"the chat template ends an answer without a special token of the tokenizer "
            f"({probe[0]!r}): a model could not learn to stop. Put {{{{ eos_token }}}} there (and "
            f"inside the generation block, if it has one), or name the token in `special`"
        )
    # Qwen's conversations have no BOS: they all begin with <|im_start|>.
    start = tokenizer.bos_id if tokenizer.pieces[ids[0]] else int(ids[0])
    return Chat(tokenizer, reader, render, start, end)


def encode_marked(
    texts: Sequence[MarkedText], tokenizer: Tokenizer, reader: Reader
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Encode each text. Returns its token ids, and the loss mask of its spans."""
    found = []
    for pieces, (whole, spans) in zip(reader.encode([whole for whole, _ in texts]), texts):
        placed = [(reader.at(whole, start), reader.at(whole, stop)) for start, stop in spans]
        found.append((pieces.ids, marks_of(pieces, placed, tokenizer)))
    return found
