"""Ids and texts are those of the library, for models trained with any options."""

import functools
import io
import itertools

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxtrain.data.files.reading import read_documents
from jaxtrain.data.files.sources import TextSource
from jaxtrain.data.tokenizer import sentencepiece_model
from jaxtrain.data.tokenizer.tokenizer import (
    byte_alphabet,
    huggingface_tokenizer,
    sentencepiece_tokenizer,
)
from jaxtrain.interop.odd_texts import odd_texts
from jaxtrain.interop.tokenizer_json import tokenizer_json
from jaxtrain.settings import UserError

SHAKESPEARE = next(read_documents(TextSource()))
TEXTS = odd_texts(1000, ("<sep>", "of the", "\u2581x"))
RULES = ("identity", "nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf")
LETTERS = "<>/|[]_unkpsx0123456789ABCDEFabcdef"


@functools.cache
def train(**options):
    """A small model: the library's defaults but for `options`."""
    model = io.BytesIO()
    sentences = [SHAKESPEARE[i : i + 200] for i in range(0, 20_000, 200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*sentences, LETTERS, "na\u00efve \ufb01ne \u4e2d\u6587"]),
        model_writer=model, minloglevel=2, hard_vocab_limit=False,
        **{"vocab_size": 420} | options,
    )  # fmt: skip
    return model.getvalue()


def options_of(kind, byte_fallback, rule, prefix, squeezed):
    return {
        "model_type": kind, "byte_fallback": byte_fallback, "normalization_rule_name": rule,
        "add_dummy_prefix": prefix, "remove_extra_whitespaces": squeezed,
    }  # fmt: skip


def assert_as_the_library(model, texts=TEXTS):
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours, expected = sentencepiece_tokenizer(model), library.encode(list(texts))
    assert [ids.tolist() for ids in ours.encode_batch(list(texts))] == expected
    assert [ours.decode(ids) for ids in expected] == [library.decode(ids) for ids in expected]
    return ours


SOME = [("bpe", True, "identity", True, True), ("unigram", False, "nmt_nfkc", True, True)]
SOME += [("bpe", False, "nmt_nfkc_cf", False, True), ("bpe", True, "identity", False, False)]
FLAGS = (False, True)
ALL = [x for x in itertools.product(("bpe", "unigram"), FLAGS, RULES, FLAGS, FLAGS)]
SPREAD = ALL[::3]  # every pair of options is among them


@pytest.mark.parametrize("case", SOME, ids=str)
def test_ids_are_the_librarys(case):
    assert_as_the_library(train(**options_of(*case)))


@pytest.mark.slow
@pytest.mark.parametrize("case", SPREAD, ids=str)
def test_ids_are_the_librarys_with_all_options(case):
    assert_as_the_library(train(**options_of(*case)))
    exported_or_refused(train(**options_of(*case)))


SYMBOLS = {"user_defined_symbols": "<sep>,[X Y],of\u2581the", "control_symbols": "<c>"}


@pytest.mark.parametrize("prefix", FLAGS)
def test_ids_are_the_librarys_with_symbols_of_ones_own(prefix):
    options = options_of("bpe", True, "identity", prefix, False) | SYMBOLS
    ours = assert_as_the_library(train(**options))
    assert ours.by_word is False and ours.specials["<c>"] == 3


@pytest.mark.parametrize("kind", ["word", "char"])
def test_ids_are_the_librarys_of_words_and_letters(kind):
    assert_as_the_library(train(model_type=kind, treat_whitespace_as_suffix=kind == "char"))


@pytest.mark.parametrize("prefix", FLAGS)
@pytest.mark.parametrize("across", FLAGS)
def test_a_long_text_is_cut_where_no_token_is(prefix, across, monkeypatch):
    monkeypatch.setattr(sentencepiece_model, "CHUNK", 60)
    options = options_of("bpe", True, "identity", prefix, False)
    model = train(**options, split_by_whitespace=not across)
    repeated = "ab" * 300 + " of the" * 60 + "\u4e2d" * 200 + "\u2581" * 100
    cut = sentencepiece_model.chunks(SHAKESPEARE[:3000], set())
    assert max(map(len, cut)) == 60 and "".join(cut) == SHAKESPEARE[:3000]
    assert_as_the_library(model, [SHAKESPEARE[:20_000], repeated, "", "".join(TEXTS)])


# ---- tokenizer.json ----------------------------------------------------------------------------


def exported_or_refused(model):
    """Whether `tokenizers` reads an export as we read the model; else it is refused."""
    ours = sentencepiece_tokenizer(model)
    try:
        inner = tokenizers.Tokenizer.from_str(tokenizer_json(ours))
    except UserError as error:
        assert "the sentencepiece model cannot be written as a tokenizer.json: " in str(error)
        return False
    inner.encode_special_tokens = True
    found = [one.ids for one in inner.encode_batch(TEXTS, add_special_tokens=False)]
    expected = [ids.tolist() for ids in ours.encode_batch(TEXTS)]
    assert found == expected
    known = [ids for ids in expected if 0 not in ids]
    assert [inner.decode(ids) for ids in known] == [ours.decode(ids) for ids in known]
    return True


WRITTEN = [(bytes_, prefix, squeezed) for bytes_ in FLAGS for prefix, squeezed in ((0, 0), (1, 1))]


@pytest.mark.parametrize(("byte_fallback", "prefix", "squeezed"), WRITTEN)
def test_an_export_has_the_same_ids(byte_fallback, prefix, squeezed):
    case = ("identity", bool(prefix), bool(squeezed))
    assert exported_or_refused(train(**options_of("bpe", byte_fallback, *case)))


def test_an_exported_unigram_model_has_the_same_ids():
    options = options_of("unigram", True, "identity", True, False)
    assert exported_or_refused(train(**options, required_chars=LETTERS, vocab_size=500))
    assert exported_or_refused(
        train(**options_of("bpe", True, "identity", False, False), **SYMBOLS)
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (options_of("bpe", True, "nmt_nfkc", False, False), "its normalizer nmt_nfkc changes"),
        (options_of("bpe", True, "identity", True, False) | SYMBOLS, r"symbols \('<sep>', ...\)"),
        ({"model_type": "char", "normalization_rule_name": "identity"}, "its model_type char"),
        (options_of("unigram", False, "identity", False, False), r"would read '<s>' as \["),
    ],
)
def test_a_model_that_tokenizers_cannot_read_is_refused_by_name(options, reason):
    with pytest.raises(UserError, match=reason):
        tokenizer_json(sentencepiece_tokenizer(train(**options)))


def byte_level(prefix_space):
    """Byte-level BPE of single bytes and a few words, as GPT-2's or RoBERTa's."""
    letters = byte_alphabet()
    merges = [("\u0120", "t"), ("h", "e"), ("\u0120t", "he"), ("o", "f")]
    pieces = [*letters, *(a + b for a, b in merges), "<s>"]
    inner = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    inner.decoder = decoders.ByteLevel()
    return inner


def metaspace(scheme, split):
    """Sentencepiece-style BPE whose pre-tokenizer puts the space before the text."""
    words = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("o", "f")]
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz", *(a + b for a, b in words)]
    model = models.BPE(
        {p: i for i, p in enumerate(pieces)}, words, byte_fallback=True, unk_token="<unk>"
    )
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", scheme, split)
    steps = [decoders.ByteFallback(), decoders.Metaspace("\u2581", scheme, split)]
    inner.decoder = decoders.Sequence(steps)
    return inner


@pytest.mark.parametrize(
    "inner",
    [
        byte_level(True), byte_level(False), metaspace("always", True), metaspace("first", True),
        metaspace("first", False), metaspace("never", True),
    ],
)  # fmt: skip
def test_a_tokenizer_json_with_a_space_before_the_text(inner):
    inner.add_special_tokens(["<s>"])
    inner.add_tokens(["<word>"])
    ours = huggingface_tokenizer(inner.to_str().encode())
    inner.encode_special_tokens = True
    texts = [*TEXTS, *(" " + text for text in TEXTS), " <word> a", "the <word>"]
    found = [one.ids for one in inner.encode_batch(texts, add_special_tokens=False)]
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == found
    assert [ours.decode(ids) for ids in found] == [inner.decode(ids) for ids in found]


def test_the_space_is_left_where_the_library_leaves_it():
    inner = byte_level(True)
    inner.add_special_tokens(["<s>"])
    ours = huggingface_tokenizer(inner.to_str().encode())
    assert ours.decode(ours.encode("the")) == " the" and ours.prefix == b""
