"""The products of `streamed` one by one, with the codes in rows."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul import integers
from jaxtrain_kernels.matmul.few_rows.operations import InputNorm, Operations
from jaxtrain_kernels.matmul.integers.around import columns_by_size
from jaxtrain_kernels.matmul.streamed.order import from_stream
from jaxtrain_kernels.matmul.streamed.plan import Arrays, StreamPhase

OPS = {"int4": integers.w4a16_matmul, "int8": integers.w8a16_matmul}


def supports(on: Target, x: Any, phases: Sequence[StreamPhase]) -> None:
    return None


def streamed_products(
    form: str,
    x: jax.Array,
    stream: jax.Array,
    phases: tuple[StreamPhase, ...],
    arrays: Sequence[Arrays],
    eps: float,
) -> list[jax.Array]:
    """Backend of the public function."""
    results = []
    for phase, (words, scales, gain) in zip(phases, arrays, strict=True):
        codes, own = from_stream(form, phase.K, words)
        operations = Operations(
            InputNorm(eps, gain) if phase.normed else None,
            None,
            phase.activation,
            stream if phase.residual else None,
        )
        given = codes, scales if form == "int8" else own
        x = OPS[form](x[:, : phase.K], *given, operations=operations, implementation="reference")
        stream = x if phase.residual else stream
        results += columns_by_size(x, phase.outputs)
    return results
