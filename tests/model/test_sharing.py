"""model.share_layers: layers with one set of weights are layers with copies of it. model.share_kv:
layers read the keys and values of another, and the cache holds the others' alone."""

import functools
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_by_hand import PLAIN, causal_attention, states_by_hand
from flax import nnx
from test_two_four import NANOCHAT
from tiny import (
    SAMPLES,
    VOCAB,
    T,
    assert_same_run,
    build,
    close,
    forget_end,
    random_run,
    resolved,
    run_overrides,
    same,
    tokens,
)

from jaxtrain.cli import main as interop
from jaxtrain.main import main
from jaxtrain.model import Prefill, Transformer, count, flops_per_token, split
from jaxtrain.model.layers import rotary, rotate
from jaxtrain.model.plan import make_plan, make_runs
from jaxtrain.model.sharing import kv_sources
from jaxtrain.runs.saved import load_saved

FIELDS = {"depth": 4, "window_pattern": "SSSL", "width": 16, "hidden": 32}
DEEP = FIELDS | {"depth": 8, "value_embeddings": False}
ADJACENT = {"name": "adjacent", "layers": 2}
SHARED = {"all": "all", "adjacent": ADJACENT}


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(graphdef, params):
    def loss(p):
        states = nnx.merge(graphdef, p)(jnp.asarray(tokens(2))).states
        return jnp.mean(states * jnp.sin(jnp.arange(states.size)).reshape(states.shape))

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.slow
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


LATENT = {"model__qk_norm": False, "model__value_embeddings": False}
RUNS = {
    "both": {"model__share_layers": "adjacent", "model__share_kv": "adjacent"},
    "latents": LATENT | {"model__mla": "{kv_rank: 16, rope_dim: 4}"},
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", RUNS.values(), ids=RUNS)
def test_a_sharded_run_goes_on_bit_for_bit(fields, tmp_path):
    given = fields | {"model__depth": 2, "mesh__fsdp": 2} | SAMPLES
    assert main(run_overrides(tmp_path / "whole", **given)) == 0
    parts = shutil.copytree(tmp_path / "whole" / "tiny", tmp_path / "parts" / "tiny")
    forget_end(parts, 6)
    assert main(run_overrides(tmp_path / "parts", **given)) == 0
    assert_same_run(parts, tmp_path / "whole" / "tiny")


# ---- keys and values ---------------------------------------------------------------------------

KV = {"adjacent": "adjacent", "global": {"name": "global", "layers": 3}}


@pytest.mark.parametrize("share", KV)
def test_which_layers_have_keys_and_values(share):
    c = resolved(**DEEP, share_kv=KV[share])
    expected = {"adjacent": [0, 0, 2, 2, 4, 4, 6, 6], "global": [0, 0, 0, 3, 4, 4, 4, 3]}
    assert [i - n for i, n in enumerate(kv_sources(c.share_kv, "SSSLSSSL"))] == expected[share]
    specs = split(Transformer(c, VOCAB))[1]
    assert len(set(expected[share])) == specs["kv"]["k"].shape[0] == specs["kv"]["v"].shape[0]
    assert specs["blocks"]["attention"].keys() == {"q", "out"}


@pytest.mark.parametrize("more", [{}, {"scan_layers": True, "remat": "block"}], ids=["", "scan"])
def test_a_layer_reads_the_keys_and_values_of_the_one_before(more):
    c, graphdef, _, params = build(**PLAIN, share_kv="adjacent", **more)
    rows, heads, kv = jnp.asarray(tokens(2)), lambda x: x.reshape(*x.shape[:2], c.heads, -1), []
    rope = rotary(jnp.arange(T)[None], c.head_dim, c.rope_base)

    def attend(i, h):
        if i % 2 == 0:
            k, v = (h @ params["kv"][name][i // 2] for name in "kv")
            kv[:] = rotate(heads(k), rope, None), heads(v)
        q = rotate(heads(h @ params["blocks"]["attention"]["q"][i]), rope, None)
        return causal_attention(q, *kv, c.head_dim**-0.5)

    states = nnx.merge(graphdef, params)(rows).states
    close(states, states_by_hand(c, params, rows, attend), rtol=1e-3, atol=1e-4)


def test_a_scanned_period_has_the_sources_of_its_layers():
    """Of many plans: a layer that reads another's keys and values stands in one period with it."""
    shares = [{"name": name, "layers": n} for name in ("adjacent", "global") for n in (2, 3)]
    for share, depth in itertools.product(shares, (1, 4, 7, 12)):
        for pattern, last in itertools.product(("L", "S", "SL", "SSL", "SSSSSL"), (True, False)):
            fields = {"depth": depth, "window_pattern": pattern, "last_layer_full": last}
            for period, _ in make_runs(make_plan(resolved(**fields, share_kv=share)), scan=True):
                assert all(spec.kv_from <= i for i, spec in enumerate(period))


def test_the_cache_holds_the_sources_alone():
    _, graphdef, _, params = build(**FIELDS, share_kv="adjacent")
    model = nnx.merge(graphdef, params)
    run = lambda rows: model(rows, mode=Prefill(jnp.array([3, 5]), 8)).cache
    assert len(jax.eval_shape(run, jnp.asarray(tokens(2, 8))).kv) == 2
