"""One document a row, filled up with padding: how fine-tuning scripts of 2019 made batches.

A document longer than a row becomes several rows, or loses its end. What stays free is padding of
weight 0, which takes as much time as text does: packing was made to avoid it. It is here as the
baseline that packings are measured against.
"""

from typing import Any, Literal, override

from pydantic import Field

from jaxtrain.data.batches.order import GLOBAL, ShuffleConfig
from jaxtrain.data.batches.planning import BestFit, check_documents_fit
from jaxtrain.data.store.store import TokenStore
from jaxtrain.settings import Settings


class OneDocumentConfig(Settings):
    """One document a row, in random order; what stays free is padding of weight 0. Slow: for
    comparisons."""

    name: Literal["one_document"] = "one_document"
    long_documents: Literal["split", "crop"] = Field(
        default="split",
        description="A document longer than a row becomes several rows, or loses its end",
    )


class OneDocument(BestFit):
    """Plans rows of one document, or of one part of a document, each."""

    @override
    def _fitting(self, room: int) -> int:
        """As that of BestFit in an empty row; nothing fits behind a document."""
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
    """The planner. Its buffer is one document: rows have the order of the documents."""
    split = config.long_documents == "split"
    if not split:
        check_documents_fit(store, "one_document, long_documents crop,", length)
    options: dict[str, Any] = {"fill": False, "split": split}
    options |= {"max_epochs": max_epochs, "shuffle": shuffle}
    return OneDocument(store, 1, length, *key, **options)
