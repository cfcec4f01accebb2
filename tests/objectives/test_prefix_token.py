"""Prefix-token prediction: the table of prefixes, and its loss against two softmaxes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    FEW_PARTS,
    PLAIN_MODEL,
    VOCAB,
    assert_same_metrics,
    batch,
    build,
    make_spec,
    resolved,
    run_overrides,
)

from jaxtrain.main import main
from jaxtrain.objectives import LossOptions
from jaxtrain.objectives.next_token import next_token_loss
from jaxtrain.objectives.prefix_token import PrefixTokenConfig, make_prefix_token, prefix_tokens
from jaxtrain.runs.history import read_rows

LETTERS = [bytes([97 + i]) for i in range(20)]
PIECES = (b"", *LETTERS, *(a + b for a in LETTERS[:4] for b in LETTERS[:10]))
OPTIONS = LossOptions(steps=30, pieces=PIECES)


def test_a_prefix_is_the_longest_proper_one_of_the_vocabulary():
    pieces = (b"", b"a", b"abc", b"ab", b"abcde", b"b", b"cd", b"a")
    np.testing.assert_array_equal(prefix_tokens(pieces), [-1, -1, 3, 1, 2, -1, -1, -1])


def apart(graphdef, params, one, weight):
    """The two losses with a softmax each."""
    prefix = prefix_tokens(PIECES)[np.asarray(one.targets_BT)]
    second = one._replace(
        targets_BT=jnp.maximum(prefix, 0), weights_BT=one.weights_BT * (prefix >= 0)
    )
    parts = [next_token_loss(graphdef, params, x) for x in (one, second)]
    return parts[0] + weight * parts[1]


@pytest.mark.parametrize(("step", "weight"), [(0, 0.25), (10, 0.25), (15, 0.125), (20, 0.0)])
@pytest.mark.quick("15-0.125")
def test_one_softmax_gives_both_losses(step, weight):
    assert len(PIECES) == VOCAB
    _, graphdef, _, params = build(depth=1)
    one = jax.tree.map(jnp.asarray, batch(4))
    objective = make_prefix_token(PrefixTokenConfig(), OPTIONS)
    found = lambda p: objective.loss(graphdef, p, one, None, step=jnp.int32(step))[0]
    loss, grads = jax.jit(jax.value_and_grad(found))(params)
    both = lambda p: apart(graphdef, p, one, weight)
    expected, theirs = jax.jit(jax.value_and_grad(both))(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4)


@pytest.mark.slow
def test_a_sharded_step_is_that_of_one_device():
    spec, hyperparams = make_spec(resolved(**PLAIN_MODEL))
    spec = spec._replace(objective=make_prefix_token(PrefixTokenConfig(), OPTIONS))
    assert_same_metrics(spec, hyperparams, ("loss", "bpb", "prefix_gap", "grad_norm"))


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_validates_the_next_token_alone(tmp_path):
    assert (
        main(run_overrides(tmp_path, train__steps=6, objective__name="prefix_token", **FEW_PARTS))
        == 0
    )
    rows = read_rows(tmp_path / "tiny" / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "train"]
    assert abs(steps[0]["prefix_gap"]) < 0.5 and np.isfinite(steps[-1]["prefix_gap"])
    last = [row for row in rows if row["kind"] == "validation"][-1]
    assert last["loss"] == pytest.approx(steps[-1]["loss"], abs=0.5)
