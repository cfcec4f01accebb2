"""Vocabularies of GGUF files: their rules give our ids, and llama.cpp's are ours where it is."""

import functools
import itertools
import json
import re

import numpy as np
import pytest
import tokenizers
from make_golden_tokenizers import train
from test_gguf import PYTHON, run_llama_cpp
from tiny import LLAMA, random_params
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from jaxtrain.data.files.reading import read_documents
from jaxtrain.data.files.sources import TextSource
from jaxtrain.data.tokenizer.tokenizer import (
    byte_alphabet,
    byte_tokenizer,
    huggingface_tokenizer,
    sentencepiece_tokenizer,
)
from jaxtrain.data.tokenizer.train_tokenizer import train_bpe, train_nanochat, train_sentencepiece
from jaxtrain.interop.configs import fitting_family
from jaxtrain.interop.gguf_file import FamilyModel, write_gguf
from jaxtrain.interop.gguf_tokenizer import PRE_TOKENIZERS, vocabulary_of
from jaxtrain.interop.odd_texts import odd_texts
from jaxtrain.interop.tokenizer_json import from_sentencepiece
from jaxtrain.model import ModelConfig, Transformer, resolve_model, split
from jaxtrain.settings import UserError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACES = {"remove_extra_whitespaces": False}
PATTERNS = {name: cuts[-1] for (cuts, _), name in PRE_TOKENIZERS.items()}


@functools.cache
def text():
    return next(read_documents(TextSource()))[:20_000]


def byte_level(steps, **options):
    """A trained byte-level BPE with one added token, as a tokenizer of ours."""
    inner = tokenizers.Tokenizer(models.BPE(**options))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, special_tokens=["<|bos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator([text()], trainer)
    inner.add_tokens([AddedToken("<tool>")])
    return inner


def ours(inner):
    return huggingface_tokenizer(inner.to_str().encode())


def cut_by(name):
    pattern = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[name]), "isolated")
    return [pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
MAKERS = {  # name -> (a tokenizer, model and pre-tokenizer in the file)
    "bytes": (byte_tokenizer, "gpt2", "qwen2"),
    "gpt-2": (lambda: ours(byte_level([GPT2])), "gpt2", "gpt-2"),
    "smollm": (lambda: ours(byte_level([DIGITS, GPT2])), "gpt2", "smollm"),
    "llama 3": (
        lambda: ours(byte_level(cut_by("llama-bpe"), ignore_merges=True)), "gpt2", "llama-bpe"
    ),
    "qwen 2": (lambda: ours(byte_level(cut_by("qwen2"))), "gpt2", "qwen2"),
    "trained bpe": (
        lambda: huggingface_tokenizer(train_bpe([text()], 500, 10**5, special_tokens=["<x>"])),
        "gpt2", "dbrx",
    ),
    "trained sentencepiece": (
        lambda: sentencepiece_tokenizer(train_sentencepiece([text()], 400, 10**5)),
        "llama", "default",
    ),
    "space before": (
        lambda: sentencepiece_tokenizer(train(model_type="bpe", **SPACES)), "llama", "default"
    ),
    "json of pieces": (
        lambda: ours(from_sentencepiece(MAKERS["space before"][0]())), "llama", "default"
    ),
    "json of symbols": (
        lambda: ours(from_sentencepiece(sentencepiece_tokenizer(train(
            model_type="bpe", add_dummy_prefix=False, user_defined_symbols="<sep>", **SPACES,
        )))), "llama", "default",
    ),
}  # fmt: skip


def by_scores(v, text):
    """Ids as llama.cpp reads a text by scores: the pair that makes the best piece goes first."""
    ids = {token: i for i, token in enumerate(v.tokens)}
    whole = [t for t, kind in zip(v.tokens, v.types) if kind == USER]
    parts = re.split("(" + "|".join(map(re.escape, whole)) + ")", text) if whole else [text]
    out = []
    for at, part in enumerate(parts):
        if part in whole:
            out.append(ids[part])
            continue
        symbols = [
            *((" " if v.space_prefix and not at and part else "") + part).replace(" ", "\u2581")
        ]
        while True:
            made = [a + b for a, b in itertools.pairwise(symbols)]
            pairs = [
                (v.scores[ids[piece]], -i)
                for i, piece in enumerate(made)
                if piece in ids and v.types[ids[piece]] == NORMAL
            ]
            if not pairs:
                break
            i = -max(pairs)[1]
            symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
        for symbol in symbols:
            known = symbol in ids
            out += [ids[symbol]] if known else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    return out


@pytest.mark.parametrize("name", ["trained sentencepiece", "json of pieces", "json of symbols"])
def test_the_scores_give_our_ids(name):
    make, model, _ = MAKERS[name]
    tokenizer, texts = make(), odd_texts(150, ("<sep>",))
    v = vocabulary_of(tokenizer, tokenizer.vocab_size)
    assert v.model == model and len(v.tokens) == len(v.types) == len(v.scores)
    assert v.types.count(BYTE) == 256 and v.types[v.unknown] == UNKNOWN
    for text, ids in zip(texts, tokenizer.encode_batch(texts)):
        assert by_scores(v, text) == ids.tolist(), ascii(text)


@pytest.mark.parametrize("name", ["bytes", "smollm", "llama 3", "trained bpe"])
def test_a_byte_level_vocabulary_names_its_words_and_fills_the_embedding(name):
    make, _, pre = MAKERS[name]
    tokenizer = make()
    v = vocabulary_of(tokenizer, tokenizer.vocab_size + 2)
    assert (v.model, v.pre, v.scores) == ("gpt2", pre, None)
    assert v.types[-2:] == [UNUSED] * 2 and len(set(v.tokens)) == len(v.tokens) == len(v.types)
    assert v.types[tokenizer.bos_id] == CONTROL
    for i, piece in enumerate(tokenizer.pieces):
        if v.types[i] == NORMAL:
            alphabet = byte_alphabet()
            assert bytes(map(alphabet.index, v.tokens[i])) == piece
        elif v.types[i] == USER:
            assert v.tokens[i] == "<tool>" == piece.decode()
    merged = {m.replace(" ", "") for m in v.merges}
    assert name == "bytes" or merged <= {*v.tokens}


def changed(change):
    tree = json.loads(ours(byte_level(cut_by("qwen2"))).model)
    change(tree)
    return huggingface_tokenizer(json.dumps(tree).encode())


def pieces(change):
    tree = json.loads(MAKERS["json of pieces"][0]().model)
    change(tree["model"])
    return huggingface_tokenizer(json.dumps(tree).encode())


LOWER = {"type": "Lowercase"}
ODD = {
    "numbers of two digits": (
        lambda: huggingface_tokenizer(train_nanochat([text()], 400, ())),
        "llama.cpp has no name for",
    ),
    "words that are never cut": (
        lambda: changed(lambda tree: tree["model"].update(ignore_merges=True)), "no name for"
    ),
    "lower case": (
        lambda: changed(lambda tree: tree.update(normalizer=LOWER)), "normalizer Lowercase"
    ),
    "unigram": (
        lambda: sentencepiece_tokenizer(train(model_type="unigram", **SPACES)), "is unigram"
    ),
    "spaces removed": (lambda: sentencepiece_tokenizer(train(model_type="bpe")), "changes letters"),
    "no bytes": (
        lambda: sentencepiece_tokenizer(train(model_type="bpe", byte_fallback=False, **SPACES)),
        "no piece for each byte",
    ),
    "merges of another order": (
        lambda: pieces(lambda model: model["merges"].append(model["merges"][0])), "not ranked"
    ),
    "a merge left out": (lambda: pieces(lambda model: model["merges"].pop()), "lacks a merge"),
    "pieces in lower case": (
        lambda: ours(lowered()), "its tokenizer.json has Lowercase"
    ),
}  # fmt: skip


def lowered():
    inner = from_sentencepiece(MAKERS["space before"][0]())
    inner.normalizer = normalizers.Sequence([normalizers.Lowercase(), inner.normalizer])
    return inner


@pytest.mark.parametrize("name", ODD)
def test_a_tokenizer_that_llama_cpp_reads_otherwise_is_refused(name):
    make, reason = ODD[name]
    with pytest.raises(UserError, match=f"llama.cpp cannot read this tokenizer: .*{reason}"):
        vocabulary_of(make(), 1000)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs llama-cpp-python (JAXTRAIN_LLAMA_PYTHON)")
def test_llama_cpp_reads_our_ids(tmp_path):
    texts, made = odd_texts(1500, ("<sep>", "<tool>")), {}
    for name, (make, _, _) in MAKERS.items():
        tokenizer = make()
        rows = tokenizer.vocab_size + 5
        fields = {**LLAMA, "vocab_multiple": rows}
        c = resolve_model(ModelConfig.model_validate(fields), 32)
        _, specs = split(Transformer(c, tokenizer.vocab_size))
        family, config = fitting_family(c, rows, "llama")
        path = tmp_path / f"{name.replace(' ', '_')}.gguf"
        source = FamilyModel(family, config, c, specs, random_params(specs))
        facts = {"bos": tokenizer.bos_id, "add_bos": True}
        write_gguf(path, source, vocabulary_of(tokenizer, rows), "f16", facts)
        made[path] = tokenizer
    run_llama_cpp(made, np.array([[1, 2]]), texts, tmp_path)
    for path, tokenizer in made.items():
        ids = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
        assert json.loads(path.with_name(path.name + ".ids.json").read_text()) == ids, path.name
