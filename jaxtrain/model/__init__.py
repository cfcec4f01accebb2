"""The Transformer and what is known about it before any array exists."""

from jaxtrain.model.config import ModelConfig, ResolvedModel, resolve_model
from jaxtrain.model.flops import active, flops_per_token, sizes
from jaxtrain.model.plan import LayerSpec, make_plan, scan_groups
from jaxtrain.model.transformer import Cache, Transformer
from jaxtrain.weights.adapted import Adapted, column_norms, is_special, whole
from jaxtrain.weights.float8 import check_fp8, fp8_weights, with_fp8
from jaxtrain.weights.packed import Packed, pack
from jaxtrain.weights.params import (
    Params,
    ParamSpec,
    abstract,
    cast,
    count,
    initialize,
    path_name,
    split,
)

__all__ = [
    "Adapted", "Cache", "LayerSpec", "ModelConfig", "Packed", "ParamSpec", "Params",
    "ResolvedModel", "Transformer", "abstract", "active", "cast", "check_fp8", "column_norms",
    "count", "flops_per_token", "fp8_weights", "initialize", "is_special", "make_plan", "pack",
    "path_name", "resolve_model", "scan_groups", "sizes", "split", "whole", "with_fp8",
]  # fmt: skip
