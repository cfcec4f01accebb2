"""Float8 training: float8 copies of matrices, made once per step, and delayed scaling.

`weights/float8.py` has the matrix product, and the choice of matrices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxtrain.config.resolve import Resolved
from jaxtrain.parallel.axes import current_mesh
from jaxtrain.train.transforms import StepTransform
from jaxtrain.weights.float8 import (
    PLAIN,
    AmaxHistory,
    Fp8Copies,
    Fp8Options,
    amax_from_history,
    fp8_weights,
    in_slots,
    init_amax_history,
    update_amax_history,
    with_fp8,
)
from jaxtrain.weights.params import Params, Specs


class Float8(StepTransform):
    """history: length of the amax history in steps (delayed scaling); None: current scaling.
    unrolled, joined: as of `fp8_weights`."""

    name = "amax_history"
    rewinds = True

    def __init__(
        self,
        history: int | None = None,
        options: Fp8Options = PLAIN,
        unrolled: bool = False,
        joined: bool = False,
    ):
        self.history, self.options = history, options
        self.has_state, self.layers = history is not None, (unrolled, joined)

    def init(self, params: Params, specs: Specs) -> AmaxHistory | None:
        return init_amax_history(specs, self.history) if self.history else None

    def prepare(self, params: Params, specs: Specs) -> Fp8Copies:
        return fp8_weights(params, specs, *self.layers)

    def statistics(self, state: AmaxHistory | None, grad_scale: jax.Array) -> AmaxHistory | None:
        if state is None:
            return None
        amax = amax_from_history(state, grad_scale)
        unrolled, _ = self.layers
        return in_slots(amax) if unrolled and current_mesh() is None else amax

    def wrap_params(
        self, params: Params, specs: Specs, prepared: Fp8Copies, statistics: AmaxHistory | None
    ) -> Params:
        return with_fp8(params, prepared, specs, statistics, self.options)

    def after_gradients(
        self, state: AmaxHistory | None, seen: AmaxHistory, grad_scale: jax.Array
    ) -> AmaxHistory | None:
        return None if state is None else update_amax_history(state, seen, grad_scale)

    def over_replicas(self, state: PyTree, pmax: Callable[[PyTree], PyTree]) -> PyTree:
        return pmax(state)


def float8(c: Resolved, dtype: jnp.dtype) -> Float8 | None:
    m = c.model
    options = Fp8Options(*(getattr(m, f"fp8_{name}") for name in Fp8Options._fields))
    layers = not m.scan_layers, m.kernels.qkv not in (None, "xla")
    return Float8(m.fp8_history, options, *layers) if m.fp8 else None
