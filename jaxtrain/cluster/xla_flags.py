"""Named sets of XLA options for compiling a step (`benchmarks/flags.py` measures more of them).

Options are passed with each compilation. XLA_FLAGS is not used: one unknown flag there ends the
process. An option of our sets that the installed XLA does not know is left out; a user's unknown
option is an error.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxtrain.settings import UserError

Option = bool | int | str

SETS: dict[str, dict[str, Option]] = {
    # All matmuls by cuBLAS, without autotuning a Triton kernel for each fused matmul. Autotuning
    # takes minutes for float8, and a third to a half of a step's compile time, and its kernels win
    # nothing there (LOG.md).
    "cublas": {"xla_gpu_enable_triton_gemm": False},
    # A matmul whose result a loop both stores and uses runs once. By default it runs twice, the
    # second time to write the result into the loop's stacked output.
    "once": {"xla_gpu_enable_dynamic_slice_fusion": False},
    # Matmuls of the same input stay apart if a matrix has more MB than this. By default XLA joins
    # them up to 32 MB: a decode step would copy its matrices once per token.
    "apart": {"xla_gpu_dot_merger_threshold_mb": 4},
    # Buffers of exchanges are in NCCL's symmetric memory, which is outside JAX's pool. The GPU's
    # copy engines then do all-gathers and all-to-alls (`parallel.mesh`), and matmuls
    # beside them keep all multiprocessors.
    "symmetric": {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True},
    # All-gathers up to this size become one: what a token's experts are comes with the token. By
    # default those of more than 30 MB stay apart, and the small one is waited for.
    "gathered": {"xla_gpu_all_gather_combine_threshold_bytes": 2**28},
}


def known_options(names: tuple[str, ...]) -> dict[str, Option]:
    """The options of these sets that the installed XLA supports."""
    return supported({option: value for name in names for option, value in SETS[name].items()})


def supported(options: Mapping[str, Option]) -> dict[str, Option]:
    """The given options that the installed XLA supports."""
    return {
        option: value for option, value in options.items() if not why_unsupported(option, value)
    }


class Jitted[**P, Result]:
    """jax.jit of a function, with the compiler options of some sets. The supported options are
    determined at the first call: this starts XLA's backend, which an import must not do.
    """

    def __init__(self, fn: Callable[P, Result], names: tuple[str, ...], options: dict[str, Any]):
        functools.update_wrapper(self, fn)
        self.jitted = functools.cache(
            lambda: jax.jit(fn, compiler_options=known_options(names), **options)
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self.jitted()(*args, **kwargs)

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        """As jax.jit's `lower`. Once compiled, the function is not compiled again when called."""
        return self.jitted().lower(*args, **kwargs)


def jit[**P, Result](
    *names: str, **options: Any
) -> Callable[[Callable[P, Result]], Jitted[P, Result]]:
    """Decorator: jax.jit with the compiler options of these sets. options: jax.jit's own."""
    return lambda fn: Jitted(fn, names, options)


def check_options(options: Mapping[str, Option]) -> None:
    """Raise UserError for the first of a user's options that this XLA does not support."""
    for option, value in options.items():
        if why := why_unsupported(option, value):
            raise UserError(f"train.compiler_options: {why}")


@functools.cache
def why_unsupported(option: str, value: Option) -> str:
    """Why this XLA rejects an option, found by compiling a constant; empty if it accepts it."""
    lowered = jax.jit(lambda: 0).lower()
    try:
        lowered.compile(compiler_options={option: value})
    except jax.errors.JaxRuntimeError as error:
        return str(error).partition("INVALID_ARGUMENT: ")[2].partition("\n")[0] or str(error)
    return ""
