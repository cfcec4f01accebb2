"""Structured pruning: what is cut is what was zero, and the rest is the same function."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import FEW_PARTS, LLAMA, SMALL, batch, build, close, resolved, run_overrides

from jaxtrain.compress.shrink import (
    Size,
    check_shrunk_size,
    cut_layers,
    layers_to_keep,
    main,
    make_loss,
    shrink,
)
from jaxtrain.compress.shrink_stream import CHANNELS
from jaxtrain.finetune import unflatten
from jaxtrain.main import main as train
from jaxtrain.objectives.next_token import next_token_loss
from jaxtrain.runs.saved import Saved, load_saved
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import flatten


class Config:
    """A configuration that has a model alone."""

    train = SimpleNamespace(precision="float32")

    def __init__(self, model):
        self.model = model

    def model_copy(self, update):
        return Config(update["model"])


class Vocabulary:
    vocab_size = 61


def saved_model(**changes):
    c, graphdef, specs, params = build(**changes)
    parts: Any = (Config(c), graphdef, specs, params, Vocabulary(), None, None)
    return Saved(*parts)


def zeroed(saved, name, index):
    """The model with a part of a parameter set to zero."""
    arrays = {key: np.array(x) for key, x in flatten(saved.params).items()}
    arrays[name][index] = 0
    return saved._replace(params=unflatten(arrays))


def nats(saved):
    one = jax.tree.map(jnp.asarray, batch(1))
    params = jax.tree.map(jnp.asarray, saved.params)
    return jax.jit(next_token_loss, static_argnums=0)(saved.graphdef, params, one)


def test_embeddings_in_16_bits_are_computed_with_in_float32():
    """As the matrices are: kernels of a GPU take one dtype."""
    saved = saved_model(depth=2, embedding_dtype="bfloat16")
    arrays, row = flatten(saved.params), jax.tree.map(jnp.asarray, batch(1))
    assert arrays["embed"].dtype == jnp.bfloat16
    jaxpr = jax.make_jaxpr(make_loss(saved))(arrays, jnp.ones(2), row)
    found = {x.aval.dtype.name for line in jaxpr.eqns for x in line.outvars}
    assert "float32" in found and "bfloat16" not in found


def test_heads_and_channels_that_are_zero_go_and_the_function_stays():
    saved = saved_model(depth=2, heads=4, kv_heads=2, hidden=24, ffn="swiglu")
    head = slice(2 * SMALL["head_dim"], None)  # the second group of two query heads
    saved = zeroed(zeroed(saved, "blocks/attention/out", (0, head)), "blocks/ffn/down", (1, 5))
    saved = zeroed(saved, "blocks/attention/out", (1, slice(0, 2 * SMALL["head_dim"])))
    saved = zeroed(saved, "blocks/ffn/down", (0, 23))
    small = shrink(saved, [batch(1)], Size(2, 2, 23, 32))
    assert small.params["blocks"]["attention"]["q"].shape == (2, 32, 16)
    assert small.params["blocks"]["ffn"]["up"].shape == (2, 32, 23)
    close(nats(small), nats(saved), rtol=1e-5)


NANO = {"depth": 3, "bigram_rows": 97, "qkv_bias": True}
GAINS = {**LLAMA, "post_norm": True, "out_bias": True, "ffn_bias": True}


@pytest.mark.parametrize("fields", [NANO, GAINS, GAINS | {"embed_norm": True}],
                         ids=["nano", "gains", "embed_norm"])  # fmt: skip
@pytest.mark.quick("nano")
def test_channels_that_are_zero_go_and_the_function_stays(fields):
    """Norms divide by the mean square over fewer channels: the weights make up for it."""
    saved = saved_model(**fields | {"norm_eps": 1e-12})
    gone = [25, 28, 30]
    for name, axis in CHANNELS.items():
        reads = name == "head" or axis == 1  # what reads a channel that is zero may stay
        if name in flatten(saved.params) and not reads and "gain" not in name:
            saved = zeroed(saved, name, (..., gone))
    for name in ("attention_post_gain", "ffn_post_gain"):
        if f"blocks/{name}" in flatten(saved.params):
            saved = zeroed(saved, f"blocks/{name}", (..., gone))
    c = saved.config.model
    small = shrink(saved, [batch(1)], Size(c.depth, c.heads, c.hidden, 29))
    assert small.params["embed"].shape[1] == small.config.model.width == 29
    close(nats(small), nats(saved), rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "width", "message"),
    [
        ({"norm": "layer", "norm_gain": True}, 28, "subtracts the mean"),
        ({"tied_head": True}, 28, "tied head has nothing"),
        ({}, 20, "less than the 24 channels that gates read"),
        ({}, 99, "--width 99 is more than the model's 32"),
    ],
)
def test_a_width_that_cannot_be_is_one_line(fields, width, message):
    c = resolved(**fields)
    with pytest.raises(UserError, match=message):
        check_shrunk_size(c, Size(c.depth, c.heads, c.hidden, width))


@pytest.mark.parametrize("valued", [False, True])
@pytest.mark.quick("False")
def test_layers_that_are_zero_go_and_the_function_stays(valued):
    saved = saved_model(depth=5, backout=False, value_embeddings=valued, window_pattern="SLS")
    gone = [1, 2] if valued else [0, 2]
    for name in ("attention/out", "ffn/down"):
        saved = zeroed(saved, f"blocks/{name}", gone)
    small = cut_layers(saved, [i for i in range(5) if i not in gone])
    assert small.config.model.depth == 3
    close(nats(small), nats(saved), rtol=1e-5)


@pytest.mark.slow
def test_the_layer_goes_whose_absence_costs_least():
    saved = saved_model(depth=3, backout=False, value_embeddings=False)
    candidates = [1, 2], [0, 2]
    best = min(candidates, key=lambda kept: nats(cut_layers(saved, kept)))
    assert layers_to_keep(saved, [batch(1)], 2) == best


@pytest.mark.slow
def test_nothing_removed_is_the_same_model_and_bad_sizes_are_one_line():
    saved = saved_model(depth=2)
    c = saved.config.model
    assert shrink(saved, [batch(1)], Size(2, c.heads, c.hidden, c.width)) is saved
    for size in (
        Size(1, c.heads, c.hidden, c.width),
        Size(2, 99, c.hidden, c.width),
        Size(2, c.heads, 9999, c.width),
    ):
        with pytest.raises(UserError):
            shrink(saved, [batch(1)], size)
    with pytest.raises(UserError, match="moe"):
        shrink(saved_model(moe={"experts": 2}), [batch(1)], Size(2, 4, 128, 32))


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_shrunk_run_trains(tmp_path):
    assert train(run_overrides(tmp_path, train__steps=1, model__depth=2, **FEW_PARTS)) == 0
    cut = ["--depth", "1", "--heads", "2", "--hidden", "16", "--width", "24", "--rows", "2"]
    assert main([str(tmp_path / "tiny"), *cut, "--out", str(tmp_path / "small")]) == 0
    c = load_saved(tmp_path / "small").config.model
    assert (c.depth, c.heads, c.hidden, c.width) == (1, 2, 16, 24)
    fields = {
        "run__name": "again", "train__init_from": tmp_path / "small", "train__steps": 1,
        "objective__name": "distill", "objective__teacher": tmp_path / "tiny",
    }  # fmt: skip
    given = ("model.", "data.tokenizer")
    again = [x for x in run_overrides(tmp_path, **fields) if not x.startswith(given)]
    assert train(again) == 0
    assert main([str(tmp_path / "tiny"), "--out", str(tmp_path / "small")]) == 2
