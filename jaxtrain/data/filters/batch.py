"""What a filter is given and gives back."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.filters.arrays import Arrays
from jaxtrain.data.filters.fold import changed, compatible, spaces


class Batch:
    """Some documents; what filters need of them is worked out when it is first asked for."""

    def __init__(self, texts: list[str], records: Sequence[Mapping[str, Any]]):
        self.texts, self.records = texts, records

    @cached_property
    def spaced(self) -> list[str]:
        """The texts with plain spaces in the place of others, each as long as it was."""
        return changed(self.texts, self._written, spaces())

    @cached_property
    def arrays(self) -> Arrays:
        """Of the texts with plain spaces."""
        return self._written if self.spaced is self.texts else Arrays(self.spaced)

    @cached_property
    def folded(self) -> Arrays:
        """Of the texts as they are compared: small letters, one form of each character."""
        lowered = [text.lower() for text in self.texts]
        arrays = Arrays(lowered)
        texts = changed(lowered, arrays, compatible())
        if texts is lowered:
            return arrays
        return Arrays([new if new is old else new.lower() for new, old in zip(texts, lowered)])

    @cached_property
    def _written(self) -> Arrays:
        return Arrays(self.texts)

    def sizes(self) -> list[int]:
        """UTF-8 bytes of each."""
        return [len(text.encode()) for text in self.texts]

    def take(self, which: np.ndarray, texts: list[str] | None = None) -> "Batch":
        """Some of the documents, perhaps changed: `texts` are of all."""
        if len(which) == len(self.texts) and texts is None:
            return self
        texts = texts or self.texts
        return Batch([texts[i] for i in which], [self.records[i] for i in which])


class Judged(NamedTuple):
    """What a filter thinks of each document."""

    reasons: np.ndarray  # uint8 [documents]: 0 keeps it, else the number of a reason, from 1
    texts: list[str] | None = None  # all documents as the filter leaves them; None: unchanged


class Kind(NamedTuple):
    """A kind of filter. It looks at each document alone (`judge`), or at what it noted of all.

    `mark` notes some numbers for each document, `choose` decides once those of all are there.
    """

    reasons: tuple[str, ...]
    judge: Callable[[Any, Batch], Judged] | None = None
    mark: Callable[[Any, Batch], np.ndarray] | None = None
    choose: Callable[[Any, np.ndarray], np.ndarray] | None = None  # uint8 [documents], as `reasons`
    edits: bool = False  # whether `judge` may change a text
    ready: Callable[[Any, Path], Any] | None = None  # what is worked out once, into a folder
    identity: Callable[[Any], str] | None = None  # of the files that the filter reads


def first_reason(*rules: np.ndarray) -> np.ndarray:
    """uint8 [documents]: the number of the first rule that a document breaks, or 0."""
    broken = np.stack(rules)
    return np.where(broken.any(0), broken.argmax(0) + 1, 0).astype(np.uint8)
