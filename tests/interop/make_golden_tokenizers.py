"""Writes golden_tokenizers.json beside it: what transformers reads in odd texts with our exports.

    JAXTRAIN_TORCH_PYTHON=PYTHON python tests/interop/make_golden_tokenizers.py

where PYTHON has transformers==5.23.0 (and no torch, if you like). Each case is a small
sentencepiece model, the hash of the files that transformers was given, and that of its ids.
"""

import base64
import hashlib
import io
import json
import os
import subprocess
import tempfile
import zlib
from pathlib import Path

import sentencepiece

from jaxtrain.data.files.reading import read_documents
from jaxtrain.data.files.sources import TextSource
from jaxtrain.data.tokenizer.tokenizer import sentencepiece_tokenizer
from jaxtrain.interop.companions import tokenizer_files
from jaxtrain.interop.odd_texts import odd_texts

HERE = Path(__file__).parent
GOLDEN = HERE / "golden_tokenizers.json"
TEXTS = odd_texts(1000, ("<sep>",))
LETTERS = "<>/|[]_unkpsx0123456789ABCDEFabcdef"
PLAIN = {"normalization_rule_name": "identity", "byte_fallback": True, "required_chars": LETTERS}
CASES = {
    "bpe": {"model_type": "bpe", "remove_extra_whitespaces": False},
    "bpe, spaces removed": {"model_type": "bpe"},
    "bpe, unknown letters": {"model_type": "bpe", "byte_fallback": False},
    "unigram": {"model_type": "unigram", "remove_extra_whitespaces": False},
    "symbols": {
        "model_type": "bpe", "remove_extra_whitespaces": False, "add_dummy_prefix": False,
        "user_defined_symbols": "<sep>",
    },
}  # fmt: skip


def train(**options):
    model, text = io.BytesIO(), next(read_documents(TextSource()))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text[i : i + 200] for i in range(0, 20_000, 200)), model_writer=model,
        vocab_size=420, minloglevel=2, hard_vocab_limit=False, **PLAIN | options,
    )  # fmt: skip
    return model.getvalue()


def written(model, folder):
    """Export a model; the hash of the files."""
    tokenizer_files(sentencepiece_tokenizer(model), folder / "none", folder)
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def hash_of(ids):
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def read(python, folders, temporary):
    """The ids of TEXTS that transformers makes with each folder."""
    (temporary / "texts.json").write_text(json.dumps(TEXTS))
    command = [python, str(HERE / "run_tokenizers.py"), str(temporary / "texts.json")]
    subprocess.run([*command, *map(str, folders)], check=True)
    return [json.loads((folder / "read.json").read_text()) for folder in folders]


def main():
    golden, models = {}, {name: train(**options) for name, options in CASES.items()}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary) / name.replace(" ", "_") for name in models}
        hashes = {name: written(model, folders[name]) for name, model in models.items()}
        found = read(os.environ["JAXTRAIN_TORCH_PYTHON"], folders.values(), Path(temporary))
    for (name, model), one in zip(models.items(), found, strict=True):
        packed = base64.b64encode(zlib.compress(model, 9)).decode()
        golden[name] = {"model": packed, "files": hashes[name], "ids": hash_of(one["ids"])}
        golden["transformers"] = one["version"]
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
