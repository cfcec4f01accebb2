"""LongRoPE: divisors of each frequency, by the row's length; in config.json and back."""

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError
from tiny import LLAMA, resolved

from jaxtrain.interop.configs import fitting_family, model_fields
from jaxtrain.model import ModelConfig
from jaxtrain.model.layers import rotary
from jaxtrain.model.rope import LongRopeScaling

SHORT, LONG = (1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 5.0, 16.0)
SECTION = {
    "name": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0,
    "original_context": 16,
}  # fmt: skip


def test_a_row_beyond_the_original_context_has_the_long_divisors():
    scaling = LongRopeScaling.model_validate(SECTION)
    positions = np.stack([np.arange(20), np.r_[:10, :10]]).astype(np.int32)
    cos = np.asarray(rotary(jnp.asarray(positions), 8, 100.0, scaling).cos_BT1H)[:, :, 0, :4]
    plain = 100.0 ** (-np.arange(0, 8, 2) / 8)
    attention = np.sqrt(1 + np.log(4) / np.log(16))  # HF: sqrt(1 + log(factor) / log(original))
    for row, divisors in zip((0, 1), (LONG, SHORT)):
        expected = attention * np.cos(positions[row][:, None] * plain / np.array(divisors))
        np.testing.assert_allclose(cos[row], expected, rtol=1e-4, atol=1e-5)


def test_config_json_and_back():
    c = resolved(**LLAMA | {"rope_scaling": SECTION, "context_length": 64})
    family, config = fitting_family(c, 61, None)
    theirs = config["rope_parameters"]
    assert family.model_type == "llama" and theirs["rope_type"] == "longrope"
    assert theirs["original_max_position_embeddings"] == 16 and theirs["long_factor"] == [*LONG]
    assert ModelConfig.model_validate(model_fields(config)).rope_scaling == c.rope_scaling
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "rope_scaling")}
    section = {"type": "longrope", "short_factor": [*SHORT], "long_factor": [*LONG]}
    old["rope_scaling"] = section | {"original_max_position_embeddings": 16}
    assert ModelConfig.model_validate(model_fields(old)).rope_scaling == c.rope_scaling


@pytest.mark.parametrize("wrong", [{"long_factor": LONG[:3]}, {"short_factor": (0.0, *SHORT[1:])}])
def test_wrong_divisors_are_refused(wrong):
    with pytest.raises(ValidationError, match="head_dim / 2 = 4 numbers|above 0"):
        resolved_config = {"head_dim": 8, "rope_scaling": SECTION | wrong}
        ModelConfig.model_validate(resolved_config)
