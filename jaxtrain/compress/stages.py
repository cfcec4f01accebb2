"""The stages of a command: a line when one begins, its progress, and the seconds of each."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between two lines of one stage, where there is no terminal

Advance = Callable[[int, int], None]  # (what is done, all of it)


class Stages:
    """`seconds` of the stages so far, by name. A stage is shown as a bar on a terminal, and as
    lines in a file."""

    def __init__(self, command: str, quiet: bool = False):
        self.command, self.console = command, Console(stderr=True, quiet=quiet)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[Advance]:
        """A part of the command that takes a while. Yields a function that shows how far it is."""
        begun = printed = time.monotonic()
        shown = self.console.is_terminal
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        bar = Progress(
            *columns, TimeRemainingColumn(), console=self.console, transient=True, disable=not shown
        )
        task = bar.add_task(f"{self.command} {name}", total=None)
        if not shown:
            self.print(name)

        def advance(done: int, total: int) -> None:
            nonlocal printed
            bar.update(task, completed=done, total=total)
            now = time.monotonic()
            if not shown and done < total and now - printed >= EVERY:
                printed = now
                left = round((now - begun) / done * (total - done))
                self.print(f"{name} {done} of {total}, {left} s left")

        with bar:
            yield advance
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begun

    def print(self, text: str) -> None:
        self.console.print(f"{self.command} {text}", highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """The seconds of each stage, on one line."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"seconds  {parts}; {sum(self.seconds.values()):.1f} in all"
