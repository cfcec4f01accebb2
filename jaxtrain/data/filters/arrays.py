"""Words, lines and paragraphs of many texts as arrays, with a hash of each.

Plain Python would process one word at a time; numpy processes all words of some megabytes at once.
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

SPACES = np.isin(np.arange(256), list(b" \t\n\r\v\f\x1c\x1d\x1e\x1f"))
LETTERS = np.array([byte >= 128 or chr(byte).isalpha() for byte in range(256)])
IN_WORDS = LETTERS | np.isin(np.arange(256), list(b"0123456789"))
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2^64
INVERSE = np.uint64(pow(int(BASE), -1, 1 << 64))
BETWEEN = b"\n\n"  # ends words, lines and paragraphs


class Spans(NamedTuple):
    """Pieces of the texts in their order, as offsets in `TextArrays.data`."""

    starts: np.ndarray  # int64 [N]
    stops: np.ndarray  # int64 [N]
    texts: np.ndarray  # int64 [N], index of the text of each piece
    hashes: np.ndarray  # uint64 [N], hash of the bytes of each piece


class TextArrays:
    """The UTF-8 bytes of some texts, one after the other."""

    def __init__(self, texts: list[str]):
        parts = [text.encode() for text in texts]
        self.count = len(parts)
        self.data = np.frombuffer(BETWEEN.join([*parts, b""]), np.uint8)
        self.ends = np.cumsum([len(part) + len(BETWEEN) for part in parts], dtype=np.int64)

    @cached_property
    def words(self) -> Spans:
        """Runs of characters between spaces."""
        return self._spans(*_runs(~SPACES[self.data]))

    @cached_property
    def folded_words(self) -> Spans:
        """Runs of letters and digits; each Chinese or Japanese character is a word of its own."""
        data, inside = self.data, IN_WORDS[self.data]
        # U+2000 to U+203F are punctuation, and so are U+3000 to U+303F.
        marks = np.flatnonzero((data[1:-1] == 0x80) & ((data[:-2] == 0xE2) | (data[:-2] == 0xE3)))
        for offset in range(3):
            inside[marks + offset] = False
        wide = (data >= 0xE3) & (data <= 0xE9) & inside
        starts, ends = inside.copy(), ~inside
        starts[1:] &= ~inside[:-1] | wide[1:]
        starts[3:] |= wide[:-3] & inside[3:]
        ends[1:] &= inside[:-1]
        places = np.flatnonzero(starts | ends)
        which = np.flatnonzero(starts[places])
        return self._spans(places[which], places[which + 1])

    @cached_property
    def lines(self) -> Spans:
        """Lines that are not empty."""
        return self._spans(*_runs(self.data != ord("\n")))

    @cached_property
    def paragraphs(self) -> Spans:
        """Runs of lines between empty lines."""
        gaps = self.data == ord("\n")
        single = gaps.copy()
        single[1:] &= ~gaps[:-1]
        single[:-1] &= ~gaps[1:]
        return self._spans(*_runs(~gaps | single))

    def characters(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """int64 [N]: characters, not bytes."""
        return self._characters[stops] - self._characters[starts]

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 [texts], in characters."""
        starts = np.concatenate([[0], self.ends[:-1]])
        return self.characters(starts, self.ends - len(BETWEEN))

    @cached_property
    def _characters(self) -> np.ndarray:
        first_bytes = (self.data & 0xC0) != 0x80
        return np.concatenate([[0], np.cumsum(first_bytes, dtype=np.int64)])

    @cached_property
    def _sums(self) -> np.ndarray:
        sums = np.zeros(len(self.data) + 1, np.uint64)
        terms = np.add(self.data, 1, out=sums[1:], dtype=np.uint64)
        terms *= _powers(len(self.data), BASE)
        np.cumsum(terms, out=terms)
        return sums

    def _spans(self, starts: np.ndarray, stops: np.ndarray) -> Spans:
        until = np.searchsorted(starts, self.ends)
        texts = np.repeat(np.arange(self.count), np.diff(until, prepend=0))
        sums = (self._sums[stops] - self._sums[starts]) * _powers(len(self.data), INVERSE)[starts]
        return Spans(starts, stops, texts, mixed(sums))


def ngrams(spans: Spans, n: int) -> tuple[np.ndarray, np.ndarray]:
    """uint64 hashes of n consecutive spans of one text, and the index of the first span of each."""
    total = rolling_hashes(spans, n)
    first = np.flatnonzero(spans.texts[: len(total)] == spans.texts[n - 1 :][: len(total)])
    return mixed(total[first]), first


def rolling_hashes(spans: Spans, n: int) -> np.ndarray:
    """uint64: a hash of each n consecutive spans, which may cross from one text to the next."""
    count = max(len(spans.hashes) - n + 1, 0)
    total = spans.hashes[:count].copy()
    for offset in range(1, n):
        total *= BASE
        total += spans.hashes[offset : offset + count]
    return total


def rolling_hashes_at(spans: Spans, n: int, first: np.ndarray) -> np.ndarray:
    """`rolling_hashes` only at the spans `first`."""
    total = spans.hashes[first]
    for offset in range(1, n):
        total = total * BASE + spans.hashes[first + offset]
    return total


def group_equal(hashes: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts indices so that equal items of one text are adjacent, in the order of occurrence.

    Returns the indices int64 [N], and bool [N]: whether each item equals the one before.
    Items are compared by 64 bits of their hash, less the bits of N.
    """
    bits = np.uint64(len(hashes).bit_length())
    keys = mixed(hashes + texts.astype(np.uint64) * BASE) >> bits << bits
    keys |= np.arange(len(hashes), dtype=np.uint64)
    keys.sort()
    same = np.zeros(len(keys), bool)
    same[1:] = keys[1:] >> bits == keys[:-1] >> bits
    return (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64), same


def seen_before(hashes: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """bool [N]: whether an equal item occurs earlier in the same text."""
    places, same = group_equal(hashes, texts)
    seen = np.zeros(len(hashes), bool)
    seen[places[same]] = True
    return seen


def mixed(values: np.ndarray) -> np.ndarray:
    """Mixes the bits of uint64 values (splitmix64)."""
    values = values ^ values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, and 0 for 0 / 0."""
    return part / np.maximum(whole, 1)


def _runs(inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops of the runs of True; the last value is False."""
    before = np.concatenate([[False], inside[:-1]])
    edges = np.flatnonzero(inside != before)
    return edges[::2], edges[1::2]


def _powers(count: int, base: np.uint64) -> np.ndarray:
    return _table(1 << max(count, 1 << 16).bit_length(), int(base))[:count]


@lru_cache(maxsize=2)
def _table(count: int, base: int) -> np.ndarray:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)
