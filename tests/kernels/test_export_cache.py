"""Kernels lowered once: in the process, from a folder in the next one, and what is not kept."""

import functools
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from golden_runs import normalized
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P
from jaxtrain_kernels import disk_cache
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.hopper import compile_beside, export_cache
from jaxtrain_kernels.matmul.hopper import gemm, symmetric
from jaxtrain_kernels.rows.hopper import norm, rope_in_place
from jaxtrain_kernels.rows.hopper.norm import NormOptions
from jaxtrain_kernels.rows.hopper.rope_in_place import TurnOptions

X = jax.ShapeDtypeStruct((2, 8, 128), jnp.bfloat16)
OPTIONS = NormOptions(1e-6, False)


@pytest.fixture
def lowerings(tmp_path, monkeypatch):
    """The names of kernels that were lowered, oldest first. Folder and process begin empty.

    A kernel is lowered where its decorated function's body runs.
    """
    names = []
    kernel = plgpu.kernel

    def counted(body, *args, **options):
        names.append(body.__name__)
        return kernel(body, *args, **options)

    monkeypatch.setattr(plgpu, "kernel", counted)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    forget()
    yield names
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()
    forget()


def forget():
    jax.clear_caches()
    export_cache.EXPORTED.clear()


def lowered(function, *arrays):
    """Lowered for Hopper as another program; with no arrays, of X."""
    with on_target("cuda", (9, 0)):
        traced = jax.jit(lambda *a: function(*a)).trace(*arrays or (X,))
        return traced.lower(lowering_platforms=("cuda",))


def forward(x, options=OPTIONS):
    return norm._forward(options, x, x, None, None)


def files(tmp_path):
    return sorted((tmp_path / "kernels").iterdir())


@pytest.mark.slow
def test_a_kernel_is_lowered_once_in_a_process_and_once_for_all(lowerings, tmp_path):
    first = normalized(lowered(forward))
    assert lowerings == ["norm_forward"]
    assert normalized(lowered(forward)) == first and len(lowerings) == 1
    forget()
    assert normalized(lowered(forward)) == first and len(lowerings) == 1
    assert [f.name.partition("-")[0] for f in files(tmp_path)] == ["_forward"]
    lowered(lambda x: forward(forward(x)[0]))
    assert len(lowerings) == 1


@pytest.mark.slow
def test_another_process_lowers_none(lowerings, tmp_path):
    lowered(forward)
    code = """
import sys, jax, jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels import disk_cache
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.rows.hopper import norm, rope_in_place
def forbidden(*_, **__):
    raise AssertionError("lowered again")
plgpu.kernel = forbidden
x = jax.ShapeDtypeStruct((2, int(sys.argv[1]), 128), jnp.bfloat16)
with on_target("cuda", (9, 0)):
    f = jax.jit(lambda x: norm._forward(norm.NormOptions(1e-6, False), x, x, None, None))
    print(f.trace(x).lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2"))
"""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    run = lambda length: subprocess.run(
        [sys.executable, "-c", code, length], env=environment, capture_output=True, text=True
    )
    assert run("8").stdout == "1\n"
    assert "lowered again" in run("16").stderr


@pytest.mark.parametrize("change", ["shape", "dtype", "static", "source", "multiprocessors"])
def test_what_a_kernel_depends_on_is_in_its_key(lowerings, monkeypatch, change):
    lowered(forward)
    forget()
    if change == "shape":
        lowered(forward, jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16))
    elif change == "dtype":
        lowered(forward, jax.ShapeDtypeStruct(X.shape, jnp.float16))
    elif change == "static":
        lowered(functools.partial(forward, options=NormOptions(1e-5, False)))
    elif change == "source":
        monkeypatch.setattr(export_cache, "SOURCES", "others")
        lowered(forward)
    else:
        monkeypatch.setattr("jaxtrain_kernels.hopper.sm_count", lambda: 114)
        lowered(forward)
    assert len(lowerings) == 2


@pytest.mark.slow
def test_a_new_kernel_compiles_before_its_program_is_lowered(lowerings, monkeypatch):
    begun = []
    monkeypatch.setattr(compile_beside, "start_compiling", begun.extend)
    lowered(forward)
    assert not begun  # without a GPU
    monkeypatch.setattr(compile_beside, "has_gpu", lambda: True)
    lowered(lambda x: forward(x, OPTIONS._replace(eps=1e-5)))
    (kernel,) = begun
    assert kernel.operands[0].shape == (16, 128)
    forget()
    lowered(lambda x: forward(x, OPTIONS._replace(eps=1e-5)))  # from disk: XLA's cache may have it
    assert len(begun) == 1


@pytest.mark.parametrize("damage", [b"", b"another program's", None])
def test_a_damaged_file_is_replaced(lowerings, tmp_path, damage):
    first = normalized(lowered(forward))
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    forget()
    assert normalized(lowered(forward)) == first and len(lowerings) == 2
    forget()
    lowered(forward)
    assert len(lowerings) == 2 and files(tmp_path) == [file]


def test_files_that_nobody_reads_are_deleted(lowerings, tmp_path, monkeypatch):
    """The oldest first; one that was read is as young as a new one."""
    folder = tmp_path / "kernels"
    lowered(forward)
    (read,) = files(tmp_path)

    def put(name, days):
        (folder / name).write_bytes(bytes(1000))
        os.utime(folder / name, (time.time() - 86400 * days,) * 2)

    def another():
        disk_cache.write_file(folder / "new", b"content")
        return {file.name for file in files(tmp_path)} - {"new"}

    put("unread-29", 29)
    put("unread-31", 31)
    os.utime(read, (time.time() - 86400 * 40,) * 2)
    forget()
    lowered(forward)
    assert len(lowerings) == 1 and another() == {"unread-29", read.name}
    put("unread-2", 2)
    monkeypatch.setattr(disk_cache, "MOST_BYTES", read.stat().st_size + 1500)
    assert another() == {"unread-2", read.name}


def test_processes_may_delete_the_same_files(tmp_path, monkeypatch):
    for i in range(50):
        (tmp_path / str(i)).write_bytes(bytes(10))
    monkeypatch.setattr(disk_cache, "MOST_BYTES", 100)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: disk_cache.evict(tmp_path), range(8)))
    assert len(list(tmp_path.iterdir())) == 10

    def another_was_first(path, unlink=os.unlink):
        unlink(path)
        raise FileNotFoundError(path)

    (tmp_path / "large").write_bytes(bytes(1000))
    monkeypatch.setattr(os, "unlink", another_was_first)
    disk_cache.evict(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_ends_nothing(lowerings, tmp_path):
    (tmp_path / "kernels").write_text("")
    lowered(forward)
    lowered(forward)
    assert len(lowerings) == 1


def test_without_the_compilation_cache_nothing_is_kept_on_disk(lowerings, tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        lowered(forward)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert len(lowerings) == 1 and not (tmp_path / "kernels").exists()


def test_without_flatbuffers_the_process_keeps_it(lowerings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    for name in [n for n in sys.modules if n.startswith("jax._src.export.serialization")]:
        monkeypatch.delitem(sys.modules, name)
    lowered(forward)
    lowered(forward)
    assert len(lowerings) == 1 and not (tmp_path / "kernels").exists()


def kernel_calls(text):
    """Each kernel's call without its operands' names."""
    found = re.findall(r"stablehlo\.custom_call @mosaic_gpu_v2.*", text)
    # A serialized module leaves out what is the default.
    return [re.sub(r"%[\w#]+", "%", line).replace('backend_config = "", ', "", 1) for line in found]


def turned(q, cos):
    return rope_in_place.turn(TurnOptions((2, 1), 1e-6, False), (q,), cos, cos)


ROPE = (
    jax.ShapeDtypeStruct((2, 256, 4, 128), jnp.bfloat16),
    jax.ShapeDtypeStruct((1, 256, 128), jnp.bfloat16),
)


@pytest.mark.parametrize(("run", "arrays"), [(forward, (X,)), (turned, ROPE)])
def test_the_program_has_the_kernels_of_one_without_the_cache(lowerings, monkeypatch, run, arrays):
    kept = kernel_calls(normalized(lowered(run, *arrays)))
    assert len(kept) == 1 and ("output_operand_alias<" in kept[0]) == (run is turned)
    monkeypatch.setattr(export_cache, "PLAIN_TYPE", re.compile("(?!)"))
    assert kernel_calls(normalized(lowered(run, *arrays))) == kept and len(lowerings) == 2


def test_under_vmap_it_is_batched_as_without_the_cache(lowerings, monkeypatch):
    many = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)
    run = lambda x, y: norm._forward(OPTIONS, x, y, None, None)
    mapped = jax.vmap(run, (0, None))
    text = normalized(lowered(mapped, many, X))
    assert jax.eval_shape(mapped, many, X)[0].shape == many.shape
    monkeypatch.setattr(export_cache, "PLAIN_TYPE", re.compile("(?!)"))
    plain = normalized(lowered(mapped, many, X))
    assert kernel_calls(text) == kernel_calls(plain) != []


def test_in_a_mesh_each_device_has_the_kernel_and_types_know_the_mesh(lowerings):
    one = kernel_calls(normalized(lowered(forward)))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loop(x):
        # A carry whose type changed would end the trace.
        return jax.lax.scan(lambda x, _: (forward(x)[1], None), x, length=3)[0]

    each = jax.shard_map(loop, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    with jax.set_mesh(mesh):
        text = normalized(lowered(each, jax.ShapeDtypeStruct((16, 8, 128), X.dtype)))
    assert kernel_calls(text) == one and len(lowerings) == 1


def of_a_test(product):
    return product


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, True), ({"epilogue": of_a_test}, False), ({"epilogue": lambda x: x}, False)],
    ids=["default", "test's", "lambda"],
)
@pytest.mark.quick("default")
def test_a_static_value_without_a_name_of_the_package_is_not_kept(
    lowerings, tmp_path, options, kept
):
    a = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    for _ in range(2):
        lowered(functools.partial(gemm.matmul, **options), a, a)
        jax.clear_caches()
    assert len(lowerings) == 2 - kept and (tmp_path / "kernels").exists() == kept


@pytest.mark.parametrize(
    "value", [1.0, "1", 1, True, None, jnp.bfloat16, jnp.dtype("float32"), OPTIONS, (1, (2,))]
)
def test_values_are_told_apart(value):
    others = [1.0, "1", 1, True, None, jnp.bfloat16, jnp.dtype("float32"), OPTIONS, (1, (2,))]
    texts = [export_cache._described(other) for other in others]
    assert texts.count(export_cache._described(value)) == 1


@pytest.mark.parametrize("value", [object(), jnp.ones(1), [1], object, NormOptions(1.0, True)])
def test_values_of_other_kinds_have_no_name(value):
    with pytest.raises(export_cache.UnnamedValue):
        export_cache._described(value)


def test_what_cannot_be_exported_is_lowered_as_before_and_said_once(lowerings, monkeypatch, caplog):
    def fails(*_, **__):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(export_cache, "export", fails)
    with caplog.at_level("WARNING", "jaxtrain_kernels"):
        texts = [lowered(forward).as_text() for _ in range(2)]
    assert all(text.count("@mosaic_gpu_v2") == 1 for text in texts)
    assert [r.getMessage() for r in caplog.records] == [
        "_forward is lowered anew in each program: no such thing"
    ]


def test_a_wrong_call_fails_as_before(lowerings, caplog):
    tiling = symmetric.Tiling(warpgroups=2, stages=1)
    a = jax.ShapeDtypeStruct((1, 256, 256), jnp.bfloat16)
    run = lambda a: symmetric.square_polynomial(a, (1.0, 2.0, 3.0), tiling=tiling)
    with pytest.raises(ValueError, match="needs a stage for each warpgroup"):
        lowered(run, a)
    assert not caplog.records
