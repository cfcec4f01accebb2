"""Which backend serves: preference, refusals with their reasons, the log."""

import logging

import jax
import jax.numpy as jnp
import pytest
from jaxtrain_kernels import dispatch
from jaxtrain_kernels.attention import attention, cudnn
from jaxtrain_kernels.cross_entropy import linear_cross_entropy
from jaxtrain_kernels.dispatch import Target, choose, on_target, target

HOPPER, AMPERE, TURING = (Target("cuda", cc) for cc in ((9, 0), (8, 0), (7, 5)))
PLAIN = dict(causal=True, window=None, segment_ids_BT=None, softcap=None, return_lse=False)


def qkv(dtype=jnp.float32, H=8):
    return (jnp.ones((1, 4, 2, H), dtype),) * 3


def test_the_first_that_can_serve_is_chosen():
    assert choose("op", {"a": "no", "b": None, "c": None}, None, "") == "b"
    assert choose("op", {"a": None, "b": None}, "b", "") == "b"


def test_refusals_name_what_is_missing():
    reasons = {"a": "needs X", "b": "needs Y"}
    with pytest.raises(NotImplementedError, match="a: needs X; b: needs Y"):
        choose("op", reasons, None, "sig")
    with pytest.raises(NotImplementedError, match="a cannot serve sig: needs X"):
        choose("op", reasons, "a", "sig")
    with pytest.raises(ValueError, match="no backend 'c'; it has a, b"):
        choose("op", reasons, "c", "sig")


def test_ops_raise_for_a_named_backend_that_cannot_serve():
    with on_target("cpu"), pytest.raises(NotImplementedError, match="cudnn .* this is cpu"):
        attention(*qkv(), implementation="cudnn")
    x = jnp.ones((2, 2))
    with pytest.raises(ValueError, match="it has xla, reference"):
        labels = jnp.zeros(2, jnp.int32)
        linear_cross_entropy(x, x, labels, jnp.ones(2), implementation="cudnn")


@pytest.mark.parametrize(
    ("device", "dtype", "H", "options", "reason"),
    [
        (HOPPER, jnp.bfloat16, 128, {}, None),
        (HOPPER, jnp.float16, 256, {"window": 3}, None),
        (AMPERE, jnp.bfloat16, 256, {}, "at most 128"),
        (HOPPER, jnp.bfloat16, 20, {}, "multiple of 8"),
        (TURING, jnp.float16, 64, {}, "8.0"),
        (HOPPER, jnp.float32, 64, {}, "float32"),
        (HOPPER, jnp.bfloat16, 64, {"softcap": 5.0}, "softcap"),
        (HOPPER, jnp.bfloat16, 64, {"segment_ids_BT": 1}, "segment"),
        (HOPPER, jnp.bfloat16, 64, {"return_lse": True}, "LSE"),
        (Target("tpu"), jnp.bfloat16, 64, {}, "tpu"),
    ],
)
def test_what_cudnn_serves(device, dtype, H, options, reason):
    said = cudnn.supports(device, jnp.ones((1, 4, 2, H), dtype), **{**PLAIN, **options})
    assert said is None if reason is None else said is not None and reason in said


def test_cudnn_leaves_odd_lengths():
    q = jnp.ones((1, 5, 2, 64), jnp.bfloat16)
    assert cudnn.supports(HOPPER, q, **PLAIN) == "jax.nn does not differentiate it at odd lengths"


def test_target_is_the_default_backend_unless_overridden():
    here = target()
    with on_target("cuda", (9, 0)):
        assert target() == HOPPER
        with on_target("cpu"):
            assert target() == Target("cpu")
        assert target() == HOPPER
    assert target() == here


def test_each_choice_is_logged_once(caplog):
    dispatch._log_once.cache_clear()
    caplog.set_level(logging.INFO, logger="jaxtrain_kernels")
    with on_target("cuda", (7, 5)):
        for H in (8, 8, 16):
            jax.eval_shape(lambda q, k, v: attention(q, k, v, window=1), *qkv(H=H))
    attention_lines = [record.getMessage() for record in caplog.records]
    assert len(attention_lines) == 2
    assert attention_lines[0].startswith("attention float32[1, 4, 2, 8] kv_heads=2 window=1 causal")
    assert ": xla (passed over cudnn: needs compute capability 8.0" in attention_lines[0]


def test_ops_lower_for_cuda_without_a_gpu():
    """The XLA backends as a GPU traces them; cuDNN's needs the CUDA plugin to trace at all."""

    def loss(q, k, v, x, w, labels, weights):
        out = attention(q, k, v, softcap=5.0)
        return out.sum().astype(jnp.float32) + linear_cross_entropy(x, w, labels, weights)

    x, w = jnp.ones((16, 8), jnp.bfloat16), jnp.ones((8, 32), jnp.bfloat16)
    arrays = (*qkv(jnp.bfloat16), x, w, jnp.zeros(16, jnp.int32), jnp.ones(16))
    with on_target("cuda", (9, 0)):
        traced = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4))).trace(*arrays)
        assert "dot_general" in traced.lower(lowering_platforms=("cuda",)).as_text()
