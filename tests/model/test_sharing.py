"""model.share_layers: layers with one set of weights are layers with copies of it."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_two_four import NANOCHAT
from tiny import (
    SAMPLES,
    VOCAB,
    T,
    assert_same_run,
    build,
    close,
    random_run,
    resolved,
    run_overrides,
    same,
    tokens,
)

from jaxtrain.cli import main as interop
from jaxtrain.main import main
from jaxtrain.model import Transformer, count, flops_per_token, split
from jaxtrain.model.plan import make_runs
from jaxtrain.runs.saved import load_saved

FIELDS = {"depth": 4, "window_pattern": "SSSL", "width": 16, "hidden": 32}
DEEP = FIELDS | {"depth": 8, "value_embeddings": False}
ADJACENT = {"name": "adjacent", "layers": 2}
SHARED = {"all": "all", "adjacent": ADJACENT}


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(graphdef, params):
    def loss(p):
        return jnp.mean(jnp.square(nnx.merge(graphdef, p)(jnp.asarray(tokens(2))).states))

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.quick("unrolled-adjacent")
def test_it_is_the_model_with_copies_and_gradients_are_summed(share, scan):
    c, shared, _, params = build(**FIELDS, share_layers=share, scan_layers=scan)
    plain, n = build(**FIELDS)[1], c.layers_per_set
    copies = {**params, "blocks": jax.tree.map(lambda w: jnp.repeat(w, n, 0), params["blocks"])}
    loss, gradient = loss_and_gradient(plain, copies)
    summed = lambda g: g.reshape(-1, n, *g.shape[1:]).sum(1)
    expected = {**gradient, "blocks": jax.tree.map(summed, gradient["blocks"])}
    close(loss_and_gradient(shared, params), (loss, expected), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
def test_a_scan_repeats_whole_sets(share):
    model = Transformer(resolved(**DEEP, share_layers=share), VOCAB)
    assert [(len(period), times) for period, times in make_runs(model.plan, True)] == [(4, 2)]


def test_parameters_are_stored_once_and_flops_count_every_use():
    plain, shared, one = (
        resolved(**FIELDS, share_layers=share) for share in (None, ADJACENT, "all")
    )
    specs = [split(Transformer(c, VOCAB))[1] for c in (plain, shared, one)]
    blocks = [count(s["blocks"]) for s in specs]
    assert blocks == [blocks[0], blocks[0] // 2, blocks[0] // 4]
    flops = [flops_per_token(c, s, T) for c, s in zip((plain, shared, one), specs)]
    assert flops == [flops[0]] * 3


def test_an_export_writes_the_weights_out_for_each_layer(tmp_path):
    run = random_run(tmp_path / "run", [*NANOCHAT, "model.share_layers=adjacent"])
    assert interop(["export", str(run), str(tmp_path / "out")]) == 0
    assert interop(["import", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    saved, back = load_saved(run), load_saved(tmp_path / "back")
    assert back.config.model.share_layers is None
    same(back.params["blocks"], jax.tree.map(lambda w: np.repeat(w, 2, 0), saved.params["blocks"]))


@pytest.mark.slow
def test_a_sharded_run_goes_on_bit_for_bit(tmp_path):
    given = {"model__share_layers": "adjacent", "model__depth": 2, "mesh__fsdp": 2} | SAMPLES
    for name in ("parts", "whole"):
        assert main(run_overrides(tmp_path / name, **given)) == 0
    shutil.rmtree(tmp_path / "parts" / "tiny" / "checkpoints" / "6")
    assert main(run_overrides(tmp_path / "parts", **given)) == 0
    assert_same_run(tmp_path / "parts" / "tiny", tmp_path / "whole" / "tiny")
