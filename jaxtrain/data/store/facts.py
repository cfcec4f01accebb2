"""Statistics of stores for the report of a run."""

from pathlib import Path

import numpy as np

from jaxtrain.data.filters.filtered import Reports
from jaxtrain.data.store.store import TokenStore

HISTOGRAM = [2**power for power in range(1, 21)]  # upper ends, in tokens


def describe_stores(
    stores: dict[str, TokenStore], filters: Reports | None = None
) -> dict[str, dict]:
    """Statistics of each source for the report: documents, tokens, bytes, a histogram of lengths by
    powers of two, the documents left out with each damaged shard, and what filters removed."""
    return {
        name: {
            "documents": store.documents,
            "tokens": store.tokens,
            "bytes": store.bytes,
            "lengths": _histogram(store.lengths),
            "skipped": {Path(path).name: count for path, count in store.skipped.items()},
            "filters": (filters or {}).get(name),
        }
        for name, store in stores.items()
    }


def _histogram(lengths: np.ndarray) -> dict[str, int]:
    places = np.minimum(np.searchsorted(HISTOGRAM, lengths), len(HISTOGRAM) - 1)
    counts = np.bincount(places, minlength=len(HISTOGRAM)).tolist()
    return {str(end): count for end, count in zip(HISTOGRAM, counts)}
