"""Kernels that worker processes lower, while this process traces their program."""

import contextvars
import os
import sys

import jax
import jax.numpy as jnp
import pytest
from golden_runs import normalized
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.hopper import export_cache, lower_beside
from jaxtrain_kernels.hopper.lower_beside import lowering_in_workers, start_workers, stop_workers
from jaxtrain_kernels.rows.hopper import norm, rope_in_place
from jaxtrain_kernels.rows.hopper.norm import NormOptions
from jaxtrain_kernels.rows.hopper.rope_in_place import TurnOptions

SHAPES = (
    jax.ShapeDtypeStruct((2, 256, 4, 128), jnp.bfloat16),
    jax.ShapeDtypeStruct((1, 256, 128), jnp.bfloat16),
)


def program(q, cos):
    """A kernel of three results, and one that changes its operand in place."""
    turned = rope_in_place.turn(TurnOptions((2, 1), 1e-6, False), (q,), cos, cos)
    x = jax.tree.leaves(turned)[0][..., 0, :]
    return norm._forward(NormOptions(1e-6, False), x, x, None, None)


def lowered():
    """The program without names, lowered for Hopper as the first of its process."""
    jax.clear_caches()
    export_cache.EXPORTED.clear()
    with on_target("cuda", (9, 0)):
        traced = jax.jit(lambda *given: program(*given)).trace(*SHAPES)
        return normalized(traced.lower(lowering_platforms=("cuda",)))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The names of kernels that this process lowers. The folder on disk is empty at first."""
    names, real = [], export_cache._export
    monkeypatch.setattr(
        export_cache,
        "_export",
        lambda kernel, shapes: names.append(kernel.name) or real(kernel, shapes),
    )
    monkeypatch.setattr(export_cache, "cache_folder", lambda name: tmp_path)
    yield names
    export_cache.EXPORTED.clear()


def wait_for_workers(monkeypatch):
    """A kernel that no worker has begun is not lowered here, but waited for."""
    monkeypatch.setattr(lower_beside.Future, "cancel", lambda self: False)


def test_workers_lower_what_this_process_would(here, tmp_path, monkeypatch):
    whole = lowered()
    assert here == ["turn", "_forward"]
    for file in tmp_path.iterdir():
        file.unlink()
    wait_for_workers(monkeypatch)
    with lowering_in_workers(2):
        assert lowered() == whole and len(here) == 2
    assert len(list(tmp_path.iterdir())) == 2  # for the next process
    assert lowered() == whole and len(here) == 2


DIES = {
    "at once": "import sys; sys.exit(1)",
    "with a kernel": "import pickle, sys; out = sys.stdout.buffer; pickle.dump((b'', None), out); "
    "out.flush(); sys.stdin.buffer.read(1)",
}


@pytest.mark.slow
@pytest.mark.parametrize("when", DIES)
def test_without_a_worker_that_lives_kernels_are_lowered_here(here, monkeypatch, when):
    whole = lowered()
    wait_for_workers(monkeypatch)
    monkeypatch.setattr(lower_beside, "START", DIES[when])
    monkeypatch.setattr(export_cache, "cache_folder", lambda name: None)
    with lowering_in_workers(2):
        assert lowered() == whole
    assert here == ["turn", "_forward"] * 2


@pytest.mark.slow
def test_what_no_worker_has_begun_is_lowered_here(here, monkeypatch):
    whole = lowered()
    monkeypatch.setattr(lower_beside, "START", "import sys; sys.stdin.read()")  # never ready
    monkeypatch.setattr(export_cache, "cache_folder", lambda name: None)
    with lowering_in_workers(2):
        assert lowered() == whole
    assert here == ["turn", "_forward"] * 2


def test_a_gpu_that_is_not_there_has_no_workers():
    with lowering_in_workers():
        assert lower_beside.submit(bytes, len) is None


@pytest.mark.parametrize("gpu, processes, cores, count", [
    (True, 1, 16, 8), (True, 1, 64, 16), (True, 1, 6, 3), (True, 1, 1, 0), (False, 1, 16, 0),
    (True, 8, 64, 0),
])  # fmt: skip
def test_workers_are_as_many_as_the_cores_bear(monkeypatch, gpu, processes, cores, count):
    monkeypatch.setattr(lower_beside, "has_gpu", lambda: gpu)
    monkeypatch.setattr(lower_beside.jax, "process_count", lambda: processes)
    monkeypatch.setattr(lower_beside.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    assert lower_beside.default_count() == count


def test_an_argument_that_has_no_name_stays_here():
    with lowering_in_workers(2):
        assert lower_beside.submit(bytes, len, lambda: None) is None


def test_an_error_in_a_worker_is_raised_here():
    with lowering_in_workers(2):
        work = lower_beside.submit(bytes, int, "no number")
        with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
            work.result(timeout=100)
        assert lower_beside.submit(list, bytes.fromhex, "0102").result(timeout=100) == [1, 2]


def test_a_workers_settings_are_this_process(monkeypatch):
    """It finds modules where this process does, and has no GPU."""
    monkeypatch.setattr(sys, "path", [*sys.path, "/nowhere"])
    monkeypatch.setenv("XLA_FLAGS", "--of_another_xla")
    with lowering_in_workers(2):
        path = lower_beside.submit(bytes.decode, eval_in_worker).result(timeout=100)
    assert "/nowhere" in path and path.endswith(" cpu")


def eval_in_worker():
    return f"{sys.path} {jax.default_backend()}".encode()


# ---- types without bodies ----------------------------------------------------------------------


def test_this_process_traces_no_body_that_a_worker_lowers(here, monkeypatch):
    bodies, real = [], plgpu.kernel

    def noted(body, **options):
        bodies.append(body.__name__)
        return real(body, **options)

    monkeypatch.setattr(plgpu, "kernel", noted)
    monkeypatch.setattr(export_cache, "cache_folder", lambda name: None)
    wait_for_workers(monkeypatch)
    with lowering_in_workers(2):
        lowered()
    assert bodies == ["<lambda>"] * 2 and not here
    lowered()
    assert bodies[2:] == ["rope_turn", "norm_forward"]


def test_an_empty_body_is_kept_for_no_program(here, monkeypatch):
    """Such as that of a kernel that another one calls."""
    whole = lowered()
    monkeypatch.setattr(export_cache, "_argument_key", raise_unnamed)  # so all use jax.jit

    def types():
        export_cache.ONLY_TYPES.set(True)
        with on_target("cuda", (9, 0)):
            return jax.eval_shape(program, *SHAPES)

    jax.clear_caches()
    found = contextvars.copy_context().run(types)
    with on_target("cuda", (9, 0)):
        traced = jax.jit(lambda *given: program(*given)).trace(*SHAPES)
    assert jax.tree.leaves(traced.out_info) == jax.tree.leaves(found)
    text = normalized(traced.lower(lowering_platforms=("cuda",)))
    assert calls(text) == calls(whole) and len(calls(text)) == 2


def raise_unnamed(*_):
    raise export_cache.UnnamedValue


def calls(text):
    """Lengths of the kernels' code in a program."""
    return sorted(len(line) // 100 for line in text.splitlines() if "@mosaic_gpu_v2" in line)


# ---- workers that started before ---------------------------------------------------------------


def test_workers_that_have_started_are_used_first_and_ended():
    start_workers(2)
    begun = list(lower_beside.STARTED)
    with lowering_in_workers(2):
        number = lower_beside.submit(bytes.decode, number_of_process).result(timeout=100)
        assert int(number) == begun[0].pid
    assert all(process.poll() is not None for process in begun) and not lower_beside.STARTED


def number_of_process():
    return str(os.getpid()).encode()


def test_workers_that_no_program_needs_are_ended():
    start_workers(2)
    begun = list(lower_beside.STARTED)
    stop_workers()
    assert all(process.poll() is not None for process in begun) and not lower_beside.STARTED


@pytest.mark.parametrize("capability, count", [((9, 0), 3), ((8, 0), 0), (None, 0)])
def test_workers_start_early_for_hopper_alone(monkeypatch, capability, count):
    monkeypatch.setattr(lower_beside, "default_count", lambda: 3)
    monkeypatch.setattr(lower_beside, "_start", lambda: None)
    with on_target("cuda" if capability else "cpu", capability):
        start_workers()
    assert len(lower_beside.STARTED) == count
    lower_beside.STARTED.clear()
