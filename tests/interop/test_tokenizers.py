"""Exported tokenizers as transformers reads them: kept in a file, and live where it is there."""

import base64
import json
import os
import zlib

import pytest
from make_golden_tokenizers import CASES, GOLDEN, TEXTS, hash_of, read, train, written
from tiny import random_params

from jaxtrain.cli import main as interop
from jaxtrain.config import Config, validate
from jaxtrain.config.resolve import resolve
from jaxtrain.data.tokenizer.tokenizer import sentencepiece_tokenizer
from jaxtrain.interop.companions import tokenizer_files
from jaxtrain.model import Transformer, split
from jaxtrain.runs.saved import save_model

FACTS = json.loads(GOLDEN.read_text())
PYTHON = os.environ.get("JAXTRAIN_TORCH_PYTHON")


def model_of(name):
    return zlib.decompress(base64.b64decode(FACTS[name]["model"]))


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_our_ids(name, tmp_path):
    """The files are those that transformers was given, and its ids are ours."""
    model = model_of(name)
    assert written(model, tmp_path / "out") == FACTS[name]["files"], "run make_golden_tokenizers.py"
    ids = [ids.tolist() for ids in sentencepiece_tokenizer(model).encode_batch(TEXTS)]
    assert hash_of(ids) == FACTS[name]["ids"]


MODEL = {
    "depth": 1, "width": 32, "head_dim": 8, "hidden": 48, "window_pattern": "L", "qk_scale": 1.0,
    "value_embeddings": False, "residual_scales": False, "smear": False, "backout": False,
}  # fmt: skip
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_bos_token": True}


def with_companions(folder):
    """An export of a model that came with a LlamaTokenizer."""
    came = folder / "model" / "huggingface"
    came.mkdir(parents=True)
    (came / "tokenizer_config.json").write_text(json.dumps(LLAMA))
    tokenizer_files(sentencepiece_tokenizer(model_of("bpe")), folder / "model", folder / "out")
    return folder / "out"


def test_the_class_of_a_checkpoint_does_not_replace_our_pipeline(tmp_path):
    """LlamaTokenizer of transformers 5 makes one of its own from the vocabulary."""
    out = with_companions(tmp_path)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings == LLAMA | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tree = json.loads((out / "tokenizer.json").read_text())
    assert tree["post_processor"]["special_tokens"]["<s>"]["ids"] == [1]


@pytest.mark.skipif(not PYTHON, reason="needs transformers (JAXTRAIN_TORCH_PYTHON)")
def test_transformers_reads_our_ids_live(tmp_path):
    folders = [tmp_path / str(i) for i in range(len(CASES))]
    for name, folder in zip(CASES, folders):
        written(model_of(name), folder)
    folders.append(with_companions(tmp_path / "came"))
    for name, one in zip([*CASES, "bpe"], read(PYTHON, folders, tmp_path), strict=True):
        assert hash_of(one["ids"]) == FACTS[name]["ids"]


def test_an_export_is_refused_before_anything_is_written(tmp_path, capsys):
    model = train(model_type="bpe", normalization_rule_name="nmt_nfkc")
    tokenizer = sentencepiece_tokenizer(model)
    tree = {"model": MODEL, "train": {"sequence_length": 32}}
    tree |= {"data": {"tokenizer": {"name": "sentencepiece"}}}
    c = resolve(validate(Config, tree), tokenizer.vocab_size)
    _, specs = split(Transformer(c.model, tokenizer.vocab_size))
    save_model(tmp_path / "model", c, random_params(specs), tokenizer)
    assert interop(["export", str(tmp_path / "model"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "as a tokenizer.json: its normalizer nmt_nfkc changes letters" in said
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()
