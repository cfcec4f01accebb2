"""An engine whose layers' products are one kernel's: codes in its order, and the same text."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import GREEDY, MODELS, OPTIONS, SINGLE, letters, prompts, run
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.matmul.few_rows import InputNorm, Operations
from jaxtrain_kernels.matmul.streamed import hopper, reference
from tiny import build

from jaxtrain.inference.engine import Engine, Request, device
from jaxtrain.inference.engine.sampling import Sampler
from jaxtrain.model import cast
from jaxtrain.model.stack import codes_in_fragments
from jaxtrain.weights.contract import PendingProduct, computed
from jaxtrain.weights.int4 import quantize_int4
from jaxtrain.weights.params import is_block_matrix
from jaxtrain.weights.quantized import quantize_int8
from jaxtrain.weights.streamed import StreamedWeight, may_stream, streamed_layers

HOPPER = ("cuda", (9, 0))
H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
FORMS = {"int8": quantize_int8, "int4": lambda w: quantize_int4(w, 128)}
WIDE = {"width": 2048, "head_dim": 512, "hidden": 2048, "depth": 3}


def quantized(form, **changes):
    """A model whose matrices have integer codes: configuration, graphdef, specs, params."""
    c, graphdef, specs, params = build(**changes)
    params = cast(params, specs, jnp.dtype(jnp.bfloat16))

    def packed(w, spec):
        if isinstance(spec, dict):
            return {name: packed(w[name], inner) for name, inner in spec.items()}
        return jax.lax.map(FORMS[form], w.astype(jnp.bfloat16)) if is_block_matrix(spec) else w

    return c, graphdef, specs, packed(params, specs)


def arranged(form, rows=1, **changes):
    c, graphdef, specs, params = quantized(form, **changes)
    with on_target(*HOPPER):
        codes_in_fragments(params, specs, rows)
    return c, graphdef, params


def is_streamed(leaf):
    return isinstance(leaf, StreamedWeight)


def streamed_of(params):
    leaves = jax.tree.leaves(params, is_leaf=is_streamed)
    return [w for w in leaves if is_streamed(w)]


@pytest.fixture
def calls(monkeypatch):
    """The reference in the kernel's place, on a CPU; the products of each call."""
    found = []

    def run(form, x, stream, phases, *args):
        found.append([(p.K, p.N, p.normed, p.activation, p.residual) for p in phases])
        return reference.streamed_products(form, x, stream, phases, *args)

    supports = hopper.supports
    on = Target(*HOPPER)
    monkeypatch.setattr(hopper, "supports", lambda _, x, phases: supports(on, x, phases))
    monkeypatch.setattr(hopper, "streamed_products", run)
    jax.clear_caches()
    yield found
    jax.clear_caches()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama 2", "qwen2"])
@pytest.mark.slow
def test_the_text_is_that_of_codes_in_rows(form, name, calls):
    requests = [
        Request(str(i), p, GREEDY._replace(max_tokens=4)) for i, p in enumerate(prompts(9, 4))
    ]
    fields = MODELS[name] | WIDE
    options = SINGLE._replace(slots=len(requests), megakernel=False)
    c, graphdef, _, params = quantized(form, **fields)
    expected = run(Engine(c, graphdef, params, letters(), options=options), requests)
    assert not calls
    c, graphdef, params = arranged(form, len(requests), **fields)
    assert len(streamed_of(params)) == c.depth * 7
    jax.clear_caches()
    assert run(Engine(c, graphdef, params, letters(), options=options), requests) == expected
    # A step: the first layer's queries, keys and values; a layer with those of the next; the last.
    assert [len(call) for call in calls[: c.depth + 1]] == [1, *[4] * (c.depth - 1), 3]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick("int8")
def test_a_layer_is_one_kernel_beside_attention(form):
    """Products between two attentions have one kernel; nothing else reads the stream."""
    c, graphdef, params = arranged(form, **MODELS["llama 2"] | WIDE)
    engine = Engine(c, graphdef, params, letters(), options=OPTIONS._replace(slots=1))
    asked, table = engine.rows.inputs(), jnp.zeros((1, 4), jnp.int32)
    how = {"steps": 1, "drafts": 0, "sampler": Sampler.TEMPERATURE}
    step = functools.partial(inspect.unwrap(device.decode_slots), engine.models[0], **how)
    with on_target(*HOPPER), jax.sharding.use_abstract_mesh(H200):
        args = engine.models[1], engine.state, asked, jnp.arange(1), table
        text = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    # Kernels of one product, of four, and of three: each is lowered once.
    assert text.count("@mosaic_gpu_v2") == 3
    assert text.count("call @call_streamed") == c.depth + 1
    assert not re.search(r"stablehlo.add %.*tensor<1x1x2048x", text)


@functools.cache
def stacks(form, *columns, K=2048):
    keys = jax.random.split(jax.random.key(0), len(columns))
    one = lambda key, N: jax.random.normal(key, (1, K, N), jnp.bfloat16) / K**0.5
    return [jax.lax.map(FORMS[form], one(k, N)) for k, N in zip(keys, columns, strict=True)]


def whole(stack):
    return jax.tree.map(lambda x: x[0], stack)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [3, 40])
def test_parts_are_the_matrices(form, rows, calls):
    """Of a few rows by the kernel, of many as in a prompt."""
    each = stacks(form, 64, 32, 32)
    x = jax.random.normal(jax.random.key(1), (rows, 2048), jnp.bfloat16)
    (parts,) = streamed_layers(each, alternating=False)
    found = parts[0].matmul_each(x, parts[1:])
    for part, stack, y in zip(parts, each, found, strict=True):
        expected = np.asarray(whole(stack).matmul(x), np.float32)
        np.testing.assert_allclose(np.asarray(y, np.float32), expected, atol=0.03)
        np.testing.assert_array_equal(part.matmul(x), y)
        np.testing.assert_array_equal(part.dequantize(), whole(stack).dequantize())
    assert len(calls) == (4 if rows == 3 else 0)
    assert parts[0].matmul_each(x, parts[2:]) is None  # one is missing


NORM = InputNorm(1e-5, jnp.ones(2048, jnp.bfloat16))


def test_products_wait_for_each_other(calls):
    """A chain is one call, whose results are those of the products one by one."""
    out, gate, up, down = (whole(w) for w in stacks("int8", 2048, 2048, 2048, 2048))
    many = stacks("int8", 2048, 2048, 2048, 2048)
    of = lambda *which, alternating=False: streamed_layers([many[i] for i in which], alternating)[0]
    x, stream = jax.random.normal(jax.random.key(1), (2, 1, 2, 2048), jnp.bfloat16)
    (first,) = of(0)[0].matmul_pending(x, (), Operations(), stream)
    gate_part, up_part = of(1, 2, alternating=True)
    (hidden,) = gate_part.matmul_pending(first, [up_part], Operations(NORM, None, "swiglu"), None)
    (last,) = of(3)[0].matmul_pending(hidden, (), Operations(), first)
    assert all(isinstance(y, PendingProduct) and y.shape == x.shape for y in (first, hidden, last))
    assert not calls
    found = computed(last)
    assert [len(call) for call in calls] == [3]
    expected = stream + out.matmul(x)
    h = NORM.of(expected)
    expected = expected + down.matmul(jax.nn.silu(gate.matmul(h)) * up.matmul(h))
    near = lambda a, b: np.testing.assert_allclose(
        np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.1, rtol=0.03
    )
    near(found, expected)
    near(computed(first), stream + out.matmul(x))
    assert len(calls) == 1
    # What no longer continues the chain begins another.
    (other,) = of(0)[0].matmul_pending(first, (), Operations(), stream)
    near(computed(other), stream + out.matmul(computed(first)))
    assert [len(call) for call in calls] == [3, 1]
    (again,) = of(0)[0].matmul_pending(x, (), Operations(), stream)
    (older,) = of(0)[0].matmul_pending(again, (), Operations(), stream)  # not the last stream
    near(computed(older), stream + out.matmul(computed(again)))
    assert [len(call) for call in calls] == [3, 1, 1, 1]


@pytest.mark.parametrize("activation", [None, "relu2"])
def test_operations_that_the_kernel_lacks_follow_it(activation, calls):
    (part,) = streamed_layers(stacks("int8", 64), alternating=False)[0]
    x = jax.random.normal(jax.random.key(1), (2, 2048), jnp.bfloat16)
    residual, bias = jnp.ones((2, 64), jnp.bfloat16), jnp.arange(64, dtype=jnp.bfloat16)
    (y,) = part.matmul_pending(x, (), Operations(None, (bias,), activation), residual)
    expected = part.matmul(x) + bias[None]
    expected = (jnp.square(jax.nn.relu(expected)) if activation else expected) + residual
    np.testing.assert_allclose(
        np.asarray(y, np.float32), np.asarray(expected, np.float32), rtol=0.02
    )
    assert all(call == [(2048, 64, False, None, False)] for call in calls)


def test_which_matrices_may_stream():
    q, out, up, down = stacks("int8", 2048, 2048, 2048, 2048)
    four = stacks("int4", 2048)[0]
    with on_target(*HOPPER):
        assert may_stream([[q, out], [up], [down]], 8)
        assert not may_stream([[q, out], [up], [down]], 9)
        assert not may_stream([[q, four]], 8)  # two forms
        assert not may_stream([stacks("int8", 64, K=1024)], 8)
        group = jax.lax.map(lambda w: quantize_int4(w, 64), jnp.ones((1, 2048, 64), jnp.bfloat16))
        assert may_stream([[four]], 8) and not may_stream([[group]], 8)
    assert not may_stream([[q, out], [up], [down]], 8)  # no GPU


@pytest.mark.parametrize("between", ["attention_scale", "ffn_post_gain"])
def test_models_with_operations_between_products_keep_them_apart(between):
    _, _, specs, params = quantized("int8", **MODELS["llama 2"] | WIDE | {"depth": 1})
    blocks = params["blocks"]
    blocks[between] = jnp.ones((1, 2048), jnp.bfloat16)
    with on_target(*HOPPER):
        codes_in_fragments(params, specs, 1)
    assert not streamed_of(params)
    assert blocks["attention"]["out"].layers[0].are_fragments()
