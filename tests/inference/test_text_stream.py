"""Text of tokens as they come."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
from jaxtrain.inference.engine.text import TextStream

BYTES = byte_tokenizer()


def pieces(data, stops=()):
    """The text of each byte, and in the end; and whether a stop string ended it."""
    stream, found = TextStream(BYTES, stops), []
    for byte in data:
        text, stopped = stream.add(byte)
        found.append(text)
        if stopped:
            return found, True
    text, stopped = stream.end()
    return [*found, text], stopped


def test_no_half_of_a_character():
    found, _ = pieces("a\u00e9\u4e2d\U0001f600!".encode())
    whole = ["a", "", "\u00e9", "", "", "\u4e2d", "", "", "", "\U0001f600", "!", ""]
    assert found == whole
    assert pieces("\u4e2d".encode()[:2])[0] == ["", "", "\ufffd"]


def test_a_space_at_the_start_stays_behind_other_text():
    spaced = dataclasses.replace(BYTES, prefix=b" ")
    said = lambda behind: [TextStream(spaced, (), behind).add(byte)[0] for byte in b" "]
    assert said(False) == [""] and said(True) == [" "]


@given(st.binary(max_size=30))
def test_all_of_it_is_the_text_of_the_tokenizer(data):
    assert "".join(pieces(data)[0]) == BYTES.decode(list(data))


@given(st.sampled_from([b"", b" "]), st.binary(max_size=30), st.integers(0, 30), st.booleans())
def test_tokens_at_once_are_those_one_at_a_time(begin, rest, cut, spaced):
    data = begin + rest
    tokenizer = dataclasses.replace(BYTES, prefix=b" ") if spaced else BYTES
    one, many = TextStream(tokenizer, ()), TextStream(tokenizer, ())
    said = "".join(one.add(byte)[0] for byte in data)
    assert many.add_all(list(data[:cut])) + many.add_all(list(data[cut:])) == said
    assert many.end() == one.end()


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("one\n\ntwo", ("\n\n",), "one"),
        ("one\ntwo", ("\n\n",), "one\ntwo"),
        ("ababac", ("abac",), "ab"),
        ("say STOP", ("STOP", "say ST"), ""),
        ("\u4e2d\u6587", ("\u6587",), "\u4e2d"),
        ("abc", ("",), "abc"),
        ("ends in a STO", ("STOP",), "ends in a STO"),
    ],
)
def test_a_stop_string_ends_it_and_is_not_shown(text, stops, kept):
    found, stopped = pieces(text.encode(), stops)
    assert "".join(found) == kept and stopped == (kept != text)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2))
def test_what_is_shown_is_never_taken_back(text, stops):
    shown = "".join(pieces(text.encode(), stops)[0])
    places = [text.find(stop) for stop in stops if stop in text]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not places:
        assert shown == text
    else:  # the first that is complete ends the text; of several, what stands first
        end = min(ends)
        assert shown == text[: min(p for p, e in zip(places, ends) if e == end)]
