"""Rotary frequencies, and their scaling to a longer context."""

import math
from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field, field_validator

from jaxtrain.settings import Settings


class LinearScaling(Settings):
    """Position interpolation: positions are divided by a factor (Chen et al. 2023)."""

    name: Literal["linear"] = "linear"
    factor: float = Field(gt=0, description="ratio of the new context length to the original one")


class Llama3Scaling(Settings):
    """Llama 3.1: low frequencies are divided by the factor, high ones kept, with a ramp between."""

    name: Literal["llama3"] = "llama3"
    factor: float = Field(8.0, gt=0, description="divisor of the low frequencies")
    low_freq_factor: float = Field(
        1.0,
        gt=0,
        description="rotations over original_context below which a frequency counts as low",
    )
    high_freq_factor: float = Field(
        4.0,
        gt=0,
        description="rotations over original_context above which a frequency counts as high",
    )
    original_context: int = Field(8192, ge=1, description="context length in tokens before scaling")


class YarnScaling(Settings):
    """YaRN (Peng et al. 2023): a ramp between kept and divided frequencies, and larger attention
    scores."""

    name: Literal["yarn"] = "yarn"
    factor: float = Field(gt=0, description="ratio of the new context length to the original one")
    beta_fast: float = Field(
        32.0, gt=0, description="rotations over original_context above which a frequency is kept"
    )
    beta_slow: float = Field(
        1.0, gt=0, description="rotations over original_context below which a frequency is divided"
    )
    original_context: int = Field(ge=1, description="context length in tokens before scaling")
    attention_factor: float | None = Field(
        None,
        gt=0,
        description="factor on queries and on keys after RoPE; default 1 + 0.1 ln(factor)",
    )
    truncate: bool = Field(True, description="round the ends of the ramp to whole channels")


class LongRopeScaling(Settings):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency has its own divisor.

    Sequences longer than original_context use the long divisors, others the short ones.
    """

    name: Literal["longrope"] = "longrope"
    short_factor: tuple[float, ...] = Field(
        description="head_dim / 2 divisors of the frequencies, for sequences up to original_context"
    )
    long_factor: tuple[float, ...] = Field(
        description="head_dim / 2 divisors of the frequencies, for longer sequences"
    )
    factor: float = Field(gt=0, description="ratio of the new context length to the original one")
    original_context: int = Field(ge=2, description="context length in tokens before scaling")
    attention_factor: float | None = Field(
        None,
        gt=0,
        description="factor on queries and on keys after RoPE; default sqrt(1 + ln(factor) / "
        "ln(original_context))",
    )

    @field_validator("short_factor", "long_factor")
    @classmethod
    def _positive(cls, given: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 < x < math.inf for x in given):
            raise ValueError("the divisors must be above 0, and finite")
        return given

    def check_size(self, rotated: int) -> None:
        """Raise ValueError unless there is one divisor per pair of the rotated channels."""
        if {len(self.short_factor), len(self.long_factor)} != {rotated // 2}:
            raise ValueError(
                f"rope_scaling.short_factor and long_factor need head_dim / 2 = {rotated // 2} "
                "numbers each"
            )


RopeScaling = Annotated[
    LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling, Field(discriminator="name")
]


class Divisors(NamedTuple):
    """Divisors of the frequencies as arrays, so that a search over them does not recompile."""

    divisors_h: Float[Array, "h"]
    factor: Float[Array, ""]  # on rotated queries and on rotated keys


def long_rope(
    c: LongRopeScaling, plain_h: Float[Array, "h"], positions_BT: Int[Array, "B T"]
) -> tuple[Float[Array, "B h"], float]:
    """Frequencies of each row, chosen by its largest position; and the factor on queries, keys."""
    is_long_B1 = jnp.max(positions_BT, axis=1, keepdims=True) >= c.original_context
    short_1h, long_1h = (jnp.asarray([f], jnp.float32) for f in (c.short_factor, c.long_factor))
    grown = 1 + math.log(max(c.factor, 1.0)) / math.log(c.original_context)
    divisors_Bh = jnp.where(is_long_B1, long_1h, short_1h)
    return plain_h[None] / divisors_Bh, c.attention_factor or math.sqrt(grown)


def frequencies(
    head_dim: int,
    base: float,
    scaling: RopeScaling | Divisors | None,
    positions_BT: Int[Array, "B T"],
) -> tuple[Float[Array, "*b h"], float | Float[Array, ""]]:
    """Radians per token of the H/2 pairs, [h] or per row [B, h], and the factor on rotated queries
    and keys."""
    plain_h = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return plain_h, 1.0
    if isinstance(scaling, Divisors):
        return plain_h / scaling.divisors_h, scaling.factor
    if scaling.name == "linear":
        return plain_h / scaling.factor, 1.0
    if scaling.name == "longrope":
        return long_rope(scaling, plain_h, positions_BT)
    if scaling.name == "llama3":
        turns_h = scaling.original_context * plain_h / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept_h = jnp.clip((turns_h - low) / (high - low), 0.0, 1.0)
        return kept_h * plain_h + (1 - kept_h) * plain_h / scaling.factor, 1.0

    def channel(turns: float) -> float:
        """Index of the pair that makes `turns` full rotations over the original context."""
        wavelength = scaling.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(base))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp_h = (jnp.arange(head_dim // 2, dtype=jnp.float32) - first) / max(last - first, 0.001)
    kept_h = 1 - jnp.clip(ramp_h, 0.0, 1.0)
    grown = max(1.0, 1 + 0.1 * math.log(scaling.factor))
    factor = scaling.attention_factor or grown
    return kept_h * plain_h + (1 - kept_h) * plain_h / scaling.factor, factor
