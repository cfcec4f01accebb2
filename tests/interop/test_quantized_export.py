"""Quantized models as compressed-tensors lays them out; opened by transformers where it is."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import prompts
from test_families import logits_of
from tiny import LLAMA, random_run

from jaxtrain.cli import main
from jaxtrain.compress.calibration_text import TokenRows
from jaxtrain.compress.methods import METHODS, MethodOptions
from jaxtrain.compress.quantize import quantize_params, solve
from jaxtrain.interop.compressed_tensors import pack_int32, quantization_config
from jaxtrain.interop.tensors import read, read_header
from jaxtrain.runs.saved import load_saved, save_model
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import dequantize, flatten
from jaxtrain.weights.int4 import quantize_int4

SCRIPT = Path(__file__).with_name("run_transformers.py")
HERE = all(importlib.util.find_spec(name) for name in ("torch", "compressed_tensors"))
PYTHON = os.environ.get("JAXTRAIN_TORCH_PYTHON", sys.executable if HERE else "")
OUT = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model folder that Hugging Face's Llama can hold; bytes."""
    fields = [f"model.{name}={json.dumps(value)}" for name, value in LLAMA.items()]
    fields += ["data.tokenizer.name=bytes", "train.sequence_length=32"]
    return random_run(tmp_path_factory.mktemp("llama"), fields) / "model"


ROWS = [TokenRows(np.random.default_rng(0).integers(0, 255, (8, 32), np.int32))]


def quantized(saved, method, options):
    """The parameters by a method, on a calibration text where it reads one."""
    if not METHODS[method].inputs:
        return quantize_params(saved.params, saved.specs, method, options)
    solved, params = solve(saved, ROWS, method, options)
    return quantize_params(params, saved.specs, method, options, solved=solved)


def export(llama, tmp_path, method):
    """(our folder, the exported one) of a model that was quantized in groups of 16."""
    saved, ours, theirs = load_saved(llama), tmp_path / "ours", tmp_path / method
    small = quantized(saved, method, MethodOptions(16))
    save_model(ours, saved.config, small, saved.tokenizer)
    assert main(["export", str(ours), str(theirs)]) == 0
    return ours, theirs


def test_codes_lie_in_an_int32_from_its_lower_bits_on():
    codes = np.array([[-8, 7, 0, 0, 0, 0, 0, 1, 3]], np.int8)
    wanted = np.array([[0x988888F0, 0xB]], np.uint32)
    np.testing.assert_array_equal(pack_int32(codes, 4).view(np.uint32), wanted)
    bytes_of = np.array([[-128, 127, 0, 1]], np.int8)
    np.testing.assert_array_equal(pack_int32(bytes_of, 8).view(np.uint32), [[0x8180FF00]])


@pytest.mark.parametrize("method", ["int4", "int8", "float8", "awq", "w8a8"])
@pytest.mark.quick("int4")
def test_the_tensors_of_an_export_stand_for_our_matrices(llama, tmp_path, method):
    ours, theirs = export(llama, tmp_path, method)
    out = flatten(load_saved(ours).params)["blocks/attention/out"]
    wanted = np.asarray(dequantize(out))[1].T
    section = json.loads((theirs / "config.json").read_text())["quantization_config"]
    scheme = section["config_groups"]["group_0"]["weights"]
    stored = read_header(theirs / "model.safetensors")
    found = {name: read(name, at, packed=True) for name, at in stored.items()}
    scale = found[f"{OUT}.weight_scale"].astype(np.float32)
    dynamic = section["config_groups"]["group_0"]["input_activations"]
    assert (dynamic is not None) == (method == "w8a8")
    if method in ("float8", "w8a8"):
        kind = "float" if method == "float8" else "int"
        assert section["format"] == f"{kind}-quantized" and scheme["type"] == kind
        assert method == "float8" or (dynamic["dynamic"], dynamic["strategy"]) == (True, "token")
        codes = found[f"{OUT}.weight"].astype(np.float32)
    else:
        bits = scheme["num_bits"]
        assert section["format"] == "pack-quantized" and bits == (8 if method == "int8" else 4)
        assert found[f"{OUT}.weight_shape"].tolist() == list(wanted.shape)
        packed = found[f"{OUT}.weight_packed"].view(np.uint32)
        places = np.arange(0, 32, bits, dtype=np.uint32)
        codes = (packed[..., None] >> places) & np.uint32(2**bits - 1)
        codes = codes.reshape(len(wanted), -1).astype(np.float32) - 2 ** (bits - 1)
    assert f"{OUT}.weight" not in found or method in ("float8", "w8a8")
    assert scale.shape[1] == (2 if method in ("int4", "awq") else 1) and section["ignore"] == [
        "lm_head"
    ]
    steps = np.repeat(scale, codes.shape[1] // scale.shape[1], axis=1)
    np.testing.assert_allclose(codes * steps, wanted, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int4", "int8", "float8", "awq", "w8a8"])
@pytest.mark.skipif(not PYTHON, reason="needs torch and compressed-tensors (JAXTRAIN_TORCH_PYTHON)")
def test_transformers_computes_what_we_do(llama, tmp_path, method):
    ours, theirs = export(llama, tmp_path, method)
    tokens = prompts()
    np.save(tmp_path / "tokens.npy", tokens)
    subprocess.run([PYTHON, str(SCRIPT), str(tmp_path / "tokens.npy"), str(theirs)], check=True)
    saved = load_saved(ours)
    found = np.load(theirs / "logits.npy")
    wanted = logits_of(saved.graphdef, saved.params, tokens)
    if method != "w8a8":
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)
        return
    # Their steps are amax / 127.5 of a token, ours amax / 127: other roundings, equally good ones.
    plain = load_saved(llama)
    exact = logits_of(plain.graphdef, plain.params, tokens)
    far = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(exact)
    assert far(found, wanted) < 0.006 and far(wanted, exact) < 0.006
    assert far(found, exact) < 1.1 * far(wanted, exact)


@pytest.mark.parametrize(
    ("method", "form"),
    [("nf4", "NF4Weight"), ("awq", "ScaledInt4Weight"), ("w8a8", "W8A8Weight")],
)
@pytest.mark.quick("nf4-NF4Weight")
def test_what_the_layout_cannot_hold_is_one_line(own_model, tmp_path, capsys, method, form):
    saved = load_saved(own_model)
    small = quantized(saved, method, MethodOptions())
    save_model(tmp_path / method, saved.config, small, saved.tokenizer)
    assert main(["export", str(tmp_path / method), str(tmp_path / "out")]) == 2
    reason = "(nf4, qalora; awq and w8a8 of norms without gains): quantize by int4, gptq, int8"
    assert f"no form for {form} {reason}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_a_family_or_a_group_cannot_hold_is_one_line(own_model, tmp_path, capsys):
    saved = load_saved(own_model)
    small = quantize_params(saved.params, saved.specs, "int8")
    save_model(tmp_path / "int8", saved.config, small, saved.tokenizer)
    assert main(["export", str(tmp_path / "int8"), str(tmp_path / "out")]) == 2
    assert "NanoChat does not load packed integers: quantize it by f" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    two = {"a": quantize_int4(jnp.ones((16, 4)), 8), "b": quantize_int4(jnp.ones((12, 4)), 128)}
    with pytest.raises(UserError, match=r"8 \(a\), 12 \(b\); quantize with --group-size 8"):
        quantization_config(two)
