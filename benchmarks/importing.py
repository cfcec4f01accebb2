"""Benchmark of reading an HF checkpoint of a real model's shapes: seconds and host memory."""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from benchmarks.record import describe
from jaxtrain.estimate.workload import SHORT
from jaxtrain.interop.configs import family_of, model_fields
from jaxtrain.interop.load import expected, load_checkpoint, open_checkpoint, our_file_layout
from jaxtrain.interop.tensors import INDEX, WEIGHTS, shards, write
from jaxtrain.model import ModelConfig, Transformer, resolve_model, split
from jaxtrain.parallel import MeshConfig, make_mesh, shardings
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import flatten

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
TINY = LLAMA_8B | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SHAPES = {"llama_8b": LLAMA_8B, "tiny": TINY}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def bench_import(variant: str | None = None, names: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds, GB/s and peak host memory of two paths: checkpoint -> run's file, and -> devices.

    Memory is the process's peak above its size before, including memory-mapped files.
    """
    name = names[0] if names else "llama_8b"
    if name not in SHAPES:
        raise UserError(f"import: there is no shape {name}; there are {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), SHAPES[name])
        source = open_checkpoint(Path(folder))
        c = resolve_model(ModelConfig.model_validate(source.fields), 2048)
        _, specs = split(Transformer(c, SHAPES[name]["vocab_size"]))
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        rows: list[dict[str, Any]] = []
        with measured(rows, "into a run's file", name, size):
            table, pieces = our_file_layout(source, specs)
            write(Path(folder) / "run.safetensors", table, pieces, {})
        placed = shardings(specs, make_mesh(MeshConfig.model_validate({"fsdp": "auto", "data": 1})))
        with measured(rows, "onto the devices", name, size):
            jax.block_until_ready(load_checkpoint(source, specs, placed, dtype="bfloat16"))
    return describe("import", name, variant or SHORT["bfloat16"]) | {"rows": rows}


def make_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json and shards of repeated random bfloat16 values, which is fast."""
    (folder / "config.json").write_text(json.dumps(config))
    c = resolve_model(ModelConfig.model_validate(model_fields(config)), 2048)
    _, specs = split(Transformer(c, config["vocab_size"]))
    shapes = expected(family_of(config), flatten(specs))
    table = {tensor: (BFLOAT16, shape) for tensor, shape in shapes.items()}
    some = (0.02 * np.random.default_rng(0).standard_normal(1 << 20)).astype(BFLOAT16)
    groups, index = list(shards(table)), {}
    for i, names in enumerate(groups):
        file = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" if groups[1:] else WEIGHTS
        part = {tensor: table[tensor] for tensor in names}
        write(folder / file, part, (np.resize(some, s) for _, s in part.values()), {"format": "pt"})
        index |= dict.fromkeys(names, file)
    if groups[1:]:
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))


@contextmanager
def measured(rows: list[dict[str, Any]], name: str, shape: str, size: int) -> Iterator[None]:
    """Add a row: seconds, and the peak resident memory above that at the start."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = resident("VmRSS"), time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    row = {"name": name, "shape": shape, "seconds": seconds, "gbps": size / seconds / 1e9}
    host = max(0, resident("VmHWM") - before)
    rows.append(row | {"checkpoint_bytes": size, "host_bytes": host})


def resident(line: str) -> int:
    """Resident bytes of this process as Linux reports them: VmRSS (current) or VmHWM (peak)."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{line}:")[1].split()[0])
