"""Attention's Mosaic backend: what it serves, and its differentiable function lowered for CUDA.

Its kernels have tests of their own; numbers on a GPU are in test_attention_gpu.py.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jaxtrain_kernels.attention import attention, hopper
from jaxtrain_kernels.attention.hopper import backward as backward_kernel
from jaxtrain_kernels.attention.hopper import forward as forward_kernel
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.shapes import ATTENTION_BENCH

HOPPER = ("cuda", (9, 0))
ours = functools.partial(attention, implementation="mosaic")


def lowered(function, *arrays):
    """(output shapes, module) of a function traced for Hopper."""
    with on_target(*HOPPER):
        traced = jax.jit(function).trace(*arrays)
    return jax.tree.map(lambda x: x.shape, traced.out_info), traced.lower(
        lowering_platforms=("cuda",)
    ).as_text()


def qkv(*batch, dtype=jnp.bfloat16, H=128):
    return jax.ShapeDtypeStruct((*batch, 256, 2, H), dtype)


@pytest.mark.parametrize("ids", [None, jax.ShapeDtypeStruct((2, 256), jnp.int32)], ids=str)
@pytest.mark.slow
def test_outputs_lse_and_gradients_lower_for_hopper(ids):
    def run(q, ids):
        f = lambda q: ours(q, q, q, segment_ids_BT=ids, return_lse=True)
        (out, lse), pull = jax.vjp(f, q)
        return out, lse, pull((out, lse))

    (out, lse, (dq,)), text = lowered(run, qkv(2), ids)
    assert out == dq == (2, 256, 2, 128) and lse == (2, 2, 256)
    assert text.count("stablehlo.custom_call @mosaic_gpu") >= 2


@pytest.mark.slow
def test_a_mapped_axis_becomes_rows_of_the_batch():
    """A batch of kernels would share the counter that hands out the tiles."""
    gradient = jax.grad(lambda q: ours(q, q, q).astype(jnp.float32).sum())
    shapes, text = lowered(jax.vmap(gradient), qkv(3, 2))
    assert shapes == (3, 2, 256, 2, 128)
    assert "tensor<6x256x2x128xbf16>" in text


@pytest.mark.parametrize(
    ("target", "array", "options", "reason"),
    [
        (("cpu",), qkv(1), {}, "needs an NVIDIA GPU, this is cpu"),
        (("cuda", (8, 0)), qkv(1), {}, r"needs compute capability 9.0 \(H100, H200\), this is"),
        (HOPPER, qkv(1, dtype=jnp.float32), {}, "needs bfloat16 or float16, got float32"),
        (HOPPER, qkv(1, H=80), {}, "needs a head dim of 64, 96, 128, 256, got 80"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(target, array, options, reason):
    with on_target(*target), pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda q: ours(q, q, q, **options), array)


@pytest.mark.slow
def test_a_scale_of_zero_is_refused_and_a_negative_one_is_not():
    with on_target(*HOPPER):
        with pytest.raises(ValueError, match="scale must not be 0"):
            jax.eval_shape(lambda q: ours(q, q, q, scale=0.0), qkv(1))
        assert jax.eval_shape(lambda q: ours(q, q, q, scale=-0.1), qkv(1)).shape == qkv(1).shape


def test_candidates_are_tilings_with_the_default_among_them():
    for shape in ATTENTION_BENCH:
        tilings = hopper.candidates(shape)
        forward = [t["forward"] for t in tilings if "forward" in t]
        backward = [t["backward"] for t in tilings if "backward" in t]
        default = forward_kernel.default_tiling(shape.H, bool(shape.documents))
        assert forward_kernel.ForwardTiling(**forward[0]) == default
        assert backward_kernel.BackwardTiling(**backward[0]) == backward_kernel.default_tiling(
            shape.H
        )
        assert len(forward) + len(backward) == len(tilings) > 4


@pytest.mark.parametrize("used", ["out", "lse", "both"])
def test_cotangents_of_zeros_are_made_for_the_output_alone(used, monkeypatch):
    given = []

    def backward(q, k, v, ids, out, lse, dout, dlse, **options):
        given.append((dout, dlse))
        return q, k, v

    monkeypatch.setattr(backward_kernel, "backward", backward)

    def loss(q):
        out, lse = ours(q, q, q, return_lse=True)
        parts = {"out": out.sum(), "lse": lse.sum(), "both": out.sum() + lse.sum()}
        return parts[used].astype(jnp.float32)

    with on_target(*HOPPER):
        jax.eval_shape(jax.grad(loss), qkv(1))
    ((dout, dlse),) = given
    assert dout.shape == qkv(1).shape and (dlse is None) == (used == "out")
