"""Measured speed and tiling of each backend, by kind of shape and device.

`table.json` holds one row per backend, kind of shape and device; `python -m benchmarks attention
--tune` measures them again. The choice of a backend is a pure function of the rows.
"""

import functools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain_kernels.dispatch import Target

PATH = Path(__file__).with_name("table.json")
Row = dict[str, Any]


class TableKey(NamedTuple):
    """Kind of shape, which the best backend depends on; `group`: query heads per KV head, N/K."""

    dtype: str
    head_dim: int
    causal: bool
    window: bool
    segments: bool
    softcap: bool
    group: int
    T: int


@functools.cache
def read_table(path: Path = PATH) -> tuple[Row, ...]:
    """The measured rows."""
    return tuple(json.loads(path.read_text())["rows"])


def make_row(
    target: Target,
    kind: TableKey,
    backend: str,
    tiling: dict[str, Any] | None,
    forward: float,
    forward_backward: float,
) -> Row:
    """Row of the table: rates in TF/s, T rounded to a power of two."""
    measured = {"tflops_forward": forward, "tflops_forward_backward": forward_backward}
    return {
        "device": target.kind,
        "compute_capability": target.compute_capability and list(target.compute_capability),
        **kind._replace(T=2 ** round(math.log2(kind.T)))._asdict(),
        "backend": backend,
        "tiling": tiling,
        **{name: float(f"{rate:.4g}") for name, rate in measured.items()},
    }


def write_table(rows: Iterable[Row], path: Path) -> None:
    """Write one row per line; later rows replace earlier ones of the same device, kind, backend."""
    latest = {(r["device"], *_kind(r), r["backend"]): r for r in rows}
    keys = sorted(latest, key=lambda key: tuple(map(str, key)))
    lines = ",\n".join(json.dumps(latest[key]) for key in keys)
    path.write_text('{"rows": [\n' + lines + "\n]}\n")


def preferred_backends(
    rows: Sequence[Row], target: Target, kind: TableKey, backends: Sequence[str]
) -> list[tuple[str, dict[str, Any] | None]]:
    """Return the backends, fastest first, each with its tiling (None: the backend's own).

    The order is by the forward and backward speed at the nearest measured kind of shape; backends
    without a row there follow in the given order. Rows of another device are used only if this
    device has none and the compute capability is the same (an H100 uses an H200's rows).
    """
    here = [row for row in rows if row["device"] == target.kind]
    if not here and target.compute_capability is not None:
        capability = list(target.compute_capability)
        here = [row for row in rows if row["compute_capability"] == capability]
    here = [row for row in here if _comparable(_kind(row), kind)]
    nearest = min((_kind(row) for row in here), key=lambda k: _distance(k, kind), default=None)
    rates = {r["backend"]: r["tflops_forward_backward"] for r in here if _kind(r) == nearest}
    ordered = sorted(backends, key=lambda name: -rates.get(name, 0.0))
    return [(name, _tiling(here, kind, name)) for name in ordered]


def _tiling(rows: Sequence[Row], kind: TableKey, backend: str) -> dict[str, Any] | None:
    # Only rows of the same head dim: it decides which tilings fit a GPU's shared memory.
    own = [r for r in rows if r["backend"] == backend and r["head_dim"] == kind.head_dim]
    return min(own, key=lambda r: _distance(_kind(r), kind))["tiling"] if own else None


def _kind(row: Row) -> TableKey:
    return TableKey(*(row[name] for name in TableKey._fields))


def _comparable(measured: TableKey, wanted: TableKey) -> bool:
    """Whether the same backends can serve both at about the same relative speed."""
    if (measured.segments, measured.softcap) != (wanted.segments, wanted.softcap):
        return False
    return (measured.dtype == "float32") == (wanted.dtype == "float32")


def _distance(a: TableKey, b: TableKey) -> tuple[float | bool, ...]:
    """Differences between two kinds of shape, the most important first."""
    apart = lambda x, y: abs(math.log2(x) - math.log2(y))
    return (
        apart(a.head_dim, b.head_dim),
        a.causal != b.causal,
        a.window != b.window,
        apart(a.T, b.T),
        apart(a.group, b.group),
        a.dtype != b.dtype,
    )
