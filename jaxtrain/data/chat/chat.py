"""Conversations by a template as tokens, those that the assistant says marked.

The loss counts the marked tokens, an answer's end of turn among them, and no others. Where an
answer begins and ends in the text is found by rendering the conversation up to it, with and without
it, so that templates need no marks of their own.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
import tokenizers

from jaxtrain.data.chat.messages import BEGIN, END
from jaxtrain.data.chat.template import Render, TemplateRefused, make_render
from jaxtrain.data.records import Conversation, Message, Tools
from jaxtrain.data.tokenizer.sentencepiece_model import piece_offsets, sentencepiece_facts
from jaxtrain.data.tokenizer.tokenizer import BYTES_BOS, Tokenizer
from jaxtrain.settings import UserError

Span = tuple[int, int]  # characters of a text

PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
OWN_MARKS = "mark what is learned in it with {% generation %} ... {% endgeneration %}"


# ---- what is learned -------------------------------------------------------------------------


def texts_and_answers(
    messages: Sequence[Message], render: Render, learned: Sequence[int]
) -> list[tuple[str, list[Span]]]:
    """The texts to train on, each with the characters of the answers `learned` in it; none without.

    One text, if a conversation is rendered as the beginning of a longer one; else (Qwen 3 leaves
    out what was thought in earlier turns) one for each answer, as the model will see it.
    """
    if not learned:
        return []
    last = learned[-1]
    messages = messages[: last + 1]
    whole = render(messages, False)
    if BEGIN in whole:
        text, spans = _generated(whole)
        if list(learned) != _answers(messages):
            # The blocks of a message are those that it adds to the text before it.
            count = lambda size: render(messages[:size], False).count(BEGIN)
            spans = [span for i in learned for span in spans[count(i) : count(i + 1)]]
        return [(text, spans)]
    answers, texts = [], []
    for i in learned:
        text = whole if i == last else render(messages[: i + 1], False)
        before, asked = render(messages[:i], True), render(messages[:i], False)
        begun = _common(before, text)
        if not begun.startswith(_common(before, asked)):
            raise UserError(
                "the chat template writes messages in another way once they are answered, so "
                f"that answers cannot be found in its text; {OWN_MARKS}"
            )
        answers.append((len(begun), len(text)))
        texts.append(text)
    if all(whole.startswith(text) for text in texts):
        return [(whole, answers)]
    return [(text, [answer]) for text, answer in zip(texts, answers)]


def learned_answers(messages: Sequence[Message], render: Render) -> list[int]:
    """Which messages are learned: the assistant's, but those with `train: false` or of no word."""
    asked = (i for i in _answers(messages) if messages[i].get("train", True))
    return [i for i in asked if not _is_empty(messages[: i + 1], render)]


def _answers(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _is_empty(messages: Sequence[Message], render: Render) -> bool:
    """Whether the last message has no content, and nothing else of it is written."""
    *before, last = messages
    if last["content"].strip():
        return False
    bare = {"role": last["role"], "content": last["content"]}
    return last == bare or render([*before, bare], False) == render(messages, False)


def check_tool_calls(messages: Sequence[Message], render: Render) -> None:
    """Raises Refused if messages have tool_calls and the template leaves them out."""
    if not any(message.get("tool_calls") for message in messages):
        return
    whole = render(messages, False)
    bare = [{k: v for k, v in one.items() if k != "tool_calls"} for one in messages]
    try:
        ignored = render(bare, False) == whole
    except TemplateRefused:  # it looks at them
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
    """A text without its marks, and what stands between them."""
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
    """Tokens and where each stands in the text: in characters, or in bytes."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Reader(NamedTuple):
    """Encodes text in which special tokens are written out.

    `special` are bos_token and eos_token unless a source says otherwise; `encode` reads many texts
    at once (a call of a tokenizer starts threads); `at(text, i)` is where character i of a text
    stands, in the unit of the pieces.
    """

    special: dict[str, str]
    encode: Callable[[Sequence[str]], list[Pieces]]
    at: Callable[[str, int], int]


def make_reader(tokenizer: Tokenizer) -> Reader:
    """A `Reader` of rendered templates for a tokenizer."""
    if tokenizer.name == "huggingface":
        # A byte-level post-processor would leave spaces out of where tokens stand.
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
    names = special_names(tokenizer)
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


def special_names(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the special tokens by their names."""
    if tokenizer.name == "bytes":
        return {BYTES_BOS: tokenizer.bos_id}
    if tokenizer.name == "huggingface":
        inner = tokenizers.Tokenizer.from_str(tokenizer.model.decode())
        ids = (i for i, piece in enumerate(tokenizer.pieces) if not piece)
        return {inner.id_to_token(i) or f"<{i}>": i for i in ids}
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    ids = (i for i in range(processor.get_piece_size()) if processor.is_control(i))
    return {processor.id_to_piece(i): i for i in ids}


def _placed(model: bytes, text: str) -> Pieces:
    """The tokens of a text, and where they stand in its bytes, as sentencepiece says."""
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
    """Special tokens and the text between them, whose tokens stand where their bytes do.

    sizes_V: None where the tokenizer changes text; then, and where they do not add up (a letter is
    unknown), `placed` says where the tokens stand.
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
        begins = np.cumsum([0, *(len(part.encode()) for part in text)])
        found = [pieces(part) for part in text]
        nothing = Pieces(*(np.zeros(0, np.int64) for _ in range(3)))
        moved = [Pieces(p.ids, p.starts + b, p.ends + b) for p, b in zip(found, begins)]
        return Pieces(*map(np.concatenate, zip(nothing, *moved)))

    return [joined(text) for text in parts]


def marks_of(pieces: Pieces, spans: Sequence[Span], tokenizer: Tokenizer) -> np.ndarray:
    """bool [tokens]: those of the answers; what follows an end of turn is no part of one."""
    marks = np.zeros(len(pieces.ids), bool)
    for start, raise_error in spans:
        piece_offsets = np.flatnonzero((pieces.ends > start) & (pieces.starts < raise_error))
        special = [i for i in piece_offsets if not tokenizer.pieces[pieces.ids[i]]]
        if (
            special
            and not tokenizer.decode(pieces.ids[special[-1] + 1 : piece_offsets[-1] + 1]).strip()
        ):
            piece_offsets = piece_offsets[piece_offsets <= special[-1]]
        marks[piece_offsets] = True
    return marks


# ---- a template and a tokenizer together -----------------------------------------------------


class Document(NamedTuple):
    """A text to train on: its tokens after the first, which of them are learned, its UTF-8 size."""

    ids: np.ndarray
    marks: np.ndarray
    size: int


def _no_answer(messages: Sequence[Message]) -> TemplateRefused:
    first = messages[0]["content"][:60]
    return TemplateRefused(
        "nothing is learned of the last answer in the conversation that begins "
        f"{first!r}: the chat template leaves it out, or it has weight 0 or train false"
    )


Asked = tuple[Sequence[Message], int, Tools]  # a conversation, how long its prompt is, its tools


OnError = Callable[[int, UserError], None]  # which of several texts cannot be used, and why


def raise_error(number: int, error: UserError) -> None:
    raise error


def _each(things: Sequence[Any], read: Callable[[Any], Any], on_error: OnError) -> list[Any]:
    """read(thing) of each thing; None where it raised UserError and `on_error` returned."""

    def attempt(number: int) -> Any:
        try:
            return read(things[number])
        except UserError as error:
            on_error(number, error)

    return [attempt(number) for number in range(len(things))]


class Chat(NamedTuple):
    """A chat template with a tokenizer: conversations as token ids.

    `documents` and `answers` call their second argument for a conversation that cannot be used; it
    is left out if that call returns.
    """

    start: int  # the token before every text, BOS for most
    end: int  # the token after every answer
    # (conversations, on_error) -> the texts to train on of each; none without a learned answer
    documents: Callable[..., list[list[Document]]]
    # messages -> the tokens up to the answer of the assistant
    prompt: Callable[[Sequence[Message]], np.ndarray]
    # (what is asked, on_error) -> each conversation, marked after its prompt alone
    answers: Callable[..., list[Document | None]]


def make_chat(template: str, special: dict[str, str], tokenizer: Tokenizer) -> Chat:
    """template: Jinja text. Raises UserError for a template that cannot be used."""
    reader = make_reader(tokenizer)
    render = make_render(template, reader.special | special)

    def read(texts: Sequence[tuple[str, list[Span]]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The tokens of each text, and which of them the spans hold."""
        found = reader.encode([whole for whole, _ in texts])
        return [
            (
                pieces.ids,
                marks_of(pieces, [(at(whole, a), at(whole, b)) for a, b in spans], tokenizer),
            )
            for pieces, (whole, spans) in zip(found, texts)
        ]

    at = reader.at
    probe = texts_and_answers(PROBE, render, [1])[0]
    ((ids, marks),) = read([probe])
    end = int(ids[marks][-1]) if marks.any() else -1
    if end < 0 or tokenizer.pieces[end]:
        raise UserError(
            f"the chat template ends an answer without a special token of the tokenizer "
            f"({probe[0]!r}): a model could not learn to stop. Put {{{{ eos_token }}}} there (and "
            f"inside the generation block, if it has one), or name the token in `special`"
        )
    # Qwen's conversations have no BOS: they all begin with <|im_start|>.
    start = tokenizer.bos_id if tokenizer.pieces[ids[0]] else int(ids[0])

    def read_documents(texts: Sequence[tuple[str, list[Span]]]) -> list[Document]:
        skips = [(ids, marks, int(ids[0] == start)) for ids, marks in read(texts)]
        return [
            Document(ids[skip:], marks[skip:], len(whole.encode()))
            for (ids, marks, skip), (whole, _) in zip(skips, texts)
        ]

    def documents(
        conversations: Sequence[Conversation], on_error: OnError = raise_error
    ) -> list[list[Document]]:
        rendered = _each(conversations, lambda one: all_answers(*one), on_error)
        rendered = [texts or [] for texts in rendered]
        found = iter(read_documents([one for texts in rendered for one in texts]))
        several = [[next(found) for _ in texts] for texts in rendered]
        return [[one for one in some if one.marks.any()] for some in several]

    def all_answers(messages: Sequence[Message], tools: Tools) -> list[tuple[str, list[Span]]]:
        told = partial(render, tools=tools)
        check_tool_calls(messages, told)
        return texts_and_answers(messages, told, learned_answers(messages, told))

    def last_answers(messages: Sequence[Message], asked: int, tools: Tools) -> tuple[str, list]:
        told = partial(render, tools=tools)
        check_tool_calls(messages, told)
        learned = [i for i in _answers(messages) if i >= asked and messages[i].get("train", True)]
        if not learned:
            raise _no_answer(messages)
        whole, spans = texts_and_answers(messages, told, learned)[-1]
        before = re.sub(f"[{BEGIN}{END}]", "", told(messages[:asked], True))
        begun = len(_common(before, whole))
        return whole, [span for span in spans if span[1] > begun]

    def answers(asked: Sequence[Asked], on_error: OnError = raise_error) -> list[Document | None]:
        rendered = _each(asked, lambda one: last_answers(*one), on_error)
        read_ = iter(read_documents([one for one in rendered if one is not None]))
        found = [None if one is None else next(read_) for one in rendered]
        for number, document in enumerate(found):
            if document is not None and not document.marks.any():
                on_error(number, _no_answer(asked[number][0]))
                found[number] = None
        return found

    def prompt(messages: Sequence[Message]) -> np.ndarray:
        (pieces,) = reader.encode([render(messages, True)])
        return pieces.ids if pieces.ids[0] == start else np.concatenate([[start], pieces.ids])

    return Chat(start, end, documents, prompt, answers)
