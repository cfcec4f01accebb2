"""The rules that FineWeb adds to those of Gopher and C4 (arXiv:2406.17557, section 3.6)."""

from typing import Literal

import numpy as np
from pydantic import Field

from jaxtrain.data.quality.arrays import seen_before, share
from jaxtrain.data.quality.batch import Batch, Judged, Kind, first_reason
from jaxtrain.data.quality.gopher import total
from jaxtrain.settings import Settings

PUNCTUATION = tuple(".!?\"'\u201d\u2019\u2026\u3002\uff01\uff1f")


class FineWeb(Settings):
    """Removes lists, tables of contents and pages that repeat their lines."""

    name: Literal["fineweb"] = "fineweb"
    min_line_ends: float = Field(
        default=0.12, ge=0, le=1, description="Share of the lines that end in punctuation, at least"
    )
    max_repeated: float = Field(
        default=0.1, ge=0, description="Share of the characters in lines seen before, at most"
    )
    max_short_lines: float = Field(
        default=0.67, ge=0, description="Share of the lines that are short, at most"
    )
    short_line: int = Field(default=30, ge=0, description="Characters of a line that is short")


def judge(config: FineWeb, batch: Batch) -> Judged:
    arrays = batch.arrays
    lines = arrays.lines
    count = np.bincount(lines.texts, minlength=arrays.count)
    ends = [sum(line.rstrip().endswith(PUNCTUATION) for line in t.split("\n")) for t in batch.texts]
    size = arrays.characters(lines.starts, lines.stops)
    again = seen_before(lines.hashes, lines.texts)
    short = total(size <= config.short_line, lines, arrays)
    return Judged(
        first_reason(
            share(np.array(ends), count) <= config.min_line_ends,
            share(total(size * again, lines, arrays), arrays.sizes) >= config.max_repeated,
            share(short, count) >= config.max_short_lines,
        )
    )


KIND = Kind(("ends of lines", "repeated lines", "short lines"), judge=judge)
