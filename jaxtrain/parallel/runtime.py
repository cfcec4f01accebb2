"""What a process sets up once: the compilation cache, and the precision its devices are good at."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp


def start() -> None:
    """Keep compiled programs on disk, so that a second run starts fast."""
    if not jax.config.jax_compilation_cache_dir:
        cache = Path(os.environ.get("JAXTRAIN_CACHE", Path.home() / ".cache" / "jaxtrain"))
        jax.config.update("jax_compilation_cache_dir", str(cache / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def compute_dtype(precision: str) -> jnp.dtype:
    """The dtype of the matmuls; auto: bfloat16 from Ampere on and on TPU, float16 before."""
    if precision != "auto":
        return jnp.dtype(precision)
    device = jax.devices()[0]
    if device.platform == "cpu":
        return jnp.dtype(jnp.float32)
    if device.platform == "gpu" and float(device.compute_capability) < 8.0:
        return jnp.dtype(jnp.float16)
    return jnp.dtype(jnp.bfloat16)
