"""Prompts in parts and rows with branches: nothing but the way of computing changes."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.data import Scored
from jaxtrain.data.evaluation.branches import RowShape, pack_branches
from jaxtrain.data.evaluation.prompts import Encoder, Prompt
from jaxtrain.data.tokenizer.tokenizer import (
    byte_tokenizer,
    huggingface_tokenizer,
    sentencepiece_tokenizer,
    train_bpe,
    train_sentencepiece,
)


def sequence(generator, length):
    return generator.integers(0, 256, length).astype(np.int32)


@pytest.mark.slow
@given(st.data())
def test_each_label_stands_behind_its_own_text(draw):
    generator = np.random.default_rng(draw.draw(st.integers(0, 99)))
    shape = RowShape(2, 24, 6)
    asked = []
    for _ in range(draw.draw(st.integers(1, 12))):
        start = sequence(generator, draw.draw(st.integers(1, 20)))
        lengths = draw.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        texts = [np.concatenate([start, sequence(generator, n)]) for n in lengths]
        asked.append([Scored(x, int(generator.integers(1, len(x)))) for x in texts])
    flat = [scored for question in asked for scored in question]
    seen = []
    for rows, owners_BM in pack_branches(asked, shape):
        for b, m in zip(*np.nonzero(owners_BM >= 0)):
            owner, position = owners_BM[b, m], rows.places_BM[b, m]
            path = text_before(rows, b, position, shape.trunk)
            tokens = flat[owner].tokens
            np.testing.assert_array_equal(rows.tokens_BT[b, path], tokens[: len(path)])
            np.testing.assert_array_equal(rows.positions_BT[b, path], np.arange(len(path)))
            assert rows.labels_BM[b, m] == tokens[len(path)]
            seen.append((owner, len(path)))
    wanted = [(i, at) for i, s in enumerate(flat) for at in range(s.start, len(s.tokens))]
    assert sorted(seen) == wanted


def text_before(rows, b, position, trunk):
    """The places that the mask of `jaxtrain.model.branches` shows to one place, itself last."""
    segments = rows.segments_BT[b]
    own = np.nonzero(segments == segments[position])[0]
    own = own[own <= position]
    if position < trunk:
        return own
    before, parent = rows.before_BR[b, own - trunk], rows.parents_BR[b, position - trunk]
    above = np.nonzero(segments == parent)[0]
    np.testing.assert_array_equal(before, [above[-1], *own[:-1]])
    return np.concatenate([above, own])


TEXTS = [f"Who knows {n} words\nof the  text?\n\n A: {n * n} words, yes" for n in range(60)]


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece", "bytes"])
def test_prompts_in_parts_have_the_tokens_of_the_whole_text(kind):
    if kind == "huggingface":
        tokenizer = huggingface_tokenizer(train_bpe(TEXTS, 290, 10_000))
    elif kind == "sentencepiece":
        tokenizer = sentencepiece_tokenizer(train_sentencepiece(TEXTS, 350, 10_000))
    else:
        tokenizer = byte_tokenizer()
    assert tokenizer.by_word == (kind != "sentencepiece")
    generator = random.Random(0)
    piece = lambda: "".join(
        generator.choices([" ", "\n", "words", "  A:", "7", "text?", " of"], k=5)
    )
    prompts = [Prompt([piece() for _ in range(3)], [piece(), piece(), "x"]) for _ in range(40)]
    prompts += [Prompt([], ["a b"]), Prompt(["", "one", " two"], ["", " "])]
    for prompt, found in zip(prompts, Encoder(tokenizer)(prompts)):
        for ending, tokens in zip(prompt.endings, found):
            whole = tokenizer.encode("".join(prompt.shared) + ending)
            np.testing.assert_array_equal(tokens, [tokenizer.bos_id, *whole])
