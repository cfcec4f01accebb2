"""Benchmark of a step with none of our kernels, those of each switch alone, all; and in float8."""

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import target

from benchmarks.peers import nanochat_step
from benchmarks.step import bench_step
from jaxtrain.config import find_config, load_config
from jaxtrain.settings import UserError

NONE = (
    "model.attention=cudnn",
    "model.kernels={norm: xla, rope: xla, ffn: xla, loss: xla}",
    "optim.symmetric=false",
)
OF_MUON = {"symmetric", "polar_express_4"}  # variants that apply only with Muon
# Overrides that each switch adds to NONE; a later override of a key wins.
ALONE = {
    "attention": ("model.attention=mosaic",),
    "rows": ("model.kernels.loss=mosaic", "model.kernels.norm=mosaic", "model.kernels.rope=mosaic"),
    "ffn": ("model.kernels.ffn=mosaic",),
    "symmetric": ("optim.symmetric=true",),
}
FP8 = ("model.fp8=blocks",)
EPILOGUE, NORMS = ("model.fp8_epilogue=true",), ("model.fp8_norms=true",)
GRADIENTS, FAST = ("model.fp8_gradients=true",), ("model.fp8_fast_accum=true",)
QKV, HEAD = ("model.kernels.qkv=mosaic",), ("model.kernels.loss=fp8_head",)
# In addition to all kernels.
MORE = {
    "three arrays": ("model.kernels.qkv=xla",),
    "fp8_logits": ("model.kernels.loss=fp8_logits",),
    "fp8_head": HEAD,
    "polar_express_4": ("optim.orthogonalize=polar_express_4",),
}


def variants() -> dict[str, tuple[str, ...]]:
    """Overrides of each variant; bf16 is the default, with all kernels."""
    alone = {f"xla and {name}": (*NONE, *more) for name, more in ALONE.items()}
    delayed = (*FP8, "model.fp8_history=16")
    more = {f"bf16 and {name}": lines for name, lines in MORE.items()}
    # In float8, one fused QKV array is not the default, since it has a single scale.
    more |= {"fp8_delayed and qkv": (*delayed, *QKV)}
    more |= {"fp8_delayed and epilogue": (*delayed, *EPILOGUE)}
    more |= {"fp8_delayed and all": (*delayed, *QKV, *HEAD)}
    every = (*delayed, *QKV, *HEAD)
    more |= {"fp8_delayed and all with epilogue": (*every, *EPILOGUE)}
    more |= {"fp8_delayed and all with norms": (*every, *NORMS)}
    more |= {"fp8_delayed and all with both": (*every, *EPILOGUE, *NORMS)}
    everything = (*every, *EPILOGUE, *NORMS, *GRADIENTS)
    more |= {"fp8_delayed and everything": everything}
    more |= {"fp8_delayed and everything with fast_accum": (*everything, *FAST)}
    return {"bf16": (), "xla": NONE, **alone, "fp8": FP8, "fp8_delayed": delayed, **more}


def is_float8(variant: str) -> bool:
    """Whether a variant has the blocks' matmuls in float8."""
    return variant.startswith("fp8")


def bench_switches(
    name: str,
    overrides: Sequence[str],
    only: str | None = None,
    profile_dir: Path | None = None,
    checkout: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a record of `bench step` for each variant (or the named ones), all in one process.

    So they share clocks and measured ceilings, and each kernel is compiled once. only:
    comma-separated names, measured in this order, without the times of a step's parts. checkout: of
    nanochat, whose own step is measured first in each requested precision. Raises UserError for an
    unknown variant, and if the kernels do not support the device.
    """
    every = variants()
    names = list(every) if only is None else [name.strip() for name in only.split(",")]
    for variant in names:
        if variant not in every:
            raise UserError(f"there is no variant {variant}; there are {', '.join(every)}")
    peer_records = {
        fp8: nanochat_step(checkout, name, [*overrides, *lines]) if checkout else []
        for fp8, lines in {False: (), True: FP8}.items()
        if any(is_float8(variant) == fp8 for variant in names)
    }
    if reason := hopper.unsupported_reason(target()):
        raise UserError(f"--switches compares the kernels for Hopper: {reason}")
    optim = load_config(find_config(name), overrides).optim.name
    for variant in names:
        if optim != "muon" and OF_MUON & set(variant.split()):
            continue
        lines = [line for line in every[variant] if optim == "muon" or "optim." not in line]
        peers = peer_records[is_float8(variant)]
        for record in bench_step(name, [*overrides, *lines], variant, profile_dir, only is None):
            yield record | ({"beside": peers} if peers else {})
        jax.clear_caches()
        gc.collect()
