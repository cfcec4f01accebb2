"""The depth dial reads horizon, batch and rates from a recorded fit."""

import json

import jax
import pytest

from jaxtrain.config import load_config
from jaxtrain.config.resolve import horizon, resolve, resolved_text
from jaxtrain.config.scaling_fit import Dial, read_dial
from jaxtrain.settings import UserError

ONE = jax.devices()[:1]
DEEP = ["model.depth=4", "data.tokenizer.name=bytes", "train.sequence_length=128"]


def resolved(*more):
    return resolve(load_config(None, [*DEEP, *more]), 257, ONE)


def record(path, **dial):
    path.write_text(json.dumps({"dial": {"name": "mine", "source": "a study", **dial}}))
    return f"train.scaling_fit={path}"


def test_the_shipped_fit_is_nanochats_ratio():
    dial = read_dial("nanochat")
    assert dial.tokens_per_parameter.value == 12.0
    assert dial.batch_tokens is None and dial.rates(1e9) == 1.0
    assert resolved().train.tokens_per_parameter == 12.0


def test_a_fit_of_ones_own_sets_horizon_batch_and_rates(tmp_path):
    ratio = {"value": 20.0, "low": 18.0, "high": 23.0}
    plain, longer = resolved(), resolved(record(tmp_path / "a.json", tokens_per_parameter=ratio))
    assert longer.train.tokens_per_parameter == 20.0
    assert longer.train.steps * longer.train.batch_size == pytest.approx(
        plain.train.steps * plain.train.batch_size * 20 / 12, rel=0.02
    )
    assert longer.optim == plain.optim
    laws = {
        "batch_tokens": {"coefficient": 4.0, "exponent": 0.5},
        "rate_multiplier": {"coefficient": 0.5, "exponent": 0.0},
    }
    own = resolved(record(tmp_path / "b.json", tokens_per_parameter=ratio, **laws))
    tokens = horizon(own.model, 257, 20.0)
    step = own.train.batch_size * 128
    assert step == Dial.model_validate(
        {"name": "", "source": "", "tokens_per_parameter": ratio, **laws}
    ).batch(tokens)
    assert 2**-0.5 <= step / (4 * tokens**0.5) <= 2**0.5
    same = resolved(f"train.batch_size={own.train.batch_size}")
    ours, theirs = own.optim.model_dump(), same.optim.model_dump()
    for name in ("matrix_lr", "embedding_lr", "head_lr", "residual_scale_lr", "x0_scale_lr"):
        assert ours[name] == pytest.approx(0.5 * theirs[name]), name


def test_what_is_set_by_hand_wins(tmp_path):
    line = record(
        tmp_path / "a.json", tokens_per_parameter={"value": 20.0},
        rate_multiplier={"coefficient": 2.0, "exponent": 0.0},
    )  # fmt: skip
    c = resolved(line, "train.tokens_per_parameter=3", "optim.matrix_lr=0.07")
    assert c.train.tokens_per_parameter == 3.0 and c.optim.model_dump()["matrix_lr"] == 0.07


def test_print_config_names_the_fit_and_its_source(tmp_path):
    text = resolved_text(load_config(None, DEEP))
    assert "# fit      train.scaling_fit nanochat: 12 tokens a parameter; nanochat's" in text
    assert "tokens_per_parameter: 12.0  # that of scaling_fit" in text
    ratio = {"value": 20.0, "low": 18.0, "high": 23.0}
    line = record(tmp_path / "a.json", tokens_per_parameter=ratio)
    assert "20 tokens a parameter (18 to 23); a study" in resolved_text(
        load_config(None, [*DEEP, line])
    )
    by_hand = resolved_text(load_config(None, [*DEEP, "train.tokens_per_parameter=3"]))
    assert "scaling_fit nanochat" not in by_hand


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (None, "no such file; give the fit.json of `jaxtrain scaling fit`, or one of nanochat"),
        ({"dial": None}, "has no tokens per parameter of matrices and head"),
        ({"dial": {"name": "x", "source": ""}}, "dial.tokens_per_parameter: Field required"),
    ],
)
def test_a_file_that_is_no_fit_is_one_line(tmp_path, tree, message):
    path = tmp_path / "x.json"
    if tree is not None:
        path.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=message) as error:
        read_dial(str(path))
    assert len(error.value.args) == 1
