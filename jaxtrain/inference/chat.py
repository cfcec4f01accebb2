"""Chat in the terminal: typed lines are answered, token by token."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from jaxtrain.data import Chat
from jaxtrain.settings import visible

HELP = "/reset begins a new conversation, /quit ends"
Answer = Callable[[np.ndarray], Iterator[str]]  # tokens of a prompt -> pieces of its answer


@runtime_checkable
class TextOut(Protocol):
    """A writable text stream, such as sys.stdout."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def chat_loop(
    chat: Chat,
    answer: Answer,
    *,
    room: int,
    system: str | None = None,
    typed: Iterable[str],
    out: TextOut,
) -> None:
    """Answer each typed line, given the conversation so far, until /quit or the end of `typed`.

    room: maximum tokens of a prompt; the oldest questions and their answers are dropped to fit.
    out: a text stream. Ctrl-C ends an answer, not the conversation.
    """
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    write_text(out, f"{HELP}\n> ")
    for line in typed:
        text = line.strip()
        if text == "/quit":
            return
        if text == "/reset":
            messages = list(start)
            write_text(out, "a new conversation\n")
        elif text.startswith("/"):
            write_text(out, f"{text} is no command; {HELP}\n")
        elif text:
            asked = [*messages, {"role": "user", "content": text}]
            prompt, kept = fit_to_context(chat, asked, len(start), room)
            if len(prompt) > room:
                write_text(out, f"[too long: {len(prompt)} tokens, at most {room}]\n")
            else:
                if forgotten := len(asked) - len(kept):
                    write_text(out, f"[{forgotten} messages forgotten: they no longer fit]\n")
                reply = print_stream(answer(prompt), out)
                messages = [*kept, {"role": "assistant", "content": reply}]
        write_text(out, "> ")


def fit_to_context(chat: Chat, messages: list, fixed: int, room: int) -> tuple[np.ndarray, list]:
    """A prompt of at most `room` tokens if that is possible, and the messages that it keeps.

    The first `fixed` and the last stay; questions are dropped with their answers, the oldest first.
    """
    prompt = chat.prompt(messages)
    while len(prompt) > room and len(messages) > fixed + 1:
        messages = [*messages[:fixed], *messages[fixed + 2 :]]
        prompt = chat.prompt(messages)
    return prompt, messages


def print_stream(pieces: Iterator[str], out: TextOut) -> str:
    """Print the pieces of an answer as they come; returns the answer."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            write_text(out, visible(piece))
    except KeyboardInterrupt:
        text += " ..."
        write_text(out, " ...")
    write_text(out, "\n")
    return text.strip()


def write_text(out: TextOut, text: str) -> None:
    out.write(text)
    out.flush()
