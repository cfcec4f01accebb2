"""An engine puts integer codes in the order of its kernels for a few rows, and joins matrices."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import GREEDY, MODELS, OPTIONS, SINGLE, letters, prompts, run
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul.integers import triton
from tiny import build

from jaxtrain.inference.engine import Engine, Request, device
from jaxtrain.inference.engine.sampling import Sampler
from jaxtrain.model import cast
from jaxtrain.model.stack import codes_in_fragments, unstack
from jaxtrain.weights.int4 import quantize_int4
from jaxtrain.weights.joined import fragments_of
from jaxtrain.weights.params import is_block_matrix
from jaxtrain.weights.quantized import IntegerWeight, quantize_int8

HOPPER = ("cuda", (9, 0))
H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
FORMS = {"int8": quantize_int8, "int4": lambda w: quantize_int4(w, 32)}


def quantized(form, **changes):
    """A small model whose matrices have integer codes: configuration, graphdef, specs, params."""
    c, graphdef, specs, params = build(**{"width": 64, "head_dim": 32} | changes)
    params = cast(params, specs, jnp.dtype(jnp.bfloat16))

    def packed(w, spec):
        if isinstance(spec, dict):
            return {name: packed(w[name], inner) for name, inner in spec.items()}
        if not is_block_matrix(spec):
            return w
        one = FORMS[form] if "experts" not in spec.axes else jax.vmap(FORMS[form])
        return jax.lax.map(one, w.astype(jnp.bfloat16))

    return c, graphdef, specs, packed(params, specs)


def weights_of(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, IntegerWeight))
    return [w for w in leaves if isinstance(w, IntegerWeight)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick("int4")
def test_the_text_is_that_of_codes_in_rows(form):
    c, graphdef, specs, params = quantized(form)
    requests = [Request("a", prompts(9)[0], GREEDY._replace(max_tokens=5))]
    text = lambda params: run(Engine(c, graphdef, params, letters(), options=SINGLE), requests)
    expected = text(params)
    with on_target(*HOPPER):
        codes_in_fragments(params, specs, 8)
    assert {w.codes.dtype for w in weights_of(params)} == {jnp.dtype("int32")}
    assert text(params) == expected


def test_codes_of_experts_and_of_many_rows_stay():
    c, _, specs, params = quantized("int8", moe={"experts": 4, "top_k": 2, "hidden": 64})
    count = len(weights_of(params))
    with on_target(*HOPPER):
        codes_in_fragments(params, specs, 9)
        assert {w.codes.dtype for w in weights_of(params)} == {jnp.dtype("int8")}
        codes_in_fragments(params, specs, 8)
    kinds = [w.codes.dtype for w in weights_of(params)]
    stacks = len(weights_of(params["blocks"])) // c.depth
    assert kinds.count(jnp.dtype("int32")) == c.depth * stacks == 4 * c.depth  # q, k, v, out
    assert kinds.count(jnp.dtype("int8")) == count - stacks > 0


def arranged(form, **changes):
    """The same model, its codes in fragments."""
    c, graphdef, specs, params = quantized(form, **changes)
    with on_target(*HOPPER):
        codes_in_fragments(params, specs, 8)
    return c, graphdef, params


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama 2", "qwen2", "gemma", "nanochat"])
@pytest.mark.slow
def test_the_text_is_that_of_matrices_apart(form, name, interpreted):
    """Joined products, with the operations around them in their kernel."""
    fields = MODELS[name] | {"hidden": 96}
    requests = [
        Request(str(i), p, GREEDY._replace(max_tokens=5)) for i, p in enumerate(prompts(9, 4))
    ]
    options = SINGLE._replace(slots=len(requests), megakernel=False)
    c, graphdef, _, params = quantized(form, **fields)
    expected = run(Engine(c, graphdef, params, letters(), options=options), requests)
    jax.clear_caches()
    assert not interpreted
    c, graphdef, params = arranged(form, **fields)
    assert run(Engine(c, graphdef, params, letters(), options=options), requests) == expected
    assert interpreted


def decode_text(slots, form, **fields):
    """The program of a decode step on an H200."""
    c, graphdef, params = arranged(form, **fields)
    engine = Engine(c, graphdef, params, letters(), options=OPTIONS._replace(slots=slots))
    asked, table = engine.rows.inputs(), jnp.zeros((slots, 4), jnp.int32)
    how = {"steps": 1, "drafts": 0, "sampler": Sampler.TEMPERATURE}
    step = functools.partial(inspect.unwrap(device.decode_slots), engine.models[0], **how)
    with on_target(*HOPPER), jax.sharding.use_abstract_mesh(H200):
        args = engine.models[1], engine.state, asked, jnp.arange(slots), table
        return jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("slots", "form"), [(1, "int8"), (1, "int4"), (4, "int4")])
@pytest.mark.slow
def test_a_layer_is_six_kernels(slots, form):
    """Queries, keys and values of the norm; their rotation and pages; attention (one part, as the
    text is short); output, added to the stream; gate and up of the norm; down, added as well."""
    text = decode_text(slots, form, **MODELS["llama 2"] | {"hidden": 96, "depth": 3})
    assert text.count("@__gpu$xla.gpu.triton") == text.count("custom_call @")
    products = re.findall(r"call @call(?:_\d+)?\(.*tensor<1x\d+x\d+x128xi32>", text)
    assert len(products) == 3 * 4
    assert len(re.findall(r"call @_rope_append(?:_\d+)?\(", text)) == 3
    assert text.count("stablehlo.rsqrt") == 1  # of the last state
    # Nothing else reads the stream, joined products or gains.
    assert not re.findall(r"stablehlo.(?:add|multiply) .*tensor<\d+x1x(?:64|96)xbf16>", text)
    assert not re.search(r"stablehlo.slice .*x192xbf16>", text)
    assert not re.search(r"stablehlo.convert .*tensor<64xbf16>", text)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel of codes in fragments, on a CPU; the rows of each call."""
    calls = []

    def supports(target, form, x_MK, codes, scales):
        in_few_rows = codes.dtype == jnp.int32 and len(x_MK) <= triton.FRAGMENT_ROWS
        return None if in_few_rows and x_MK.dtype == jnp.bfloat16 else "no"

    def noted(function):
        run = functools.partial(function, interpret=True)
        return lambda x_MK, *args, **options: (
            calls.append(len(x_MK)),
            run(x_MK, *args, **options),
        )[1]

    monkeypatch.setattr(triton, "supports", supports)
    for op in ("w8a16_matmul", "w4a16_matmul"):
        monkeypatch.setattr(triton, op, noted(getattr(triton, op)))
    jax.clear_caches()
    yield calls
    jax.clear_caches()


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_in_fragments_is_its_matrix(form):
    w = jax.random.normal(jax.random.key(0), (2, 64, 32), jnp.bfloat16)
    stack = jax.lax.map(FORMS[form], w)
    for i, theirs in enumerate(unstack(stack, 2)):
        ours = fragments_of([stack], i)
        assert ours.are_fragments()
        np.testing.assert_array_equal(ours.dequantize(), theirs.dequantize())
