"""The engine's step of a few texts: which kernels its products are, and that the texts stay."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
import numpy as np
import pytest
from engine_cases import GREEDY, LLAMA, OPTIONS, SINGLE, letters, make_engine, model, prompts, run
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels import rows
from jaxtrain_kernels.attention.paged import append
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul import few_rows
from jaxtrain_kernels.matmul.few_rows import InputNorm, preferring, triton
from tiny import build

from jaxtrain.inference.engine import Engine, Request, device
from jaxtrain.inference.engine.sampling import Sampler
from jaxtrain.model import cast, stack
from jaxtrain.model.init import constant
from jaxtrain.model.layers import rms_norm
from jaxtrain.model.stack import take_apart, transpose_large
from jaxtrain.weights.contract import DeferredNorm, dense_of, matmul
from jaxtrain.weights.params import declare
from jaxtrain.weights.quantized import quantize_int8
from jaxtrain.weights.transposed import TransposedWeight

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
PASSES = ("residual_norm", "mixed_norm", "rope_norm")
WIDE = {"width": 64, "hidden": 128, "head_dim": 16, "depth": 2}


def decode_text(slots, backend, **fields):
    """The program of a step on an H200."""
    c, graphdef, specs, params = build(**WIDE | fields)
    params = cast(params, specs, jnp.dtype(jnp.bfloat16))
    take_apart(params, specs)
    engine = Engine(c, graphdef, params, letters(), options=OPTIONS._replace(slots=slots))
    asked, table = engine.rows.inputs(), jnp.zeros((slots, 4), jnp.int32)
    step = functools.partial(device.decode_slots.__wrapped__, engine.models[0])
    how = {"steps": 1, "drafts": 0, "sampler": Sampler.TEMPERATURE}
    with on_target("cuda", (9, 0)), preferring(backend), jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(functools.partial(step, **how)).trace(
            engine.models[1], engine.state, asked, jnp.arange(slots), table
        )
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def calls(text, *names):
    """How often a program calls each of these functions."""
    return [len(re.findall(rf"call @{name}(?:_\d+)?\(", text)) for name in names]


@pytest.mark.parametrize("ffn", ["relu2", "swiglu"])
@pytest.mark.slow
def test_a_layer_of_one_row_has_four_products(ffn):
    """Queries, keys and values; the output; up, with the gate; down."""
    text = decode_text(1, "triton", ffn=ffn)
    assert text.count("call @call") == 2 * 4 + 1  # the head
    one_row = decode_text(1, "padded", ffn=ffn)
    assert one_row.count("tensor<8x64xbf16>, tensor<64x64xbf16>") == 2 * 4 + 1
    assert "tensor<8x64xbf16>" not in decode_text(4, None, ffn=ffn)


@pytest.mark.slow
def test_a_fused_layer_is_eight_kernels():
    """Norm; queries, keys and values; their rotation and pages; attention (one part, as the text is
    short); output; norm; up; down."""
    text = decode_text(1, "fused")
    assert calls(text, "mixed_norm", "residual_norm", "_rope_append", "_append") == [2, 2, 2, 0]
    assert text.count("call @call") == 2 * 4 + 1
    assert text.count('"stablehlo.scatter"') == 1 + 2  # the text; text and length of the slot
    # Left to XLA: the embeddings of the token and of the one before, and the last state.
    counts = [one.count("stablehlo.rsqrt") for one in (text, decode_text(1, "triton"))]
    assert counts == [3, 3 + 2 * 4]
    assert decode_text(1, "fused", scan_layers=True).count("call @mixed_norm") == 2


@pytest.mark.parametrize(
    "fields", [{}, {"qk_norm": True, "qk_norm_gain": True}, {"ffn": "geglu"}, {"qkv_bias": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.slow
def test_a_layer_with_gains_is_six_kernels(fields):
    """Queries, keys and values of the norm; their rotation and pages; attention (one part, as the
    text is short); output, added to the stream; gate and up of the norm; down, added as well."""
    text = decode_text(1, "fused", **LLAMA | WIDE | fields)
    assert calls(text, "call", "_rope_append") == [2 * 4 + 1, 2]
    assert text.count("@__gpu$xla.gpu.triton") == text.count("custom_call @")
    assert text.count("stablehlo.rsqrt") == 1  # of the last state
    adds = re.findall(r"stablehlo.add .*tensor<[^>]*x(?:64|128)xbf16>", text)
    assert not adds  # biases and residuals
    # Nothing else reads the stream or a layer's gain.
    assert "tensor<2x64xf32>" not in text and "tensor<2x64xbf16>" not in text


@pytest.mark.slow
def test_a_norm_behind_a_branch_stays_between_matmul_and_sum():
    text = decode_text(1, "fused", **LLAMA | WIDE | {"post_norm": True})
    assert text.count("stablehlo.rsqrt") == 2 * 2 + 1
    assert calls(text, "call", "_rope_append") == [2 * 4 + 1, 2]


def test_any_matrix_can_read_a_norm_that_its_kernel_computes():
    c, _, _, params = build(**LLAMA | WIDE)
    x, w = jnp.ones((1, 1, c.width)), params["blocks"]["attention"]["q"][0]
    x = x.at[..., 0].set(3.0)
    gain = jnp.arange(c.width) / c.width
    norm = InputNorm(c.norm_eps, gain)
    for matrix in (w, quantize_int8(w), TransposedWeight(w.T)):
        expected = matmul(rms_norm(x, gain, eps=c.norm_eps), matrix)
        np.testing.assert_allclose(matmul(DeferredNorm(x, norm), matrix), expected, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 16])
def test_matmuls_of_one_input_add_their_biases(rows):
    one = constant(1.0)
    matrix = lambda N: declare((3, N), (None, None), one, "matrix").replace(jnp.ones((3, N)))
    x, q, k = jnp.ones((rows, 3)), matrix(4), matrix(2)
    product = dense_of(x, q, k, biases=(nnx.Param(jnp.arange(4.0)), None))
    np.testing.assert_array_equal(product(q), jnp.tile(3 + jnp.arange(4.0), (rows, 1)))
    np.testing.assert_array_equal(product(k), jnp.full((rows, 2), 3.0))


@pytest.mark.parametrize("rows", [1, 16])
def test_a_transposed_matrix_multiplies_as_the_matrix(rows):
    w_KN = jnp.arange(12.0).reshape(3, 4)
    x = jnp.arange(rows * 3.0).reshape(rows, 3)
    weight = TransposedWeight(w_KN.T)
    np.testing.assert_allclose(matmul(x, weight), x @ w_KN)
    np.testing.assert_array_equal(weight.dequantize(), w_KN)
    stack = TransposedWeight(jnp.stack([w_KN.T, w_KN.T]))
    np.testing.assert_array_equal(stack.dequantize()[1], w_KN)


@pytest.fixture
def small_is_large(monkeypatch):
    monkeypatch.setattr(stack, "LARGE", 1)
    monkeypatch.setattr(stack, "streams_rows", lambda rows, dtype: rows == 1)


def transposed(name, rows=1):
    c, graphdef, specs, params = model(name)
    params = jax.tree.map(lambda x: x, params)
    take_apart(params, specs)
    transpose_large(params, specs, rows)
    return c, graphdef, params


@pytest.mark.parametrize("name", ["llama 2", "qwen2", "nanochat", "experts", "latent"])
@pytest.mark.parametrize("backend", ["fused", "xla"])
@pytest.mark.slow
def test_the_text_is_that_of_transposed_matrices(interpreted, small_is_large, name, backend):
    requests = [Request("a", prompts(9)[0], GREEDY._replace(max_tokens=5))]
    one = SINGLE._replace(slots=1, megakernel=False)
    with preferring("xla"):
        expected = run(make_engine(name, one), requests)
    jax.clear_caches()
    with preferring(backend):
        c, graphdef, params = transposed(name)
        engine = Engine(c, graphdef, params, letters(), options=one)
        assert run(engine, requests) == expected
    assert ("product" in interpreted) == (backend == "fused")


def test_large_matrices_are_transposed_for_few_rows(small_is_large, monkeypatch):
    kinds = lambda params: {
        type(w) for w in params["blocks"]["attention"]["q"].layers
    } | {type(params["head"])}  # fmt: skip
    assert kinds(transposed("llama 2")[2]) == {TransposedWeight}
    assert TransposedWeight not in kinds(transposed("llama 2", rows=2)[2])
    monkeypatch.setattr(stack, "LARGE", 10**6)
    assert TransposedWeight not in kinds(transposed("llama 2")[2])


@pytest.mark.slow
def test_scales_of_a_layer_are_not_sliced_again_for_each_token():
    text = decode_text(1, "fused", depth=3)
    assert "tensor<3xf32>" not in text


@pytest.fixture
def interpreted(monkeypatch):
    """Every Triton kernel of a few rows, on a CPU; what was called, in order."""
    calls = []

    def noted(name, function):
        run = functools.partial(function, interpret=True)
        return lambda *args, **options: (calls.append(name), run(*args, **options))[1]

    few = lambda on, x_MK, *_, **__: None if len(x_MK) == 1 else "rows"
    products = noted("product", triton.few_rows_matmul)
    fake = types.SimpleNamespace(supports=few, few_rows_matmul=products)
    monkeypatch.setitem(few_rows.BACKENDS, "triton", fake)
    passes = {x: noted(x, getattr(rows.triton, x)) for x in PASSES}
    one = lambda on, op, x, *_: None if x.shape[0] * x.shape[1] == 1 else "rows"
    monkeypatch.setitem(rows.BACKENDS, "triton", types.SimpleNamespace(supports=one, **passes))
    monkeypatch.setattr(append, "supports", lambda on, new: None)
    monkeypatch.setitem(append.BACKENDS, "triton", noted("append", append.triton))
    rotate = noted("rope_append", kernels.rope_append)
    monkeypatch.setattr(kernels, "rope_append", rotate)
    jax.clear_caches()
    yield calls
    jax.clear_caches()


FUSED = {
    "nanochat": {"residual_norm", "mixed_norm", "rope_append"},
    "shared_kv": {"residual_norm", "mixed_norm", "rope_append"},
    "latent": {"residual_norm", "mixed_norm", "append"},
    "plain": {"residual_norm", "rope_append"},
    **{name: {"rope_append"} for name in ("llama", "qwen2", "qwen3", "gemma")},
}


@pytest.mark.parametrize(
    ("name", "backend"),  # the products of `fused` are those of `triton`
    [*((name, "fused") for name in FUSED), ("plain", "triton"), ("llama", "triton")],
)  # fmt: skip
@pytest.mark.slow
def test_the_text_is_that_of_matmuls(interpreted, name, backend):
    one = SINGLE._replace(slots=1)
    requests = [Request("a", prompts(9)[0], GREEDY._replace(max_tokens=5))]
    with preferring("xla"):
        expected = run(make_engine(name, one), requests)
    assert not interpreted
    jax.clear_caches()
    with preferring(backend):
        assert run(make_engine(name, one), requests) == expected
    fused = FUSED[name] if backend == "fused" else set()
    assert set(interpreted) == {"product", *fused}
