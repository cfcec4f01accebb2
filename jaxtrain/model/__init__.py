"""The Transformer, its configuration, and its plan and FLOP counts, which need no arrays."""

from jaxtrain.model.config import ModelConfig, ResolvedModel
from jaxtrain.model.flops import active, flops_per_token, sizes
from jaxtrain.model.kv_cache import Cache, PagedCache
from jaxtrain.model.modes import Decode, Forward, Paged, Pipelined, Prefill
from jaxtrain.model.plan import LayerSpec, make_plan, scan_groups
from jaxtrain.model.resolve import resolve_model
from jaxtrain.model.transformer import Transformer
from jaxtrain.weights.adapted import AdaptedWeight, GroupAdaptedWeight, column_norms, merge_weights
from jaxtrain.weights.contract import is_weight
from jaxtrain.weights.float8 import check_fp8, fp8_weights
from jaxtrain.weights.params import Params, ParamSpec, cast, count, initialize, path_name, split
from jaxtrain.weights.quantized import quantize

__all__ = [
    "AdaptedWeight", "Cache", "Decode", "Forward", "GroupAdaptedWeight", "LayerSpec", "ModelConfig",
    "Paged", "PagedCache", "ParamSpec", "Params", "Pipelined", "Prefill", "ResolvedModel",
    "Transformer", "active", "cast", "check_fp8", "column_norms", "count", "flops_per_token",
    "fp8_weights", "initialize", "is_weight", "make_plan", "merge_weights", "path_name", "quantize",
    "resolve_model", "scan_groups", "sizes", "split",
]  # fmt: skip
