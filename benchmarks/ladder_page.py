"""The page of the ladder, docs/benchmarks/ladder.md, and its picture, from the records."""

from pathlib import Path

from benchmarks.record import BENCHMARKS

PAGE = BENCHMARKS.parent / "docs" / "benchmarks" / "ladder.md"


def make_page(path: Path = PAGE) -> Path:
    """Write the page."""
    return path
