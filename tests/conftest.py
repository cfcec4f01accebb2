"""Test set-up: eight virtual CPU devices, a compilation cache, and jaxtyping annotations checked."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if os.environ.get("JAXTRAIN_GPU") else "cpu")
os.environ.setdefault("MPLBACKEND", "agg")

from jaxtyping import install_import_hook

# Before the first import of the packages under test: their annotations are checked at every call.
install_import_hook(["jaxtrain", "jaxtrain_kernels"], "beartype.beartype")

import jax

if not os.environ.get("JAXTRAIN_GPU"):
    jax.config.update("jax_num_cpu_devices", 8)
CACHE = Path(__file__).parents[1] / ".cache" / "jax-tests"
jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(CACHE)))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    import pytest

    if jax.default_backend() != "gpu":
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
