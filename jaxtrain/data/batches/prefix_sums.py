"""Prefix sums over documents: one in GROUP is stored, the others are computed again when needed.

At 10^9 documents an array of all sums takes 8 GB per process. This takes 0.125 bytes per document.
"""

from collections.abc import Callable

import numpy as np

GROUP = 64
CHUNK = 1 << 20  # documents that are summed together, a multiple of GROUP
FOUND = 1 << 12  # positions that are looked up together


class PrefixSums:
    """Prefix sums (int64) of of(lengths), which are integers of at least 0."""

    def __init__(self, lengths: np.ndarray, of: Callable[[np.ndarray], np.ndarray]):
        self.lengths, self.of = lengths, of
        sums = [
            np.add.reduceat(
                part := of(lengths[start : start + CHUNK]), np.arange(0, len(part), GROUP)
            )
            for start in range(0, len(lengths), CHUNK)
        ]
        self.ends = np.cumsum(np.concatenate(sums), dtype=np.int64)  # of each group
        self.total = int(self.ends[-1])

    def before(self, documents: np.ndarray) -> np.ndarray:
        """int64: the sum over all documents before each of `documents`."""
        found = np.empty(len(documents), np.int64)
        for start in range(0, len(documents), FOUND):
            some = np.asarray(documents[start : start + FOUND])
            groups = np.minimum(some // GROUP, len(self.ends) - 1)
            values = self._values(groups)
            earlier = np.arange(GROUP) < (some - groups * GROUP)[:, None]
            found[start : start + FOUND] = self._before_groups(groups) + (values * earlier).sum(1)
        return found

    def find(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64, int64: the document at each position below `total`, and the sum before it."""
        documents, before = np.empty(len(places), np.int64), np.empty(len(places), np.int64)
        for start in range(0, len(places), FOUND):
            some = np.asarray(places[start : start + FOUND])
            groups = np.searchsorted(self.ends, some, side="right")
            before_group = self._before_groups(groups)
            values = self._values(groups)
            ends = np.cumsum(values, 1)
            number = (ends <= (some - before_group)[:, None]).sum(1)
            rows = np.arange(len(some))
            documents[start : start + FOUND] = groups * GROUP + number
            before[start : start + FOUND] = before_group + (ends - values)[rows, number]
        return documents, before

    def _before_groups(self, groups: np.ndarray) -> np.ndarray:
        return np.where(groups > 0, self.ends[groups - 1], 0)

    def _values(self, groups: np.ndarray) -> np.ndarray:
        """int64 [groups, GROUP]: values of the documents of these groups; 0 after the last one."""
        numbers = groups[:, None] * GROUP + np.arange(GROUP)
        there = numbers < len(self.lengths)
        values = self.of(self.lengths[np.where(there, numbers, 0)])
        return np.where(there, values, 0)
