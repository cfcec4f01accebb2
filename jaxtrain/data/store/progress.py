"""Progress of a preparation: a bar on a terminal, a line now and then in a file."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

# (stage, UTF-8 bytes done, an estimate of the bytes in all or None if unknown)
Progress = Callable[[str, int, int | None], None]
EVERY = 10.0  # seconds between lines


def named_progress(name: str, progress: Progress) -> Progress:
    """Return a `progress` that names a source in its stages; unchanged if the name is empty."""
    return (lambda stage, *rest: progress(f"{name}: {stage}", *rest)) if name else progress


def estimate_bytes(done: int, stored: int, total: int) -> int | None:
    """Estimate all bytes of text, if `done` of them came from `stored` of `total` file bytes."""
    return done * max(total, stored) // stored if stored else None


@contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """A `progress` for `prepare`, which shows stage, bytes of text, MB/s and the time left."""
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    begun: dict[str, tuple[float, int]] = {}  # when a stage began, and what was done then
    printed: dict[str, float] = {}

    def progress(stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if stage not in begun:
            begun[stage] = now, done
            bar.add_task(f"prepare {stage}", total=total, text="")
        if done < begun[stage][1]:  # the stage started over
            begun[stage] = now, done
        text = described(done, total, done - begun[stage][1], now - begun[stage][0])
        bar.update(bar.task_ids[list(begun).index(stage)], completed=done, total=total, text=text)
        if not console.is_terminal and now - printed.get(stage, -EVERY) >= EVERY:
            printed[stage] = now
            console.print(f"prepare  {stage} {text}".rstrip(), highlight=False, soft_wrap=True)

    with bar:
        yield progress


def described(done: int, total: int | None, fresh: int, seconds: float) -> str:
    """`12 MB of 80 MB, 8.5 MB/s, 0:08 left`; `fresh` bytes were done in these seconds."""
    if not done:
        return ""
    parts = [f"{done / 1e6:,.0f} MB" + (f" of {total / 1e6:,.0f} MB" if total else "")]
    if fresh and seconds:
        rate = fresh / seconds
        parts.append(f"{rate / 1e6:,.1f} MB/s")
        if total:
            minutes, rest = divmod(round(max(total - done, 0) / rate), 60)
            parts.append(f"{minutes}:{rest:02d} left")
    return ", ".join(parts)
