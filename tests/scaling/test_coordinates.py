"""The coordinate check: what is measured, and the verdicts."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import FEW_PARTS, assignments, build, tokens

from jaxtrain.cli import main
from jaxtrain.model import initialize
from jaxtrain.scaling.coordinates import (
    ActivationChange,
    activation_rms,
    activations,
    slope_of,
    slopes,
)
from jaxtrain.scaling.laws import Interval


@pytest.mark.slow
def test_activations_are_those_of_the_forward_pass():
    _, graphdef, specs, params = build()
    ids = jnp.asarray(tokens())
    found = activations(graphdef, params, ids)
    assert list(found) == ["embedding", "attention", "ffn", "stream", "logits"]
    assert len(found["attention"]) == len(found["ffn"]) == 2
    from flax import nnx

    network = nnx.merge(graphdef, params)
    expected = network.logits(network(ids).states)
    np.testing.assert_allclose(found["logits"][0], expected, rtol=1e-5, atol=1e-5)
    before, after, change = activation_rms(graphdef, params, params, ids)["ffn"]
    assert before == after > 0 and change == 0
    first = initialize(specs, 0)  # whose output matrices are zeros
    assert activation_rms(graphdef, first, first, ids)["attention"][0] == 0


def rows(power, sizes=(32, 64, 128), noise=0.0):
    random = np.random.default_rng(0)
    value = lambda size: size**power * math.exp(noise * random.normal())
    return [(size, value(size)) for size in sizes for _ in range(3)]


@pytest.mark.parametrize(
    ("power", "noise", "verdict"),
    [(0.0, 0.01, "flat"), (0.5, 0.01, "grows"), (-0.5, 0.01, "shrinks"), (0.0, 1.0, "unclear")],
)
def test_a_verdict_is_of_the_interval_of_the_power(power, noise, verdict):
    slope, found = slope_of(rows(power, noise=noise))
    assert found == verdict and slope.holds(power)


def test_without_points_nothing_is_said():
    assert slope_of([(32, 1.0)])[1] == slope_of([(32, 1.0)] * 5)[1] == "unclear"
    zero = [ActivationChange("ffn", size, 0, 0.0, 1.0, 1.0) for size in (32, 64, 128)]
    found = {one.what: one for one in slopes(zero)}
    assert found["before"].verdict == "unclear" and isinstance(found["before"].slope, Interval)
    assert found["change"].verdict == "flat"


@pytest.mark.slow
def test_the_logits_of_the_standard_parametrization_grow_and_those_of_mup_do_not(
    tmp_path, monkeypatch
):
    devices = jax.devices()[:1]  # a step of eight takes longer to compile
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    words = [
        "quickstart", "data.tokenizer={name: bytes}", "model.depth=1", "model.head_dim=8",
        "train.sequence_length=16", "train.batch_size=8", "--widths", "16", "32", "64",
        "--seeds", "1", "--steps", "3", *assignments(**FEW_PARTS),
    ]  # fmt: skip
    found = {}
    for scheme in ("speedrun", "mup"):
        out = tmp_path / scheme
        assert (
            main(["scaling", "coordinates", *words, f"model.init={scheme}", "--out", str(out)]) == 0
        )
        tree = json.loads((out / "coordinates.json").read_text())
        found[scheme] = {(s["kind"], s["what"]): s["value"] for s in tree["slopes"]}
        assert "<svg" in (out / "coordinates.html").read_text()
    assert found["speedrun"]["logits", "change"] > found["mup"]["logits", "change"] + 0.2


def test_one_size_has_no_slope(tmp_path, capsys):
    assert main(["scaling", "coordinates", "quickstart", "--widths", "16"]) == 2
    assert "--widths 16: a slope needs two sizes or more" in capsys.readouterr().err
