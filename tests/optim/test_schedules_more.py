"""All schedules with their warm-up, multipliers of groups, scaling with the batch, bad input."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import TypeAdapter
from tiny import VOCAB, resolved

from jaxtrain.config import load_config
from jaxtrain.model import Transformer, split
from jaxtrain.optim import AdamWConfig, MuonConfig, make_optimizer
from jaxtrain.optim.schedule import Schedule, multiplier, schedule_values
from jaxtrain.settings import UserError

TOTAL = 100
ALL = [
    {"name": "constant"},
    {"name": "linear", "final_fraction": 0.1},
    {"name": "cosine", "final_fraction": 0.1},
    {"name": "trapezoid", "final_fraction": 0.1},
    {"name": "trapezoid", "final_fraction": 0.1, "decay": "sqrt"},
    {"name": "trapezoid", "final_fraction": 0.1, "decay": "power"},
    {"name": "onecycle"},
    {"name": "inverse_sqrt"},
]
KINDS = pytest.mark.parametrize("fields", ALL, ids=lambda f: "-".join(map(str, f.values())))


def curve(**fields):
    """The multiplier at steps 0 ... TOTAL."""
    c = TypeAdapter(Schedule).validate_python(fields)
    return np.asarray(multiplier(c, schedule_values(c, TOTAL), jnp.arange(TOTAL + 1)))


@KINDS
def test_warmup_is_a_line_up_to_the_curve(fields):
    """From 1/warmup at the first step; what follows is the curve, where it has not fallen yet."""
    values = curve(**fields, warmup_steps=10)
    plain = curve(**fields) if fields["name"] == "onecycle" else np.ones(TOTAL + 1)
    np.testing.assert_allclose(values[:10], plain[:10] * np.arange(1, 11) / 10, rtol=1e-5)
    assert (values > 0).all() and values.max() <= 1 + 1e-6


@KINDS
def test_all_but_constant_end_where_they_should(fields):
    ends = {"constant": 1.0, "onecycle": 4e-6, "inverse_sqrt": np.sqrt(100 / 200)}
    assert curve(**fields)[-1] == pytest.approx(ends.get(fields["name"], 0.1), rel=1e-3)


@pytest.mark.parametrize(
    "fields", [{}, {"warmup_fraction": 0.5, "initial_fraction": 0.1, "final_fraction": 0.02}]
)
@pytest.mark.quick("fields0")
def test_onecycle_is_optaxs(fields):
    start, end = fields.get("initial_fraction", 0.04), fields.get("final_fraction", 4e-6)
    theirs = optax.cosine_onecycle_schedule(
        TOTAL, 1.0, fields.get("warmup_fraction", 0.3), 1 / start, start / end
    )
    expected = [float(theirs(step)) for step in range(TOTAL + 1)]
    np.testing.assert_allclose(curve(name="onecycle", **fields), expected, rtol=1e-4, atol=1e-6)


def test_inverse_sqrt_is_the_transformers_where_the_timescale_is_the_warmup():
    values = curve(name="inverse_sqrt", warmup_steps=20, timescale=20)
    np.testing.assert_allclose(values[20:], np.sqrt(20 / np.arange(20, TOTAL + 1)), rtol=1e-5)
    halves = curve(name="inverse_sqrt", timescale=25)
    np.testing.assert_allclose(halves[[25, 75]], [np.sqrt(0.5), 0.5], rtol=1e-5)


# ---- multipliers and the batch -------------------------------------------------------------------


def specs_of(**changes):
    return split(Transformer(resolved(depth=2, **changes), VOCAB))[1]


def peaks(c, batch_tokens=None, of="learning_rate"):
    optimizer = make_optimizer(c, specs_of(), 100, batch_tokens)
    return {n: float(h[of]) for n, h in optimizer.hyperparams["groups"].items()}


def adamw(**fields):
    return AdamWConfig.model_validate({"learning_rate": 1e-3, **fields})


def test_multipliers_scale_their_group_only():
    plain = peaks(adamw())
    scaled = peaks(adamw(multipliers={"head": 0.5, "scalar": 0.0}))
    factors = {name: scaled[name] / plain[name] for name in plain}
    assert factors == pytest.approx({"matrix": 1, "embedding": 1, "head": 0.5, "scalar": 0})
    muon = peaks(MuonConfig.model_validate({"multipliers": {"matrix": 2.0}}))
    assert muon["matrix"] == pytest.approx(2 * peaks(MuonConfig())["matrix"])


def test_decay_multipliers_scale_their_groups_decay_only():
    c = adamw(weight_decay=0.2, decay_multipliers={"value_embedding": 0.0, "head": 0.5})
    found = peaks(c, of="weight_decay")
    expected = {"matrix": 0.2, "embedding": 0.2, "value_embedding": 0, "head": 0.1, "scalar": 0}
    assert found == pytest.approx(expected)
    assert list(peaks(c).values()) == pytest.approx([1e-3] * 5)


def test_the_betas_of_one_adam_group_of_muon_leave_the_others():
    c = MuonConfig.model_validate({"adam_betas": {"embedding": [0.5, 0.9], "head": [0.6, 0.7]}})
    for index, name in enumerate(("b1", "b2")):
        of = lambda c, name=name: {
            row: float(h[name])
            for row, h in make_optimizer(c, specs_of(), 100).hyperparams["groups"].items()
            if row != "matrix"
        }
        plain = of(MuonConfig())
        changed = {"embedding": (0.5, 0.9)[index], "head": (0.6, 0.7)[index]}
        assert of(c) == pytest.approx(plain | changed)
        assert plain["embedding"] == pytest.approx((0.8, 0.995)[index])


def test_a_declared_group_without_a_row_can_have_a_multiplier():
    found = peaks(adamw(multipliers={"value_embedding": 3.0, "embedding": 2.0}))
    assert found["value_embedding"] == pytest.approx(3e-3)
    assert found["embedding"] == pytest.approx(2e-3)


def test_an_unknown_group_is_refused_with_the_list():
    message = r"multipliers: no group heads; there are matrix, .*head, .*value_embedding"
    with pytest.raises(UserError, match="optim." + message):
        peaks(adamw(multipliers={"heads": 0.5}))
    with pytest.raises(UserError, match="optim.decay_" + message):
        peaks(adamw(decay_multipliers={"heads": 0.5}))


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_rates_follow_the_batch(rule, factor):
    c = adamw(batch_scaling={"rule": rule, "reference_tokens": 1024})
    np.testing.assert_allclose(list(peaks(c, 4096).values()), 1e-3 * factor, rtol=1e-6)
    np.testing.assert_allclose(list(peaks(c).values()), 1e-3, rtol=1e-6)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.name=adamm", "optim.name: got 'adamm', allowed are 'muon', 'adamw', .*'lars'"),
        (
            "optim.schedule.name=step",
            "optim.schedule.name: got 'step', allowed are 'constant', .*'inverse_sqrt'",
        ),
        (
            "optim.multipliers={head: -1}",
            "optim.multipliers.head: got -1: .*greater than or equal to 0",
        ),
        ("optim.adam_betas={matrix: [0.9, 0.9]}", "optim.adam_betas.*'embedding', .*'gain'"),
        ("optim.adam_betas={head: [0.9, 1]}", r"optim.adam_betas.head.1: got 1: .*less than 1"),
        ("optim.batch_scaling.rule=square", "optim.batch_scaling.rule: got 'square': .*'sqrt'"),
    ],
)
def test_unknown_names_are_answered_with_the_list(override, message):
    with pytest.raises(UserError, match=message):
        load_config(None, [override])


@KINDS
def test_a_warmup_longer_than_the_run_is_refused(fields):
    c = adamw(schedule={**fields, "warmup_steps": 101})
    with pytest.raises(UserError, match="warmup_steps is 101, but the run has 100 steps"):
        make_optimizer(c, specs_of(), 100)


@pytest.mark.parametrize(
    "override, expected",
    [
        ("optim.schedule.final_fraction=0", ("trapezoid", 40, 0.0, 0.65)),
        ("optim.schedule.decay_fraction=0.85", ("trapezoid", 40, 0.05, 0.85)),
        ("optim.schedule={warmup_steps: 7}", ("trapezoid", 7, 0.05, 0.65)),
        ("optim.schedule.name=linear", ("linear", 0, 0.0, None)),
    ],
)
def test_one_field_of_the_default_schedule_leaves_the_others(override, expected):
    found = load_config(None, [override]).optim.schedule
    fields = (getattr(found, n, None) for n in ("name", "warmup_steps", "final_fraction"))
    assert (*fields, getattr(found, "decay_fraction", None)) == expected
