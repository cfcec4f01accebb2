"""Metrics of a run: metrics.jsonl, TensorBoard, W&B and the progress line.

Device scalars are pushed every step and fetched once they are ready. Logging therefore never blocks
the host on the device, except to limit the steps in flight. A thread notes when each step ends: the
host learns of it late, for launching a long step blocks it until the device has run most of it.
"""

import importlib
import importlib.metadata
import json
import math
import platform
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxtrain.runs.config import MetricsConfig
from jaxtrain.runs.environment import memory_bytes, peak_flops
from jaxtrain.runs.goodput import rollback_fields, start_fields
from jaxtrain.runs.history import MetricsRow, missing_rows, rewound
from jaxtrain.runs.tensorboard import open_events
from jaxtrain.settings import UserError
from jaxtrain.storage.strict_yaml import read_yaml

Number = float | int
MAX_IN_FLIGHT = 8  # steps the host may run ahead before `push` waits for the oldest
# Names with these prefixes are logged with their last value, all others with their mean.
STATES = ("lr", "loss_scale", "tokens", "data_", "sparsity", "mask_")


class PendingStep(NamedTuple):
    """A step in flight."""

    step: int
    values: Mapping[str, Any]
    ended: Future[float]  # `time.perf_counter()` at its end, or the error of the step


class MetricsWriter:
    """Writer of a run directory's metrics; a context manager that records how the run ended.

    Opening at `start_step` > 0 resumes: rows of later steps are dropped (0 starts afresh), and
    `time` continues from the last row kept. With `primary=False` a process writes and prints
    nothing, but its `push` limits the steps in flight in the same way.

    total_steps, tokens_per_step: of the whole run, over all devices. tokens_of(steps): tokens of
    the first `steps` steps, if steps differ in size. flops_per_token: of the model, forward and
    backward, for the MFU over `devices` (default: all). parameters: their number, for the report.
    more: facts about the run, for its first row. began: `time.perf_counter()` at the session's
    start; default now.
    """

    def __init__(
        self,
        run_dir: Path,
        config: MetricsConfig,
        *,
        total_steps: int,
        tokens_per_step: int,
        tokens_of: Callable[[int], int] | None = None,
        start_step: int = 0,
        flops_per_token: Number | None = None,
        parameters: int | None = None,
        devices: Sequence[Any] | None = None,
        primary: bool = True,
        console: Console | None = None,
        more: Mapping[str, Any] | None = None,
        began: float | None = None,
    ):
        devices = jax.devices() if devices is None else devices
        peak = peak_flops(devices[0].device_kind)
        self._peak_tokens_per_s = (
            peak * len(devices) / flops_per_token if peak and flops_per_token else None
        )
        self._total, self._every = total_steps, config.every
        self._tokens_of = tokens_of or (lambda steps: steps * tokens_per_step)
        self._pending: deque[PendingStep] = deque()
        self._clock = ThreadPoolExecutor(1, "end-of-steps")
        self._sums: dict[str, float] = {}
        self._count = 0  # steps summed since the last row
        self._step = start_step
        # When the newest finished step ended; None before the first.
        self._stamp: float | None = None
        # (time, step) at the end of the first step, which compiles.
        self._begin = (0.0, start_step)
        self._timed, self._seconds = 0, 0.0  # steps and seconds since the last row, without pauses
        self._pauses: dict[str, float] = {}  # seconds since the last row, by field of `goodput`
        self._values = ["compiling"]  # values of the last row, for the live line
        self._file = self._tensorboard = self._wandb = self._live = None
        self._zero = self._opened = time.perf_counter()
        if not primary:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        if config.wandb:
            self._wandb = _start_wandb(run_dir)
        self._run_dir = run_dir
        before = self._open(start_step, config.tensorboard)
        self._zero -= self._kept_time
        self._console = console or Console()
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._live_line, transient=True)
            self._live.start()
        facts: MetricsRow = {"total_steps": total_steps, "tokens_per_step": tokens_per_step}
        facts |= {"flops_per_token": flops_per_token, "parameters": parameters}
        facts["every"] = config.every
        startup = 0.0 if began is None else self._opened - began
        facts |= start_fields(before, start_step, startup)
        self._log(self._row(start_step, "event") | {"event": "start"} | facts | {**(more or {})})
        if self._missing:
            self.write(start_step, "event", {"missing": self._missing})

    def _open(self, step: int, tensorboard: bool) -> list[MetricsRow]:
        """Truncate the log to the rows up to `step`, and open the files to append. Returns all rows
        before the truncation."""
        path = self._run_dir / "metrics.jsonl"
        rows, before = rewound(path, step)
        self._kept_time: Number = rows[-1]["time"] if rows else 0.0
        self._missing = missing_rows(rows, step, self._every)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            self._tensorboard = open_events(
                self._run_dir / "tensorboard",
                purge_step=step + 1 if step else 0,
                filename_suffix=f".{step}",
            )
        return before

    def rewind(self, step: int) -> MetricsRow:
        """Roll back to `step`: drop the rows of later steps, as a resume does.

        Returns the goodput fields for the row of the rollback.
        """
        newest = max([self._step, *(one.step for one in self._pending)])
        self._pending.clear()
        self._clear()
        self._step, self._stamp, self._begin = step, None, (0.0, step)
        if not self._file:
            return {}
        self._opened = time.perf_counter()
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        before = self._open(step, self._tensorboard is not None)
        return rollback_fields(before, step, newest, self._opened - self._zero)

    def _clear(self) -> None:
        self._sums, self._count, self._timed, self._seconds = {}, 0, 0, 0.0
        self._pauses = {}

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind, error: BaseException | None, traceback):
        if error is None:
            self.flush()
            return self.close("finished" if self._step >= self._total else "stopped")
        with suppress(Exception):  # the steps in flight may raise the error that ended the run
            self.flush()
        self._pending.clear()
        if isinstance(error, KeyboardInterrupt):
            return self.close("interrupted")
        self.close(f"failed: {type(error).__name__}: {error}".splitlines()[0])

    def push(self, step: int, values: Mapping[str, Any]) -> list[MetricsRow]:
        """Add the scalars of the next step: numbers, or jax arrays that no later step donates.

        Returns the rows that became complete: one every `every` steps, and at the first and last
        step. A row has means over the steps since the previous row (the last value for names in
        STATES), and adds tokens, tokens_per_s, mfu (a fraction) and memory_bytes. `wait_s` (seconds
        spent waiting for batches) becomes data_wait, a share of the time.
        """
        for value in values.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self._pending.append(PendingStep(step, values, self._end_of(values)))
        rows = []
        while self._pending and (
            len(self._pending) > MAX_IN_FLIGHT or self._pending[0].ended.done()
        ):
            rows += self._fetch()
        return rows

    def flush(self) -> list[MetricsRow]:
        """Wait for all pushed steps. Returns the rows that became complete."""
        rows = []
        while self._pending:
            rows += self._fetch()
        return rows

    @contextmanager
    def pause(self, kind: str = "events_s") -> Iterator[None]:
        """Exclude the context (validation, sampling, checkpoints) from tokens/s and MFU.

        kind: the row's field, one of `goodput.PAUSES`, to which its seconds are added.
        """
        self.flush()
        yield
        if self._stamp is not None:  # before the first step, a pause counts as start_s
            now = time.perf_counter()
            self._pauses[kind] = self._pauses.get(kind, 0.0) + now - self._stamp
            self._stamp = now

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> MetricsRow:
        """Write and print one row of kind `validation`, `sample` or `event` now.

        Values are scalars (jax arrays or numbers) or strings. Waits for the steps in flight, so
        that rows stay in order.
        """
        self.flush()
        row = self._row(step, kind) | {name: _plain(value) for name, value in values.items()}
        self._log(row)
        if self._file:
            self._print(row)
        return row

    def close(self, status: str = "finished"):
        """Wait for the steps in flight, record `status` as the run's end and close all files."""
        try:
            self.flush()
            end = self._row(self._step, "event") | {"event": "end", "status": status}
            self._log(end | self._spent(self._sums.get("wait_s")))
        finally:
            self._clock.shutdown(wait=False, cancel_futures=True)
            if self._live:
                self._live.stop()
            if self._tensorboard:
                self._tensorboard.close()
            if self._wandb:
                self._wandb.finish(exit_code=int(status.startswith("failed")))
            if self._file:
                self._file.close()

    def _row(self, step: int, kind: str) -> MetricsRow:
        return {"step": step, "kind": kind, "time": round(time.perf_counter() - self._zero, 3)}

    def _end_of(self, values: Mapping[str, Any]) -> Future[float]:
        """When a step ends, by a thread that waits for its values unless they are there."""
        if not all(v.is_ready() for v in values.values() if hasattr(v, "is_ready")):
            return self._clock.submit(_wait_for, values)
        ended = Future[float]()
        ended.set_result(time.perf_counter())
        return ended

    def _fetch(self) -> list[MetricsRow]:
        """Wait for the oldest step in flight and add its values. Returns its row, if one is due."""
        step, values, ended = self._pending.popleft()
        now = ended.result()
        numbers = dict(_scalars(values))
        if self._stamp is None:
            self._begin = (now, step)
            self._pauses["start_s"] = now - self._opened
        else:
            self._timed += 1
            self._seconds += now - self._stamp
        self._stamp = now
        self._step = step
        self._count += 1
        for name, value in numbers.items():
            before = 0.0 if name.startswith(STATES) else self._sums.get(name, 0.0)
            self._sums[name] = before + value
        if step % self._every and step not in (1, self._total):
            return []
        return [self._finish_row(step)]

    def _finish_row(self, step: int) -> MetricsRow:
        row = self._row(step, "train")
        for name, total in self._sums.items():
            row[name] = total if name.startswith(STATES) else total / self._count
        row["tokens"] = int(row.get("tokens", self._tokens_of(step)))
        row.pop("wait_s", None)
        row |= self._spent(self._sums.get("wait_s"))
        if self._timed:
            timed = self._tokens_of(step) - self._tokens_of(step - self._timed)
            row["tokens_per_s"] = timed / self._seconds
            if self._peak_tokens_per_s:
                row["mfu"] = row["tokens_per_s"] / self._peak_tokens_per_s
        row["memory_bytes"] = memory_bytes()
        self._clear()
        self._log(row)
        if self._file:
            self._values = _format_values(row)
            self._print(row, self._eta())
        return row

    def _spent(self, waited: float | None) -> MetricsRow:
        """Time fields of a row: seconds since the last row. waited: seconds waited for batches."""
        found: MetricsRow = {name: round(seconds, 6) for name, seconds in self._pauses.items()}
        if self._timed:
            found["steps_s"] = round(self._seconds, 6)
            if waited is not None:
                share = waited / self._count * self._timed / self._seconds
                found["data_wait"] = min(share, 1.0)
        return found

    def _eta(self) -> Number | None:
        """Seconds to the end at the average pace, including pauses; None before the second step."""
        began, first = self._begin
        done = self._step - first
        left = self._total - self._step
        return ((self._stamp or began) - began) * left / done if done > 0 else None

    def _live_line(self) -> Text:
        """The progress line below the rows in a terminal; at most one line."""
        begin = [f"step {self._step}/{self._total}", *_format_eta(self._eta())]
        bar = _bar(self._step / self._total, ascii_only=self._console.options.ascii_only)
        line = _fit([*begin, bar, *self._values], self._console.width, " ")
        return Text(line, no_wrap=True, overflow="crop")

    def _print(self, row: MetricsRow, eta: Number | None = None):
        width = self._console.width if self._live else None
        line = format_row(row, self._total, eta, width)
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _log(self, row: MetricsRow):
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


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, float). A vector's elements are named NAME_0, NAME_1, ..."""
    for name, value in values.items():
        if np.ndim(value):
            yield from ((f"{name}_{i}", float(x)) for i, x in enumerate(np.asarray(value)))
        else:
            yield name, float(value)


def _wait_for(values: Mapping[str, Any]) -> float:
    """Wait for the arrays; returns the time at which the last one was ready."""
    jax.block_until_ready(list(values.values()))
    return time.perf_counter()


def _plain(value: Any) -> Any:
    """A string, int or None unchanged; any other scalar as a float."""
    return value if isinstance(value, str | int | None) else float(value)


def _start_wandb(run_dir: Path) -> Any:
    try:
        wandb = importlib.import_module("wandb")
    except ImportError:
        raise UserError(
            "metrics.wandb=true needs the package wandb, which is not installed: "
            "uv sync --extra wandb, or pip install wandb; or set metrics.wandb=false"
        ) from None
    saved = run_dir / "config.yaml"
    config = read_yaml(saved) if saved.exists() else None
    # One W&B run per directory and host, so that a resumed run continues it.
    name = run_dir.resolve().name
    identity = f"{zlib.crc32(f'{platform.node()}:{run_dir.resolve()}'.encode()):08x}"
    return wandb.init(
        project="jaxtrain", name=name, id=identity, resume="allow", dir=str(run_dir), config=config
    )


def _bar(share: float, ascii_only: bool, width: int = 12) -> str:
    done = round(width * share)
    full, empty = "#-" if ascii_only else "\u2501\u2500"  # a heavy and a light line
    return full * done + empty * (width - done)


def _fit(parts: Sequence[str], width: int | None, gap: str, whole: int = 1) -> str:
    """Join the leftmost parts that fit into `width` columns, but at least `whole` of them."""
    kept = list(parts)
    while width is not None and len(kept) > whole and len(gap.join(kept).rstrip()) > width:
        kept.pop()
    return gap.join(kept).rstrip()


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
    "accuracy": lambda x: f"acc {x:.1%}",
    "reward_margin": lambda x: f"margin {x:.3f}",
    "perplexity": lambda x: f"ppl {x:.2f}",
    "lr": lambda x: f"lr {x:#.3g}",
    "loss_scale": lambda x: f"scale {x:g}",
    "skipped": lambda x: f"skipped {x:.0%}",
    "tokens_per_s": lambda x: f"{x:,.0f} tok/s",
    "mfu": lambda x: f"mfu {x:.1%}",
    "memory_bytes": lambda x: f"mem {format_bytes(x)}",
}


def _format_values(row: MetricsRow) -> list[str]:
    return [form(row[name]) for name, form in FORMATS.items() if row.get(name) is not None]


def _format_eta(eta: Number | None) -> list[str]:
    return [] if eta is None else [f"eta {format_duration(eta)}"]


def format_row(
    row: MetricsRow, total_steps: int, eta: Number | None = None, width: int | None = None
) -> str:
    """One line for a terminal or a log file: step, time left, any strings, the values of `FORMATS`.

    width: terminal columns; values that do not fit are dropped from the right, strings never are.
    """
    head = [f"step {row['step']:>5}/{total_steps}"]
    if row["kind"] != "train":
        head.append(row["kind"])
    head += [v for name, v in row.items() if isinstance(v, str) and name != "kind"]
    # The time left has a fixed width, so that the following values align.
    values = [*(f"{part:<10}" for part in _format_eta(eta)), *_format_values(row)]
    return _fit([*head, *values], width, "  ", whole=len(head))
