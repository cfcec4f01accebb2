"""Benchmark of LoRA and QLoRA on random weights: memory and rate, compared with HF peft."""

import gc
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from pydantic import TypeAdapter

from benchmarks.memory import needs, random_frozen, rate
from benchmarks.peers import rows_of
from benchmarks.record import describe
from benchmarks.step import compiled_step
from benchmarks.timing import COMPILERS
from jaxtrain.estimate.workload import Workload, load_workload
from jaxtrain.finetune import FinetuneConfig, apply_lora_plus, make_partition
from jaxtrain.optim import make_optimizer
from jaxtrain.settings import UserError

LORA: dict[str, Any] = {"name": "lora", "rank": 16, "alpha": 32.0}
PEER = "peft"
DOTS = ["model.remat=dots"]  # recomputes no matmul, in twice peft's bytes
# Finetuning methods with their memory techniques; all others recompute whole blocks.
# The first group is measured, then the peer, then the second group.
METHODS: tuple[dict[str, tuple[dict[str, Any], list[str]]], ...] = (
    {"LoRA r16": (LORA, []), "LoRA r16, dots": (LORA, DOTS)},
    {
        "QLoRA r16, nf4": (LORA | {"base_quantization": "nf4"}, []),
        "QLoRA r16, nf4, dots": (LORA | {"base_quantization": "nf4"}, DOTS),
        "LoRA r16, offload": (LORA, ["model.remat=offload"]),
        "LoRA r16, ffn in 8 tiles": (LORA, ["model.ffn_tiles=8"]),
        "LoRA r16, int8 base": (LORA | {"base_quantization": "int8"}, []),
    },
)
SHAPES = ((2048, 4), (8192, 1))  # (sequence length, sequences per step)


def bench_finetune(
    name: str, overrides: Sequence[str], variant: str | None, only: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the record, each time with one more row: for each method and shape the bytes of a step
    and, on a GPU, its time; peft's rows follow those of LoRA.

    only: names of methods, or peft; () for all. The peer runs in its own process, if torch and peft
    are installed.
    """
    names = [*itertools.chain(*METHODS), PEER]
    if wrong := [method for method in only if method not in names]:
        raise UserError(f"--only {wrong[0]}: no such row; there are {', '.join(names)}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # room for the peer's memory
    overrides = ["mesh={data: 1, fsdp: 1}", *overrides]
    w = load_workload(name, overrides, jax.devices()[:1])
    record = describe("finetune", w.name, variant or w.precision, workload=w.facts())
    rows: list[dict[str, Any]] = []
    running = jax.default_backend() == "gpu"
    for i, group in enumerate(METHODS):
        methods = {method: group[method] for method in group if not only or method in only}
        peers = peer_rows(name) if i == 0 and (not only or PEER in only) else ()
        for row in itertools.chain(measured(name, overrides, methods, running), peers):
            rows.append(row)
            print(f"  {row}", file=sys.stderr, flush=True)
            yield record | {"rows": list(rows)}


def measured(
    name: str, overrides: Sequence[str], methods: dict[str, Any], running: bool
) -> Iterator[dict[str, Any]]:
    """Our rows of some methods. They are compiled together, and random weights are made once per
    base."""
    kind, frozen = "none yet", None
    with ThreadPoolExecutor(COMPILERS) as pool:
        jobs = {
            (method, shape): pool.submit(compiled, name, overrides, shape, *methods[method])
            for method, shape in itertools.product(methods, SHAPES)
        }
    for (method, (T, batch)), job in jobs.items():
        row: dict[str, Any] = {"name": method, "shape": f"T {T}, batch {batch}"}
        try:
            w, step = job.result()
            row |= needs(step)
            if running:
                base = methods[method][0].get("base_quantization")
                if base != kind:
                    frozen = None
                    gc.collect()
                    kind, frozen = base, random_frozen(w)
                row |= rate(w, step, frozen)
        except UserError as error:
            row |= {"ms": None, "failed": str(error).partition(";")[0]}
        yield row | {"backend": "jaxtrain"}
    jax.clear_caches()


def compiled(
    name: str, overrides: Sequence[str], shape: tuple[int, int], tuning: Any, changes: list[str]
) -> tuple[Workload, Any]:
    """The workload and compiled step of a method at a (sequence length, batch) shape."""
    T, batch = shape
    size = [f"train.sequence_length={T}", f"train.batch_size={batch}"]
    size += [f"train.device_batch_size={batch}", "optim={name: adamw}", "model.remat=block"]
    w = tuned(load_workload(name, [*size, *overrides, *changes], jax.devices()[:1]), tuning)
    return w, compiled_step(w)


def tuned(w: Workload, tuning: dict[str, Any]) -> Workload:
    """The workload with the finetuning method's partition and optimizer."""
    finetune: Any = TypeAdapter(FinetuneConfig).validate_python(tuning)
    partition = make_partition(finetune, w.partition.base, w.spec.dtype)
    optimizer = make_optimizer(
        apply_lora_plus(w.config.optim, finetune), partition.trainable, 100, w.tokens
    )
    task = w.spec._replace(specs=partition.trainable, optimizer=optimizer, join=partition.join)
    return w._replace(spec=task, partition=partition)


def peer_rows(name: str) -> Iterator[dict[str, Any]]:
    """peft's rows, measured in its own process."""
    if name != "llama_8b":
        print("  no peer: it is for llama_8b", file=sys.stderr)
        return
    shapes = (f"{T}x{batch}" for T, batch in SHAPES)
    yield from rows_of("peer_finetune.py", *shapes, needs=("torch", "peft", "transformers"))
