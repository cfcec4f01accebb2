"""Our model against nanochat's forward and backward pass in PyTorch float64 (make_golden.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden import Golden, model_of, to_ours

from benchmarks.nanochat import nanochat_weights
from jaxtrain.data import Batch
from jaxtrain.model import initialize
from jaxtrain.objectives import next_token as objectives

GOLDEN = Golden("golden_model")
CONFIG = GOLDEN.facts("config")
VOCAB = GOLDEN["logits"].shape[-1]
VARIANTS = sorted(path.removesuffix("/facts") for path in GOLDEN.arrays if path.endswith("/facts"))


def golden_batch(document_mask):
    targets = GOLDEN["targets"].astype(np.int32)
    weights = (targets >= 0).astype(np.float32)
    documents = GOLDEN["documents"].astype(np.int32) + 1 if document_mask else None
    batch = Batch(GOLDEN["tokens"], np.maximum(targets, 0), weights, documents, None)
    return jax.tree.map(jnp.asarray, batch)


def loss_and_gradients(config, weights):
    """Mean loss and its gradients in nanochat's own layout, through our model in float32."""
    c, graphdef, specs = model_of(config, VOCAB, GOLDEN["tokens"].shape[1])
    batch = golden_batch(c.document_mask)

    def loss(w):
        params = to_ours(w, c)
        jax.tree.map(lambda p, s: p.shape == s.shape or pytest.fail(f"{s}"), params, specs)
        return objectives.next_token_loss(graphdef, params, batch) / batch.weights_BT.sum()

    return jax.jit(jax.value_and_grad(loss))({k: np.float32(w) for k, w in weights.items()})


def test_logits_loss_and_every_gradient_equal_the_oracle():
    weights = GOLDEN.under("weights")
    c, graphdef, _ = model_of(CONFIG, VOCAB, GOLDEN["tokens"].shape[1])
    model = nnx.merge(graphdef, to_ours(weights, c))
    x_BTD = jax.jit(lambda m, tokens: m(tokens).states)(model, golden_batch(False).tokens_BT)
    logits = model.logits(x_BTD.reshape(-1, c.width)).reshape(GOLDEN["logits"].shape)
    np.testing.assert_allclose(logits, GOLDEN["logits"], rtol=1e-5, atol=1e-5)
    loss, gradients = loss_and_gradients(CONFIG, weights)
    np.testing.assert_allclose(loss, GOLDEN["loss"], rtol=1e-5)
    expected = GOLDEN.under("gradients")
    assert gradients.keys() == expected.keys()
    for name, g in expected.items():
        scale = np.abs(g).max()
        assert scale > 1e-4, name  # no path is closed
        np.testing.assert_allclose(gradients[name], g, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


def test_nanochat_can_start_from_our_weights():
    """`bench nanochat` names them as nanochat does: read back, they are the same tree."""
    c, _, specs = model_of(CONFIG, VOCAB, GOLDEN["tokens"].shape[1])
    params = initialize(specs, 0)
    named = nanochat_weights(params, c)
    short = {n.removeprefix("transformer.").removesuffix(".weight"): x for n, x in named.items()}
    assert short.keys() == GOLDEN.under("weights").keys()
    jax.tree.map(np.testing.assert_array_equal, to_ours(short, c), params)


def sketch(x):
    """As make_golden.py's."""
    x = np.asarray(x, np.float64)
    return np.cos(np.arange(1, 5)[:, None] * np.arange(1, x.size + 1)) @ x.ravel()


@pytest.mark.slow
@pytest.mark.parametrize("title", VARIANTS)
def test_each_switch_equals_the_oracle(title):
    facts = GOLDEN.facts(f"{title}/facts")
    weights = GOLDEN.under("weights") | GOLDEN.under("shallow/weights")
    weights |= GOLDEN.under(f"{title}/weights")
    weights = {name: weights[name] for name in facts["names"]}
    loss, gradients = loss_and_gradients(CONFIG | facts["config"], weights)
    assert title == "shallow" or abs(loss - GOLDEN["shallow/loss"]) > 1e-4  # the switch counts
    np.testing.assert_allclose(loss, GOLDEN[f"{title}/loss"], rtol=1e-5)
    for name, expected, norm in zip(
        facts["names"], GOLDEN[f"{title}/sketches"], GOLDEN[f"{title}/norms"], strict=True
    ):
        # a scalar's gradient is a sum of many terms that cancel
        noise = {"rtol": 1e-5, "atol": 1e-5 * norm + 3e-7, "err_msg": name}
        np.testing.assert_allclose(np.linalg.norm(gradients[name]), norm, **noise)
        np.testing.assert_allclose(sketch(gradients[name]), expected, **noise)
