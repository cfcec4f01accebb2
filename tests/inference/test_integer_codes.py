"""An engine puts integer codes in the order of its kernels for a few rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import GREEDY, SINGLE, letters, prompts, run
from jaxtrain_kernels.dispatch import on_target
from tiny import build

from jaxtrain.inference.engine import Engine, Request
from jaxtrain.model.stack import codes_in_fragments, unstack
from jaxtrain.weights.int4 import quantize_int4
from jaxtrain.weights.params import is_block_matrix
from jaxtrain.weights.quantized import IntegerWeight, quantize_int8

HOPPER = ("cuda", (9, 0))
FORMS = {"int8": quantize_int8, "int4": lambda w: quantize_int4(w, 32)}


def quantized(form, **changes):
    """A small model whose matrices have integer codes: configuration, graphdef, specs, params."""
    c, graphdef, specs, params = build(width=64, head_dim=32, **changes)

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
    _, _, specs, params = quantized("int8", moe={"experts": 4, "top_k": 2, "hidden": 64})
    count = len(weights_of(params))
    with on_target(*HOPPER):
        codes_in_fragments(params, specs, 9)
        assert {w.codes.dtype for w in weights_of(params)} == {jnp.dtype("int8")}
        codes_in_fragments(params, specs, 8)
    kinds = [w.codes.dtype for w in weights_of(params)]
    assert len(kinds) == count and set(kinds) == {jnp.dtype("int8"), jnp.dtype("int32")}
    assert {w.codes.dtype for w in weights_of(params["blocks"])} == {jnp.dtype("int32")}


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_of_a_stack_in_fragments_is_its_matrix(form):
    w = jax.random.normal(jax.random.key(0), (2, 64, 32), jnp.bfloat16)
    stack = jax.lax.map(FORMS[form], w)
    with on_target(*HOPPER):
        arranged = stack.in_fragments(1)
    assert arranged.are_fragments() and not stack.are_fragments()
    for ours, theirs in zip(unstack(arranged, 2), unstack(stack, 2), strict=True):
        np.testing.assert_array_equal(ours.dequantize(), theirs.dequantize())
