"""Validation of a model before and after quantization, mostly by one compiled program."""

import contextvars
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from jaxtrain.config.resolve import Resolved
from jaxtrain.evaluation.evaluate import ValidationProgram, evaluate
from jaxtrain.runs.saved import Saved
from jaxtrain.weights.contract import dequantize, flatten, is_weight
from jaxtrain.weights.float8_storage import StoredFloat8Weight
from jaxtrain.weights.int4 import Int4Weight
from jaxtrain.weights.params import ParamSpec
from jaxtrain.weights.quantized import Int8Weight, NF4Weight, QuantizedWeight

# Forms that multiply many rows by the dequantized matrix in the compute dtype. The others round or
# scale the inputs as well.
ARRAYS = (Int4Weight, Int8Weight, NF4Weight, StoredFloat8Weight)


class BeforeAfter:
    """Validates a model, and then its quantized form.

    A thread tokenizes the text and compiles the program while the model is quantized. Matrices that
    are multiplied as arrays are dequantized first: so the same program takes them, and none is
    compiled for their packed form. Other forms have a program of their own.
    """

    def __init__(self, saved: Saved, config: Resolved):
        self.saved, self.config = saved, config
        pool = ThreadPoolExecutor(1, thread_name_prefix="comparison")
        run = contextvars.copy_context().run  # includes the preferred kernels
        self.held_out: Future[ValidationProgram] = pool.submit(run, self.prepare)
        pool.shutdown(wait=False)

    def prepare(self) -> ValidationProgram:
        held_out = ValidationProgram(self.saved, self.config)
        held_out.compile(self.saved)
        return held_out

    def before(self) -> dict[str, float]:
        """Loss, perplexity and bits per byte of the model. Raises UserError as `evaluate` does."""
        return self.held_out.result().figures(self.saved)

    def after(self, small: Saved) -> dict[str, float]:
        """The same of its quantized form."""
        packed = [x for x in flatten(small.params).values() if is_weight(x)]
        same = small.config.model == self.saved.config.model
        if not same or not all(isinstance(x, ARRAYS) for x in packed):
            return evaluate(small, self.config)
        return self.held_out.result().figures(dequantized(small, self.saved))


def dequantized(small: Saved, like: Saved) -> Saved:
    """`like` with the values of a quantized model. They are rounded as its layers round them."""
    array = jax.jit(dequantize)

    def one(_: ParamSpec, x: np.ndarray | QuantizedWeight, old: np.ndarray) -> np.ndarray:
        x = jax.device_get(array(x)) if isinstance(x, QuantizedWeight) else x
        return np.asarray(x).astype(old.dtype)

    return like._replace(params=jax.tree.map(one, like.specs, small.params, like.params))
