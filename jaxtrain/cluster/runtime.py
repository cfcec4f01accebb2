"""One-time process setup: compilation cache, memory, kernel log, and the default compute dtype."""

import contextlib
import ctypes
import logging
import os
import sys
import threading
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.hopper.lower_beside import start_workers


def start(quiet: bool = False) -> None:
    """Set up this process: cache compiled programs on disk for a fast second start, keep freed
    memory on CPUs, and preallocate GPU memory."""
    if only_cpus():
        keep_freed_memory()
    take_memory()
    if not quiet:
        show_kernel_choices()
    if not jax.config.jax_compilation_cache_dir:
        cache = Path(os.environ.get("JAXTRAIN_CACHE", Path.home() / ".cache" / "jaxtrain"))
        jax.config.update("jax_compilation_cache_dir", str(cache / "xla"))
    # At most 0.1 s; the environment may set 0.
    least = min(0.1, jax.config.jax_persistent_cache_min_compile_time_secs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def start_devices() -> None:
    """Start the devices, and the workers that lower kernels for them, while the caller goes on.

    The first array on a GPU reserves its memory, which takes 2 s on an H200. An error is left to
    the caller's first use of the devices. The process has joined its job.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            devices = jax.local_devices()
            start_workers()
            jax.block_until_ready([jax.device_put(np.float32(0), one) for one in devices])

    threading.Thread(target=run).start()


def show_kernel_choices() -> None:
    """Log each kernel's backend once, to stderr, so that no slow fallback is silent.

    Nothing is logged on a CPU: it has no faster backend to miss.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: target().platform != "cpu")
    handler.setFormatter(logging.Formatter("kernel   %(message)s"))
    logger = logging.getLogger("jaxtrain_kernels")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def only_cpus() -> bool:
    """Whether JAX can only have CPU devices. Asking JAX would start its backend too early, before
    the processes are connected.

    False if a GPU plugin is installed but no GPU exists, unless JAX_PLATFORMS=cpu is set.
    """
    if platforms := jax.config.jax_platforms:
        return platforms == "cpu"
    return not metadata.entry_points(group="jax_plugins") and find_spec("libtpu") is None


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the kernel, in a single arena.

    Only for CPUs: threads that compile for a GPU would contend for the single arena.

    On a CPU, XLA allocates a step's buffers anew each time. With glibc's defaults, every step then
    page-faults all of them again: a fifth of the quickstart's CPU time.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # M_... in malloc.h
    for parameter, value in (
        (trim_threshold, 2**31 - 1),
        (top_pad, 2**27),
        (mmap_max, 0),
        (arena_max, 1),
    ):
        mallopt(parameter, value)


def take_memory() -> None:
    """Let XLA use 90% of each GPU's memory and of the host's, unless the environment sets a limit.

    XLA's default, 75%, leaves 35 GB of an H200 and 4 GB of a T4 unused. CUDA, cuBLAS and NCCL need
    one or two GB outside of it. Its default for arrays offloaded to the host is 64 GB.
    """
    said = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    if not any(name in os.environ for name in said):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.9"
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gigabytes = max(1, int(0.9 * host_bytes / 2**30))
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(gigabytes))


def compute_dtype(precision: str) -> jnp.dtype:
    """The dtype of matmuls. auto: bfloat16 on TPUs and GPUs from Ampere on, float16 on older GPUs,
    float32 on CPUs."""
    if precision != "auto":
        return jnp.dtype(precision)
    device = target()
    if device.platform == "cpu":
        return jnp.dtype(jnp.float32)
    if device.platform == "cuda" and (device.compute_capability or (0, 0)) < (8, 0):
        return jnp.dtype(jnp.float16)
    return jnp.dtype(jnp.bfloat16)
