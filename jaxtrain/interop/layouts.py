"""Layouts of a parameter in a checkpoint's tensor: pairs of functions, theirs -> ours and back."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxtrain.interop.tensors import transposed

Change = Callable[[np.ndarray, int], np.ndarray]  # (array of one layer, head dim) -> array


class Layout(NamedTuple):
    """`read` converts their array to ours, `write` ours to theirs."""

    read: Change
    write: Change


def swap_rotary_halves(x: np.ndarray, head_dim: int) -> np.ndarray:
    """Swap the two halves of each head's channels, which are the last dim of x.

    NanoChat rotates by minus the angle, which equals our RoPE with the halves of q and k swapped.
    """
    halves = x.reshape(*x.shape[:-1], -1, 2, head_dim // 2)
    return halves[..., ::-1, :].reshape(x.shape)


LAYOUTS = {
    "same": Layout(lambda x, h: x, lambda x, h: x),
    # PyTorch's Linear stores [out, in].
    "linear": Layout(lambda x, h: transposed(x), lambda x, h: transposed(x)),
    "turned linear": Layout(
        lambda x, h: swap_rotary_halves(transposed(x), h),
        lambda x, h: transposed(swap_rotary_halves(x, h)),
    ),
    # Gemma's norms multiply by 1 + weight.
    "plus one": Layout(
        lambda x, h: 1 + x.astype(np.float32), lambda x, h: x.astype(np.float32) - 1
    ),
}
