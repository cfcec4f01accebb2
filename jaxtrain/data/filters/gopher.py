"""The rules of Gopher (Rae et al. 2021, arXiv:2112.11446, appendix A.1 and table A1)."""

from typing import Literal
from unicodedata import normalize

import numpy as np
from pydantic import Field

from jaxtrain.data.filters.arrays import (
    LETTERS,
    Spans,
    TextArrays,
    group_equal,
    ngrams,
    seen_before,
    share,
)
from jaxtrain.data.filters.batch import FilterFunctions, FilterVerdict, TextBatch, first_reason
from jaxtrain.settings import Settings

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
BEGINNING = 2000  # characters, nearly always enough to find the stop words
BULLETS = ("-", "*", "\u2022", "\u2023", "\u25b6", "\u25c6", "\u25cf", "\u25e6")
ELLIPSES = ("...", "\u2026")


class GopherQuality(Settings):
    """Removes documents that are not prose: too short or long, unusual words, symbols, lists.
    English only."""

    name: Literal["gopher_quality"] = "gopher_quality"
    min_words: int = Field(default=50, ge=0, description="minimum words per document")
    max_words: int = Field(default=100_000, gt=0, description="maximum words per document")
    min_word_length: float = Field(
        default=3, ge=0, description="minimum mean word length in characters"
    )
    max_word_length: float = Field(
        default=10, gt=0, description="maximum mean word length in characters"
    )
    max_symbols: float = Field(
        default=0.1,
        ge=0,
        description="maximum number of hash signs per word, and of ellipses per word",
    )
    max_bullets: float = Field(
        default=0.9, ge=0, description="maximum fraction of lines that begin with a bullet"
    )
    max_ellipses: float = Field(
        default=0.3, ge=0, description="maximum fraction of lines that end with an ellipsis"
    )
    min_letters: float = Field(
        default=0.8, ge=0, le=1, description="minimum fraction of words that contain a letter"
    )
    min_stop_words: int = Field(
        default=2,
        ge=0,
        le=8,
        description="minimum number of different stop words (the, be, to, of, and, that, "
        "have, with)",
    )


class GopherRepetition(Settings):
    """Removes repetitive documents, by the share of repeated lines, paragraphs and n-grams."""

    name: Literal["gopher_repetition"] = "gopher_repetition"
    max_lines: float = Field(
        default=0.3, ge=0, description="maximum fraction of lines that repeat an earlier one"
    )
    max_paragraphs: float = Field(
        default=0.3, ge=0, description="maximum fraction of paragraphs that repeat an earlier one"
    )
    max_line_characters: float = Field(
        default=0.2, ge=0, description="maximum fraction of characters in repeated lines"
    )
    max_paragraph_characters: float = Field(
        default=0.2, ge=0, description="maximum fraction of characters in repeated paragraphs"
    )
    max_top_ngrams: tuple[float, ...] = Field(
        default=(0.2, 0.18, 0.16),
        description="maximum fraction of characters in the most frequent n-gram, for n = 2, 3, 4 "
        "words",
    )
    max_ngrams: tuple[float, ...] = Field(
        default=(0.15, 0.14, 0.13, 0.12, 0.11, 0.1),
        description="maximum fraction of characters in repeated n-grams, for n = 5 to 10 words",
    )


def filter_quality(config: GopherQuality, batch: TextBatch) -> FilterVerdict:
    arrays, words = batch.arrays, batch.arrays.words
    count = np.bincount(words.texts, minlength=arrays.count)
    characters = total(arrays.characters(words.starts, words.stops), words, arrays)
    letters = np.concatenate([[0], np.cumsum(LETTERS[arrays.data], dtype=np.int64)])
    wordy = total(letters[words.stops] > letters[words.starts], words, arrays)
    length = characters / np.maximum(count, 1)
    hashes = np.array([text.count("#") for text in batch.texts])
    ellipses = np.array([sum(map(text.count, ELLIPSES)) for text in batch.texts])
    lines = [[s for line in t.split("\n") if (s := line.strip())] for t in batch.texts]
    number = np.array([len(of) for of in lines])
    bullets = np.array([sum(line.startswith(BULLETS) for line in of) for of in lines])
    cut_off = np.array([sum(line.endswith(ELLIPSES) for line in of) for of in lines])
    found = [stop_words(text, config.min_stop_words) for text in batch.texts]
    return FilterVerdict(
        first_reason(
            count < config.min_words,
            count > config.max_words,
            (length < config.min_word_length) | (length > config.max_word_length),
            share(hashes, count) > config.max_symbols,
            share(ellipses, count) > config.max_symbols,
            share(bullets, number) > config.max_bullets,
            share(cut_off, number) > config.max_ellipses,
            share(wordy, count) < config.min_letters,
            np.array(found) < config.min_stop_words,
        )
    )


def stop_words(text: str, enough: int) -> int:
    """Number of stop words in a text's beginning, or in the whole text if those are too few."""
    found = len(STOP_WORDS.intersection(text[:BEGINNING].lower().split()))
    if found < enough:  # full-width letters too
        found = len(STOP_WORDS.intersection(normalize("NFKC", text).lower().split()))
    return found


def filter_repetition(config: GopherRepetition, batch: TextBatch) -> FilterVerdict:
    arrays, broken = batch.arrays, []
    for spans, most, most_characters in (
        (arrays.lines, config.max_lines, config.max_line_characters),
        (arrays.paragraphs, config.max_paragraphs, config.max_paragraph_characters),
    ):
        again = seen_before(spans.hashes, spans.texts)
        count = np.bincount(spans.texts, minlength=arrays.count)
        size = arrays.characters(spans.starts, spans.stops)
        broken.append(share(total(again, spans, arrays), count) > most)
        broken.append(share(total(size * again, spans, arrays), arrays.sizes) > most_characters)
    top = [share(top_ngram(arrays, n), arrays.sizes) > most
           for n, most in enumerate(config.max_top_ngrams, 2)]  # fmt: skip
    broken.append(np.any([*top, np.zeros(arrays.count, bool)], axis=0))
    broken.append(_repeats(config, batch))
    return FilterVerdict(first_reason(*broken))


def top_ngram(arrays: TextArrays, n: int) -> np.ndarray:
    """int64 [texts]: characters of all occurrences of the most frequent n-gram of words."""
    words = arrays.words
    hashes, first = ngrams(words, n)
    places, same = group_equal(hashes, words.texts[first])
    run_starts = np.flatnonzero(~same)
    times = np.diff(np.append(run_starts, len(same)))
    often = times > 1
    first, times = first[places[run_starts[often]]], times[often]
    size = arrays.characters(words.starts[first], words.stops[first + n - 1])
    best = np.zeros(arrays.count, np.int64)
    np.maximum.at(best, words.texts[first], times << 32 | size)  # the longest of those
    return (best >> 32) * (best & 0xFFFFFFFF)


def repeated(arrays: TextArrays, n: int) -> np.ndarray:
    """int64 [texts]: characters of the words in repeated n-grams, each word counted once."""
    words = arrays.words
    hashes, first = ngrams(words, n)
    again = first[seen_before(hashes, words.texts[first])]
    change = np.zeros(len(words.starts) + 1, np.int64)
    np.add.at(change, again, 1)
    np.add.at(change, again + n, -1)
    size = arrays.characters(words.starts, words.stops)
    return total(size * (np.cumsum(change)[:-1] > 0), words, arrays)


def _repeats(config: GopherRepetition, batch: TextBatch) -> np.ndarray:
    """Whether too much is repeated. Text outside repeated 5-grams is outside longer ones too."""
    broken = np.zeros(len(batch.texts), bool)
    left = np.arange(len(batch.texts))
    for n, most in enumerate(config.max_ngrams, 5):
        arrays = batch.arrays
        covered = share(repeated(arrays, n), arrays.sizes)
        broken[left[covered > most]] = True
        go_on = np.flatnonzero(
            (covered <= most) & (covered > min(config.max_ngrams[n - 4 :] or [1]))
        )
        left, batch = left[go_on], batch.take(go_on)
        if not len(left):
            break
    return broken


def total(values: np.ndarray, spans: Spans, arrays: TextArrays) -> np.ndarray:
    """The sum of a value of each span over the spans of a text."""
    return np.bincount(spans.texts, weights=values, minlength=arrays.count).astype(np.int64)


QUALITY = FilterFunctions(
    ("too few words", "too many words", "length of the words", "hash signs", "ellipses",
     "bullets", "lines that break off", "words without letters", "no stop words"),
    apply=filter_quality,
)  # fmt: skip
REPETITION = FilterFunctions(
    ("lines", "characters of lines", "paragraphs", "characters of paragraphs",
     "most frequent words", "sequences of words"),
    apply=filter_repetition,
)  # fmt: skip
