"""LoRA and QLoRA on a model of random weights: memory and rate, beside Hugging Face's peft."""

import gc
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from pydantic import TypeAdapter

from jaxtrain.bench.memory import figures
from jaxtrain.bench.record import BENCHMARKS, describe
from jaxtrain.bench.workload import Workload, load_workload
from jaxtrain.finetune import FinetuneConfig, make_parts, plus
from jaxtrain.optim import make_optimizer
from jaxtrain.settings import UserError

LORA: dict[str, Any] = {"name": "lora", "rank": 16, "alpha": 32.0}
# What is tuned, and with which of the memory techniques; all recompute the blocks.
METHODS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "LoRA r16": (LORA, []),
    "LoRA r16, ffn in 8 tiles": (LORA, ["model.ffn_tiles=8"]),
    "LoRA r16, offload": (LORA, ["model.remat=offload"]),
    "QLoRA r16, nf4": (LORA | {"base": "nf4"}, []),
    "LoRA r16, int8 base": (LORA | {"base": "int8"}, []),
}
SHAPES = ((2048, 4), (8192, 1))  # tokens of a row, rows of a step
PEER = BENCHMARKS / "peer_finetune.py"


def bench_finetune(
    name: str, overrides: Sequence[str], variant: str | None
) -> Iterator[dict[str, Any]]:
    """The record, with one row more each time it is yielded: for each method and shape the bytes of
    a step and, on a GPU, its time; peft's beside them.

    The peer runs first, in a process of its own (JAX would hold the memory), where torch and peft
    are installed.
    """
    rows = peer_rows(name)
    running, one = jax.default_backend() == "gpu", jax.devices()[:1]
    overrides = ["mesh={data: 1, fsdp: 1}", *overrides]
    w = load_workload(name, overrides, one)
    record = describe("finetune", w.name, variant or w.precision, workload=w.facts())
    for T, batch in SHAPES:
        for method, (tuning, changes) in METHODS.items():
            size = [f"train.sequence_length={T}", f"train.batch_size={batch}"]
            size += [f"train.device_batch_size={batch}", "optim={name: adamw}", "model.remat=block"]
            row: dict[str, Any] = {"name": method, "shape": f"T {T}, batch {batch}"}
            try:
                w = load_workload(name, [*size, *overrides, *changes], one)
                row |= figures(tuned(w, tuning), running)
            except UserError as error:
                row |= {"ms": None, "failed": str(error).partition(";")[0]}
            rows.append(row | {"backend": "jaxtrain"})
            print(f"  {row}", file=sys.stderr, flush=True)
            yield record | {"rows": list(rows)}
            jax.clear_caches()
            gc.collect()


def tuned(w: Workload, tuning: dict[str, Any]) -> Workload:
    """The workload with a part of its model trained."""
    finetune: Any = TypeAdapter(FinetuneConfig).validate_python(tuning)
    parts = make_parts(finetune, w.parts.base, w.task.dtype)
    optimizer = make_optimizer(plus(w.config.optim, finetune), parts.trainable, 100, w.tokens)
    task = w.task._replace(specs=parts.trainable, optimizer=optimizer, join=parts.join)
    return w._replace(task=task, parts=parts)


def peer_rows(name: str) -> list[dict[str, Any]]:
    """What the peer's script prints, one JSON a line; none where it cannot run."""
    missing = [p for p in ("torch", "peft", "transformers") if importlib.util.find_spec(p) is None]
    if missing or name != "llama_8b" or not PEER.exists():
        print(f"  no peer: {', '.join(missing) or 'it is for llama_8b'}", file=sys.stderr)
        return []
    shapes = [f"{T}x{batch}" for T, batch in SHAPES]
    done = subprocess.run([sys.executable, str(PEER), *shapes], stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
