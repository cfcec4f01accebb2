"""Folded scales: the same function before rounding, less error behind it, no scale of an input."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import LLAMA, random_run

from jaxtrain.cli import main
from jaxtrain.compress.calibrate import visit_layers
from jaxtrain.compress.calibration_text import TokenRows
from jaxtrain.compress.fold import fold_layer, folds_of
from jaxtrain.compress.methods import MethodOptions
from jaxtrain.compress.quantize import (
    Calibration,
    quantize_params,
    quantize_saved,
    replaced,
    save_quantized,
    solve,
)
from jaxtrain.model import cast
from jaxtrain.runs.saved import load_saved
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.int4 import Int4Weight, ScaledInt4Weight
from jaxtrain.weights.quantized import QuantizedWeight
from jaxtrain.weights.w8a8 import DynamicInt8Weight, W8A8Weight

BIASES = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
MODELS = {
    "llama": LLAMA,
    "biases": {**LLAMA, **BIASES, "kv_heads": 4},
    "gemma": {**LLAMA, "ffn": "geglu", "post_norm": True, "kv_heads": 1, "embed_scale": 5.6},
    "gpt2": {**LLAMA, **BIASES, "ffn": "gelu", "norm": "layer", "position_embedding": "learned"},
}
TEXT = np.random.default_rng(0).integers(0, 255, (8, 32), np.int32)
ROWS = [TokenRows(TEXT)]


@pytest.fixture(scope="module")
def saved_as(tmp_path_factory):
    """name -> a saved model with random weights; three of its norms' channels are loud."""

    def make(name, loud=1.0):
        fields = [f"model.{key}={json.dumps(value)}" for key, value in MODELS[name].items()]
        fields += ["data.tokenizer.name=bytes", "train.sequence_length=32"]
        saved = load_saved(random_run(tmp_path_factory.mktemp("fold"), fields))
        gains = {n: np.array(x) for n, x in flatten(saved.params).items() if n.endswith("_gain")}
        for gain in gains.values():
            gain[..., [3, 11, 20]] *= loud
        return saved._replace(params=replaced(saved.params, gains))

    return make


def hidden(saved, params):
    """The last layer's states of the text, in float32."""
    narrow = cast(jax.device_put(params), saved.specs, jnp.dtype("float32"))
    return np.asarray(nnx.merge(saved.graphdef, narrow)(jnp.asarray(TEXT)).states)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick("llama")
def test_scales_that_are_folded_change_nothing(name, saved_as):
    """Any scales: queries of one value head share those of its channels."""
    saved, random = saved_as(name), np.random.default_rng(1)
    folds = folds_of(saved.config.model)
    assert len(folds) == (3 if name == "gpt2" else 4)
    flat = flatten(saved.params)
    vectors = {n: flat[n] for fold in folds for n in fold.makers if n in flat and flat[n].ndim == 2}
    assert len(vectors) == {"llama": 2, "biases": 4, "gemma": 2, "gpt2": 5}[name]

    def any_scales(w_KN, inputs, fold):
        return fold.pooled(jnp.exp(jnp.float32(random.normal(size=len(w_KN)))), jnp.mean)

    def visit(index, matrices):
        arrays = {n: m.w_KN for n, m in matrices.items()} | {
            n: x[index] for n, x in vectors.items()
        }
        return fold_layer(folds, arrays, {n: m.inputs for n, m in matrices.items()}, any_scales)

    params = visit_layers(saved, ROWS, visit)
    for fold in folds:
        for n in (*fold.readers, *fold.makers):
            assert n not in flat or np.abs(flatten(params)[n] - flat[n]).max() > 0.1, n
    wanted = hidden(saved, saved.params)
    np.testing.assert_allclose(
        hidden(saved, params), wanted, rtol=0, atol=2e-4 * np.abs(wanted).max()
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["awq", "w8a8"])
def test_a_model_with_gains_needs_no_scale_of_an_input_and_loses_less(method, saved_as):
    """Less than rounding to nearest, where a few inputs are 20 times the others."""
    saved, options = saved_as("llama", loud=20.0), MethodOptions(16)
    solved, params = solve(saved, ROWS, method, options)
    small = quantize_params(params, saved.specs, method, options, solved=solved)
    packed = [x for x in flatten(small).values() if isinstance(x, QuantizedWeight)]
    form = Int4Weight if method == "awq" else DynamicInt8Weight
    assert len(packed) == 7 and {type(x) for x in packed} == {form}
    wanted = hidden(saved, saved.params)
    plain = quantize_params(saved.params, saved.specs, method, options)  # without statistics
    moved = [np.linalg.norm(hidden(saved, p) - wanted) for p in (small, plain)]
    assert 0 < moved[0] < 0.8 * moved[1]


@pytest.mark.slow
def test_gains_of_an_imported_model_are_folded_in_float32(saved_as, tmp_path):
    """bfloat16 would round each channel of them; the saved arrays are loaded and exported."""
    saved, text = saved_as("biases"), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    flat = flatten(saved.params)
    gains = {n: np.asarray(x, jnp.bfloat16) for n, x in flat.items() if n.endswith("_gain")}
    saved = saved._replace(params=replaced(saved.params, gains))
    calibration = Calibration(text, 8, 32)
    config, params = quantize_saved(saved, "awq", MethodOptions(16), calibration=calibration)
    found = flatten(params)
    assert (
        found["blocks/attention_gain"].dtype == found["blocks/attention/v_bias"].dtype == "float32"
    )
    save_quantized(tmp_path / "small", saved, config, params)
    again = flatten(load_saved(tmp_path / "small").params)
    for name in ("blocks/attention_gain", "blocks/ffn_gain", "blocks/attention/v_bias"):
        np.testing.assert_array_equal(again[name], found[name])
        assert np.abs(np.float32(found[name]) - np.float32(flat[name])).max() > 0.01
    assert main(["export", str(tmp_path / "small"), str(tmp_path / "out")]) == 0


@pytest.mark.slow
def test_what_no_gain_and_no_gate_precedes_keeps_its_scales(saved_as):
    """GPT-2's down projection reads a GELU, and the norms of a speed-run GPT have no gains."""
    saved = saved_as("gpt2")
    kinds = {}
    for method in ("awq", "w8a8"):
        solved, _ = solve(saved, ROWS, method, MethodOptions(16))
        kinds |= {(method, name.split("/")[-1]): type(x) for (name, _), x in solved.items()}
    assert {n for (_, n), kind in kinds.items() if kind in (ScaledInt4Weight, W8A8Weight)} == {
        "down"
    }
    c = saved.config.model
    for changes in ({"norm_gain": False}, {"value_embeddings": True}, {"block_norm": False}):
        assert folds_of(c.model_copy(update=changes)) == ()
