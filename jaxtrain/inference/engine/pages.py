"""Allocation of KV pages: free pages, pages in use, and cached pages of known prefixes.

The cache key of a full page is a digest of its tokens and all tokens before it. Requests with the
same prefix share pages. A page that no request uses stays cached until a new page is needed and it
is the least recently used one.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import PyTree

Digest = bytes


def page_digests(
    tokens: Sequence[int], size: int, adapter: str | None = None, known: Sequence[Digest] = ()
) -> list[Digest]:
    """Digest of each full page of `size` tokens, over it and all tokens before it. adapter: name of
    a LoRA adapter, which has its own keys and values. known: digests of the first pages."""
    count = len(tokens) // size
    found = list(known[:count])
    if len(found) == count:
        return found
    seed = b"" if adapter is None else _digest(adapter.encode())
    before = found[-1] if found else seed
    new = np.asarray(tokens[len(found) * size : count * size], np.int32).tobytes()
    page = len(new) // (count - len(found))  # bytes
    for at in range(0, len(new), page):
        before = _digest(before + new[at : at + page])
        found.append(before)
    return found


def _digest(data: bytes) -> Digest:
    return hashlib.blake2b(data, digest_size=16).digest()


def affordable_pages(page: PyTree, wanted: int, params: PyTree, share: float) -> int:
    """Number of pages that fit in a share of the device's free memory, at most `wanted`. page: the
    shapes of one page. params: arrays on that device."""
    if (free := free_bytes(params)) is None:
        return wanted
    return max(1, min(wanted, int(free * share) // bytes_of(page)))


def free_bytes(params: PyTree) -> int | None:
    """Free memory in bytes on the device of some arrays. None if the device does not report it."""
    stats = next(iter(jax.tree.leaves(params)[0].devices())).memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None


def bytes_of(shapes: PyTree) -> int:
    """Total bytes of arrays, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


class PagePool:
    """Allocator of page indices. Counts the requests that use each page."""

    def __init__(self, pages: int):
        self.total = pages
        self.free = list(range(pages - 1, -1, -1))
        self.uses: Counter[int] = Counter()
        self.page_of: dict[Digest, int] = {}
        self.digest_of: dict[int, Digest] = {}
        self.unused: OrderedDict[int, None] = OrderedDict()  # cached, least recently used first

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out."""
        return len(self.free) + len(self.unused)

    @property
    def used(self) -> int:
        """Pages that requests use."""
        return self.total - self.available

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` pages. Returns None if fewer are available."""
        if count > self.available:
            return None
        found = [self.free.pop() for _ in range(min(count, len(self.free)))]
        found += [self._evict() for _ in range(count - len(found))]
        for page in found:
            self.uses[page] = 1
        return found

    def _evict(self) -> int:
        """The cached page that was used least recently, cached no longer."""
        page, _ = self.unused.popitem(last=False)
        del self.page_of[self.digest_of.pop(page)]
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Release one use of each page. Of pages that become unused, the last are evicted first."""
        for page in reversed(pages):
            self.uses[page] -= 1
            if self.uses[page]:
                continue
            del self.uses[page]
            if page in self.digest_of:
                self.unused[page] = None
            else:
                self.free.append(page)

    def find_cached(self, digests: Sequence[Digest]) -> list[int]:
        """Pages of the longest cached prefix. Adds one use to each."""
        found: list[int] = []
        for digest in digests:
            if (page := self.page_of.get(digest)) is None:
                break
            found.append(page)
        for page in found:
            self.unused.pop(page, None)
            self.uses[page] += 1
        return found

    def cache(self, pages: Sequence[int], digests: Sequence[Digest]) -> None:
        """Cache these full pages under their digests. Existing entries stay."""
        for page, digest in zip(pages, digests):
            if digest not in self.page_of and page not in self.digest_of:
                self.page_of[digest], self.digest_of[page] = page, digest
