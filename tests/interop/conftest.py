"""A model of our own for the tests of export."""

import pytest
from tiny import random_params

from jaxtrain.config import Config, validate
from jaxtrain.config.resolve import resolve
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
from jaxtrain.model import Transformer, split
from jaxtrain.runs.saved import save_model

PLAIN = {
    "depth": 2, "width": 32, "head_dim": 8, "hidden": 48, "window_pattern": "L", "qk_scale": 1.0,
    "value_embeddings": False, "residual_scales": False, "smear": False, "backout": False,
}  # fmt: skip


@pytest.fixture(scope="session")
def own_model(tmp_path_factory):
    """A model folder of the gpt family without what Hugging Face's NanoChat lacks; bytes."""
    folder = tmp_path_factory.mktemp("own") / "model"
    tokenizer = byte_tokenizer()
    tree = {"model": PLAIN, "train": {"sequence_length": 32}}
    tree |= {"data": {"tokenizer": {"name": "bytes"}}}
    c = resolve(validate(Config, tree), tokenizer.vocab_size)
    _, specs = split(Transformer(c.model, tokenizer.vocab_size))
    save_model(folder, c, random_params(specs), tokenizer)
    return folder
