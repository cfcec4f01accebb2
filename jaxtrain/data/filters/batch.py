"""The interface of a filter: its input, its verdict, its functions.

The input also holds its texts normalized for comparison: plain spaces and NFKC. Most texts need no
change. The characters that do are found in the bytes of many texts at once, because Python's
normalization looks at every character.
"""

import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.filters.arrays import TextArrays
from jaxtrain.data.filters.marks import MarkFiles
from jaxtrain.data.pool import Map

LAST = 0x30000  # no character above this has another NFKC form
# Word joiners and invisible characters: a text looks the same without them.
UNSEEN = "\u00ad\u2060\ufeff"


class TextBatch:
    """A batch of documents; the arrays that filters need are computed at the first use."""

    def __init__(self, texts: list[str], records: Sequence[Mapping[str, Any]]):
        self.texts, self.records = texts, records

    @cached_property
    def spaced(self) -> list[str]:
        """The texts with plain spaces in place of other spaces; each keeps its length."""
        return changed(self.texts, self._written, spaces())

    @cached_property
    def arrays(self) -> TextArrays:
        """`TextArrays` of the texts with plain spaces."""
        return self._written if self.spaced is self.texts else TextArrays(self.spaced)

    @cached_property
    def folded(self) -> TextArrays:
        """`TextArrays` of the texts normalized for comparison: lower case, NFKC."""
        lowered = [text.lower() for text in self.texts]
        arrays = TextArrays(lowered)
        texts = changed(lowered, arrays, compatible())
        if texts is lowered:
            return arrays
        return TextArrays([new if new is old else new.lower() for new, old in zip(texts, lowered)])

    @cached_property
    def _written(self) -> TextArrays:
        return TextArrays(self.texts)

    def sizes(self) -> list[int]:
        """UTF-8 bytes of each text."""
        return [len(text.encode()) for text in self.texts]

    def take(self, which: np.ndarray, texts: list[str] | None = None) -> "TextBatch":
        """Select documents by index. texts: changed texts of all documents of this batch."""
        if len(which) == len(self.texts) and texts is None:
            return self
        texts = texts or self.texts
        return TextBatch([texts[i] for i in which], [self.records[i] for i in which])


class FilterVerdict(NamedTuple):
    """The documents that a filter removes, and the texts of the others."""

    reasons: np.ndarray  # uint8 [documents]: 0 keeps it, else the number of a reason, from 1
    texts: list[str] | None = None  # texts of all documents after the filter; None: unchanged


class FilterFunctions(NamedTuple):
    """The functions of one filter; the first argument of each is the filter's configuration.

    A filter of single documents has `apply`. A filter that compares documents has `features`
    (values for each document) and `decide`, which gets the features and the source numbers of all
    documents.
    """

    reasons: tuple[str, ...]
    apply: Callable[[Any, TextBatch], FilterVerdict] | None = None
    features: Callable[[Any, TextBatch], np.ndarray] | None = None
    # (config, features, sources, map over processes) -> uint8 [documents], as `reasons`
    decide: Callable[[Any, MarkFiles, np.ndarray, Map], np.ndarray] | None = None
    edits: bool = False  # whether `apply` may change a text
    prepare: Callable[[Any, Path], Any] | None = None  # runs once; may write files into the folder
    input_hash: Callable[[Any], str] | None = None  # of the files that the filter reads


def first_reason(*rules: np.ndarray) -> np.ndarray:
    """uint8 [documents]: the number of the first rule that a document breaks, or 0."""
    broken = np.stack(rules)
    return np.where(broken.any(0), broken.argmax(0) + 1, 0).astype(np.uint8)


# ---- normalization for comparison ----------------------------------------------------------------


class Change(NamedTuple):
    """A replacement of characters."""

    to: dict[str, str]
    joining: frozenset[str]  # characters whose form may depend on the character before
    marked: np.ndarray  # bool [LAST]: whether a character is one of all these


@cache
def spaces() -> Change:
    """Replace every non-ASCII space by a plain one; a text keeps its number of characters."""
    return _change({c: " " for c in map(chr, range(0x80, LAST)) if c.isspace()})


@cache
def compatible() -> Change:
    """Normalize to NFKC (Unicode Annex 15) with plain spaces, and remove UNSEEN characters."""
    form = lambda c: unicodedata.normalize("NFKC", c)
    others = [c for c in map(chr, range(0x80, LAST)) if not "\ud800" <= c <= "\udfff"]
    joining = frozenset(c for c in others if _joins(form(c)[0]))
    to = {c: form(c) for c in others if form(c) != c and c not in joining}
    return _change(to | spaces().to | dict.fromkeys(UNSEEN, ""), joining)


def changed(texts: list[str], arrays: TextArrays, change: Change) -> list[str]:
    """Apply a change to the texts; unchanged texts stay the same objects. arrays: of the texts."""
    first = np.flatnonzero(arrays.data >= 0xC2)  # first bytes of the non-ASCII characters
    codes = _code_points(arrays.data, first)
    found = np.flatnonzero(change.marked[np.minimum(codes, LAST - 1)])
    if not len(found):
        return texts
    numbers = np.searchsorted(arrays.ends, first[found], side="right")
    pairs = np.unique(numbers * (sys.maxunicode + 1) + codes[found])
    of: dict[int, list[str]] = {}
    for number, code in zip(*(part.tolist() for part in np.divmod(pairs, sys.maxunicode + 1))):
        of.setdefault(number, []).append(chr(code))
    texts = list(texts)
    for number, characters in of.items():
        text = texts[number]
        if not change.joining.isdisjoint(characters):
            text = unicodedata.normalize("NFKC", text)
        for character in characters:
            text = text.replace(character, change.to.get(character, character))
        texts[number] = text
    return texts


def _joins(character: str) -> bool:
    """Whether a character may combine with the one before: marks, Hangul vowels and finals."""
    return unicodedata.category(character)[0] == "M" or "\u1160" <= character <= "\u11ff"


def _change(to: dict[str, str], joining: frozenset[str] = frozenset()) -> Change:
    marked = np.zeros(LAST, bool)
    marked[[ord(c) for c in (*to, *joining)]] = True
    return Change(to, joining, marked)


def _code_points(data: np.ndarray, first: np.ndarray) -> np.ndarray:
    """int64 code points of the UTF-8 characters at these offsets; 3 more bytes must follow."""
    lead, second = data[first].astype(np.int64), data[first + 1] & 0x3F
    codes = (lead & 0x1F) << 6 | second
    for size, least, bits in ((3, 0xE0, 0x0F), (4, 0xF0, 0x07)):
        some = np.flatnonzero(lead >= least)
        if len(some):
            code = (lead[some] & bits) << 6 | second[some]
            for offset in range(2, size):
                code = code << 6 | data[first[some] + offset] & 0x3F
            codes[some] = code
    return codes
