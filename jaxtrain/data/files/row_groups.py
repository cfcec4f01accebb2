"""Raw row groups of a Parquet file, for cluster nodes that lack the file."""

import io
from collections.abc import Buffer
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, override, runtime_checkable

from jaxtrain.data.files.local import File, local_path
from jaxtrain.data.files.positioned import PositionedReader

MAGIC_BYTES = 8  # after the footer: its length and the magic bytes
# Extra bytes that readers take, because old writers undercount a column chunk (PARQUET-816).
PADDING = 100


@runtime_checkable
class ColumnChunk(Protocol):
    """Attributes that are used of a `pyarrow.parquet.ColumnChunkMetaData`."""

    @property
    def dictionary_page_offset(self) -> int | None: ...
    @property
    def data_page_offset(self) -> int: ...
    @property
    def total_compressed_size(self) -> int: ...


@runtime_checkable
class RowGroupMetadata(Protocol):
    """Attributes that are used of a `pyarrow.parquet.RowGroupMetaData`."""

    @property
    def num_columns(self) -> int: ...
    def column(self, i: int, /) -> ColumnChunk: ...


class RowGroup(NamedTuple):
    """One row group as stored (compressed), with the metadata that is needed to read it."""

    footer: bytes  # the metadata of the file
    file_bytes: int
    start: int  # byte offset of `data` in the file
    data: bytes

    def open(self) -> Any:
        """A `pyarrow.parquet.ParquetFile` that can read this row group alone."""
        import pyarrow.parquet as pq

        return pq.ParquetFile(_Stored(self), metadata=_metadata(self.footer))


def read_footer(file: File) -> bytes:
    """Read the footer of a local Parquet file, with its length and magic bytes."""
    with open(local_path(file.url), "rb") as opened:
        end = opened.seek(-MAGIC_BYTES, io.SEEK_END)
        size = int.from_bytes(opened.read(4), "little")
        opened.seek(end - size)
        return opened.read()


def read_row_group(file: File, group: RowGroupMetadata, footer: bytes) -> RowGroup:
    """Read the bytes of a row group of a local file."""
    chunks = [group.column(number) for number in range(group.num_columns)]
    starts = [_start(chunk) for chunk in chunks]
    start = min(starts, default=0)
    ends = [at + chunk.total_compressed_size for at, chunk in zip(starts, chunks)]
    with open(local_path(file.url), "rb") as opened:
        opened.seek(start)
        data = opened.read(max(ends, default=0) + PADDING - start)
        return RowGroup(footer, opened.seek(0, io.SEEK_END), start, data)


def _start(chunk: ColumnChunk) -> int:
    """Offset of a column chunk's first byte: that of its dictionary page, if it has one."""
    dictionary = chunk.dictionary_page_offset or chunk.data_page_offset
    return min(dictionary, chunk.data_page_offset)


@lru_cache(maxsize=4)
def _metadata(footer: bytes) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.read_metadata(pa.BufferReader(footer))


class _Stored(PositionedReader):
    """File object that holds the bytes of one row group only."""

    def __init__(self, group: RowGroup):
        super().__init__()
        self._group = group

    @override
    def end(self) -> int:
        return self._group.file_bytes

    @override
    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        begin = self.at - self._group.start
        data = self._group.data[begin : begin + len(view)]
        view[: len(data)] = data
        self.at += len(data)
        return len(data)
