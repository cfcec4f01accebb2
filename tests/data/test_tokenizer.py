import functools
import itertools
import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.data.files.reading import read_documents
from jaxtrain.data.files.sources import TextSource
from jaxtrain.data.tokenizer.tokenizer import (
    FILES,
    TOKENIZERS,
    BytesConfig,
    HuggingFaceConfig,
    NanochatConfig,
    SentencePieceConfig,
    build_tokenizer,
    load_tokenizer,
    sentencepiece_tokenizer,
    train_sentencepiece,
)
from jaxtrain.settings import UserError

SHAKESPEARE = next(read_documents(TextSource()))
AWKWARD = [
    "",
    "a",
    " ",
    "two  spaces\tand\ttabs \n\n\n end ",
    "\u2581 is \u2581\u2581 itself\u2581",
    "\0 null \x01\x7f \x85",
    "<s></s><unk><0x41><|bos|>",
    "\U0001f600\u00e9\u4e2d\u200d\ue000\U0010ffff \u2047 ",
    "\r\n\r",
    SHAKESPEARE[:30_000],
    "no spaces" * 3000,
]


def byte_level_json(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([SHAKESPEARE[:50_000]], trainer)
    inner.add_tokens(["Citizen"])
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def metaspace_json(tmp_path):
    pieces = ["<unk>", "<s>", "\u2581", "a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces.append("\u2581a")
    model = tokenizers.models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[("\u2581", "a")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    inner = tokenizers.Tokenizer(model)
    inner.add_special_tokens(["<s>", "<unk>"])
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture(
    scope="module", params=["words", "across", "byte_level", "bpe", "nanochat", "bytes"]
)
def tokenizer(request, tmp_path_factory):
    if request.param == "bytes":
        return build_tokenizer(BytesConfig(), ())
    if request.param == "byte_level":
        path = byte_level_json(tmp_path_factory.mktemp("hf"))
        return build_tokenizer(HuggingFaceConfig(path=str(path)), ())
    if request.param == "bpe":
        config = HuggingFaceConfig(vocab_size=600)
        return build_tokenizer(config, [SHAKESPEARE[:100_000]])
    if request.param == "nanochat":
        return build_tokenizer(NanochatConfig(vocab_size=600), iter([SHAKESPEARE[:100_000]]))
    config = SentencePieceConfig(vocab_size=600, across_words=request.param == "across")
    return build_tokenizer(config, [SHAKESPEARE[:100_000]])


def assert_lossless(tokenizer, text):
    if tokenizer.name == "sentencepiece":
        text = text.replace("\u2581", " ")  # the library reads its sign for a space as one
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.bos_id not in ids


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_survives(tokenizer, text):
    assert_lossless(tokenizer, text)


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(tokenizer, text):
    assert_lossless(tokenizer, text)


def test_a_batch_is_encoded_like_its_texts(tokenizer):
    batch = tokenizer.encode_batch(AWKWARD)
    for ids, text in zip(batch, AWKWARD, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


@functools.lru_cache(maxsize=4)
def library(tokenizer):
    """How the library itself encodes one text."""
    if tokenizer.name == "sentencepiece":
        return sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model).encode
    inner = tokenizers.Tokenizer.from_str(tokenizer.model.decode())
    return lambda text: inner.encode(text, add_special_tokens=False).ids


WORD_BY_WORD = st.text(alphabet=" \t\n\r.,'aZ\u00e9\u4e2d019-\u3000\x1c") | st.text()


@given(text=WORD_BY_WORD)
@pytest.mark.quick("bpe", "byte_level", "across", "nanochat", "bytes")
def test_words_remembered_are_encoded_as_the_whole_text(tokenizer, text):
    if tokenizer.name == "bytes" or "\u2581" in text or "<" in text:
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert tokenizer.encode(text).tolist() == library(tokenizer)(text)


def test_a_tokenizer_whose_tokens_cross_words_is_given_whole_texts():
    sentence = "one of the many, one of the few. " * 40
    model = train_sentencepiece([sentence], 290, 10**6, across_words=True)
    tokenizer = sentencepiece_tokenizer(model)
    assert any(b"e o" in piece or b"f t" in piece for piece in tokenizer.pieces)
    assert tokenizer.encode(sentence).tolist() == library(tokenizer)(sentence)


def test_what_is_remembered_is_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr("jaxtrain.data.tokenizer.tokenizer.WORDS", 3)
    expected = [tokenizer.encode(text) for text in AWKWARD]
    for text, ids in zip(AWKWARD * 2, expected * 2):
        np.testing.assert_array_equal(tokenizer.encode(text), ids)


def test_bos_stands_for_no_bytes(tokenizer):
    counts = tokenizer.token_bytes()
    assert counts.shape == (tokenizer.vocab_size,) and counts.dtype == np.int32
    assert counts[tokenizer.bos_id] == 0
    assert tokenizer.decode([tokenizer.bos_id]) == ""


def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert set(FILES) == set(TOKENIZERS)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.pieces == tokenizer.pieces and loaded.bos_id == tokenizer.bos_id
    np.testing.assert_array_equal(loaded.encode(AWKWARD[3]), tokenizer.encode(AWKWARD[3]))


def test_pieces_with_newlines_are_learned_and_tokens_are_few():
    tokenizer = build_tokenizer(SentencePieceConfig(vocab_size=512), [SHAKESPEARE])
    assert {b",\n", b"\n\n", b":\n"} <= set(tokenizer.pieces)
    assert len(tokenizer.encode(SHAKESPEARE)) / len(SHAKESPEARE) < 0.525


def test_training_is_deterministic_and_stops_at_train_bytes():
    first = train_sentencepiece([SHAKESPEARE[:20_000]], 400, 10**6)
    assert train_sentencepiece([SHAKESPEARE[:20_000]], 400, 10**6) == first
    cut = train_sentencepiece([SHAKESPEARE[:8192], SHAKESPEARE], 400, 8192)
    assert cut == train_sentencepiece([SHAKESPEARE[:8192]], 400, 10**6)


def test_a_vocabulary_that_does_not_suit_the_text_is_refused_with_the_limit():
    with pytest.raises(UserError, match=r"is 5000, but this text supports at most (\d+)") as error:
        train_sentencepiece(["hello world " * 20], 5000, 10**6)
    most = int(str(error.value).split()[-1])
    assert len(train_sentencepiece(["hello world " * 20], most, 10**6)) > 0
    with pytest.raises(UserError, match=r"is 280, but .* at least (\d+)") as error:
        train_sentencepiece([SHAKESPEARE], 280, 10**6)
    least = int(str(error.value).split()[-1])
    assert sentencepiece_tokenizer(train_sentencepiece([SHAKESPEARE], least, 10**6))


def test_sentencepiece_style_tokenizer_json(tmp_path):
    path = metaspace_json(tmp_path)
    tokenizer = build_tokenizer(HuggingFaceConfig(path=str(tmp_path)), ())
    assert (
        tokenizer.fingerprint == build_tokenizer(HuggingFaceConfig(path=str(path)), ()).fingerprint
    )
    ids = tokenizer.encode("a b\u00e9")
    assert tokenizer.prefix == b" "
    assert tokenizer.decode(ids) == "a b\u00e9"
    assert (
        tokenizer.decode_behind(ids.tolist()) == " a b\u00e9" and tokenizer.decode_behind([]) == ""
    )
    assert tokenizer.decode_behind(ids[1:].tolist()).strip() == "b\u00e9"
    assert tokenizer.token_bytes()[ids].sum() == len(" a b\u00e9".encode())
    assert tokenizer.pieces[tokenizer.bos_id] == b"" and tokenizer.bos_id == 1


def test_bad_tokenizer_files_are_named(tmp_path):
    file = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"there is no file .*tokenizer.json"):
        build_tokenizer(HuggingFaceConfig(path=str(file)), ())
    file.write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json"):
        build_tokenizer(HuggingFaceConfig(path=str(file)), ())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    inner.save(str(file))
    with pytest.raises(UserError, match=r"tokenizer\.json has no BOS token; looked for <\|bos\|>"):
        build_tokenizer(HuggingFaceConfig(path=str(file)), ())
    inner.add_special_tokens(["<s>"])
    inner.save(str(file))
    with pytest.raises(UserError, match="neither byte-level nor sentencepiece-style"):
        build_tokenizer(HuggingFaceConfig(path=str(file)), ())
    (tmp_path / "x.model").write_text("no")
    with pytest.raises(UserError, match=r"x\.model is not a sentencepiece model"):
        build_tokenizer(SentencePieceConfig(path=str(tmp_path / "x.model")), ())
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(tmp_path / "nothing")


# ---- nanochat's ------------------------------------------------------------------------------

WORDS_OF = {
    "Hello world's 1234567 ab1": ["Hello", " world", "'s", " ", "12", "34", "56", "7", " ab", "1"],
    "I'LL we've don't": ["I", "'LL", " we", "'ve", " don", "'t"],
    "a  b\t\tc": ["a", " ", " b", "\t", "\tc"],
    "x = y+1;\n\n\n  if(z)\r\n": ["x", " =", " y", "+", "1", ";\n\n\n", " ", " if", "(z", ")\r\n"],
    "end  \n \n  ": ["end", "  \n \n", "  "],
    "caf\u00e9 \u4e2d\u6587\uff01\u0661\u0662\u0663": [
        "caf\u00e9", " \u4e2d\u6587", "\uff01", "\u0661\u0662", "\u0663",
    ],
}  # fmt: skip


def merged(word, ranks):
    """Byte pairs of a word merged one by one, the earliest learned first: what BPE is."""
    parts = list(word)
    while True:
        pairs = [ranks.get(pair, len(ranks)) for pair in itertools.pairwise(parts)]
        if min(pairs, default=len(ranks)) == len(ranks):
            return parts
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_nanochats_words_are_gpt4s_with_two_digits_and_merged_by_rank():
    tokenizer = build_tokenizer(NanochatConfig(vocab_size=700), iter([SHAKESPEARE[:100_000]]))
    tree = json.loads(tokenizer.model)
    inner = tokenizers.Tokenizer.from_str(tokenizer.model.decode())
    ranks = {tuple(pair): rank for rank, pair in enumerate(tree["model"]["merges"])}
    for text, words in WORDS_OF.items():
        cut = inner.pre_tokenizer.pre_tokenize_str(text)
        assert [text[a:b] for _, (a, b) in cut] == words
        parts = [part for word, _ in cut for part in merged(word, ranks)]
        assert tokenizer.encode(text).tolist() == [tree["model"]["vocab"][part] for part in parts]
    names = list(tokenizer.specials)
    assert names[:2] == ["<|bos|>", "<|user_start|>"] and names[-1] == "<|output_end|>"
    assert list(tokenizer.specials.values()) == list(range(691, 700))
    assert tokenizer.vocab_size == 700 and tokenizer.bos_id == 691 and tokenizer.by_word
    assert tokenizer.token_bytes().sum() == sum(map(len, tokenizer.pieces)) > 256


def test_nanochats_tokenizer_reads_a_stream_and_says_what_is_too_short(tmp_path):
    read = []
    texts = (read.append(i) or SHAKESPEARE[:50_000] for i in range(3))
    tokenizer = build_tokenizer(NanochatConfig(vocab_size=300), texts)
    assert read == [0, 1, 2]
    with pytest.raises(UserError, match="vocab_size 300 is larger than .* has 5 bytes; use"):
        build_tokenizer(NanochatConfig(vocab_size=300), iter(["hello"]))
    tokenizer.save(tmp_path)
    ready = build_tokenizer(NanochatConfig(path=str(tmp_path)), ())
    assert ready.model == tokenizer.model and ready.name == "huggingface"
