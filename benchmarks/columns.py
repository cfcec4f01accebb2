"""The columns of each benchmark's table, and the formatting of their values."""

from collections.abc import Callable
from typing import Any

from jaxtrain.runs.metrics import format_bytes

Columns = dict[str, Callable[[Any], str]]


def size(x: Any) -> str:
    return "-" if x is None else format_bytes(x)


def rounded(format: str) -> Callable[[Any], str]:
    return lambda x: "-" if x is None else f"{x:{format}}"


# Extra columns of steps and kernels, if the GPU's power was read.
POWER: Columns = {"watts": rounded(",.0f"), "sm_mhz": rounded(",.0f")}
# In rows of the engine's peers: ratio of our rate to theirs.
BESIDE: Columns = {"our_ratio": rounded(".2f"), "our_decode_ratio": rounded(".2f")}
STEP: Columns = {
    "tokens_per_s": rounded(",.0f"),
    "ms": rounded(".1f"),
    "ms_forward_backward": rounded(".1f"),
    "ms_optimizer": rounded(".1f"),
    "mfu": rounded(".3f"),
    "peak_bytes": size,
    "compile_s": rounded(".0f"),
}
MEMORY: Columns = {
    "arguments_bytes": size,
    "temp_bytes": size,
    "total_bytes": size,
    "device_bytes": size,
    "compile_s": rounded(".0f"),
}
TECHNIQUES: Columns = {
    "total_bytes": size,
    "host_bytes": size,
    "ms": rounded(",.1f"),
    "tokens_per_s": rounded(",.0f"),
    "error": rounded(".1e"),
}
KERNEL: Columns = {
    "ms": rounded(".3f"),
    "floor_ms": rounded(".3f"),
    "tflops": rounded(".3g"),
    "error": rounded(".1e"),
}
MATMUL: Columns = {
    "ms": rounded(".3f"),
    "floor_ms": rounded(".3f"),
    "tflops": rounded(".3g"),
    "gbps": rounded(",.0f"),
    "of_copy": rounded(".0%"),
    "error": rounded(".1e"),
}
ATTENTION: Columns = {
    "ms": rounded(".3f"),
    "tflops": rounded(".3g"),
    "tflops_visited": rounded(".3g"),
    "error": rounded(".1e"),
    "naive_error": rounded(".1e"),
    "exact": lambda x: "-" if x is None else ("yes" if x else "NO"),
}
DECODE: Columns = {
    "ms": rounded(".3f"),
    "gbps": rounded(",.0f"),
    "of_copy": rounded(".0%"),
    "error": rounded(".1e"),
    "naive_error": rounded(".1e"),
}
ENGINE: Columns = {
    "tokens_per_s": rounded(",.0f"),
    "decode_tokens_per_s": rounded(",.0f"),
    "ms": rounded(".3f"),
    "floor_ms": rounded(".3f"),
    "of_floor": rounded(".0%"),
    "us_a_layer": rounded(".2f"),
    "gbps": rounded(",.0f"),
    "of_copy": rounded(".0%"),
    "compile_s": rounded(".0f"),
    "alone_ms": rounded(".1f"),
    "alone_p99_ms": rounded(".1f"),
    "alone_host_ms": rounded(".1f"),
    "median_ms": rounded(".1f"),
    "median_p99_ms": rounded(".1f"),
    "last_ms": rounded(".1f"),
    "median_host_ms": rounded(".1f"),
    "joining_ms": rounded(".1f"),
    "joining_p99_ms": rounded(".1f"),
}
ENGINE_DRAFTS: Columns = {
    "tokens_per_s": rounded(",.0f"),
    "decode_tokens_per_s": rounded(",.0f"),
    "ms": rounded(".3f"),
    "speedup": rounded(".2f"),
    "acceptance": rounded(".1%"),
    "guesses": rounded(",.0f"),
    "tokens_per_check": rounded(".2f"),
    "same_text": rounded(".0%"),
    "compile_s": rounded(".0f"),
}
IMPORT: Columns = {
    "seconds": rounded(".1f"),
    "gbps": rounded(".2f"),
    "checkpoint_bytes": size,
    "host_bytes": size,
}
DATA: Columns = {
    "seconds": rounded(".1f"),
    "mb_per_s": rounded(".1f"),
    "mb_per_cpu_s": rounded(".1f"),
    "of_raw": rounded(".2f"),
    "tokens_per_s": rounded(",.0f"),
    "tokens_per_cpu_s": rounded(",.0f"),
    "plan_tokens_per_cpu_s": rounded(",.0f"),
    "crop": rounded(".1%"),
}
LOADER: Columns = {
    "first_mib": rounded(",.1f"),
    "last_mib": rounded(",.1f"),
    "growth_mib_per_minute": rounded(".3f"),
    "tokens_per_s": rounded(",.0f"),
    "epochs": rounded(",.0f"),
}
REMOTE_LOADER: Columns = {
    "tokens_per_s": rounded(",.0f"),
    "tokens_per_cpu_s": rounded(",.0f"),
    "first_batch_s": rounded(".2f"),
    "fetched_blocks": rounded(",.0f"),
    "waited_blocks": rounded(",.0f"),
    "waited_blocks_s": rounded(".2f"),
}
AT_SCALE: Columns = {
    "hours": rounded(",.1f"),
    "dollars": rounded(",.0f"),
    "terabytes": rounded(",.2f"),
    "core_hours": rounded(",.0f"),
    "cores": rounded(".3f"),
    "share": rounded(".3f"),
    "checkpoint_s": rounded(".2f"),
}
SIMULATE: Columns = {
    "meet_s": rounded(".2f"),
    "compare_s": rounded(".2f"),
    "stop_s": rounded(".2f"),
    "beat_cpu_s_per_s": rounded(".3f"),
    "write_s": rounded(".2f"),
    "check_s": rounded(".2f"),
    "list_bytes": rounded(",.0f"),
}
PLANS: Columns = {
    "first_batch_cpu_s": rounded(".2f"),
    "resume_cpu_s": rounded(".2f"),
    "held_bytes_per_document": rounded(".2f"),
    "peak_bytes_per_document": rounded(".2f"),
    "plan_tokens_per_cpu_s": rounded(",.0f"),
}
SERVE_SOAK: Columns = {
    "answers": rounded(",.0f"),
    "left": rounded(",.0f"),
    "garbage": rounded(",.0f"),
    "lost": rounded(",.0f"),
    "crossed": rounded(",.0f"),
    "first_token_p50_ms": rounded(",.0f"),
    "first_token_p99_ms": rounded(",.0f"),
    "request_p50_ms": rounded(",.0f"),
    "request_p99_ms": rounded(",.0f"),
    "tokens_per_s": rounded(",.0f"),
    "first_mib": rounded(",.1f"),
    "last_mib": rounded(",.1f"),
}
PRODUCTS: Columns = {
    "count": rounded(",.0f"),
    "ms": rounded(".3f"),
    "burst_ms": rounded(".3f"),
    "ms_of_burst": rounded(".3f"),
    "tflops": rounded(".0f"),
}
PACKED: Columns = {
    "crop": rounded(".2%"),
    "cuts": rounded(".3f"),
    "padding": rounded(".2%"),
    "unused": rounded(".1%"),
    "plan_tokens_per_cpu_s": rounded(",.0f"),
}
FILTERS: Columns = {
    "documents": rounded(",.0f"),
    "of_documents": rounded(".2%"),
    "bytes": size,
    "of_bytes": rounded(".2%"),
    "seconds": rounded(".1f"),
    "mb_per_s": rounded(".1f"),
    "mb_per_cpu_s": rounded(".1f"),
}
COMPRESS: Columns = {
    "bpb": rounded(".4f"),
    "core": rounded(".4f"),
    "disk_bytes": size,
    "memory_bytes": size,
    "tokens_per_s_1": rounded(",.0f"),
    "tokens_per_s_32": rounded(",.0f"),
}
RECIPES: Columns = {
    "steps": rounded("d"),
    "parameters": rounded(",d"),
    "bpb": rounded(".4f"),
    "memory_bytes": size,
}
CASE: Columns = {
    "seconds": rounded(",.1f"),
    "tokens_per_s": rounded(",.0f"),
    "loss": rounded(".4f"),
    "bpb": rounded(".4f"),
    "core": rounded(".4f"),
}
PROJECTION: Columns = {
    "tokens": rounded(",.0f"),
    "projected_tokens_per_s": rounded(",.0f"),
    "efficiency": rounded(".3f"),
    "efficiency_low": rounded(".3f"),
    "hours_low": rounded(".2f"),
    "hours": rounded(".2f"),
    "hours_high": rounded(".2f"),
}
QUICKSTART: Columns = {
    "seed": rounded("d"),
    "seconds": rounded(".1f"),
    "tokens_per_s": rounded(",.0f"),
    "bpb": rounded(".4f"),
    "step_bytes": size,
}
TASKS: Columns = {
    "seconds": rounded(".1f"),
    "examples_per_s": rounded(",.0f"),
    "speedup": rounded(".1f"),
}
OPTIMIZER: Columns = {
    "ms": rounded(".2f"),
    "state_bytes": size,
    "floor_matmul_ms": rounded(".2f"),
    "floor_bytes_ms": rounded(".2f"),
}
POPULATION: Columns = {
    "tokens_per_s": rounded(",.0f"),
    "tokens_per_s_alone": rounded(",.0f"),
    "ratio": rounded(".2f"),
    "ratio_cpu_seconds": rounded(".2f"),
    "ratio_compiled_each": rounded(".2f"),
    "compile_s": rounded(".0f"),
    "peak_bytes": size,
    "error": rounded(".1e"),
}
RACE: Columns = {
    "lowest": rounded(".4f"),
    "bpb": rounded(".4f"),
    "tokens_per_s": rounded(",.0f"),
    "seconds": rounded(",.0f"),
    "speedup_steps": rounded(".2f"),
    "speedup_seconds": rounded(".2f"),
}
TITLES = {
    "terabytes": "TB moved",
    "core_hours": "core hours",
    "share": "of a host's 1.25 GB/s",
    "checkpoint_s": "s a checkpoint",
    "meet_s": "meeting, s",
    "compare_s": "comparing, s",
    "stop_s": "agreeing on a last step, s",
    "beat_cpu_s_per_s": "CPU s/s of beats, all",
    "write_s": "list written, s",
    "check_s": "read and checked, s",
    "list_bytes": "bytes of the list",
    "first_batch_s": "first batch, s",
    "first_batch_cpu_s": "first batch, CPU s",
    "resume_cpu_s": "from the middle, CPU s",
    "held_bytes_per_document": "bytes held a document",
    "peak_bytes_per_document": "most bytes a document",
    "fetched_blocks": "blocks fetched",
    "waited_blocks": "blocks waited for",
    "waited_blocks_s": "s of that",
    "decode_tokens_per_s": "tokens/s, decoding",
    "of_floor": "of the floor's rate",
    "our_ratio": "ours, times this",
    "our_decode_ratio": "decoding",
    "acceptance": "right guesses",
    "tokens_per_check": "tokens a step",
    "same_text": "texts as without",
    "alone_ms": "first token alone, ms",
    "alone_p99_ms": "p99, ms",
    "alone_host_ms": "of it host, ms",
    "median_ms": "of many, ms",
    "median_p99_ms": "p99 of many, ms",
    "last_ms": "of the last, ms",
    "median_host_ms": "of it host, ms",
    "joining_ms": "joining others, ms",
    "joining_p99_ms": "p99 joining, ms",
    "lowest": "lowest bits per byte",
    "bpb": "final bits per byte",
    "seconds": "seconds",
    "speedup_steps": "speed-up, steps",
    "speedup_seconds": "speed-up, time",
    "tokens_per_s": "tokens/s",
    "projected_tokens_per_s": "tokens/s, projected",
    "efficiency_low": "efficiency, low",
    "hours_low": "hours, low",
    "hours_high": "hours, high",
    "step_bytes": "step memory",
    "tokens_per_s_1": "tokens/s, batch 1",
    "tokens_per_s_32": "tokens/s, batch 32",
    "core": "CORE",
    "disk_bytes": "on disk",
    "memory_bytes": "in memory",
    "tokens_per_s_alone": "tokens/s, one after another",
    "ratio": "times",
    "ratio_cpu_seconds": "times in CPU seconds",
    "ratio_compiled_each": "times with compiling",
    "examples_per_s": "examples/s",
    "speedup": "speed-up",
    "count": "times",
    "burst_ms": "ms after a rest",
    "ms_of_burst": "ms of the fastest after a rest",
    "ms": "ms",
    "floor_ms": "floor ms",
    "ms_forward_backward": "fwd+bwd ms",
    "ms_optimizer": "optimizer ms",
    "mfu": "MFU",
    "peak_bytes": "peak memory",
    "compile_s": "compile s",
    "arguments_bytes": "state and batch",
    "temp_bytes": "scratch",
    "total_bytes": "needs",
    "device_bytes": "device has",
    "tflops": "TF/s",
    "tflops_visited": "TF/s visited",
    "gbps": "GB/s",
    "of_copy": "of copy rate",
    "us_a_layer": "us a layer",
    "naive_error": "naive error",
    "exact": "below 2x naive",
    "documents": "documents lost",
    "of_documents": "share",
    "bytes": "text lost",
    "of_bytes": "share of text",
    "mb_per_s": "MB/s",
    "mb_per_cpu_s": "MB/CPU s",
    "of_raw": "of library",
    "cuts": "cuts a row",
    "unused": "never used",
    "tokens_per_cpu_s": "tokens/CPU s",
    "plan_tokens_per_cpu_s": "planned tokens/CPU s",
    "first_mib": "MiB, first minute",
    "last_mib": "MiB, last minute",
    "growth_mib_per_minute": "MiB/minute",
    "state_bytes": "state",
    "checkpoint_bytes": "checkpoint",
    "host_bytes": "host memory",
    "floor_matmul_ms": "matmul floor ms",
    "floor_bytes_ms": "bytes floor ms",
    "watts": "W",
    "sm_mhz": "MHz",
}
