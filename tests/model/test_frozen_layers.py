"""model.frozen_layers: no backward pass, no optimizer step, for the layers from the bottom up."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_transformer import loss_and_gradient
from tiny import QUICK, VOCAB, build, rows_of, run_overrides, same, tokens, weights_of

from jaxtrain.config import load_config
from jaxtrain.finetune.partition import flatten
from jaxtrain.main import main
from jaxtrain.optim import make_optimizer
from jaxtrain.train.frozen_layers import freeze_layers, merge

FROZEN = 2  # of 4 layers, of which the last of each half has value embeddings
DEPTH = 4
INPUT = ("embed", "smear_gate", "smear_scale")
PHASES = QUICK | {
    "model__depth": 3, "model__frozen_layers": 2, "train__steps": 4, "checkpoint__every": 1,
    "train__phases": "[{until: 1, model: {frozen_layers: 0}}, "
    "{until: 2, model: {frozen_layers: 1}}]",
    "checkpoint__keep": 9, "data__workers": 0,
}  # fmt: skip


def halves(name, x):
    """The frozen and the trained entries of a parameter of the small model."""
    if name in INPUT:
        return x, x[:0] if x.ndim else x[None][:0]
    stacked = name.startswith("blocks/") or name in ("residual_scale", "x0_scale")
    k = FROZEN if stacked else 1 if name.startswith("value_embed") else 0
    return x[:k] if k else x[None][:0], x[k:] if k else x


@pytest.mark.parametrize("more", [{"scan_layers": True}, {"remat": "block"}], ids=str)
@pytest.mark.quick("{'scan_layers': True}")
def test_frozen_layers_have_no_gradient_and_the_others_have_theirs(more):
    few = more | {"smear": False, "backout": False, "window_pattern": "L", "depth": DEPTH}
    _, plain, _, params = build(**few)
    _, frozen, _, _ = build(**few, frozen_layers=FROZEN)
    (loss, grads), (other, found) = (
        loss_and_gradient(graphdef, params, tokens()) for graphdef in (plain, frozen)
    )
    np.testing.assert_array_equal(loss, other)
    for name, g in flatten(grads).items():
        (below, above), (zero, rest) = halves(name, g), halves(name, flatten(found)[name])
        assert not np.any(zero) and (np.any(below) or below.size == 0 or name == "smear_scale")
        np.testing.assert_allclose(rest, above, rtol=1e-5, atol=1e-6, err_msg=name)


def test_what_trains_is_written_over_the_last_entries():
    whole = {"stack": jnp.zeros((4, 2)), "head": jnp.zeros(2), "frozen": jnp.zeros(3)}
    merged = merge(whole, {"stack": jnp.ones((1, 2)), "head": jnp.ones(2)})
    assert merged["stack"].tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]
    assert merged["head"].tolist() == [1, 1] and not np.any(merged["frozen"])


@pytest.mark.slow
def test_a_frozen_layer_costs_no_backward_pass():
    """Products of the compiled gradient: 16 less for each frozen layer, which had 22 or more."""

    def products(k):
        fields = {"window_pattern": "L", "value_embeddings": False, "depth": 6}
        _, graphdef, _, params = build(**fields, frozen_layers=k)
        text = loss_and_gradient.lower(graphdef, params, tokens()).compile().as_text()
        return text.count(" dot(")

    none, two, four = products(0), products(2), products(4)
    assert none - two >= 32 and two - four >= 32  # six matrices and attention, two products each


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adamw8bit", "soap", "galore"])
@pytest.mark.quick("muon")
def test_the_optimizer_moves_the_others_as_before_and_leaves_the_frozen(name):
    c, _, specs, params = build(depth=DEPTH, frozen_layers=FROZEN)
    given = [f"optim.name={name}", "optim.schedule.warmup_steps=0"]
    given += ["optim.min_size=32"] * (name == "adamw8bit")
    optim = load_config(None, given).optim
    if name == "muon":
        optim = optim.model_copy(update={
            "matrix_lr": 0.01, "weight_decay": 0.1, "embedding_lr": 0.1, "head_lr": 0.01,
            "value_embedding_lr": 0.1, "residual_scale_lr": 0.1, "x0_scale_lr": 0.1, "mix_lr": 0.1,
        })  # fmt: skip
    make = lambda s: make_optimizer(optim, s, 10)
    whole, frozen = make(specs), freeze_layers(make, specs, c, VOCAB)
    state = whole.init(params)
    grads = jax.tree.map(lambda p: jnp.sin(7 * p), params)
    step = jnp.int32(1)
    run = lambda o: jax.jit(o.apply)(grads, state, params, step, whole.hyperparams)
    (expected, _), (moved, after) = run(whole), run(frozen)
    for key, old in flatten(params).items():
        same(halves(key, flatten(moved)[key])[0], halves(key, old)[0])
        new, usual = halves(key, flatten(moved)[key])[1], halves(key, flatten(expected)[key])[1]
        np.testing.assert_allclose(new, usual, rtol=1e-4, atol=1e-5, err_msg=key)
        # SOAP's first step makes its basis alone.
        assert new.size == 0 or name == "soap" or np.any(new != halves(key, old)[1])
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


@pytest.mark.slow
def test_gradients_may_have_fewer_bits_than_parameters():
    """As on a GPU, where a step computes in bfloat16."""
    c, _, specs, params = build(depth=DEPTH, frozen_layers=FROZEN)
    frozen = freeze_layers(
        lambda s: make_optimizer(load_config(None, []).optim, s, 100), specs, c, VOCAB
    )
    grads = jax.tree.map(lambda p: jnp.ones_like(p, jnp.bfloat16), params)
    new, _ = frozen.apply(grads, frozen.init(params), params, jnp.int32(5), frozen.hyperparams)
    old, now = (tree["blocks"]["ffn"]["up"] for tree in (params, new))
    moved = lambda layers: np.any(now[layers] != old[layers])
    assert moved(slice(FROZEN, None)) and not moved(slice(FROZEN))


@pytest.mark.slow
def test_layers_freeze_phase_by_phase_and_a_run_resumes_inside(tmp_path):
    more = {"mesh__fsdp": 2, "mesh__data": 4}
    assert main(run_overrides(tmp_path / "whole", **PHASES, **more)) == 0
    for last in (3, 2):  # inside a phase, and the end of one
        copy = shutil.copytree(tmp_path / "whole" / "tiny", tmp_path / str(last) / "tiny")
        for step in range(last + 1, 5):
            shutil.rmtree(copy / "checkpoints" / str(step))
        shutil.rmtree(copy / "model")
        assert main(run_overrides(tmp_path / str(last), **PHASES, **more)) == 0
        same(weights_of(copy), weights_of(tmp_path / "whole" / "tiny"))
        assert rows_of(copy) == rows_of(tmp_path / "whole" / "tiny")


def test_freezing_all_layers_is_refused(tmp_path, capfd):
    assert main(run_overrides(tmp_path, model__depth=2, model__frozen_layers=2)) == 2
    assert "frozen_layers 2 leaves none of 2 layers to train" in capfd.readouterr().err
