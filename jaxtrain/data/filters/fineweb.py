"""The rules that FineWeb adds to those of Gopher and C4 (arXiv:2406.17557, section 3.6).

datatrove (its FineWebQualityFilter) differs from the paper: it is ten times stricter on repeated
lines, has a fourth rule, and counts the sentence-final marks of all scripts, but no quotation mark.
"""

import re
from functools import cache
from typing import Literal

import numpy as np
from pydantic import Field

from jaxtrain.data.filters.arrays import seen_before, share
from jaxtrain.data.filters.batch import FilterFunctions, FilterVerdict, TextBatch, first_reason
from jaxtrain.data.filters.gopher import total
from jaxtrain.settings import Settings

PUNCTUATION = tuple(".!?\"'\u201d\u2019\u2026\u3002\uff01\uff1f")
# Sentence-final marks, by Unicode's property Sentence_Terminal: code points and ranges of them.
TERMINAL = """
    21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e
    1735-1736 17d4-17d6 17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e
    1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7
    a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01 ff0e ff1f ff61
    10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6 111cd
    111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642
    1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44
    16a6e-16a6f 16af5 16b37-16b38 16b44 16e98 1bc9f 1da88
"""
ENDS, REPEATED, SHORT, BREAKS = 1, 2, 3, 4
TOKEN = re.compile(r"\w+|[^\w\s]")


class FineWeb(Settings):
    """Removes lists, tables of contents and pages that repeat their lines.

    The preset datatrove has the rules of the library: at most 1% instead of 10% of repeated text,
    at most 0.3 line breaks per word, other final marks of lines; documents at a bound are kept.
    """

    name: Literal["fineweb"] = "fineweb"
    preset: Literal["paper", "datatrove"] = Field(
        default="paper", description="rules of the FineWeb paper, or of the library datatrove"
    )
    min_line_ends: float = Field(
        default=0.12, ge=0, le=1, description="minimum fraction of lines that end in punctuation"
    )
    max_repeated: float | None = Field(
        default=None,
        ge=0,
        description="maximum fraction of characters in repeated lines; default 0.1, for datatrove "
        "0.01",
    )
    max_short_lines: float = Field(
        default=0.67, ge=0, description="maximum fraction of short lines"
    )
    short_line: int = Field(default=30, ge=0, description="maximum characters of a short line")
    max_line_breaks: float = Field(
        default=0.3, ge=0, description="maximum line breaks per word; datatrove only"
    )


def filter_fineweb(config: FineWeb, batch: TextBatch) -> FilterVerdict:
    if config.preset == "datatrove":
        reasons = [datatrove_reason(config, text) for text in batch.texts]
        return FilterVerdict(np.array(reasons, np.uint8))
    arrays = batch.arrays
    lines = arrays.lines
    count = np.bincount(lines.texts, minlength=arrays.count)
    ends = [sum(line.rstrip().endswith(PUNCTUATION) for line in t.split("\n")) for t in batch.texts]
    size = arrays.characters(lines.starts, lines.stops)
    again = seen_before(lines.hashes, lines.texts)
    short = total(size <= config.short_line, lines, arrays)
    repeated = share(total(size * again, lines, arrays), arrays.sizes)
    return FilterVerdict(
        first_reason(
            share(np.array(ends), count) <= config.min_line_ends,
            repeated >= (0.1 if config.max_repeated is None else config.max_repeated),
            share(short, count) >= config.max_short_lines,
        )
    )


def datatrove_reason(config: FineWeb, text: str) -> int:
    """The number of the reason, or 0. Words are split from punctuation, about as in datatrove."""
    lines = [line for line in text.split("\n") if line.strip()]
    if sum(line[-1] in sentence_ends() for line in lines) < config.min_line_ends * len(lines):
        return ENDS
    if sum(len(line) <= config.short_line for line in lines) > config.max_short_lines * len(lines):
        return SHORT
    breaks = text.count("\n")
    repeated = sum(map(len, lines)) - sum(map(len, set(lines)))
    most = 0.01 if config.max_repeated is None else config.max_repeated
    if repeated > most * (len(text) - breaks):
        return REPEATED
    return BREAKS if not lines or breaks > config.max_line_breaks * len(TOKEN.findall(text)) else 0


@cache
def sentence_ends() -> frozenset[str]:
    ranges = (one.partition("-") for one in TERMINAL.split())
    codes = (range(int(low, 16), int(high or low, 16) + 1) for low, _, high in ranges)
    return frozenset(chr(code) for some in codes for code in some)


FUNCTIONS = FilterFunctions(
    ("ends of lines", "repeated lines", "short lines", "line breaks"), apply=filter_fineweb
)
