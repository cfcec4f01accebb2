"""Sampling of one token per row. Every parameter is an array, so no mix of requests recompiles.

A row's sample depends only on its seed, the token's position and the row's logits. There are three
programs (`Sampler`). `Sampler.ALL` takes a branch only if a row asks for it: on a GPU the host
waits for each branch.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

MOST_TOP = 20  # top log-probs, besides that of the sampled token
MOST_BIASED = 300  # tokens of one request with a logit bias


class Sampler(enum.IntEnum):
    """Sampling parameters that a program supports. Each member includes those before it."""

    TEMPERATURE = 0  # and min_p
    BEST = 1  # top_k and top_p
    ALL = 2


class RowSampling(NamedTuple):
    """Sampling parameters of rows, arrays [B]. prompt_B: prompt tokens. limit_B: maximum tokens of
    the sequence. top_B: number of top log-probs, -1 for no log-probs at all. guesses_B: maximum
    draft tokens per step. adapter_B: index of the LoRA adapter, 0 for none."""

    temperature_B: Array
    top_k_B: Array
    top_p_B: Array
    min_p_B: Array
    typical_p_B: Array
    repetition_B: Array
    presence_B: Array
    frequency_B: Array
    seed_B: Array
    prompt_B: Array
    limit_B: Array
    top_B: Array
    guesses_B: Array
    adapter_B: Array


# Format of each field's values (`struct`): float32, int32 or uint32.
FORMATS = dict.fromkeys(RowSampling._fields, "f")
FORMATS |= dict.fromkeys(("top_k_B", "prompt_B", "limit_B", "top_B", "guesses_B", "adapter_B"), "i")
FORMATS["seed_B"] = "I"
DTYPES = {"f": jnp.float32, "i": jnp.int32, "I": jnp.uint32}


class SlotRows(NamedTuple):
    """Sampling inputs of rows. packed_BF: the bits of all fields of `RowSampling`, in one array
    because each copy to a device costs host time. allowed_Bv: a bit for each token, 1 if allowed.
    biased_Bn: tokens with a logit bias, padded beyond the vocabulary. bias_Bn: values added to
    their logits."""

    packed_BF: UInt32[Array, "B F"]
    allowed_Bv: UInt32[Array, "B v"]
    biased_Bn: Int[Array, "B n"]
    bias_Bn: Float[Array, "B n"]

    @property
    def sampling(self) -> RowSampling:
        """The sampling parameters."""
        bits, dtypes = self.packed_BF, (DTYPES[x] for x in FORMATS.values())
        fields = (jax.lax.bitcast_convert_type(bits[:, i], x) for i, x in enumerate(dtypes))
        return RowSampling(*fields)


class Draw(NamedTuple):
    """Sampled token of each row. `Sampler.ALL` adds its log-prob before temperature and penalties,
    and the top tokens with theirs."""

    token_B: Array
    logprob_B: Array | None = None
    top_Bn: Array | None = None
    top_logprob_Bn: Array | None = None


def sample_rows(
    logits_BV: Float[Array, "B V"],
    rows: SlotRows,
    texts_BC: Int[Array, "B C"],
    lengths_B: Int[Array, "B"],
    sampler: Sampler,
) -> Draw:
    """Sample the token at position lengths_B of each row. texts_BC: the row's tokens before it.

    sampler: supports what every row asks for.
    """
    s = rows.sampling
    if sampler < Sampler.ALL:
        scaled_BV = scaled_logits(logits_BV, s)
        scaled_BV = scaled_BV if sampler < Sampler.BEST else keep_best(scaled_BV, s)
        noisy_B = with_noise(keep_likely(scaled_BV, s), s, lengths_B)
        best_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        token_B = jnp.where(s.temperature_B == 0, best_B, noisy_B)
        return Draw(token_B)
    raw_BV = logits_BV
    biased_B = jnp.any(rows.biased_Bn < logits_BV.shape[1], axis=1)
    logits_BV = when(biased_B, lambda x: add_logit_bias(x, rows), lambda x: x, logits_BV)
    punished_B = (s.repetition_B != 1) | (s.presence_B != 0) | (s.frequency_B != 0)
    logits_BV = when(
        punished_B, lambda x: penalized(x, s, texts_BC, lengths_B), lambda x: x, logits_BV
    )
    masked_B = jnp.any(rows.allowed_Bv != jnp.uint32(0xFFFFFFFF), axis=1)
    logits_BV = when(masked_B, lambda x: mask_tokens(x, rows.allowed_Bv), lambda x: x, logits_BV)
    best_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    random = lambda x: jnp.where(s.temperature_B == 0, best_B, sampled(x, s, lengths_B))
    token_B = when(s.temperature_B > 0, random, lambda x: best_B, logits_BV)
    return Draw(token_B, *logprobs(raw_BV, token_B, s.top_B))


def when(rows_B: Bool[Array, "B"], yes, no, x_BV: Array) -> Array:
    """yes(x) if any row asks for it, else no(x). Only one of them runs."""
    return jax.lax.cond(jnp.any(rows_B), yes, no, x_BV)


def add_logit_bias(logits_BV: Array, rows: SlotRows) -> Float[Array, "B V"]:
    """Logits plus the logit biases of each row."""
    rows_B1 = jnp.arange(len(logits_BV))[:, None]
    return logits_BV.at[rows_B1, rows.biased_Bn].add(rows.bias_Bn, mode="drop")


def penalized(
    logits_BV: Array, s: RowSampling, texts_BC: Array, lengths_B: Array
) -> Float[Array, "B V"]:
    """Logits after the repetition, presence and frequency penalties for each row's tokens."""
    rows_B1 = jnp.arange(len(logits_BV))[:, None]
    place_1C = jnp.arange(texts_BC.shape[1])[None]
    here_BC = place_1C < lengths_B[:, None]
    new_BC = here_BC & (place_1C >= s.prompt_B[:, None])
    counted = lambda of_BC: (
        jnp.zeros(logits_BV.shape, jnp.float32).at[rows_B1, texts_BC].add(of_BC, mode="drop")
    )
    in_text_BV = counted(here_BC.astype(jnp.float32)) > 0
    new_BV = counted(new_BC.astype(jnp.float32))
    column = lambda x_B: x_B[:, None]
    factor_B1 = column(s.repetition_B)
    lower_BV = jnp.where(logits_BV > 0, logits_BV / factor_B1, logits_BV * factor_B1)
    logits_BV = jnp.where(in_text_BV, lower_BV, logits_BV)
    logits_BV -= column(s.frequency_B) * new_BV
    return logits_BV - column(s.presence_B) * (new_BV > 0)


def mask_tokens(logits_BV: Array, allowed_Bv: Array) -> Float[Array, "B V"]:
    """Logits, -inf where a row's bit is 0."""
    token_V = jnp.arange(logits_BV.shape[1])
    word_BV = allowed_Bv[:, token_V // 32]
    bit_BV = (word_BV >> (token_V % 32).astype(jnp.uint32)[None]) & jnp.uint32(1)
    return jnp.where(bit_BV == 1, logits_BV, -jnp.inf)


def sampled(logits_BV: Array, s: RowSampling, positions_B: Array) -> Int[Array, "B"]:
    """Sample a token from the probabilities that a row's filters keep."""
    scaled_BV = scaled_logits(logits_BV, s)
    ordered_B = (s.top_k_B < logits_BV.shape[1]) | (s.top_p_B < 1)
    scaled_BV = when(ordered_B, lambda x: keep_best(x, s), lambda x: x, scaled_BV)
    scaled_BV = keep_likely(scaled_BV, s)
    scaled_BV = when(s.typical_p_B < 1, lambda x: keep_typical(x, s), lambda x: x, scaled_BV)
    return with_noise(scaled_BV, s, positions_B)


def scaled_logits(logits_BV: Array, s: RowSampling) -> Float[Array, "B V"]:
    """Logits divided by the temperature, or by a small value in greedy rows, which ignore them."""
    return logits_BV / jnp.maximum(s.temperature_B, 1e-6)[:, None]


def keep_likely(scaled_BV: Array, s: RowSampling) -> Float[Array, "B V"]:
    """Keep the tokens with at least min_p times the best token's probability; -inf elsewhere."""
    floor_B1 = scaled_BV.max(-1, keepdims=True) + jnp.log(s.min_p_B)[:, None]
    return jnp.where(scaled_BV < floor_B1, -jnp.inf, scaled_BV)


def with_noise(scaled_BV: Array, s: RowSampling, positions_B: Array) -> Int[Array, "B"]:
    """Sample a token by the Gumbel-max trick, with noise from the row's key."""

    def noise_V(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, scaled_BV.shape[1:])

    noise_BV = jax.vmap(noise_V)(s.seed_B, positions_B)
    return jnp.argmax(scaled_BV + noise_BV, axis=-1).astype(jnp.int32)


def keep_best(scaled_BV: Array, s: RowSampling) -> Float[Array, "B V"]:
    """Keep the top_k best tokens, and of these the best ones with top_p of the probability."""
    ordered_BV = jnp.sort(scaled_BV, axis=-1, descending=True)
    V = scaled_BV.shape[1]
    last_B1 = jnp.clip(s.top_k_B, 1, V)[:, None] - 1
    least_B1 = jnp.take_along_axis(ordered_BV, last_B1, axis=-1)
    ordered_BV = jnp.where(ordered_BV < least_B1, -jnp.inf, ordered_BV)
    p_BV = jax.nn.softmax(ordered_BV, axis=-1)
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    inside_BV = (before_BV < s.top_p_B[:, None]) | (s.top_p_B >= 1)[:, None]
    kept_B1 = jnp.maximum(jnp.sum(inside_BV, axis=-1, keepdims=True), 1)
    least_p_B1 = jnp.take_along_axis(ordered_BV, kept_B1 - 1, axis=-1)
    return jnp.where(scaled_BV < jnp.maximum(least_B1, least_p_B1), -jnp.inf, scaled_BV)


def keep_typical(scaled_BV: Array, s: RowSampling) -> Float[Array, "B V"]:
    """Keep the tokens whose surprise is nearest to the expected one, with probability typical_p."""
    log_p_BV = jax.nn.log_softmax(scaled_BV, axis=-1)
    p_BV = jnp.exp(log_p_BV)
    surprise_BV = jnp.where(p_BV > 0, -log_p_BV, jnp.inf)
    mean_B1 = jnp.sum(jnp.where(p_BV > 0, p_BV * surprise_BV, 0), axis=-1, keepdims=True)
    off_BV = jnp.abs(surprise_BV - mean_B1)
    order_BV = jnp.argsort(off_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(p_BV, order_BV, axis=-1)
    before_BV = jnp.cumsum(sorted_BV, axis=-1) - sorted_BV
    kept_B1 = jnp.maximum(jnp.sum(before_BV < s.typical_p_B[:, None], -1, keepdims=True), 1)
    off_sorted_BV = jnp.take_along_axis(off_BV, order_BV, axis=-1)
    most_B1 = jnp.take_along_axis(off_sorted_BV, kept_B1 - 1, axis=-1)
    return jnp.where((off_BV > most_B1) & (s.typical_p_B < 1)[:, None], -jnp.inf, scaled_BV)


def logprobs(logits_BV: Array, token_B: Array, top_B: Array) -> tuple[Array, Array, Array]:
    """Log-prob of the sampled token, then the top tokens and theirs. Zeros if no row asks."""
    n = min(MOST_TOP, logits_BV.shape[1])

    def some(logits_BV: Array) -> tuple[Array, Array, Array]:
        log_p_BV = jax.nn.log_softmax(logits_BV, axis=-1)
        best_Bn, which_Bn = jax.lax.top_k(log_p_BV, n)
        of_token_B1 = jnp.take_along_axis(log_p_BV, token_B[:, None], axis=-1)
        return of_token_B1[:, 0], which_Bn.astype(jnp.int32), best_Bn

    B = len(logits_BV)
    none = jnp.zeros(B), jnp.zeros((B, n), jnp.int32), jnp.zeros((B, n))
    return jax.lax.cond(jnp.any(top_B >= 0), some, lambda _: none, logits_BV)
