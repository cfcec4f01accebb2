"""The interface of a filter: its input, its verdict, its functions."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.filters.arrays import TextArrays
from jaxtrain.data.filters.fold import changed, compatible, spaces


class TextBatch:
    """Some documents; what filters need of them is worked out when it is first asked for."""

    def __init__(self, texts: list[str], records: Sequence[Mapping[str, Any]]):
        self.texts, self.records = texts, records

    @cached_property
    def spaced(self) -> list[str]:
        """The texts with plain spaces in the place of others, each as long as it was."""
        return changed(self.texts, self._written, spaces())

    @cached_property
    def arrays(self) -> TextArrays:
        """Of the texts with plain spaces."""
        return self._written if self.spaced is self.texts else TextArrays(self.spaced)

    @cached_property
    def folded(self) -> TextArrays:
        """Of the texts as they are compared: small letters, one form of each character."""
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
        """UTF-8 bytes of each."""
        return [len(text.encode()) for text in self.texts]

    def take(self, which: np.ndarray, texts: list[str] | None = None) -> "TextBatch":
        """Some of the documents, perhaps changed: `texts` are of all."""
        if len(which) == len(self.texts) and texts is None:
            return self
        texts = texts or self.texts
        return TextBatch([texts[i] for i in which], [self.records[i] for i in which])


class FilterVerdict(NamedTuple):
    """Which documents a filter removes, and how it leaves the others."""

    reasons: np.ndarray  # uint8 [documents]: 0 keeps it, else the number of a reason, from 1
    texts: list[str] | None = None  # all documents as the filter leaves them; None: unchanged


class FilterFunctions(NamedTuple):
    """The functions of one filter; the first argument of each is the filter's configuration.

    A filter of single documents has `apply`. A filter that compares documents has `features`
    (numbers for each document) and `decide`, which gets those of all documents.
    """

    reasons: tuple[str, ...]
    apply: Callable[[Any, TextBatch], FilterVerdict] | None = None
    features: Callable[[Any, TextBatch], np.ndarray] | None = None
    decide: Callable[[Any, np.ndarray], np.ndarray] | None = None  # uint8 [documents], as `reasons`
    edits: bool = False  # whether `apply` may change a text
    prepare: Callable[[Any, Path], Any] | None = None  # runs once; may write files into the folder
    input_hash: Callable[[Any], str] | None = None  # of the files that the filter reads


def first_reason(*rules: np.ndarray) -> np.ndarray:
    """uint8 [documents]: the number of the first rule that a document breaks, or 0."""
    broken = np.stack(rules)
    return np.where(broken.any(0), broken.argmax(0) + 1, 0).astype(np.uint8)
