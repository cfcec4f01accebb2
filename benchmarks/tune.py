"""Autotuning of the table that selects attention's backend and tiling."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain_kernels.attention import BACKENDS, table
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.shapes import ATTENTION_TUNE, AttentionShape

from benchmarks.attention import (
    WRAPS,
    attention_inputs,
    errors,
    our_attention,
    rate,
    small_attention,
)
from benchmarks.kernels import chosen, finished, report, sized
from benchmarks.timing import rotating
from jaxtrain.cluster.runtime import compute_dtype

Tiling = dict[str, Any]
# Time per measurement; short, since there are many.
SHORT: dict[str, Any] = {"windows": 3, "seconds": 0.05}


def tune_attention(
    out: Path | None = None, variant: str | None = None, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure backends and tilings, and write the fastest tiling of each backend into the table.

    out: folder for the new table.json; default the package's own. The record has every figure,
    including slower tilings. names: shapes and backends to measure; default all.
    """
    dtype, figures = compute_dtype("auto"), []
    path = table.PATH if out is None else out / table.PATH.name
    ours = [name for name in BACKENDS if name != "reference"]
    shapes, wanted = chosen("attention", names, [s.name for s in ATTENTION_TUNE], ours)
    rows = list(table.read_table())
    for shape in map(sized(small_attention), [s for s in ATTENTION_TUNE if s.name in shapes]):
        inputs = rotating(lambda key, s=shape: attention_inputs(s, dtype, key))
        for backend in [name for name in ours if name in wanted]:
            tried, best = sweep(shape, backend, dtype, inputs)
            figures += tried
            rows += [table_row(shape, dtype, best)] if best else []
        # Write after each shape, so that an interrupted run keeps its results.
        path.parent.mkdir(parents=True, exist_ok=True)
        table.write_table(rows, path)
    table.read_table.cache_clear()
    return finished("attention", dtype, variant, figures) | {"config": "tune", "peers": []}


def table_row(shape: AttentionShape, dtype: Any, best: dict[str, Any]) -> table.Row:
    kind = table.TableKey(
        dtype=dtype.name,
        head_dim=shape.H,
        causal=shape.causal,
        window=shape.window is not None,
        segments=bool(shape.documents),
        softcap=shape.softcap is not None,
        group=shape.N // shape.K,
        T=shape.T,
    )
    return table.make_row(target(), kind, best["backend"], best["tiling"], *best["rates"])


def sweep(
    shape: AttentionShape, backend: str, dtype: Any, inputs: Any
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Rows of a backend's candidates, and its best tiling with its rates (None if none works).

    Candidates with the same keys are alternatives; the best one is part of all later candidates.
    Those of `forward` are compared by the forward pass, others by forward and backward together.
    """
    groups: dict[frozenset[str], list[Tiling]] = {}
    for tiling in getattr(BACKENDS[backend], "candidates", lambda shape: [])(shape):
        groups.setdefault(frozenset(tiling), []).append(tiling)
    only_forward = groups.pop(frozenset({"forward"}), [])
    rows, best, rates = [], {}, {}
    stages = [("forward", only_forward)]
    stages += [("forward_backward", tilings) for tilings in groups.values() or [[]]]
    for name, tilings in stages:
        tried = [best, *({**best, **tiling} for tiling in tilings)]
        measured = [(t, candidate(shape, backend, t, inputs, name)) for t in tried]
        if measured[0][1] is None:
            return rows, None
        rows += [row for _, row in measured if row]
        ranked = [(row["tflops"], t) for t, row in measured if row and row["tflops"]]
        ranked.sort(key=lambda entry: -entry[0])
        best, rates[name], wrong = fastest_exact(shape, backend, ranked, name, dtype)
        rows += wrong
        if best is None:
            return rows, None
    return rows, {"backend": backend, "tiling": best or None, "rates": tuple(rates.values())}


def fastest_exact(
    shape: AttentionShape, backend: str, ranked: list[tuple[float, Tiling]], name: str, dtype: Any
) -> tuple[Any, float, list[dict[str, Any]]]:
    """The first tiling with an error within the bound, its rate, and rows of the rejected ones."""
    wrong = []
    for tflops, tiling in ranked:
        found = errors(shape, our_attention(backend, tiling), WRAPS[name], dtype)
        if found["exact"]:
            return tiling, tflops, wrong
        row = {"name": f"attention_{name}", "shape": shape.name, "backend": label(backend, tiling)}
        row |= {"ms": None, "tflops": tflops, "failed": found.get("why", "error above the bound")}
        wrong.append(row | found)
        report(wrong[-1])
    return None, 0.0, wrong


def candidate(
    shape: AttentionShape, backend: str, tiling: Tiling, inputs: Any, name: str
) -> dict[str, Any] | None:
    fn = WRAPS[name](our_attention(backend, tiling)(shape))
    figures = rate(shape, fn, inputs, name, **SHORT)
    if figures is None:
        return None
    row = {"name": f"attention_{name}", "shape": shape.name, "backend": label(backend, tiling)}
    report(row | figures)
    return row | figures


def label(backend: str, tiling: Tiling) -> str:
    return f"{backend} {json.dumps(tiling)}" if tiling else backend
