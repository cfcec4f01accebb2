"""Int4 weights with one scale per group of inputs; two inputs of a column are packed into a byte.

Symmetric round-to-nearest, as in the baselines of GPTQ and AWQ (arXiv:2210.17323,
arXiv:2306.00978): in a group of 128 inputs of a column the largest magnitude is 7 steps.
`pack_int4` packs the codes of any method. `ScaledInt4Weight` also has a scale per input, for AWQ;
`OffsetInt4Weight` has a zero point per group, for QA-LoRA. The low half of a byte is the code + 8
of the even input, as in compressed-tensors.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
from jaxtrain_kernels.matmul.few_rows.operations import NOTHING, Operations
from jaxtrain_kernels.matmul.integers import w4a16_matmul
from jaxtyping import Array, Float, Int

from jaxtrain.settings import UserError
from jaxtrain.weights.contract import Weight
from jaxtrain.weights.quantized import IntegerWeight, QuantizedWeight

GROUP = 128


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales"],
    meta_fields=["dtype", "layer"],
)
@dataclasses.dataclass(frozen=True)
class Int4Weight(IntegerWeight):
    """codes uint8 [.., K / 2, N], scales bfloat16 [.., K / group, N]."""

    ALONG: ClassVar[Mapping[str, str]] = {"codes": "KN", "scales": "KN"}
    FORM: ClassVar[str] = "int4"
    codes: Any
    scales: Any

    @override
    def values(self) -> Float[Array, "*E K N"]:
        return int4_values(self.integers(), self.scales).astype(self.dtype)

    @override
    def product(
        self, x: Float[Array, "*B K"], operations: Operations = NOTHING
    ) -> Float[Array, "*B N"]:
        if self.is_experts():
            return x @ self.dequantize()
        arrays = self.codes, self.scales
        return w4a16_matmul(x, *arrays, layer=self.layer, operations=operations)

    def integers(self) -> Int[Array, "*E K N"]:
        """The codes, int8, from -8 to 7."""
        *front, half, N = self.codes.shape
        both = jnp.stack([self.codes & 15, self.codes >> 4], axis=-2)
        return both.reshape(*front, 2 * half, N).astype(jnp.int8) - jnp.int8(8)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "input_scales"],
    meta_fields=["dtype", "layer"],
)
@dataclasses.dataclass(frozen=True)
class ScaledInt4Weight(IntegerWeight):
    """Int4 codes of a matrix whose row k was multiplied by input_scales[k] (AWQ).

    codes uint8 [.., K / 2, N], scales bfloat16 [.., K / group, N], input_scales bfloat16 [.., K].
    """

    ALONG: ClassVar[Mapping[str, str]] = {"codes": "KN", "scales": "KN", "input_scales": "K"}
    FORM: ClassVar[str] = "int4"
    codes: Any
    scales: Any
    input_scales: Any

    @override
    def values(self) -> Float[Array, "*E K N"]:
        scaled = Int4Weight(self.codes, self.scales, dtype="float32").dequantize()
        return (scaled / self.input_scales[..., None].astype(jnp.float32)).astype(self.dtype)

    @override
    def takes_operations(
        self, rows: int, dtype: jnp.dtype, others: Sequence[Array | Weight]
    ) -> bool:
        return False

    @override
    def product(
        self, x: Float[Array, "*B K"], operations: Operations = NOTHING
    ) -> Float[Array, "*B N"]:
        assert operations == NOTHING
        if self.is_experts():
            return x @ self.dequantize()
        own = self.input_scales if self.layer is None else self.input_scales[self.layer]
        input_scales = jnp.expand_dims(own, tuple(range(x.ndim - 1)))
        divided = x.astype(jnp.float32) / input_scales.astype(jnp.float32)
        return w4a16_matmul(divided.astype(x.dtype), self.codes, self.scales, layer=self.layer)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "offsets"],
    meta_fields=["dtype"],
)
@dataclasses.dataclass(frozen=True)
class OffsetInt4Weight(QuantizedWeight):
    """Int4 codes with an arbitrary zero point: codes x scale + offset of the group.

    codes uint8 [.., K / 2, N], scales bfloat16 and offsets float32 [.., K / group, N]. Offsets are
    in units of the matrix, so a change of a whole group is a change of its offset.
    """

    ALONG: ClassVar[Mapping[str, str]] = {"codes": "KN", "scales": "KN", "offsets": "KN"}
    codes: Any
    scales: Any
    offsets: Any

    def dequantize(self) -> Float[Array, "*E K N"]:
        centered = Int4Weight(self.codes, self.scales, dtype="float32").dequantize()
        return (centered + repeat_groups(self.offsets, centered.shape[-2])).astype(self.dtype)

    @override
    def product(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        if self.codes.ndim > 2:  # experts
            return super().product(x)
        return w4a16_matmul(x, self.codes, self.scales, self.offsets)


def repeat_groups(x: Float[Array, "*L G N"], K: int) -> Float[Array, "*L K N"]:
    """Repeat each group's value for its inputs."""
    return jnp.repeat(x, K // x.shape[-2], axis=-2)


def group_of(K: int, group_size: int, field: str = "--group-size") -> int:
    """Number of inputs per group: `group_size`, or K if that is smaller.

    Raises UserError if groups do not divide K, or K is odd.
    """
    group = min(group_size, K)
    if K % group or K % 2:
        fits = [n for n in (128, 96, 64, 48, 32, 16, 8, 4, 2) if K % n == 0 and n < group]
        fix = f"{field} {fits[0]} does" if fits else "int8 takes any shape"
        raise UserError(
            f"int4 packs two inputs a byte in groups of {group}, which a matrix of {K} inputs does "
            f"not allow: {fix}"
        )
    return group


def group_sizes(weights: Mapping[str, QuantizedWeight]) -> dict[str, int]:
    """Inputs per scale of each matrix whose 4-bit codes have groups."""
    return {
        name: 2 * w.codes.shape[-2] // w.scales.shape[-2]
        for name, w in weights.items()
        if isinstance(w, Int4Weight | ScaledInt4Weight)
    }


def pack_int4(
    codes_KN: Int[Array, "K N"], scales_GN: Float[Array, "G N"], dtype: str
) -> Int4Weight:
    """Pack codes from -8 to 7; scales: the step of each group of K / G inputs."""
    shifted = (codes_KN + 8).astype(jnp.uint8)
    return Int4Weight(
        shifted[0::2] | shifted[1::2] << 4, scales_GN.astype(jnp.bfloat16), dtype=dtype
    )


def int4_scales(
    w: Float[Array, "*L K N"], group_size: int = GROUP, field: str = "--group-size"
) -> Float[Array, "*L G N"]:
    """Absmax scales: a group's largest magnitude / 7, float32 rounded to bfloat16 values.

    Raises UserError as `group_of` does. It uses `reduce_precision`, since XLA may drop a cast to
    bfloat16 and back.
    """
    *front, K, N = w.shape
    groups = w.astype(jnp.float32).reshape(*front, -1, group_of(K, group_size, field), N)
    return jax.lax.reduce_precision(jnp.max(jnp.abs(groups), axis=-2) / 7, 8, 7)


def int4_codes(w: Float[Array, "*L K N"], scales: Float[Array, "*L G N"]) -> Float[Array, "*L K N"]:
    """The nearest codes from -8 to 7, as float32."""
    step = repeat_groups(scales, w.shape[-2])
    codes = jnp.round(w.astype(jnp.float32) / jnp.where(step > 0, step, 1.0))
    return jnp.clip(codes, -8, 7)


def int4_values(
    codes: Float[Array, "*L K N"] | Int[Array, "*L K N"], scales: Float[Array, "*L G N"]
) -> Float[Array, "*L K N"]:
    """Dequantize codes to float32."""
    *front, K, N = codes.shape
    groups = codes.reshape(*front, scales.shape[-2], -1, N).astype(jnp.float32)
    return (groups * jnp.expand_dims(scales, -2).astype(jnp.float32)).reshape(*front, K, N)


def quantize_int4(w_KN: Float[Array, "K N"], group_size: int = GROUP) -> Int4Weight:
    """Quantize one matrix to the nearest codes. Raises UserError as `group_of` does."""
    scales_GN = int4_scales(w_KN, group_size)
    return pack_int4(int4_codes(w_KN, scales_GN).astype(jnp.int8), scales_GN, w_KN.dtype.name)


def quantize_offset_int4(w_KN: Float[Array, "K N"], group_size: int = GROUP) -> OffsetInt4Weight:
    """Quantize one matrix to the nearest of 16 steps from each group's minimum to its maximum.

    Raises UserError as `group_of` does.
    """
    K, N = w_KN.shape
    w32 = w_KN.astype(jnp.float32)
    groups = w32.reshape(-1, group_of(K, group_size), N)
    least_GN, most_GN = jnp.min(groups, axis=1), jnp.max(groups, axis=1)
    scales_GN = jax.lax.reduce_precision((most_GN - least_GN) / 15, 8, 7)
    offsets_GN = least_GN + 8 * scales_GN
    codes = int4_codes(w32 - repeat_groups(offsets_GN, K), scales_GN)
    packed = pack_int4(codes.astype(jnp.int8), scales_GN, w_KN.dtype.name)
    return OffsetInt4Weight(packed.codes, packed.scales, offsets_GN, dtype=packed.dtype)
