"""What a process sets up once: the compilation cache, and the precision its devices are good at."""

import ctypes
import logging
import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtrain_kernels.dispatch import target


def start(quiet: bool = False) -> None:
    """Keep compiled programs on disk, for a fast second start, and on CPUs freed memory at hand."""
    if only_cpus():
        keep_freed_memory()
    take_memory()
    if not quiet:
        show_kernel_choices()
    if not jax.config.jax_compilation_cache_dir:
        cache = Path(os.environ.get("JAXTRAIN_CACHE", Path.home() / ".cache" / "jaxtrain"))
        jax.config.update("jax_compilation_cache_dir", str(cache / "xla"))
    least = min(0.1, jax.config.jax_persistent_cache_min_compile_time_secs)  # 0 of the environment
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def show_kernel_choices() -> None:
    """Say each kernel's backend once, so that no slow path is silent; stdout is for results.

    A CPU has no fast path to pass over, and nothing is said there.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: target().platform != "cpu")
    handler.setFormatter(logging.Formatter("kernel   %(message)s"))
    logger = logging.getLogger("jaxtrain_kernels")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def only_cpus() -> bool:
    """Whether JAX can have nothing but CPUs; asked, it would start, before processes have met.

    Not where it was installed for a GPU that is not there; JAX_PLATFORMS=cpu says so.
    """
    if platforms := jax.config.jax_platforms:
        return platforms == "cpu"
    return not metadata.entry_points(group="jax_plugins") and find_spec("libtpu") is None


def keep_freed_memory() -> None:
    """Make glibc keep what is freed instead of returning it to the kernel, in one arena for all.

    For CPUs alone: threads that compile for a GPU would wait for each other at that one arena.

    On a CPU, XLA allocates a step's buffers anew each time: with glibc's defaults every step faults
    all their pages in again, a fifth of the quickstart's processor time.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # names in malloc.h: M_...
    for parameter, value in (
        (trim_threshold, 2**31 - 1),
        (top_pad, 2**27),
        (mmap_max, 0),
        (arena_max, 1),
    ):
        mallopt(parameter, value)


def take_memory() -> None:
    """Let XLA have nine tenths of each GPU's memory, unless the environment says how much.

    Its default, three quarters, leaves 35 GB of an H200 and 4 GB of a T4 to nobody. CUDA, cuBLAS
    and NCCL take one or two besides.
    """
    said = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    if not any(name in os.environ for name in said):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.9"


def compute_dtype(precision: str) -> jnp.dtype:
    """The dtype of the matmuls; auto: bfloat16 from Ampere on and on TPU, float16 before."""
    if precision != "auto":
        return jnp.dtype(precision)
    device = target()
    if device.platform == "cpu":
        return jnp.dtype(jnp.float32)
    if device.platform == "cuda" and (device.compute_capability or (0, 0)) < (8, 0):
        return jnp.dtype(jnp.float16)
    return jnp.dtype(jnp.bfloat16)
