"""The terminal chat: typed lines in, streamed answers out, and the tokens of `generate`."""

import io

import jax
import numpy as np
import pytest
from chat_cases import PLAIN, TEMPLATES, make_tokenizer
from tiny import build

from jaxtrain.data import make_chat
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer, huggingface_tokenizer
from jaxtrain.inference.chat import chat_loop, print_stream
from jaxtrain.inference.generate import Sampling, decode_tokens, stream_tokens

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
        yield from TOKENIZER.encode(answer).tolist()

    typed = (f"{line}\n" for line in lines)
    chat_loop(CHAT, TOKENIZER, reply, room=room, system=system, typed=typed, out=screen)
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


def test_a_character_waits_for_all_its_bytes():
    screen = Screen()
    reply = print_stream(iter("\u00e9\U0001f600".encode()), byte_tokenizer(), screen)
    assert reply == "\u00e9\U0001f600" and screen.getvalue() == reply + "\n"
    assert not any("\ufffd" in text for text in screen.shown)
    cut = print_stream(iter("a\u00e9".encode()[:2]), byte_tokenizer(), Screen())
    assert cut == "a\ufffd"


def test_ctrl_c_ends_an_answer_not_the_conversation():
    def reply(ids):
        yield from TOKENIZER.encode("Well").tolist()
        raise KeyboardInterrupt

    screen = Screen()
    chat_loop(CHAT, TOKENIZER, reply, room=999, typed=["a\n", "b\n"], out=screen)
    assert screen.getvalue().count("Well ...\n") == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.quick("0.0")
def test_streamed_tokens_are_those_of_generate(temperature):
    _, graphdef, _, params = build()
    prompt = np.arange(1, 12)
    sampling = Sampling(7, temperature, top_k=5, top_p=0.9, seed=3)
    ids = list(stream_tokens(graphdef, params, prompt, sampling, stop=()))
    padded = np.pad(prompt.astype(np.int32), (0, 21))[None]
    whole = decode_tokens(
        graphdef, params, padded, np.array([11], np.int32), jax.random.key(3),
        np.float32(temperature), np.float32(0.9), new=7, top_k=5,
    )  # fmt: skip
    assert ids == np.asarray(whole)[0].tolist()
    assert (
        list(stream_tokens(graphdef, params, prompt, sampling, stop=(ids[3],)))
        == ids[: ids.index(ids[3])]
    )
