"""The experts' matmul: every backend is the reference, what tokamax's needs, and its lowering."""

import importlib.metadata
import os
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import grouped_matmul
from jaxtrain_kernels.dispatch import Target, on_target, target
from jaxtrain_kernels.grouped_matmul import tokamax

AMPERE, HOPPER, TURING = (Target("cuda", cc) for cc in ((8, 0), (9, 0), (7, 5)))
NEWEST = {"tokamax": "0.0.17", "jax-triton": "0.4.1", "triton": "3.9.0"}
SIZES = {"some": (7, 0, 20, 5), "all": (10, 3, 9, 18), "none": (0, 0, 0, 0)}


def with_gradients(x_MK, w_EKN, sizes_E, implementation):
    """y, dx and dw, of a loss whose cotangent is not zero behind the last group."""
    f = lambda x, w: grouped_matmul(x, w, sizes_E, implementation=implementation)
    y, vjp = jax.vjp(f, x_MK, w_EKN)
    return y, *vjp(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))


def arrays(sizes, K=16, N=24, dtype=np.float32, rows=40):
    random = np.random.default_rng(0)
    x, w = random.normal(size=(rows, K)), random.normal(size=(len(sizes), K, N)) / 4
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(sizes, jnp.int32)


def stand_in(monkeypatch, called):
    """In the place of tokamax's kernels, XLA's: which leaves garbage where those do."""

    def op(name):
        def make(config, bypass_device_check):
            def run(x, w, *, group_sizes, preferred_element_type, **how):
                called.append(name)
                if how:
                    return jax.lax.ragged_dot_general(
                        x, w, group_sizes, preferred_element_type=preferred_element_type, **how
                    )
                y = jax.lax.ragged_dot(x, w, group_sizes)
                inside = jnp.arange(len(x))[:, None] < group_sizes.sum()
                return jnp.where(inside, y, jnp.nan)

            return run

        return make

    gpu = types.ModuleType("tokamax.ops.gpu")
    for name in ("Triton", "Mosaic"):
        setattr(gpu, f"Pallas{name}RaggedDot", op(name))
        setattr(gpu, f"Pallas{name}RaggedDotConfig", dict)
    ops, package = types.ModuleType("tokamax.ops"), types.ModuleType("tokamax")
    ops.gpu, package.ops = gpu, ops
    for module in (gpu, ops, package):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tokamax, "supports", lambda target, x, w: None)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("backend", ["xla", "tokamax"])
def test_value_and_gradients_are_the_references(monkeypatch, backend, sizes):
    stand_in(monkeypatch, [])
    inputs = arrays(sizes)
    given = jax.jit(with_gradients, static_argnums=3)(*inputs, backend)
    expected = jax.jit(with_gradients, static_argnums=3)(*inputs, "reference")
    for x, y in zip(given, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "E", "K", "kernels"),
    [
        (HOPPER, 8, 512, ["Triton"] * 3),
        (HOPPER, 64, 512, ["Mosaic", "Triton", "Mosaic"]),
        (HOPPER, 64, 500, ["Triton"] * 3),  # the Mosaic kernel takes multiples of 128
        (AMPERE, 64, 512, ["Triton"] * 3),
    ],
)
def test_many_experts_go_to_the_mosaic_kernel_and_the_weights_gradient_never(
    monkeypatch, target, E, K, kernels
):
    called = []
    stand_in(monkeypatch, called)
    x, w = jax.ShapeDtypeStruct((8, K), jnp.float32), jax.ShapeDtypeStruct((E, K, K), jnp.float32)
    with on_target(*target):
        run = lambda *given: with_gradients(*given, "tokamax")
        jax.eval_shape(run, x, w, jax.ShapeDtypeStruct((E,), jnp.int32))
    assert called == kernels


@pytest.mark.parametrize("said", [None, "/own/ptxas"])
def test_triton_writes_for_the_assembler_that_xla_runs(said, tmp_path, monkeypatch):
    """It is in the first of the places where XLA looks that has one, here the second."""
    for name in tokamax.ASSEMBLERS:
        monkeypatch.setenv(name, said or "")  # so that it is as before afterwards
        if not said:
            monkeypatch.delenv(name)
    assembler = tmp_path / "bin" / "ptxas"
    assembler.parent.mkdir()
    assembler.touch(0o755)
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path / "empty"))
    monkeypatch.setattr(tokamax, "WHEELS", ())
    monkeypatch.setenv("PATH", str(assembler.parent))
    tokamax.share_assembler.__wrapped__()
    assert {os.environ[name] for name in tokamax.ASSEMBLERS} == {said or str(assembler)}


@pytest.mark.parametrize(
    ("target", "dtype", "versions", "reason"),
    [
        (HOPPER, jnp.bfloat16, {}, None),
        (AMPERE, jnp.float16, {"tokamax": "0.1"}, None),
        (HOPPER, jnp.bfloat16, {"tokamax": None}, "needs tokamax 0.0.17: pip install tokamax=="),
        (HOPPER, jnp.bfloat16, {"jax-triton": "0.3.1"}, "needs jax-triton 0.4, this is 0.3.1: pip"),
        (HOPPER, jnp.bfloat16, {"triton": "3.7.1"}, "needs triton 3.9, this is 3.7.1"),
        (HOPPER, jnp.float32, {}, "got float32 and float32"),
        (TURING, jnp.float16, {}, "8.0"),
        (Target("cpu"), jnp.bfloat16, {}, "this is cpu"),
    ],
)
def test_what_tokamax_needs(monkeypatch, target, dtype, versions, reason):
    def installed(name):
        version = (NEWEST | versions)[name]
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    inputs = arrays(SIZES["all"], dtype=dtype)
    said = tokamax.supports(target, *inputs[:2])
    assert said is None if reason is None else said is not None and reason in said
    if reason is not None:
        with on_target(*target):
            with pytest.raises(NotImplementedError, match="tokamax cannot serve"):
                grouped_matmul(*inputs, implementation="tokamax")
            grouped_matmul(*inputs)


# ---- with tokamax ------------------------------------------------------------------------------


def installed():
    pytest.importorskip("tokamax", exc_type=ImportError)
    return pytest.importorskip("tokamax.ops.gpu", exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("E", "mosaic"), [(4, 0), (32, 2)])
def test_it_lowers_for_cuda_without_a_gpu(monkeypatch, E, mosaic):
    """Tokamax and jax-triton ask for the device; tell them."""
    installed()
    import jaxlib.gpu_triton
    from jax.extend import backend

    device = types.SimpleNamespace(
        platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200", core_count=132
    )
    monkeypatch.setattr(backend, "get_default_device", lambda: device)
    monkeypatch.setattr(
        jaxlib.gpu_triton, "get_compute_capability", lambda device: 90, raising=False
    )
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 256), (E, 256, 512)))
    with on_target(*HOPPER):
        run = jax.jit(lambda *given: with_gradients(*given, "tokamax"))
        traced = run.trace(x, w, jax.ShapeDtypeStruct((E,), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = [
        text.count(f"custom_call @{name}(") for name in ("triton_kernel_call_ffi", "mosaic_gpu_v2")
    ]
    assert found == [3 - mosaic, mosaic]


@pytest.mark.gpu
@pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("E", [4, 64])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("end", [0, 173], ids=["all", "rows_behind"])
def test_on_a_gpu_it_errs_no_more_than_xla(E, dtype, end):
    """Both kernels; random groups, one of them empty."""
    installed()
    x, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((2048, 256), (E, 256, 512)))
    if reason := tokamax.supports(target(), x, w):
        pytest.skip(reason)
    random = np.random.default_rng(0)
    share = random.dirichlet(np.ones(E))
    share[1] = 0
    sizes = random.multinomial(2048 - end, share / share.sum())
    narrow = arrays(sizes, 256, 512, dtype, rows=2048)
    wide = *(x.astype(jnp.float32) for x in narrow[:2]), narrow[2]
    with jax.default_matmul_precision("highest"):
        true = jax.jit(with_gradients, static_argnums=3)(*wide, "reference")
    run = lambda backend: jax.jit(with_gradients, static_argnums=3)(*narrow, backend)
    for name, ours, theirs, exact in zip(("y", "dx", "dw"), run("tokamax"), run("xla"), true):
        error = lambda x, exact=exact: float(jnp.abs(x.astype(jnp.float32) - exact).mean())
        assert ours.dtype == dtype and ours.shape == exact.shape
        assert error(ours) <= 2 * error(theirs) + 1e-6, name
