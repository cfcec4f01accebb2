"""Benchmark of XLA options for a step: the default, then each set of options alone."""

import gc
import json
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.step import bench_step
from jaxtrain.cluster import xla_flags
from jaxtrain.cluster.xla_flags import Option, supported
from jaxtrain.settings import UserError

GIB = 2**30
PIPELINED = "COLLECTIVE_PIPELINING_MODE_ON"
COMBINED = ("all_reduce", "all_gather", "reduce_scatter")
# Comments state the effect that MaxText, AXLearn and NVIDIA claim; BENCHMARKS.md has our results.
SETS: dict[str, dict[str, Option]] = {
    # No overlap of collectives with compute: measures the gain of the latency-hiding scheduler.
    "in_order": {"xla_gpu_enable_latency_hiding_scheduler": False},
    # Few large collectives: combined up to 1 GiB instead of 30 MiB.
    "combined": {f"xla_gpu_{kind}_combine_threshold_bytes": GIB for kind in COMBINED},
    # In a loop, collectives of one iteration overlap with the compute of the next.
    "pipelined": {
        "xla_gpu_enable_while_loop_double_buffering": True,
        **{f"xla_gpu_pipeline_{kind}": PIPELINED for kind in COMBINED},
    },
    # Several collectives at once.
    "parallel": {
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
        "xla_gpu_experimental_parallel_scale_up_collective_overlap_limit": 4,
    },
    # Buffers registered with NCCL, which avoids copies.
    "user_buffers": {"xla_gpu_enable_nccl_user_buffers": True},
    # No CUDA graphs: every kernel is launched separately.
    "launched": {"xla_gpu_enable_command_buffer": ""},
    # The sets that training uses.
    **xla_flags.SETS,
}


def bench_flags(
    name: str, overrides: Sequence[str], only: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a record of `bench step` for each set (or the named one), all in one process.

    A set is skipped if this XLA has none of its options. Raises UserError for an unknown set.
    """
    every = {"default": dict[str, Option](), **SETS}
    if only is not None and only not in every:
        raise UserError(f"there is no set of flags {only}; there are {', '.join(every)}")
    sets = {set_: supported(options) for set_, options in every.items() if only in (None, set_)}
    lines = {
        set_: [*overrides, f"train.compiler_options={json.dumps(options)}"]
        for set_, options in sets.items()
        if options or not every[set_]
    }
    # One after another: programs compiled at once compete for the GPU in autotuning, and ten of
    # them exceeded the time limit of a call.
    for set_, line in lines.items():
        yield from bench_step(name, line, f"flags {set_}", parts=False)
        gc.collect()
