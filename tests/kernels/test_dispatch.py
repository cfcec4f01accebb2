"""Which backend serves: preference, refusals with their reasons, the log."""

import functools
import inspect
import logging

import jax
import jax.numpy as jnp
import pytest
from jaxtrain_kernels import dispatch
from jaxtrain_kernels.attention import BACKENDS, Call, attention, cudnn, table
from jaxtrain_kernels.cross_entropy import linear_cross_entropy
from jaxtrain_kernels.dispatch import Target, choose_backend, on_target, target

HOPPER, AMPERE, TURING = (Target("cuda", cc) for cc in ((9, 0), (8, 0), (7, 5)))
# Without the tests' check of the annotations, as a user calls it.
unchecked = inspect.unwrap(attention)


def qkv(dtype=jnp.float32, H=8):
    return (jnp.ones((1, 4, 2, H), dtype),) * 3


def test_the_first_that_can_serve_is_chosen():
    assert choose_backend("op", {"a": "no", "b": None, "c": None}, None, "") == "b"
    assert choose_backend("op", {"a": None, "b": None}, "b", "") == "b"


def test_refusals_name_what_is_missing():
    reasons = {"a": "needs X", "b": "needs Y"}
    with pytest.raises(NotImplementedError, match="a: needs X; b: needs Y"):
        choose_backend("op", reasons, None, "sig")
    with pytest.raises(NotImplementedError, match="a cannot serve sig: needs X"):
        choose_backend("op", reasons, "a", "sig")
    with pytest.raises(ValueError, match="no backend 'c'; it has a, b"):
        choose_backend("op", reasons, "c", "sig")


def test_ops_raise_for_a_named_backend_that_cannot_serve():
    with on_target("cpu"), pytest.raises(NotImplementedError, match="cudnn .* this is cpu"):
        attention(*qkv(), implementation="cudnn")
    x = jnp.ones((2, 2))
    with pytest.raises(
        ValueError, match="it has mosaic, xla, fp8, fp8_head, fp8_logits, reference"
    ):
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
        (HOPPER, jnp.bfloat16, 64, {"deterministic": True}, "any order"),
        (Target("tpu"), jnp.bfloat16, 64, {}, "tpu"),
    ],
)
def test_what_cudnn_serves(device, dtype, H, options, reason):
    said = cudnn.supports(device, jnp.ones((1, 4, 2, H), dtype), Call(**options))
    assert said is None if reason is None else said is not None and reason in said


def test_cudnn_leaves_odd_lengths():
    q = jnp.ones((1, 5, 2, 64), jnp.bfloat16)
    assert cudnn.supports(HOPPER, q, Call()) == "jax.nn does not differentiate it at odd lengths"


def test_target_is_the_default_backend_unless_overridden():
    here = target()
    with on_target("cuda", (9, 0)):
        assert target() == HOPPER
        with on_target("cpu"):
            assert target() == Target("cpu")
        assert target() == HOPPER
    assert target() == here and here.kind == jax.devices()[0].device_kind


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


H200 = Target("cuda", (9, 0), "NVIDIA H200")
KIND = table.TableKey("bfloat16", 128, True, False, False, False, 1, 2048)


def rows(*entries):
    """Rows of the H200 for (kind, {backend: (rate, tiling)})."""
    return [
        table.make_row(H200, kind, name, tiling, 2 * rate, rate)
        for kind, rates in entries
        for name, (rate, tiling) in rates.items()
    ]


MEASURED = rows(
    (KIND, {"a": (300.0, None), "b": (400.0, {"block": 1}), "c": (10.0, None)}),
    (KIND._replace(head_dim=64), {"a": (300.0, None), "b": (200.0, {"block": 2})}),
    (KIND._replace(window=True), {"a": (300.0, None), "b": (250.0, {"block": 3})}),
    (KIND._replace(T=8192), {"a": (500.0, None), "b": (490.0, None)}),
    (KIND._replace(segments=True), {"c": (20.0, None)}),
)


@pytest.mark.parametrize(
    ("device", "change", "expected"),
    [
        (H200, {}, [("b", {"block": 1}), ("a", None), ("c", None)]),
        (H200._replace(kind="NVIDIA H100"), {}, [("b", {"block": 1}), ("a", None), ("c", None)]),
        (HOPPER, {"T": 3000, "group": 4}, [("b", {"block": 1}), ("a", None), ("c", None)]),
        (H200, {"dtype": "float16"}, [("b", {"block": 1}), ("a", None), ("c", None)]),
        (H200, {"T": 20000}, [("a", None), ("b", None), ("c", None)]),
        (H200, {"window": True}, [("a", None), ("b", {"block": 3}), ("c", None)]),
        # A tiling is for its head dim alone; the order is the nearest one's.
        (H200, {"head_dim": 96}, [("b", None), ("a", None), ("c", None)]),
        (H200, {"head_dim": 80}, [("a", None), ("b", None), ("c", None)]),
        (H200, {"segments": True}, [("c", None), ("a", None), ("b", None)]),
        # Nothing comparable was measured: the order that was given.
        (H200, {"softcap": True}, [("a", None), ("b", None), ("c", None)]),
        (H200, {"dtype": "float32"}, [("a", None), ("b", None), ("c", None)]),
        (AMPERE, {}, [("a", None), ("b", None), ("c", None)]),
        (Target("cpu", kind="cpu"), {}, [("a", None), ("b", None), ("c", None)]),
    ],
)
def test_the_nearest_measured_kind_orders_the_backends(device, change, expected):
    wanted = KIND._replace(**change)
    assert table.preferred_backends(MEASURED, device, wanted, ("a", "b", "c")) == expected


def test_a_devices_own_rows_come_before_its_relatives():
    own = table.make_row(Target("cuda", (9, 0), "NVIDIA H100"), KIND, "a", None, 1.0, 1.0)
    order = table.preferred_backends(
        [*MEASURED, own], HOPPER._replace(kind="NVIDIA H100"), KIND, "ab"
    )
    assert order[0] == ("a", None)


def test_the_table_is_written_and_read_again(tmp_path):
    path = tmp_path / "table.json"
    newer = table.make_row(H200, KIND._replace(T=2100), "a", {"block": 9}, 7.0, 1234.567)
    table.write_table([*MEASURED, newer], path)
    again = table.read_table(path)
    assert len(again) == len(MEASURED) and newer in again and MEASURED[0] not in again
    assert newer["T"] == 2048 and newer["tflops_forward_backward"] == 1235.0


def test_shipped_rows_name_backends_and_kinds():
    for row in table.read_table():
        assert row["backend"] in BACKENDS and row["tflops_forward_backward"] > 0
        assert {*table.TableKey._fields, "device", "tiling"} <= set(row)


def test_attention_follows_the_table(monkeypatch):
    block = {"block": 2}
    cpu = table.make_row(target(), KIND._replace(dtype="float32"), "xla", block, 1.0, 1.0)
    slower = cpu | {"backend": "reference", "tflops_forward_backward": 0.5, "tiling": None}
    seen = []
    monkeypatch.setattr(table, "read_table", lambda: (slower, cpu))
    for name in ("xla", "reference"):
        original = BACKENDS[name].attention
        monkeypatch.setattr(
            BACKENDS[name], "attention",
            lambda q, k, v, call, name=name, original=original: (
                seen.append((name, call.tiling)), original(q, k, v, call)
            )[1],
        )  # fmt: skip
    run = lambda H, **how: jax.eval_shape(functools.partial(attention, **how), *qkv(H=H))
    run(128)
    run(64)
    run(128, implementation="xla", tiling={})
    run(128, implementation="xla", tiling={"block": 4})
    run(128, implementation="reference")
    assert seen == [("xla", block), ("xla", None), ("xla", None), ("xla", {"block": 4}),
                    ("reference", None)]  # fmt: skip


def test_what_nothing_serves_is_one_line():
    x = jnp.ones((1, 4, 2, 8), jnp.int32)
    with pytest.raises(NotImplementedError) as error:
        unchecked(x, x, x)
    message = str(error.value)
    assert "\n" not in message and "cudnn: needs an NVIDIA GPU, this is cpu" in message
    assert "xla: needs a floating-point dtype, got int32" in message


def test_a_missing_triton_says_how_to_install_it(monkeypatch):
    def missing(name):
        raise triton.importlib.metadata.PackageNotFoundError

    triton = BACKENDS["triton"]
    monkeypatch.setattr(triton.importlib.metadata, "version", missing)
    with on_target("cuda", (8, 0)), pytest.raises(NotImplementedError, match="pip install"):
        attention(*qkv(jnp.bfloat16), implementation="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(v=jnp.ones((1, 4, 2, 8), jnp.bfloat16)),
            "same dtype, got float32, float32, bfloat16",
        ),
        (dict(v=jnp.ones((1, 4, 2, 4))), "one shape and q's head dim 8"),
        (dict(q=jnp.ones((1, 4, 3, 8))), "N % K == 0"),
        (dict(q=jnp.ones((1, 5, 2, 8))), "T == S"),
    ],
)
def test_operands_that_do_not_match_are_refused(change, message):
    arrays = dict(zip("qkv", qkv())) | change
    with pytest.raises(ValueError, match=message):
        unchecked(*arrays.values())
