"""The sampling parameters of an engine's slots, as the host keeps them."""

import jax
import numpy as np

from jaxtrain.inference.engine.requests import SamplingParams
from jaxtrain.inference.engine.sampling import RowSampling

OFF = 2**31 - 1  # top_k of all tokens


def row_values(s: SamplingParams, prompt: int) -> tuple[float | int, ...]:
    """One request's row, in the order of RowSampling."""
    return (
        s.temperature, s.top_k or OFF, s.top_p, s.min_p, s.typical_p, s.repetition_penalty,
        s.presence_penalty, s.frequency_penalty, s.seed & 0xFFFFFFFF, prompt,
        prompt + s.max_tokens, -1 if s.logprobs is None else s.logprobs,
    )  # fmt: skip


IDLE = row_values(SamplingParams(max_tokens=0, temperature=0), 0)
DTYPES: dict[str, type[np.number]] = dict.fromkeys(RowSampling._fields, np.float32)
DTYPES |= dict.fromkeys(("top_k_B", "prompt_B", "limit_B", "top_B"), np.int32)
DTYPES["seed_B"] = np.uint32


class SlotTable:
    """Rows that change as requests come and go; copied to the device when they have changed."""

    def __init__(self, slots: int):
        columns = zip(IDLE, RowSampling._fields, strict=True)
        self.columns = [np.full(slots, value, DTYPES[name]) for value, name in columns]
        self.there: RowSampling | None = None

    def put(self, slot: int, sampling: SamplingParams, prompt: int) -> None:
        """A request with so many tokens of a prompt begins in a slot."""
        self._write(slot, row_values(sampling, prompt))

    def clear(self, slot: int) -> None:
        """A slot asks for nothing again."""
        self._write(slot, IDLE)

    def _write(self, slot: int, values: tuple[float | int, ...]) -> None:
        for column, value in zip(self.columns, values, strict=True):
            column[slot] = value
        self.there = None

    def on_device(self) -> RowSampling:
        if self.there is None:
            # Copies: an array on a CPU may be the host's own memory.
            self.there = RowSampling(*jax.device_put([x.copy() for x in self.columns]))
        return self.there
