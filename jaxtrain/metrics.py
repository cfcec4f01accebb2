"""What a run tells the world: metrics.jsonl, TensorBoard, W&B and the progress line.

Device scalars are pushed every step and fetched when they are ready, so that logging never makes
the host wait for the device (except to stop it from running away).
"""

import importlib
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import yaml
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from tensorboardX import SummaryWriter

from jaxtrain.settings import Settings, UserError

Row = dict[str, Any]
Number = float | int
MAX_IN_FLIGHT = 8  # steps the host may run ahead before `push` waits for the oldest
# A row holds the last value of what begins so, and the mean of all others.
STATES = ("lr", "loss_scale", "tokens", "data_")


class MetricsConfig(Settings):
    """Where the numbers go, and how often."""

    every: int = Field(10, ge=1, description="Steps between the logged and printed training rows.")
    tensorboard: bool = Field(True, description="Also write TensorBoard event files.")
    wandb: bool = Field(
        False, description="Also log to the W&B project `jaxtrain` (needs the extra `wandb`)."
    )


class MetricsWriter:
    """Owns the metrics of one run directory; a context manager that records how the run ended.

    Opening at `start_step` > 0 resumes: rows of later steps are dropped (0 starts afresh), and
    `time` goes on from the last row kept. A process with `primary=False` writes and prints nothing,
    but its `push` holds the host back in the same way.

    total_steps, tokens_per_step: of the whole run, over all devices. flops_per_token: of the model,
    forward and backward, for the MFU over `devices` (default: all). parameters: for the report.
    """

    def __init__(
        self,
        run_dir: Path,
        config: MetricsConfig,
        *,
        total_steps: int,
        tokens_per_step: int,
        start_step: int = 0,
        flops_per_token: Number | None = None,
        parameters: int | None = None,
        devices: Sequence[Any] | None = None,
        primary: bool = True,
        console: Console | None = None,
    ):
        devices = jax.devices() if devices is None else devices
        peak = peak_flops(devices[0].device_kind)
        self._peak_tokens_per_s = (
            peak * len(devices) / flops_per_token if peak and flops_per_token else None
        )
        self._total, self._every = total_steps, config.every
        self._tokens_per_step = tokens_per_step
        self._pending: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._sums: dict[str, float] = {}
        self._count = 0  # steps summed since the last row
        self._step = start_step
        self._stamp: float | None = (
            None  # when the last step was seen to end; None before the first
        )
        self._begin = (
            0.0,
            start_step,
        )  # (time, step) at the end of the first step: compiling is out
        self._timed, self._seconds = 0, 0.0  # steps and seconds since the last row, pauses left out
        self._file = self._tensorboard = self._wandb = self._bar = None
        self._zero = time.perf_counter()
        if not primary:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        if config.wandb:
            self._wandb = _start_wandb(run_dir)
        path = run_dir / "metrics.jsonl"
        self._zero -= _rewind(path, start_step)
        self._file = path.open("a", encoding="utf-8")
        if config.tensorboard:
            self._tensorboard = SummaryWriter(
                str(run_dir / "tensorboard"),
                purge_step=start_step + 1 if start_step else 0,
                filename_suffix=f".{start_step}",
            )
        self._console = console or Console()
        if self._console.is_terminal:
            self._bar = _progress_bar(self._console)
            self._bar.add_task("step", total=total_steps, completed=start_step, text="compiling")
            self._bar.start()
        facts: Row = {"total_steps": total_steps, "tokens_per_step": tokens_per_step}
        facts |= {"flops_per_token": flops_per_token, "parameters": parameters}
        self._log(self._row(start_step, "event") | {"event": "start"} | facts)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind, error: BaseException | None, traceback):
        if error is None:
            self.flush()
            return self.close("finished" if self._step >= self._total else "stopped")
        with suppress(Exception):  # the steps in flight may carry the error that brought us here
            self.flush()
        self._pending.clear()
        if isinstance(error, KeyboardInterrupt):
            return self.close("interrupted")
        self.close(f"failed: {type(error).__name__}: {error}".splitlines()[0])

    def push(self, step: int, values: Mapping[str, Any]) -> list[Row]:
        """Take the scalars (numbers, or jax arrays that no later step donates) of step 1, 2, ...

        Returns the rows that became complete: one every `every` steps, and at the first and last
        step. A row holds means over the steps since the row before (of lr, loss_scale and tokens:
        the last value), and adds tokens, tokens_per_s, mfu (a fraction) and memory_bytes.
        """
        for value in values.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self._pending.append((step, values))
        rows = []
        while self._pending and (
            len(self._pending) > MAX_IN_FLIGHT or _is_ready(self._pending[0][1])
        ):
            rows += self._fetch()
        return rows

    def flush(self) -> list[Row]:
        """Wait for all steps pushed so far; returns the rows that became complete."""
        rows = []
        while self._pending:
            rows += self._fetch()
        return rows

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what runs inside (validation, sampling, checkpoints) out of tokens/s and MFU."""
        self.flush()
        yield
        if self._stamp is not None:
            self._stamp = time.perf_counter()

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> Row:
        """Write and print one row of kind `validation`, `sample` or `event` now.

        Values are scalars (jax arrays or numbers) or strings. Steps in flight are waited for, so
        that rows stay in order.
        """
        self.flush()
        row = self._row(step, kind) | {name: _plain(value) for name, value in values.items()}
        self._log(row)
        if self._file:
            self._print(format_row(row, self._total))
        return row

    def close(self, status: str = "finished"):
        """Wait for the steps in flight, record `status` as the run's end and close all files."""
        try:
            self.flush()
            self._log(self._row(self._step, "event") | {"event": "end", "status": status})
        finally:
            if self._bar:
                self._bar.stop()
            if self._tensorboard:
                self._tensorboard.close()
            if self._wandb:
                self._wandb.finish(exit_code=int(status.startswith("failed")))
            if self._file:
                self._file.close()

    def _row(self, step: int, kind: str) -> Row:
        return {"step": step, "kind": kind, "time": round(time.perf_counter() - self._zero, 3)}

    def _fetch(self) -> list[Row]:
        """Convert the oldest step in flight (waits until it is done); its row, if one is due."""
        step, values = self._pending.popleft()
        numbers = dict(_scalars(values))
        now = time.perf_counter()
        if self._stamp is None:
            self._begin = (now, step)
        else:
            self._timed += 1
            self._seconds += now - self._stamp
        self._stamp = now
        self._step = step
        self._count += 1
        for name, value in numbers.items():
            before = 0.0 if name.startswith(STATES) else self._sums.get(name, 0.0)
            self._sums[name] = before + value
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=step)
        if step % self._every and step not in (1, self._total):
            return []
        return [self._finish_row(step)]

    def _finish_row(self, step: int) -> Row:
        row = self._row(step, "train")
        for name, total in self._sums.items():
            row[name] = total if name.startswith(STATES) else total / self._count
        row["tokens"] = int(row.get("tokens", step * self._tokens_per_step))
        if self._timed:
            row["tokens_per_s"] = self._timed * self._tokens_per_step / self._seconds
            if self._peak_tokens_per_s:
                row["mfu"] = row["tokens_per_s"] / self._peak_tokens_per_s
        row["memory_bytes"] = memory_bytes()
        self._sums, self._count, self._timed, self._seconds = {}, 0, 0, 0.0
        self._log(row)
        if self._file:
            self._show(row)
        return row

    def _show(self, row: Row):
        began, first = self._begin
        done = row["step"] - first
        eta = (time.perf_counter() - began) * (self._total - row["step"]) / done if done else None
        if self._bar:
            self._bar.update(self._bar.task_ids[0], text=" ".join(_format_values(row, eta)))
        else:
            self._print(format_row(row, self._total, eta))

    def _print(self, line: str):
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _log(self, row: Row):
        if not self._file:
            return
        bad = [name for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
        valid = row | dict.fromkeys(bad) | ({"nonfinite": bad} if bad else {})
        self._file.write(json.dumps(valid, allow_nan=False) + "\n")
        self._file.flush()
        step, kind = row["step"], row["kind"]
        values = {k: v for k, v in row.items() if k not in ("step", "kind", "time")}
        if self._tensorboard:
            for name, value in values.items():
                if isinstance(value, str):
                    self._tensorboard.add_text(f"{kind}/{name}", value, step)
                elif value is not None and kind != "event":
                    self._tensorboard.add_scalar(f"{kind}/{name}", value, step)
        if self._wandb:
            self._wandb.log({f"{kind}/{name}": v for name, v in values.items()}, step=step)


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl; a torn last line (the writer was killed) is left out.

    Raises UserError for a line before the last that is not a JSON object.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not row.keys() >= {"step", "kind", "time"}:
                raise ValueError
            rows.append(row)
        except (ValueError, AttributeError):
            if number < len(lines):
                raise UserError(
                    f"{path}, line {number} is not a metrics row (a JSON object with step, kind "
                    "and time): repair or delete that line"
                ) from None
    return rows


def _rewind(path: Path, step: int) -> Number:
    """Keep the rows up to `step` (none for 0); the `time` of the last one, in seconds."""
    rows = read_rows(path) if step and path.exists() else []
    rows = [row for row in rows if row["step"] <= step]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(fresh, path)
    return rows[-1]["time"] if rows else 0.0


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and numbers; a vector's elements are NAME_0, NAME_1, ..."""
    for name, value in values.items():
        if np.ndim(value):
            yield from ((f"{name}_{i}", float(x)) for i, x in enumerate(np.asarray(value)))
        else:
            yield name, float(value)


def _is_ready(values: Mapping[str, Any]) -> bool:
    return all(v.is_ready() for v in values.values() if hasattr(v, "is_ready"))


def _plain(value: Any) -> Any:
    """A string, int or None as it is; any other scalar as a float."""
    return value if isinstance(value, str | int | None) else float(value)


def _start_wandb(run_dir: Path) -> Any:
    try:
        wandb = importlib.import_module("wandb")
    except ImportError:
        raise UserError(
            "metrics.wandb=true needs the package wandb, which is not installed: "
            "pip install 'jaxtrain[wandb]', or set metrics.wandb=false"
        ) from None
    saved = run_dir / "config.yaml"
    config = yaml.safe_load(saved.read_text(encoding="utf-8")) if saved.exists() else None
    # The same directory on the same host is the same W&B run, so that a resumed run continues it.
    name = run_dir.resolve().name
    identity = f"{zlib.crc32(f'{platform.node()}:{run_dir.resolve()}'.encode()):08x}"
    return wandb.init(
        project="jaxtrain", name=name, id=identity, resume="allow", dir=str(run_dir), config=config
    )


def _progress_bar(console: Console) -> Progress:
    text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (BarColumn(bar_width=12), MofNCompleteColumn(), text)
    return Progress(*columns, console=console, refresh_per_second=4)


def format_bytes(count: Number) -> str:
    """1288490189 -> '1.2 GiB'."""
    power = min(4, max(0, int(math.log2(count) // 10))) if count >= 1 else 0
    return f"{count / 1024**power:.{int(power > 0)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def format_duration(seconds: Number) -> str:
    """92 -> '1m32s'; the two largest of days, hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


FORMATS = {
    "loss": lambda x: f"loss {x:.4f}",
    "bpb": lambda x: f"bpb {x:.3f}",
    "perplexity": lambda x: f"ppl {x:.2f}",
    "lr": lambda x: f"lr {x:#.3g}",
    "loss_scale": lambda x: f"scale {x:g}",
    "tokens_per_s": lambda x: f"{x:,.0f} tok/s",
    "mfu": lambda x: f"mfu {x:.1%}",
    "memory_bytes": lambda x: f"mem {format_bytes(x)}",
}


def _format_values(row: Row, eta: Number | None) -> list[str]:
    parts = [form(row[name]) for name, form in FORMATS.items() if row.get(name) is not None]
    return parts if eta is None else [*parts, f"eta {format_duration(eta)}"]


def format_row(row: Row, total_steps: int, eta: Number | None = None) -> str:
    """One line for a terminal or a log file: the values of `FORMATS`, and any strings."""
    head = [f"step {row['step']:>5}/{total_steps}"]
    if row["kind"] != "train":
        head.append(row["kind"])
    strings = [v for name, v in row.items() if isinstance(v, str) and name != "kind"]
    return "  ".join(head + strings + _format_values(row, eta))


def memory_bytes() -> int:
    """Peak bytes of the fullest local device; where unknown (CPU), the process's resident bytes."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max(s.get("peak_bytes_in_use", 0) for s in stats) or psutil.Process().memory_info().rss


# Dense bf16 FLOP/s of one JAX device (fp16 where there is no bf16 unit), from data sheets and
# jax/_src/tpu_info.py. The first pattern found in the device kind as a whole word counts.
# fmt: off
PEAK_FLOPS = {
    "gb300|gb200": 2500e12, "b300|b200": 2250e12,
    "h100 nvl": 835e12, "h100 pcie": 756e12, "gh200|h200|h100|h800": 989e12, "h20": 148e12,
    "a100|a800": 312e12, "a40": 149.7e12, "a30": 165e12, "a10": 125e12, "a10g": 70e12,
    "l40s": 362e12, "l40": 181e12, "l4": 121e12,
    "rtx 5090": 209.5e12, "rtx 4090": 165.2e12, "rtx 3090": 71e12,
    "v100": 125e12, "t4": 65e12, "p100": 18.7e12,
    "tpu7x": 1155e12, "tpu v6 lite|tpu v6e": 918e12, "tpu v5 lite|tpu v5e": 197e12,
    "tpu v5p|tpu v5": 459e12, "tpu v4": 275e12, "tpu v3": 61.5e12, "tpu v2": 22.5e12,
    "mi355x": 2500e12, "mi300x|mi325x": 1307e12,
}
# fmt: on


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a `jax.Device.device_kind`; None when unknown (MFU is omitted).

    The bf16 peak is nanochat's convention for MFU, whatever the precision trained in.
    """
    kind = device_kind.lower()
    if re.search(r"\b(laptop|mig)\b", kind):  # a part of the card, or a slower one of the same name
        return None
    for pattern, peak in PEAK_FLOPS.items():
        if re.search(rf"\b({pattern})\b", kind):
            return peak
    return None


PACKAGES = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy")


def environment() -> Row:
    """What a run ran on and with, for env.json: versions, devices, host, commit, command.

    The commit is that of the checkout, or the variable JAXTRAIN_COMMIT where the code is a copy.
    """
    device = jax.devices()[0]
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.orig_argv,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "backend": f"{device.platform}: {device.client.platform_version}".splitlines()[0],
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "device_memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def versions() -> dict[str, str]:
    """Of the packages that a result may depend on."""
    installed = importlib.metadata.distributions()
    return {d.name: d.version for d in installed if d.name in PACKAGES}


def commit() -> str | None:
    """Of the code that runs."""
    return os.environ.get("JAXTRAIN_COMMIT") or _git_commit()


def _git_commit() -> str | None:
    """The commit of the checkout this file is tracked in, with `-dirty` if it has changes."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    # The first command fails where this file is installed inside another project's checkout.
    tracked = [*git, "ls-files", "--error-unmatch", here.name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, timeout=10, check=True)
        done = subprocess.run(describe, capture_output=True, timeout=10, check=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
