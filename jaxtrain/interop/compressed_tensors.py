"""Quantized matrices in the compressed-tensors layout, which transformers and vLLM read.

`pack-quantized`: integers plus 2^(bits-1), packed into int32 along the input dim; earlier inputs
take the lower bits. `int-quantized`: int8, with activations quantized to int8 at run time.
`float-quantized`: float8 e4m3. Scales are [out, groups].
Layout: https://github.com/vllm-project/compressed-tensors
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxtrain.settings import UserError
from jaxtrain.weights.float8_storage import StoredFloat8Weight
from jaxtrain.weights.int4 import Int4Weight, group_sizes
from jaxtrain.weights.quantized import Int8Weight, QuantizedWeight
from jaxtrain.weights.w8a8 import DynamicInt8Weight

BITS = {Int4Weight: 4, Int8Weight: 8, StoredFloat8Weight: 8, DynamicInt8Weight: 8}
FORMATS = {StoredFloat8Weight: "float-quantized", DynamicInt8Weight: "int-quantized"}
Write = Callable[[np.ndarray], np.ndarray]  # ours [K, N] -> theirs [N, K]


def quantization_config(weights: Mapping[str, QuantizedWeight]) -> dict[str, Any]:
    """`quantization_config` of config.json. Raises UserError for formats the layout lacks."""
    kinds = {type(weight) for weight in weights.values()}
    if lost := sorted(kind.__name__ for kind in kinds - BITS.keys()):
        raise UserError(
            f"compressed-tensors has no form for {', '.join(lost)} (nf4, qalora; awq and w8a8 of "
            "norms without gains): quantize by int4, gptq, int8 or float8, or tune with "
            "finetune.name=lora"
        )
    if len(kinds) > 1:
        raise UserError("an export has one form of matrices; this model has several")
    kind, first = next(iter(kinds)), next(iter(weights.values()))
    scheme: dict[str, Any] = {
        "num_bits": BITS[kind], "type": "float" if kind is StoredFloat8Weight else "int",
        "symmetric": True, "dynamic": False, "strategy": "channel", "group_size": None,
    }  # fmt: skip
    if isinstance(first, Int4Weight):
        scheme |= {"strategy": "group", "group_size": group_size(weights)}
    head = [] if "head" in weights else ["lm_head"]
    dynamic = None
    if kind is DynamicInt8Weight:
        if not head:
            raise UserError(
                "w8a8 rounds the inputs of the blocks' matrices and not those of the head: "
                "quantize without --head to export"
            )
        dynamic = scheme | {"dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": dynamic}
    return {
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "format": FORMATS.get(kind, "pack-quantized"),
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": head,
    }  # fmt: skip


def group_size(weights: Mapping[str, QuantizedWeight]) -> int:
    """Group size (inputs per scale) of all matrices. Raises UserError if the sizes differ."""
    sizes = {size: name for name, size in group_sizes(weights).items()}
    if len(sizes) > 1:
        found = ", ".join(f"{size} ({name})" for size, name in sorted(sizes.items()))
        raise UserError(
            f"an export has one group size, and this model has several: {found}; quantize with "
            f"--group-size {min(sizes)}"
        )
    return next(iter(sizes))


def tensors_of(
    name: str, weight: QuantizedWeight, write: Write, dtype: np.dtype
) -> dict[str, np.ndarray]:
    """The tensors that store one layer's matrix NAME.weight. dtype: of the scales."""
    if isinstance(weight, Int4Weight):
        codes, scales = np.asarray(weight.integers()), np.asarray(weight.scales)
    elif isinstance(weight, Int8Weight | StoredFloat8Weight | DynamicInt8Weight):
        codes, scales = np.asarray(weight.codes), np.asarray(weight.scales)[None]
    else:
        raise TypeError(type(weight).__name__)
    scale = write(scales.astype(dtype))
    if not isinstance(weight, Int4Weight | Int8Weight):
        return {f"{name}.weight": write(codes), f"{name}.weight_scale": scale}
    theirs = write(codes)
    packed = pack_int32(theirs, BITS[type(weight)])
    shape = np.array(theirs.shape, np.int64)
    return {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": shape,
    }


def pack_int32(codes_NK: np.ndarray, bits: int) -> np.ndarray:
    """Pack signed codes, int8 [N, K], into int32 [N, ceil(K bits / 32)]."""
    each = 32 // bits
    wide = (codes_NK.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint32)
    wide = np.pad(wide, ((0, 0), (0, -wide.shape[1] % each)))
    shifts = np.arange(each, dtype=np.uint32) * np.uint32(bits)
    parts = wide.reshape(len(wide), -1, each) << shifts
    return np.bitwise_or.reduce(parts, axis=-1).view(np.int32)
