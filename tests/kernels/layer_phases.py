"""What each phase of the kernel `decode_layers` computed, against float32 of its own inputs."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels.decode_layers import LayersShape, PackedLayers, triton
from jaxtrain_kernels.decode_layers.reference import (
    TokenPlace,
    add_scaled,
    attend_token,
    packed_matmul,
    rms_normed,
    squared_relu,
)

# A phase's output is rounded to bfloat16 (2^-9 of it), and so are numbers inside of a phase. One of
# them that is rounded the other way, as a root ends in another bit, moves its square by 2^-7.
RELATIVE, OF_SIZE = 2**-6, 2**-6  # of the output, and of the root of the mean square of all
PHASES = ("qkv", "heads", "out", "up", "down")


class PhaseError(NamedTuple):
    """A phase of all layers. worst: the layer of the largest error. error: the largest, of what is
    allowed: above 1 the phase is wrong. missing: words that nobody wrote. changed: words that
    another run wrote otherwise."""

    phase: str
    worst: int
    error: float
    missing: int
    changed: int

    @property
    def is_right(self) -> bool:
        return self.error <= 1 and not self.missing and not self.changed

    def __str__(self) -> str:
        return (
            f"{self.phase:6} error {self.error:8.3g} (layer {self.worst}), {self.missing} missing, "
            f"{self.changed} changed"
        )


def check_phases(
    s: LayersShape, inputs: tuple, first: triton.Launched, again: triton.Launched
) -> list[PhaseError]:
    """Of two launches with the same inputs, those of the public function. An error of a phase is
    its own: it is compared with what it had to make of what the launch's phases before it made."""
    weights, x0_D, cos_h, sin_h, values_LC, pages, *row = inputs
    where = TokenPlace(cos_h, sin_h, *row)
    found = {phase: [first.values(i, phase)[0] for i in range(s.depth)] for phase in PHASES}
    expected = {phase: [] for phase in PHASES}
    run = jax.jit(functools.partial(one_layer, s))
    x_D, down_D = x0_D, jnp.zeros_like(x0_D)
    for i, window in enumerate(s.windows):
        layer = PackedLayers(*(x[i] for x in weights))
        own = {phase: found[phase][i].astype(x0_D.dtype) for phase in PHASES}
        token = x0_D, values_LC[i], where, (pages[0][i], pages[1][i])
        x_D, outputs = run(layer, *token, x_D + down_D, own, jnp.int32(window))
        for phase, output in zip(PHASES, outputs):
            expected[phase].append(output)
        down_D = own["down"]
    return [
        phase_error(phase, s.depth, np.stack(found[phase]), np.stack(expected[phase]), first, again)
        for phase in PHASES
    ]


def one_layer(s: LayersShape, layer: PackedLayers, x0_D, values_C, where, pages, x_D, own, window):
    """The stream behind attention, and the outputs that a layer's phases should have, in float32.
    own: those that they have."""
    x_D = add_scaled(layer.scales_L2, x_D, x0_D)
    qkv = packed_matmul(layer.qkv_LRd, rms_normed(s, x_D))
    heads, _ = attend_token(s, own["qkv"], values_C, where, pages, window)
    out = packed_matmul(layer.out_LDn, own["heads"])
    x_D = x_D + own["out"]
    up = squared_relu(packed_matmul(layer.up_LFd, rms_normed(s, x_D)).astype(x0_D.dtype))
    return x_D, (qkv, heads, out, up, packed_matmul(layer.down_LDf, own["up"]))


def phase_error(phase, depth, found, expected, first, again) -> PhaseError:
    size = np.sqrt((expected**2).mean(axis=1, keepdims=True))
    of_allowed = np.abs(found - expected) / (RELATIVE * np.abs(expected) + OF_SIZE * size)
    of_layer = np.where(np.isfinite(of_allowed), of_allowed, np.inf).max(axis=1)
    words = [[x.words(i, phase) for i in range(depth)] for x in (first, again)]
    missing = sum(int((np.asarray(x) & 1 == 0).sum()) for x in words[0])
    changed = sum(int((np.asarray(x) != np.asarray(y)).sum()) for x, y in zip(*words))
    return PhaseError(phase, int(of_layer.argmax()), float(of_layer.max()), missing, changed)
