"""One document per row, padded: the batches of fine-tuning scripts of 2019.

A document longer than a row becomes several rows, or loses its end. The rest of a row is padding of
weight 0, which takes as much time as text; packing avoids it. This is the baseline that packings
are measured against.
"""

from typing import Any, Literal, override

from pydantic import Field

from jaxtrain.data.batches.order import GLOBAL, ShuffleConfig
from jaxtrain.data.batches.planning import BestFit, check_documents_fit
from jaxtrain.data.store.store import TokenStore
from jaxtrain.settings import Settings


class OneDocumentConfig(Settings):
    """One document per sequence, in random order; the rest is padding of weight 0. Slow: for
    comparisons."""

    name: Literal["one_document"] = "one_document"
    long_documents: Literal["split", "crop"] = Field(
        default="split",
        description="a document longer than a sequence is split over several sequences, or cropped",
    )


class OneDocument(BestFit):
    """Planner of rows that hold one document, or one part of a document, each."""

    @override
    def _fitting(self, room: int) -> int:
        """Size of an empty row's next document, as in BestFit; 0 if the row has a document."""
        empty = room == self.length // self.cut + 1
        return super()._fitting(room) if empty else 0


def make_one_document(
    store: TokenStore,
    config: OneDocumentConfig,
    length: int,
    *key: int,
    max_epochs: float | None = None,
    shuffle: ShuffleConfig = GLOBAL,
) -> OneDocument:
    """Make the planner. Its buffer holds one document, so rows keep the order of the documents."""
    split = config.long_documents == "split"
    if not split:
        check_documents_fit(store, "one_document, long_documents crop,", length)
    options: dict[str, Any] = {"fill": False, "split": split}
    options |= {"max_epochs": max_epochs, "shuffle": shuffle}
    return OneDocument(store, 1, length, *key, **options)
