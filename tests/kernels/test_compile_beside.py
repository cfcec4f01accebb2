"""Mosaic kernels of a program are found in it, and compiled in threads beside it."""

import threading

import jax
import jax.numpy as jnp
import pytest
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.feed_forward import feed_forward_relu2
from jaxtrain_kernels.hopper import compile_beside
from jaxtrain_kernels.hopper.compile_beside import (
    compiling_kernels,
    mosaic_kernels,
    start_compiling,
)
from jaxtrain_kernels.rows import residual_norm


def lowered_for_cuda(fn, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with on_target("cuda", (9, 0)):
        return jax.jit(fn).trace(*arrays).lower(lowering_platforms=("cuda",))


def network(x, up, down):
    """Twice the same kernel, and one of other sizes."""
    twice = feed_forward_relu2(feed_forward_relu2(x, up, down), up, down)
    return feed_forward_relu2(twice[:256], up, down)


@pytest.fixture(scope="module")
def lowered():
    return lowered_for_cuda(network, (512, 128), (128, 256), (256, 128))


@pytest.fixture(autouse=True)
def none_started(monkeypatch):
    monkeypatch.setattr(compile_beside, "STARTED", set())


def calls(lowered):
    """The kernels' attributes in a program's text, each once."""
    text = lowered.as_text()
    return set(line.partition("kernel_hash")[2].partition("}")[0] for line in text.splitlines()
               if "@mosaic_gpu_v2" in line)  # fmt: skip


@pytest.mark.slow
def test_each_kernel_is_found_once_and_called_alone_as_in_the_program(lowered):
    kernels = mosaic_kernels(lowered)
    assert [kernel.operands[0].shape for kernel in kernels] == [(512, 128), (256, 128)]
    assert kernels[0].results == (jax.ShapeDtypeStruct((512, 256), jnp.bfloat16),)
    for kernel in kernels:
        traced = jax.jit(kernel.call).trace(*kernel.operands)
        alone = traced.lower(lowering_platforms=("cuda",))
        assert len(calls(alone)) == 1 and calls(alone) < calls(lowered)


def test_a_program_without_kernels_has_none():
    assert not mosaic_kernels(jax.jit(jnp.sin).lower(1.0))


@pytest.mark.slow
def test_kernels_are_compiled_while_the_program_is(lowered, monkeypatch):
    monkeypatch.setattr(compile_beside, "PATIENCE", 0.0)
    seen, both = [], threading.Barrier(3, timeout=30)

    def compile_one(kernel):
        seen.append(kernel.operands[0].shape)
        both.wait()  # all at once

    with compiling_kernels(lowered, compile_one):
        both.wait()
    assert sorted(seen) == [(256, 128), (512, 128)]


def test_a_program_from_the_cache_compiles_no_kernel(lowered):
    seen = []
    with compiling_kernels(lowered, seen.append):
        pass  # within PATIENCE
    assert not seen


def test_an_error_of_a_kernel_is_not_the_programs(lowered, monkeypatch):
    monkeypatch.setattr(compile_beside, "PATIENCE", 0.0)
    tried = threading.Event()

    def compile_one(kernel):
        tried.set()
        raise RuntimeError("no GPU")

    with compiling_kernels(lowered, compile_one):
        assert tried.wait(30)


def test_dtypes_of_other_kernels_are_read():
    """float32 sums and integers: each kernel of a norm is found."""
    lowered = lowered_for_cuda(
        lambda x, y: residual_norm(x, y, eps=1e-6), (2, 1024, 256), (2, 1024, 256)
    )
    assert len(mosaic_kernels(lowered)) == len(calls(lowered)) > 0


def test_a_kernel_is_compiled_once(lowered):
    seen, kernels = [], mosaic_kernels(lowered)
    begun = start_compiling(kernels, seen.append) + start_compiling(kernels, seen.append)
    assert [one.result(30) for one in begun] == [None, None] and seen == kernels
