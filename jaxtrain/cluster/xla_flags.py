"""Options of XLA's for a step's compilation, in sets by name: `bench step --flags` measures each.

They go with one compilation, never through XLA_FLAGS, where one unknown flag ends the process. Of a
set of ours what the installed XLA does not know is left out; of a user's it is an error.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxtrain.settings import UserError

Option = bool | int | str

GIB = 2**30
PIPELINED = "COLLECTIVE_PIPELINING_MODE_ON"
COMBINED = ("all_reduce", "all_gather", "reduce_scatter")
# What each is said to do (MaxText's, AXLearn's and NVIDIA's recipes); what it does: BENCHMARKS.md.
SETS: dict[str, dict[str, Option]] = {
    # Collectives where they stand, none beside computing: what the scheduler brings.
    "in_order": {"xla_gpu_enable_latency_hiding_scheduler": False},
    # Few large collectives; by default they are joined up to 30 MiB.
    "combined": {f"xla_gpu_{kind}_combine_threshold_bytes": GIB for kind in COMBINED},
    # Those of a loop's round beside the computing of the next.
    "pipelined": {
        "xla_gpu_enable_while_loop_double_buffering": True,
        **{f"xla_gpu_pipeline_{kind}": PIPELINED for kind in COMBINED},
    },
    # Several at once.
    "parallel": {
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
        "xla_gpu_experimental_parallel_scale_up_collective_overlap_limit": 4,
    },
    # Buffers that NCCL knows, so that it need not copy.
    "user_buffers": {"xla_gpu_enable_nccl_user_buffers": True},
    # The same memory on all devices, where NCCL can gather by copy engines (NCCL_CTA_POLICY=2), so
    # that matmuls beside it keep their multiprocessors. It lies outside of JAX's pool of memory.
    "symmetric": {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True},
    # Every kernel launched by itself, none from a CUDA graph.
    "launched": {"xla_gpu_enable_command_buffer": ""},
    # All matmuls by cuBLAS: no search among Triton's for each matmul with what it is fused with. It
    # takes minutes for float8's, and a third to a half of a decoder's compiling (LOG.md).
    "cublas": {"xla_gpu_enable_triton_gemm": False},
    # A matmul whose result a loop both keeps and uses runs once. By default it runs twice, the
    # second time to write what is kept to its place.
    "once": {"xla_gpu_enable_dynamic_slice_fusion": False},
}


def known_options(names: tuple[str, ...]) -> dict[str, Option]:
    """The options of these sets, without those that this XLA does not know."""
    options = {option: value for name in names for option, value in SETS[name].items()}
    return {
        option: value for option, value in options.items() if not why_unsupported(option, value)
    }


class Jitted:
    """jax.jit of a function with the options of some sets. They are looked up at its first use:
    asking what XLA knows starts its backend, which an import must not.
    """

    def __init__(self, fn: Callable[..., Any], names: tuple[str, ...], options: dict[str, Any]):
        functools.update_wrapper(self, fn)
        self.jitted = functools.cache(
            lambda: jax.jit(fn, compiler_options=known_options(names), **options)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.jitted()(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As jax.jit's: what is compiled of it is not compiled again when it is called."""
        return self.jitted().lower(*args, **kwargs)


def jit(*names: str, **options: Any) -> Callable[[Callable[..., Any]], Jitted]:
    """A decorator: jax.jit with the options of these sets; options: jax.jit's own."""
    return lambda fn: Jitted(fn, names, options)


def check_options(options: Mapping[str, Option]) -> None:
    """Raise UserError for the first of a user's options that this XLA would not take."""
    for option, value in options.items():
        if why := why_unsupported(option, value):
            raise UserError(f"train.compiler_options: {why}")


@functools.cache
def why_unsupported(option: str, value: Option) -> str:
    """Why this XLA does not take an option; empty if it does. It is asked to compile a constant."""
    lowered = jax.jit(lambda: 0).lower()
    try:
        lowered.compile(compiler_options={option: value})
    except jax.errors.JaxRuntimeError as error:
        return str(error).partition("INVALID_ARGUMENT: ")[2].partition("\n")[0] or str(error)
    return ""
