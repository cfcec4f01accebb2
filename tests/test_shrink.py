"""Structured pruning: what is cut is what was zero, and the rest is the same function."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import SMALL, batch, build, close, run_overrides

from jaxtrain.compress.shrink import Size, cut_layers, layers_to_keep, main, shrink
from jaxtrain.finetune import unflatten
from jaxtrain.main import main as train
from jaxtrain.objectives.next_token import next_token_loss
from jaxtrain.runs.saved import Saved, load_saved
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import flatten


class Config:
    """A configuration that has a model alone."""

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


def test_heads_and_channels_that_are_zero_go_and_the_function_stays():
    saved = saved_model(depth=2, heads=4, kv_heads=2, hidden=24, ffn="swiglu")
    head = slice(2 * SMALL["head_dim"], None)  # the second group of two query heads
    saved = zeroed(zeroed(saved, "blocks/attention/out", (0, head)), "blocks/ffn/down", (1, 5))
    saved = zeroed(saved, "blocks/attention/out", (1, slice(0, 2 * SMALL["head_dim"])))
    saved = zeroed(saved, "blocks/ffn/down", (0, 23))
    small = shrink(saved, [batch(1)], Size(2, 2, 23))
    assert small.params["blocks"]["attention"]["q"].shape == (2, 32, 16)
    assert small.params["blocks"]["ffn"]["up"].shape == (2, 32, 23)
    close(nats(small), nats(saved), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("valued", [False, True])
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
    assert shrink(saved, [batch(1)], Size(2, c.heads, c.hidden)) is saved
    for size in (Size(1, c.heads, c.hidden), Size(2, 99, c.hidden), Size(2, c.heads, 9999)):
        with pytest.raises(UserError):
            shrink(saved, [batch(1)], size)
    with pytest.raises(UserError, match="moe"):
        shrink(saved_model(moe={"experts": 2}), [batch(1)], Size(2, 4, 128))


@pytest.mark.slow
def test_a_shrunk_run_trains(tmp_path):
    assert train(run_overrides(tmp_path, train__steps=1, model__depth=3)) == 0
    cut = ["--depth", "1", "--heads", "2", "--hidden", "16", "--rows", "2"]
    assert main([str(tmp_path / "tiny"), *cut, "--out", str(tmp_path / "small")]) == 0
    c = load_saved(tmp_path / "small").config.model
    assert (c.depth, c.heads, c.hidden) == (1, 2, 16)
    fields = {
        "run__name": "again", "train__init_from": tmp_path / "small", "train__steps": 1,
        "objective__name": "distill", "objective__teacher": tmp_path / "tiny",
    }  # fmt: skip
    given = ("model.", "data.tokenizer")
    again = [x for x in run_overrides(tmp_path, **fields) if not x.startswith(given)]
    assert train(again) == 0
    assert main([str(tmp_path / "tiny"), "--out", str(tmp_path / "small")]) == 2
