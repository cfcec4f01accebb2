"""The rules of C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2), which remove lines."""

import re
from itertools import repeat
from typing import Literal

import numpy as np
from pydantic import Field

from jaxtrain.data.filters.batch import FilterFunctions, FilterVerdict, TextBatch
from jaxtrain.settings import Settings

TERMINAL = (".", "!", "?", '"', "\u201d")
BAD_LINES = (
    "javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies",
    "use of cookies", "use cookies",
)  # fmt: skip
CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation\sneeded\]")
SENTENCE = re.compile(r"[.!?][\"'\u201d)]*(?=\s|\Z)")
BRACKET, LOREM, SHORT = 1, 2, 3


class C4(Settings):
    """Keeps the lines that are sentences, and the documents with enough lines left. Not
    implemented: C4's list of bad words, and its deduplication of spans of three sentences."""

    name: Literal["c4"] = "c4"
    terminal_punctuation: bool = Field(
        default=True, description="remove lines that do not end in . ! ? or a quotation mark"
    )
    min_line_words: int = Field(default=5, ge=0, description="minimum words per line")
    min_sentences: int = Field(default=3, ge=0, description="minimum sentences per document")
    curly_brackets: bool = Field(
        default=True, description="remove documents that contain a {, as code"
    )


def filter_c4(config: C4, batch: TextBatch) -> FilterVerdict:
    reasons, texts = np.zeros(len(batch.texts), np.uint8), []
    for number, (text, spaced) in enumerate(zip(batch.texts, batch.spaced)):
        if config.curly_brackets and "{" in text:
            reasons[number] = BRACKET
        elif "lorem ipsum" in (lowered := spaced.lower()):
            reasons[number] = LOREM
        else:
            bad = tuple(phrase for phrase in BAD_LINES if phrase in lowered)
            text = "\n".join(lines_kept(config, text, spaced, bad))
            if len(SENTENCE.findall(text)) < config.min_sentences or not text:
                reasons[number] = SHORT
        texts.append(text)
    return FilterVerdict(reasons, texts)


def lines_kept(config: C4, text: str, spaced: str, bad: tuple[str, ...]) -> list[str]:
    """Return the lines that are sentences without `bad` phrases, minus Wikipedia's citation marks.

    spaced: the text with plain spaces, which the rules are applied to.
    """
    kept = []
    for written, plain in zip(_lines(text), _lines(spaced) if spaced is not text else repeat("")):
        written = written.strip()
        line = plain.strip() or written
        if config.terminal_punctuation and not line.endswith(TERMINAL):
            continue
        if line.endswith("...") or line.count(" ") + 1 < config.min_line_words:
            continue
        if not bad or not any(phrase in line.lower() for phrase in bad):
            kept.append(written)
    return kept


def _lines(text: str) -> list[str]:
    return (CITATION.sub("", text) if "[" in text else text).split("\n")


FUNCTIONS = FilterFunctions(
    ("curly bracket", "lorem ipsum", "too few sentences"), apply=filter_c4, edits=True
)
