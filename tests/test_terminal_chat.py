"""The terminal chat: typed lines in, streamed answers out, and the tokens of `generate`."""

import io

from chat_cases import PLAIN, TEMPLATES, make_tokenizer

from jaxtrain.data import make_chat
from jaxtrain.data.tokenizer.tokenizer import huggingface_tokenizer
from jaxtrain.inference.chat import chat_loop

TOKENIZER = huggingface_tokenizer(make_tokenizer().encode())
CHAT = make_chat(TEMPLATES["qwen2"], PLAIN, TOKENIZER)
ROOM = len(CHAT.prompt([{"role": "user", "content": "x" * 40}]))


class Screen(io.StringIO):
    """Remembers what stood there each time that something was shown."""

    def __init__(self):
        super().__init__()
        self.shown = []

    def flush(self):
        self.shown.append(self.getvalue())


def converse(lines, answer="Yes.", room=10_000, system=None):
    """(the screen, the prompts that the model got, as text)."""
    screen, prompts = Screen(), []

    def reply(ids):
        prompts.append(b"".join(TOKENIZER.pieces[i] for i in ids).decode())
        yield from answer

    typed = (f"{line}\n" for line in lines)
    chat_loop(CHAT, reply, room=room, system=system, typed=typed, out=screen)
    return screen, prompts


def test_the_conversation_so_far_is_in_view():
    screen, prompts = converse(["One?", "", "Two?", "/quit", "Three?"], system="Be brief.")
    first = "system\nBe brief.\nuser\nOne?\nassistant\n"
    assert prompts == [first, first + "Yes.\nuser\nTwo?\nassistant\n"]
    assert screen.getvalue().endswith("> Yes.\n> > Yes.\n> ")
    assert any(text.endswith("> Ye") for text in screen.shown)  # each token as it comes


def test_reset_and_unknown_commands():
    screen, prompts = converse(["One?", "/reset", "/help", "Two?"], system="Be brief.")
    assert prompts[1] == "system\nBe brief.\nuser\nTwo?\nassistant\n"
    assert "a new conversation" in screen.getvalue() and "/help is no command" in screen.getvalue()


def test_what_no_longer_fits_is_forgotten():
    """A question that is too long by itself changes nothing."""
    lines = ["first " * 2, "second", "y" * 400, "third"]
    screen, prompts = converse(lines, room=ROOM + 10)
    assert "first" in prompts[1] and len(prompts) == 3
    assert f"[too long: 437 tokens, at most {ROOM + 10}]" in screen.getvalue()
    assert screen.getvalue().count("[2 messages forgotten") == 1
    assert "first" not in prompts[2] and "second" in prompts[2] and "yyy" not in prompts[2]


def test_ctrl_c_ends_an_answer_not_the_conversation():
    def reply(ids):
        yield "Well"
        raise KeyboardInterrupt

    screen = Screen()
    chat_loop(CHAT, reply, room=999, typed=["a\n", "b\n"], out=screen)
    assert screen.getvalue().count("Well ...\n") == 2
