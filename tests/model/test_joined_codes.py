"""Matrices of integer codes that read the same input are one: its parts, products, and limits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul.few_rows import InputNorm, Operations

from jaxtrain.model.init import constant
from jaxtrain.model.stack import codes_in_fragments
from jaxtrain.weights import contract
from jaxtrain.weights.int4 import ScaledInt4Weight, quantize_int4
from jaxtrain.weights.joined import JoinedWeight, joined_layers, may_join
from jaxtrain.weights.params import declare
from jaxtrain.weights.quantized import quantize_int8

HOPPER = ("cuda", (9, 0))
FORMS = {"int8": quantize_int8, "int4": lambda w: quantize_int4(w, 32)}
K = 64
SHIFT = jnp.arange(64, dtype=jnp.float32) / 64


def stacks(form, *columns, group=32):
    """Stacks [2, K, N] with codes, one for each N of `columns`."""
    keys = jax.random.split(jax.random.key(0), len(columns))
    encode = quantize_int8 if form == "int8" else lambda w: quantize_int4(w, group)
    normal = lambda key, N: jax.random.normal(key, (2, K, N), jnp.bfloat16)
    return [jax.lax.map(encode, normal(key, N)) for key, N in zip(keys, columns, strict=True)]


def layer(stack, i):
    return jax.tree.map(lambda x: x[i], stack)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("columns", "alternating"), [((64, 32, 96), False), ((64, 64), True)])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_parts_are_the_matrices(form, columns, alternating, rows):
    each = stacks(form, *columns)
    x = jax.random.normal(jax.random.key(1), (rows, K), jnp.bfloat16)
    for i, parts in enumerate(joined_layers(each, alternating)):
        assert parts[0].matrix.are_fragments()
        for own, part in zip(each, parts, strict=True):
            np.testing.assert_array_equal(part.dequantize(), layer(own, i).dequantize())
            np.testing.assert_allclose(
                part.matmul(x), layer(own, i).matmul(x), rtol=0.01, atol=0.05
            )
        backward = parts[0].matmul_each(x, parts[:0:-1])
        assert backward is not None
        for y, part in zip(backward, (parts[0], *parts[:0:-1]), strict=True):
            np.testing.assert_array_equal(y, part.matmul(x))
        assert parts[0].matmul_each(x, parts[2:]) is None  # one is missing


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_operations_around_joined_products(form, bias):
    """`matmul_fused` equals the operations one by one."""
    x = jax.random.normal(jax.random.key(1), (3, K), jnp.bfloat16)
    norm = InputNorm(1e-5, jnp.arange(K) / K)
    of = lambda *N: tuple(SHIFT[:n] for n in N) if bias else None
    gate, up = joined_layers(stacks(form, 64, 64), alternating=True)[1]
    (h,) = gate.matmul_fused(x, (up,), Operations(norm, of(64, 64), "swiglu"))
    g, u = (w.matmul(norm.of(x)) for w in (gate, up))
    if bias:
        g, u = (y + SHIFT[None, :64].astype(y.dtype) for y in (g, u))
    np.testing.assert_allclose(h, jax.nn.silu(g) * u, rtol=0.02, atol=0.02)
    first, *others = parts = joined_layers(stacks(form, 64, 32), alternating=False)[0]
    found = first.matmul_fused(x, others, Operations(norm, of(64, 32)))
    for y, w in zip(found, parts, strict=True):
        shift = SHIFT[None, : y.shape[1]].astype(y.dtype) if bias else 0
        np.testing.assert_allclose(y, w.matmul(norm.of(x)) + shift, rtol=0.02, atol=0.02)


def params_of(**arrays):
    """Parameters and declarations of a module with these stacks."""
    matrix = lambda w: declare(
        (2, K, w.scales.shape[-1]), ("layers", None, None), constant(0.0), "matrix"
    )
    specs = {name: matrix(w).get_metadata()["spec"] for name, w in arrays.items()}
    return dict(arrays), specs


def joined(params, specs):
    with on_target(*HOPPER):
        codes_in_fragments(params, specs, 8)
    kinds = {name: type(w.layers[0]).__name__ for name, w in params.items() if hasattr(w, "layers")}
    return {name for name, kind in kinds.items() if kind == "JoinedWeight"}, kinds


def test_matrices_of_one_input_are_joined():
    q, k, v, out, gate, up = stacks("int4", 64, 32, 32, 64, 96, 96)
    names, kinds = joined(*params_of(q=q, k=k, v=v, out=out, gate=gate, up=up))
    assert names == {"q", "k", "v", "gate", "up"} and kinds["out"] == "Int4Weight"


@pytest.mark.parametrize("reason", ["groups", "form", "columns", "input scales", "one is missing"])
def test_what_keeps_matrices_apart(reason):
    q, k, v, gate, up = stacks("int4", 64, 32, 32, 96, 96)
    if reason == "groups":
        (k,), (up,) = stacks("int4", 32, group=64), stacks("int4", 96, group=64)
    elif reason == "form":
        (k,), (up,) = stacks("int8", 32), stacks("int8", 96)
    elif reason == "columns":
        (up,) = stacks("int4", 64)
    elif reason == "input scales":
        scaled = lambda w: ScaledInt4Weight(
            w.codes, w.scales, jnp.ones((2, K), jnp.bfloat16), dtype=w.dtype
        )
        q, k, v, gate, up = map(scaled, (q, k, v, gate, up))
    arrays = {"q": q, "k": k, "v": v, "gate": gate, "up": up}
    if reason == "one is missing":
        del arrays["v"], arrays["gate"]
    names, kinds = joined(*params_of(**arrays))
    assert names == ({"q", "k", "v"} if reason == "columns" else set())
    assert set(kinds) == set(arrays)  # in fragments, each alone


@pytest.mark.parametrize("form", FORMS)
def test_a_module_multiplies_its_parts_at_once(form, monkeypatch):
    parts = joined_layers(stacks(form, 64, 32, 32), alternating=False)[0]
    params = [nnx.Param(part) for part in parts]
    calls = []
    matmul = type(parts[0].matrix).matmul
    noted = lambda self, x: (calls.append(x.shape), matmul(self, x))[1]
    monkeypatch.setattr(type(parts[0].matrix), "matmul", noted)
    x = jnp.ones((1, 9, K), jnp.bfloat16)
    product = contract.dense_of(x, params[1], params[0], params[2])
    assert calls == [x.shape]
    for param, part in zip(params, parts, strict=True):
        np.testing.assert_array_equal(product(param), part.matmul(x))


def test_which_products_take_operations():
    q, k, v = joined_layers(stacks("int8", 64, 32, 32), alternating=False)[0]
    bf16 = jnp.dtype(jnp.bfloat16)
    with on_target(*HOPPER):
        assert q.takes_operations(8, bf16, (k, v))
        assert not q.takes_operations(9, bf16, (k, v))
        assert not q.takes_operations(8, bf16, (v, k)) and not q.takes_operations(8, bf16, (k,))
        assert q.matrix.takes_operations(1, bf16, ())
        apart = dataclasses.replace(q.matrix, codes=stacks("int8", 128)[0].codes[0])
        assert not apart.takes_operations(1, bf16, ())
    assert not q.takes_operations(1, bf16, (k, v))  # this is a CPU


def test_other_matrices_are_not_parts():
    q, k = joined_layers(stacks("int8", 64, 64), alternating=False)[0]
    other = JoinedWeight(q.matrix, (32, 96), 1, alternating=False)
    assert q.order((k,)) == [0, 1]
    assert q.order((other,)) is None and q.order((jnp.ones((K, 64)),)) is None
    assert may_join(stacks("int8", 64, 32), alternating=False)
    assert not may_join(stacks("int8", 64, 32), alternating=True)
