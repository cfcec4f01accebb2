"""The backend of fa4-jax: what it serves, what it passes to the package, packed documents.

`STAND_IN` has the package's two functions, in plain JAX; where the package is installed, its own
plain implementation is compared too.
"""

import functools
import importlib.metadata
import importlib.util
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels.attention import BACKENDS, Call, attention, fa4, reference, table
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.shapes import ATTENTION_SMALL, AttentionShape
from test_attention import inputs, truth_without_lse
from tiny import mesh_of

from jaxtrain import parallel

HOPPER, BLACKWELL = Target("cuda", (9, 0), "NVIDIA H200"), Target("cuda", (10, 0))
TURING, THOR = Target("cuda", (7, 5)), Target("cuda", (11, 0))
SERVED = [shape for shape in ATTENTION_SMALL if shape.softcap is None]
by_name = functools.partial(pytest.mark.parametrize, "shape", ids=lambda shape: shape.name)


def flash_attn(q, k, v, *, causal=False, window_size=None, scale=None, backend=None):
    assert window_size is None or window_size[1] == 0
    window = None if window_size is None else window_size[0]
    return reference.attention(q, k, v, Call(causal, window, scale=scale))[0]


def flash_attn_varlen(
    q, k, v, starts, key_starts, *, causal=False, window_size=None, scale=None, backend=None
):
    """Attention within each sequence of `starts`; NaN where a sequence is not whole."""
    assert starts is key_starts and starts.dtype == jnp.int32
    ids = jnp.searchsorted(starts, jnp.arange(len(q)), side="right")
    window = None if window_size is None else window_size[0]
    call = Call(causal, window, ids[None], scale=scale)
    out = reference.attention(q[None], k[None], v[None], call)[0][0]
    whole = (starts[0] == 0) & (starts[-1] == len(q)) & (jnp.diff(starts) >= 0).all()
    return jnp.where(whole, out, jnp.nan)


STAND_IN = SimpleNamespace(flash_attn=flash_attn, flash_attn_varlen=flash_attn_varlen)
PACKAGES = [
    "stand-in",
    pytest.param(
        "fa4_jax",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("fa4_jax") is None, reason="needs fa4-jax"
        ),
    ),
]


def installed(monkeypatch, version="0.1.0"):
    def read(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", read)


@pytest.fixture
def package(request, monkeypatch):
    installed(monkeypatch)
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "fa4_jax", STAND_IN)
    else:
        monkeypatch.setattr(fa4, "KERNELS", "reference")


@pytest.mark.parametrize(
    ("device", "dtype", "H", "options", "version", "reason"),
    [
        (HOPPER, jnp.bfloat16, 256, {}, "0.1.0", None),
        (HOPPER, jnp.float16, 64, {"window": 3, "segment_ids_BT": 1}, "0.1.7", None),
        (Target("cuda", (8, 6)), jnp.bfloat16, 96, {}, "0.1.0", None),
        (BLACKWELL, jnp.bfloat16, 128, {"causal": False}, "0.1.0", None),
        (BLACKWELL, jnp.bfloat16, 136, {}, "0.1.0", "at most 128"),
        (HOPPER, jnp.bfloat16, 20, {}, "0.1.0", "multiple of 8"),
        (HOPPER, jnp.float32, 64, {}, "0.1.0", "float32"),
        (HOPPER, jnp.bfloat16, 64, {"softcap": 5.0}, "0.1.0", "softcap"),
        (HOPPER, jnp.bfloat16, 64, {"return_lse": True}, "0.1.0", "LSE"),
        (HOPPER, jnp.bfloat16, 64, {"deterministic": True}, "0.1.0", "any order"),
        (HOPPER, jnp.bfloat16, 64, {"key_segment_ids_BS": 1}, "0.1.0", "one array of segment"),
        (HOPPER, jnp.bfloat16, 64, {}, None, "needs fa4-jax 0.1: pip install 'fa4-jax[cu13]'"),
        (HOPPER, jnp.bfloat16, 64, {}, "0.2.0", "this is 0.2.0"),
        (TURING, jnp.float16, 64, {}, "0.1.0", "8, 9, 10 or 12"),
        (THOR, jnp.float16, 64, {}, "0.1.0", "8, 9, 10 or 12"),
        (Target("cpu"), jnp.bfloat16, 64, {}, "0.1.0", "this is cpu"),
    ],
)
def test_what_it_serves(monkeypatch, device, dtype, H, options, version, reason):
    installed(monkeypatch, version)
    said = fa4.supports(device, jnp.ones((1, 4, 2, H), dtype), Call(**options))
    assert said is None if reason is None else said is not None and reason in said


def test_a_scale_that_is_traced_is_refused(monkeypatch):
    installed(monkeypatch)
    q = jnp.ones((1, 4, 2, 64), jnp.bfloat16)
    reasons = []
    jax.eval_shape(lambda scale: reasons.append(fa4.supports(HOPPER, q, Call(scale=scale))), 1.0)
    assert reasons == ["needs a scale that is known when it is compiled"]


def half(shape):
    return [jnp.asarray(x, jnp.bfloat16) for x in inputs(shape)[:4]]


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({}, {"causal": True, "scale": 0.25}),
        ({"causal": False, "scale": 0.5}, {"causal": False, "scale": 0.5}),
        ({"window": 7}, {"causal": True, "scale": 0.25, "window_size": (7, 0)}),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_arguments_of_the_package(monkeypatch, options, passed, packed):
    calls = []

    def record(q, k, v, *offsets, **given):
        calls.append(([x.shape for x in (q, k, v, *offsets)], given))
        return q

    name = "flash_attn_varlen" if packed else "flash_attn"
    monkeypatch.setitem(sys.modules, "fa4_jax", SimpleNamespace(**{name: record}))
    installed(monkeypatch)
    q, k, v = half(AttentionShape("", 2, 64, 4, 2, 16))[:3]
    ids = jnp.ones((2, 64), jnp.int32) if packed else None
    with on_target(*HOPPER):
        attention(q, k, v, segment_ids_BT=ids, implementation="fa4", **options)
    shapes = [q.shape, k.shape, v.shape]
    if packed:
        shapes = [(128, 4, 16), (128, 2, 16), (128, 2, 16), (5,), (5,)]
    assert calls == [(shapes, passed | {"backend": "cute"})]


@by_name(SERVED)
@pytest.mark.parametrize("package", PACKAGES, indirect=True)
@pytest.mark.quick("stand-in-packed_window", "stand-in-gqa2")
def test_it_equals_the_reference(package, shape):
    q, k, v, dout, _ = (jnp.asarray(x, jnp.float32) for x in inputs(shape))
    ids = shape.segment_ids_BT()
    ids = None if ids is None else jnp.asarray(ids)
    call = Call(shape.causal, shape.window, ids, scale=shape.H**-0.5, tiling={"sequences": 10})

    @jax.jit
    def run(q, k, v, dout):
        out, pull = jax.vjp(lambda *qkv: fa4.attention(*qkv, call)[0], q, k, v)
        return out, *pull(dout)

    got = run(q, k, v, dout)
    for name, x, y in zip(
        ("out", "dq", "dk", "dv"), got, (out_of(shape), *truth_without_lse(shape))
    ):
        np.testing.assert_allclose(x, y, atol=3e-5, rtol=3e-5, err_msg=name)
    if ids is not None:
        assert all((np.asarray(x)[np.asarray(ids) == 0] == 0).all() for x in got)


@functools.cache
def out_of(shape):
    with jax.enable_x64(True):
        q, k, v = inputs(shape)[:3]
        ids = shape.segment_ids_BT()
        call = Call(shape.causal, shape.window, ids, scale=shape.H**-0.5)
        return np.asarray(reference.attention(q, k, v, call)[0])


def test_offsets_are_those_of_documents_in_rows():
    ids = jnp.asarray([[1, 1, 2, 0], [2, 3, 3, 3]])  # the second row's 2 is another document
    offsets, fits = jax.jit(fa4.sequence_offsets, static_argnums=1)(ids, 7)
    assert offsets.tolist() == [0, 2, 3, 4, 5, 8, 8, 8] and fits
    offsets, fits = fa4.sequence_offsets(ids, 5)
    assert offsets.tolist() == [0, 2, 3, 4, 5, 8] and fits
    assert not fa4.sequence_offsets(ids, 4)[1]
    assert fa4.default_sequences(3, 130) == 10


@pytest.mark.parametrize("package", PACKAGES[:1], indirect=True)
def test_more_documents_than_sequences_give_nan(package):
    q, k, v = half(AttentionShape("", 2, 8, 2, 2, 16))[:3]
    ids = jnp.asarray([[1] * 5 + [2] * 3, [1] * 8])
    run = lambda count: fa4.attention(
        q, k, v, Call(segment_ids_BT=ids, tiling={"sequences": count})
    )
    assert jnp.isfinite(run(3)[0]).all()
    assert jnp.isnan(run(2)[0]).all()


def test_it_serves_by_name_or_by_a_measured_row(monkeypatch):
    kind = table.TableKey("bfloat16", 128, True, False, False, False, 1, 2048)
    measured = [table.make_row(HOPPER, kind, "fa4", None, 600.0, 900.0)]
    q = jax.ShapeDtypeStruct((1, 2048, 2, 128), jnp.bfloat16)
    called = []
    for name in ("fa4", "cudnn"):
        record = lambda q, k, v, call, name=name: (called.append(name), (q, None))[1]
        monkeypatch.setattr(BACKENDS[name], "attention", record)

    def chosen(version, rows, **options):
        installed(monkeypatch, version)
        monkeypatch.setattr(table, "read_table", lambda: rows)
        with on_target(*HOPPER):
            jax.eval_shape(lambda q: attention(q, q, q, **options), q)
        return called.pop()

    assert chosen("0.1.0", measured) == "fa4"
    assert chosen(None, measured) == "cudnn"
    assert chosen("0.1.0", []) == "cudnn"
    assert chosen("0.1.0", [], implementation="fa4") == "fa4"


@pytest.mark.parametrize("package", PACKAGES[:1], indirect=True)
def test_each_device_of_a_mesh_has_its_own_rows_and_heads(package):
    shape = AttentionShape("", 4, 130, 4, 2, 16, window=9, documents=(80, 40))
    *qkv, dout = half(shape)
    ids = jnp.asarray(shape.segment_ids_BT())

    def run(*qkv):
        f = lambda *qkv: parallel.attention(*qkv, window=9, segments_BT=ids, implementation="fa4")
        out, pull = jax.vjp(f, *qkv)
        return out, *pull(dout)

    with on_target(*HOPPER):
        expected = jax.jit(lambda *qkv: run(*qkv))(*qkv)
        with jax.set_mesh(mesh_of(data=4, tensor=2)):
            got = jax.jit(run)(*qkv)
    for x, y in zip(got, expected):
        assert jnp.isfinite(x).all()
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
