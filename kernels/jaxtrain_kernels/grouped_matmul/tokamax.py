"""Tokamax's ragged dots: Triton kernels, and a Mosaic kernel for many experts on Hopper.

https://github.com/openxla/tokamax. The tiles and the choice of kernel follow the H100 timings that
tokamax 0.0.17 ships (`tokamax/data/autotuning`); it has none for other Hopper GPUs. In them the
weight gradient, which contracts over the rows, runs at 480 to 730 TF/s in Triton and at 100 to 280
TF/s in Mosaic. Rows times weights in Triton are as fast with 8 experts, but slower with each more
expert, since Triton starts a program for each expert, block of all rows and block of columns. The
Mosaic kernel's rate, 270 to 480 TF/s, does not depend on the number of experts.
"""

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target, target

INSTALL = "pip install tokamax==0.0.17 jax-triton==0.4.1 triton==3.9.0"
OLDEST = {"tokamax": (0, 0, 17), "jax-triton": (0, 4), "triton": (3, 9)}
# Environment variables of Triton's assemblers; Triton uses the "Blackwell" one for Hopper, too.
ASSEMBLERS = "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH"
WHEELS = "cu13", "cuda_nvcc"  # parts of NVIDIA's wheels that may contain an assembler
# rows [M, K] and [M, N] in groups of rows -> one product [K, N] per group
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def supports(target: Target, x_MK, w_EKN) -> str | None:
    cc = target.compute_capability
    if target.platform != "cuda":
        return f"needs an NVIDIA GPU, this is {target.platform}"
    if cc is None or cc < (8, 0):
        return f"needs compute capability 8.0 (Ampere), this is {cc}"
    if x_MK.dtype not in (jnp.bfloat16, jnp.float16) or w_EKN.dtype != x_MK.dtype:
        return f"needs bfloat16 or float16 in both, got {x_MK.dtype} and {w_EKN.dtype}"
    for package, oldest in OLDEST.items():
        needed = f"{package} {'.'.join(map(str, oldest))}"
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"needs {needed}: {INSTALL}"
        if tuple(map(int, re.findall(r"\d+", version)[: len(oldest)])) < oldest:
            return f"needs {needed}, this is {version}: {INSTALL}"
    return None


@jax.custom_vjp
def grouped_matmul(x_MK, w_EKN, sizes_E):
    """Backend of the public function."""
    return _rows(x_MK, w_EKN, sizes_E)


def _rows(x_MK, w_EKN, sizes_E):
    y_MN = _kernel(x_MK.shape, w_EKN.shape)(
        x_MK, w_EKN, group_sizes=sizes_E, preferred_element_type=x_MK.dtype
    )
    # The kernels leave rows after the last group uninitialized.
    inside_M = jnp.arange(len(x_MK)) < jnp.sum(sizes_E)
    return jnp.where(inside_M[:, None], y_MN, 0)


def _forward(x_MK, w_EKN, sizes_E):
    return _rows(x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _backward(saved, g_MN):
    x_MK, w_EKN, sizes_E = saved
    dw_EKN = _triton(wide=True)(
        x_MK,
        g_MN,
        group_sizes=sizes_E,
        ragged_dot_dimension_numbers=OVER_ROWS,
        preferred_element_type=w_EKN.dtype,
    )
    return _rows(g_MN, w_EKN.mT, sizes_E), dw_EKN, None


grouped_matmul.defvjp(_forward, _backward)


def _kernel(x: tuple[int, ...], w: tuple[int, ...]):
    """Choose the kernel for rows of shape x times weights of shape w, by the timings."""
    E, K, N = w
    cc = target().compute_capability
    hopper = cc is not None and cc[0] == 9
    if hopper and 24 * E > K and K % 128 == 0 and N % 64 == 0:
        return _mosaic()
    return _triton(wide=E <= 32)


def _triton(wide: bool):
    from tokamax.ops import gpu

    share_assembler()
    tile = dict(block_n=256, num_warps=8, num_stages=5)
    tile = tile if wide else dict(block_n=128, num_warps=4, num_stages=4)
    config = gpu.PallasTritonRaggedDotConfig(block_m=128, block_k=32, **tile)
    return gpu.PallasTritonRaggedDot(config=config, bypass_device_check=True)


@functools.cache
def share_assembler() -> None:
    """Have Triton write PTX for the assembler that XLA runs, unless the environment names one.

    XLA's assembler may be older than Triton's own, and then rejects Triton's PTX: CUDA 13.0's takes
    PTX 9.0, and Triton 3.9 writes 9.4. XLA looks in CUDA_ROOT or else in NVIDIA's wheels, then in
    PATH and in /usr/local/cuda.
    """
    nvidia = importlib.util.find_spec("nvidia")
    wheels = nvidia.submodule_search_locations or [] if nvidia else []
    root = os.environ.get("CUDA_ROOT")
    roots = [root] if root else [f"{wheel}/{part}" for wheel in wheels for part in WHEELS]
    named = [Path(root, "bin/ptxas") for root in roots]
    for path in [*named, shutil.which("ptxas"), Path("/usr/local/cuda/bin/ptxas")]:
        if path and os.access(path, os.X_OK):
            for name in ASSEMBLERS:
                os.environ.setdefault(name, str(path))
            return


def _mosaic():
    from tokamax.ops import gpu

    config = gpu.PallasMosaicRaggedDotConfig(
        block_m=128, block_n=64, block_k=128, num_stages=4, split_k=1, grid_minor_dim=1,
        grid_tile_width=8,
    )  # fmt: skip
    return gpu.PallasMosaicRaggedDot(config=config, bypass_device_check=True)
