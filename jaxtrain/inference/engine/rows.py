"""Sampling parameters of an engine's slots, on the host."""

import struct
from collections.abc import Sequence
from typing import cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxtrain.inference.engine.requests import SamplingParams
from jaxtrain.inference.engine.sampling import FORMATS, MOST_BIASED, Sampler, SlotRows

OFF = 2**31 - 1  # no limit: top_k of all tokens


def row_values(s: SamplingParams, prompt: int, adapter: int) -> tuple[float | int, ...]:
    """One request's row, in the order of RowSampling."""
    return (
        s.temperature, s.top_k or OFF, s.top_p, s.min_p, s.typical_p, s.repetition_penalty,
        s.presence_penalty, s.frequency_penalty, s.seed & 0xFFFFFFFF, prompt,
        prompt + s.max_tokens, -1 if s.logprobs is None else s.logprobs,
        OFF if s.grammar is None else 0, adapter,
    )  # fmt: skip


# Mask of 32 tokens, all of which are allowed.
ALL = 0xFFFFFFFF
# Fields of SamplingParams that each program supports, or that do not concern it.
CHEAP = {"max_tokens", "temperature", "min_p", "seed", "stop", "stop_tokens", "ignore_stop"}
FIELDS = {Sampler.TEMPERATURE: CHEAP, Sampler.BEST: CHEAP | {"top_k", "top_p"}}
PLAIN = SamplingParams()
IDLE = row_values(SamplingParams(max_tokens=0, temperature=0), 0, 0)


def sampler_of(s: SamplingParams) -> Sampler:
    """Cheapest program that supports a request's sampling parameters."""
    asked = {name for name, value, default in zip(s._fields, s, PLAIN) if value != default}
    return next((one for one, fields in FIELDS.items() if asked <= fields), Sampler.ALL)


PACK = struct.Struct("=" + "".join(FORMATS.values())).pack


def pack_row(values: tuple[float | int, ...]) -> np.ndarray:
    """The bits of a row's values, as `SlotRows` has them."""
    return np.frombuffer(PACK(*values), np.uint32)


class SlotTable:
    """Sampling inputs of all slots. Those that few requests need are copied to the device after a
    change; the small array that each request changes goes there with every call."""

    def __init__(self, slots: int, vocab_size: int):
        self.packed_SF = np.tile(pack_row(IDLE), (slots, 1))
        self.allowed_Sv = np.full((slots, -(-vocab_size // 32)), ALL, np.uint32)
        self.allowed_there: Array | None = None
        self.biased_Sn = np.full((slots, MOST_BIASED), OFF, np.int32)
        self.bias_Sn = np.zeros((slots, MOST_BIASED), np.float32)
        self.bias_there: tuple[Array, Array] | None = None

    def put(self, slot: int, sampling: SamplingParams, prompt: int, adapter: int = 0) -> None:
        """Write a request's parameters into a slot. prompt: number of tokens. adapter: index."""
        self._write(slot, row_values(sampling, prompt, adapter))
        if sampling.logit_bias:
            self._bias(slot, sampling.logit_bias)

    def clear(self, slot: int) -> None:
        """Reset a slot to idle."""
        self._write(slot, IDLE)
        if (self.allowed_Sv[slot] != ALL).any():
            self.allow(slot, np.uint32(ALL))
        if self.biased_Sn[slot, 0] != OFF:
            self._bias(slot, ())

    def allow(self, slot: int, bits_v: np.ndarray | np.uint32) -> None:
        """Set the mask of the tokens that a slot allows next."""
        self.allowed_Sv[slot] = bits_v
        self.allowed_there = None

    def _write(self, slot: int, values: tuple[float | int, ...]) -> None:
        self.packed_SF[slot] = pack_row(values)

    def _bias(self, slot: int, pairs: Sequence[tuple[int, float]]) -> None:
        self.biased_Sn[slot], self.bias_Sn[slot] = OFF, 0
        for i, (token, bias) in enumerate(pairs):
            self.biased_Sn[slot, i], self.bias_Sn[slot, i] = token, bias
        self.bias_there = None

    def inputs(self) -> SlotRows:
        """Sampling inputs of all slots, for a device call."""
        rows = cast(Array, self.packed_SF.copy())  # jit copies it faster than jnp.array does
        if (allowed := self.allowed_there) is None:
            self.allowed_there = allowed = jnp.array(self.allowed_Sv)
        if (bias := self.bias_there) is None:
            self.bias_there = bias = jnp.array(self.biased_Sn), jnp.array(self.bias_Sn)
        return SlotRows(rows, allowed, *bias)
