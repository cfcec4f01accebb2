"""A token store in memory, in which every token tells where it stands in the corpus."""

import numpy as np
import pytest

from jaxtrain.data.store.store import RECORD_TOKENS, Records, TokenStore

BOS = 0


class MemoryRecords(Records):
    def __init__(self, data):
        self.data = data

    def read(self, records):
        return [self.data[record] for record in records]


def memory_store(lengths) -> TokenStore:
    """Documents of these lengths whose tokens are 1, 2, 3, ... over the whole corpus; BOS is 0."""
    lengths = np.array(lengths, np.uint32)
    records, first = [], [0]
    for stop, length in zip(np.cumsum(lengths), lengths):
        tokens = np.arange(stop - length, stop, dtype="<u4") + 1
        records += [
            tokens[i : i + RECORD_TOKENS].tobytes() for i in range(0, len(tokens), RECORD_TOKENS)
        ]
        first.append(len(records))
    return TokenStore(
        directory=None,
        lengths=lengths,
        tokens=int(lengths.sum()),
        bytes=0,
        bos_id=BOS,
        vocab_size=int(lengths.sum()) + 1,
        tokenizer="",
        fingerprint=str(hash(lengths.tobytes())),
        first_record=np.array(first),
        records=MemoryRecords(records),
        dtype=np.dtype("<u4"),
    )


@pytest.fixture(scope="session")
def store_of():
    return memory_store
