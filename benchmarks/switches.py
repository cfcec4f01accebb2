"""What our kernels bring to a step: none of them, those of each switch alone, all; and float8."""

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import target

from benchmarks.step import bench_step
from jaxtrain.config import find_config, load_config
from jaxtrain.settings import UserError

NONE = (
    "model.attention=cudnn",
    "model.kernels={norm: xla, rope: xla, ffn: xla, loss: xla}",
    "optim.symmetric=false",
)
# What each switch adds to none; a later override of a key wins.
ALONE = {
    "attention": ("model.attention=mosaic",),
    "rows": ("model.kernels.loss=mosaic", "model.kernels.norm=mosaic", "model.kernels.rope=mosaic"),
    "ffn": ("model.kernels.ffn=mosaic",),
    "symmetric": ("optim.symmetric=true",),
}


def variants() -> dict[str, tuple[str, ...]]:
    """Overrides of each variant; bf16 is the default, with all kernels."""
    alone = {f"xla and {name}": (*NONE, *more) for name, more in ALONE.items()}
    fp8 = ("model.fp8=blocks",)
    delayed = (*fp8, "model.fp8_history=16")
    return {"bf16": (), "xla": NONE, **alone, "fp8": fp8, "fp8_delayed": delayed}


def bench_switches(
    name: str, overrides: Sequence[str], only: str | None = None, profile_dir: Path | None = None
) -> Iterator[dict[str, Any]]:
    """A record of `bench step` for each variant (or the one named), all of one process.

    So they share its clocks and its ceilings, and each kernel is compiled once. Raises UserError
    for an unknown variant, and where the kernels do not serve.
    """
    every = variants()
    if only is not None and only not in every:
        raise UserError(f"there is no variant {only}; there are {', '.join(every)}")
    if reason := hopper.unsupported_reason(target()):
        raise UserError(f"--switches compares the kernels for Hopper: {reason}")
    optim = load_config(find_config(name), overrides).optim.name
    for variant, lines in every.items():
        if only not in (None, variant) or (optim != "muon" and "symmetric" in variant):
            continue
        lines = [line for line in lines if optim == "muon" or not line.startswith("optim.")]
        yield from bench_step(name, [*overrides, *lines], variant, profile_dir)
        jax.clear_caches()
        gc.collect()
