"""Exact and near-duplicate documents. The first of each is kept."""

import hashlib
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from jaxtrain.data.filters.arrays import Spans, mixed, ngrams
from jaxtrain.data.filters.batch import FilterFunctions, TextBatch
from jaxtrain.data.filters.marks import MarkFiles
from jaxtrain.data.pool import Map
from jaxtrain.settings import Settings


class ExactDuplicates(Settings):
    """Removes a document whose text is that of an earlier one."""

    name: Literal["exact_duplicates"] = "exact_duplicates"


class NearDuplicates(Settings):
    """Removes a document that shares most of its words with an earlier one (MinHash, Broder 1997).

    Two documents match if all `rows` hashes of one of the `bands` are equal. If they share a
    fraction s of their n-grams, the probability is 1 - (1 - s^rows)^bands: 1/2 at s = 0.69 with the
    defaults, which are FineWeb's (arXiv:2406.17557). Matches are transitive.
    """

    name: Literal["near_duplicates"] = "near_duplicates"
    ngram: int = Field(default=5, gt=0, description="words per shingle (n-gram)")
    bands: int = Field(
        default=14,
        gt=0,
        description="bands: groups of hashes; near-duplicates have one equal group",
    )
    rows: int = Field(default=8, gt=0, description="hashes per band")


Duplicates = Annotated[ExactDuplicates | NearDuplicates, Field(discriminator="name")]


def text_hashes(config: ExactDuplicates, batch: TextBatch) -> np.ndarray:
    """uint64 [documents]: a hash of the text."""
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in batch.texts)
    return np.frombuffer(b"".join(digests), np.uint64)


def minhash_bands(config: NearDuplicates, batch: TextBatch) -> np.ndarray:
    """uint64 [documents, bands]: a hash of each band; 0 for a document without words."""
    arrays = batch.folded
    words = arrays.folded_words
    counts = np.bincount(words.texts, minlength=arrays.count)
    found = [_shingles(words, config.ngram)]
    for count in np.unique(counts[(counts > 0) & (counts < config.ngram)]):
        # A text of fewer words than a shingle has one shingle, of all its words.
        here = counts[words.texts] == count
        found.append(_shingles(Spans(*(values[here] for values in words)), int(count)))
    hashes, texts = map(np.concatenate, zip(*found))
    if len(found) > 1:
        order = np.argsort(texts, kind="stable")
        hashes, texts = hashes[order], texts[order]
    there, starts = np.unique(texts, return_index=True)
    marks = np.zeros((arrays.count, config.bands), np.uint64)
    if not len(there):
        return marks
    small = (hashes >> np.uint64(32)).astype(np.uint32)
    multiply, add = _permutations(config.bands * config.rows)
    room = np.empty_like(small)
    for number, (m, a) in enumerate(zip(multiply, add)):
        np.multiply(small, m, out=room)
        room += a
        lowest = np.minimum.reduceat(room, starts)
        band = number // config.rows
        marks[there, band] = mixed(marks[there, band] + lowest + np.uint64(1))
    return marks


def _shingles(words: Spans, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of n consecutive words, and the index of the text of each."""
    hashes, first = ngrams(words, n)
    return hashes, words.texts[first]


def mark_duplicates(
    config: ExactDuplicates | NearDuplicates, marks: MarkFiles, sources_D: np.ndarray, mapped: Map
) -> np.ndarray:
    """uint8 [documents]: 1 + the source of the first document of each cluster; 0 for that one."""
    first = np.arange(len(sources_D))
    columns = range(marks.columns())
    partitions = (part for column in columns for part in marks.partitions(column))
    for pairs in mapped(equal_pairs, partitions):
        join_clusters(first, pairs)
    alone = first == np.arange(len(first))
    return np.where(alone, 0, sources_D[first] + 1).astype(np.uint8)


def equal_pairs(partition: np.ndarray) -> np.ndarray:
    """int64 [2, pairs]: documents with equal values, each and the next one.

    partition: [documents, 2], the value and the document.
    """
    order = np.argsort(partition[:, 0], kind="stable")
    keys, documents = partition[order].T
    same = keys[1:] == keys[:-1]
    return np.stack([documents[:-1][same], documents[1:][same]]).astype(np.int64)


def join_clusters(first_D: np.ndarray, pairs: np.ndarray) -> None:
    """Merges the clusters of the documents of each pair, in place. first_D: the first document of
    each document's cluster."""
    a, b = pairs
    while True:
        low, high = np.minimum(first_D[a], first_D[b]), np.maximum(first_D[a], first_D[b])
        if (low == high).all():
            return
        np.minimum.at(first_D, high, low)
        while (first_D[first_D] != first_D).any():
            first_D[:] = first_D[first_D]


def _permutations(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws `multiply` (odd) and `add`: x -> multiply x + add modulo 2^32 is then a permutation."""
    drawn = np.random.SeedSequence(1).generate_state(2 * count, np.uint32)
    return drawn[:count] | np.uint32(1), drawn[count:]


EXACT = FilterFunctions(("duplicate",), features=text_hashes, decide=mark_duplicates)
NEAR = FilterFunctions(("near duplicate",), features=minhash_bands, decide=mark_duplicates)
