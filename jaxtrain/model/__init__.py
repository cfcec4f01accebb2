"""The Transformer and what is known about it before any array exists."""

from jaxtrain.model.config import ModelConfig, ResolvedModel, resolve_model
from jaxtrain.model.flops import flops_per_token, sizes
from jaxtrain.model.fp8 import check_fp8, fp8_weights, with_fp8
from jaxtrain.model.params import ParamSpec, abstract, cast, count, initialize, path_name, split
from jaxtrain.model.plan import LayerSpec, make_plan, segments
from jaxtrain.model.transformer import Cache, Transformer

__all__ = [
    "Cache", "LayerSpec", "ModelConfig", "ParamSpec", "ResolvedModel", "Transformer", "abstract",
    "cast", "check_fp8", "count", "flops_per_token", "fp8_weights", "initialize", "make_plan",
    "path_name", "resolve_model", "segments", "sizes", "split", "with_fp8",
]  # fmt: skip
