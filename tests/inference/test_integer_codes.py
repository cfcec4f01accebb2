"""An engine puts integer codes in the order of its kernels for a few rows, and joins matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import GREEDY, MODELS, SINGLE, letters, prompts, run
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul.integers import triton
from tiny import build

from jaxtrain.inference.engine import Engine, Request
from jaxtrain.model import cast
from jaxtrain.model.stack import codes_in_fragments, unstack
from jaxtrain.weights.int4 import quantize_int4
from jaxtrain.weights.joined import fragments_of
from jaxtrain.weights.params import is_block_matrix
from jaxtrain.weights.quantized import IntegerWeight, quantize_int8

HOPPER = ("cuda", (9, 0))
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
