"""Files to documents in two steps: one process cuts files into blocks, many decode blocks to text.

A block ends at the end of a document. Its end depends only on its start, so reading can resume at
any block and finds the same blocks from there on.
"""

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, runtime_checkable

from jaxtrain.cluster.ray_cluster import current_cluster
from jaxtrain.data.chat.messages import conversations
from jaxtrain.data.files.local import File
from jaxtrain.data.files.remote import open_file
from jaxtrain.data.files.row_groups import RowGroup, read_footer, read_row_group
from jaxtrain.data.files.sources import (
    ChatSource,
    CodeSource,
    JsonlSource,
    PreferenceSource,
    Source,
    TextSource,
    find_files,
    source_path,
)
from jaxtrain.data.preference.preferences import preferences
from jaxtrain.data.records import Record
from jaxtrain.settings import UserError, parse_json
from jaxtrain.storage.objects import is_local

BLOCK = 1 << 22  # bytes of text, unless a document is longer


class Position(NamedTuple):
    """Position to resume reading at: a byte of the decompressed file, or a Parquet row group."""

    file: int = 0
    at: int = 0
    line: int = 1
    stored: int = 0  # bytes read so far, of the files as stored (compressed)


START = Position()


class TextBlock(NamedTuple):
    """Consecutive whole documents of one file."""

    file: File
    line: int  # the number of its first line, from 1
    start: int  # a byte of the decompressed file, or a row group
    size: int  # bytes of text
    data: bytes | None  # None: the consumer reads row group `start` itself
    after: Position
    row_group: RowGroup | None = None  # for cluster nodes, which may lack the file


def read_documents(source: Source) -> Iterator[str]:
    """Yields the documents of every file of `source` in the order of the file names, streamed.

    Raises UserError for a missing file, a source without text, text that is not UTF-8, and bad
    records.
    """
    found = False
    for block in blocks(source, find_files(source)):
        for text in texts_of(source, block):
            found = True
            yield text
    if not found:
        raise UserError(f"{source_path(source)} holds no text")


def blocks(source: Source, files: list[File], begin: Position = START) -> Iterator[TextBlock]:
    """Yield the blocks of `files` in order, from `begin` on."""
    stored = sum(file.size or 0 for file in files[: begin.file])
    for number in range(begin.file, len(files)):
        at = begin if number == begin.file else Position(number)
        yield from SOURCES[source.name].blocks(source, files[number], at._replace(stored=stored))
        stored += files[number].size or 0


def texts_of(source: Source, block: TextBlock) -> Iterator[str]:
    """Return the non-empty documents of a block. Raises UserError for bad text."""
    return (text for text, _ in records_of(source, block))


def records_of(
    source: Source, block: TextBlock, fields: tuple[str, ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return documents of a block, each with its JSONL record or the Parquet columns `fields`."""
    reader = SOURCES[source.name]
    if reader.records is None:
        return ((text, {}) for text in reader.texts(source, block) if text)
    return (pair for pair in reader.records(source, block, fields) if pair[0])


@runtime_checkable
class ByteStream(Protocol):
    """A source of bytes: a file, a decompressor, or bytes in memory."""

    def read(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


def cut_stream(
    stream: ByteStream,
    file: File,
    at: Position,
    cut: Callable[[bytes], int],
    stored: Callable[[], int],
) -> Iterator[TextBlock]:
    """Yield the blocks of a text stream at byte `at.at`; `cut` finds the last end of a document.

    `stored()` returns the number of bytes read so far of the file as stored.
    """
    position, buffer, ended = at, b"", False
    while True:
        end, wanted = 0, BLOCK
        while not end:
            if len(buffer) < wanted and not ended:
                buffer += stream.read(wanted - len(buffer))
                ended = len(buffer) < wanted
            if ended and len(buffer) <= wanted:
                end = len(buffer)
                break
            end = cut(buffer[:wanted])
            wanted *= 2
        if not end:
            return
        data, buffer = buffer[:end], buffer[end:]
        after = Position(
            at.file, position.at + end, position.line + data.count(b"\n"), at.stored + stored()
        )
        yield TextBlock(file, position.line, position.at, end, data, after)
        position = after


def _chat_blocks(source: Any, file: File, at: Position) -> Iterator[TextBlock]:
    whole = ".json" in Path(file.url).suffixes  # the file may be one array
    return blocks_of_file(file, at, CUTS["file" if whole else "line"])


def blocks_of_file(file: File, at: Position, cut: Callable[[bytes], int]) -> Iterator[TextBlock]:
    with open_file(file) as raw:
        ending = Path(file.url).suffix.lower()
        try:
            if ending in DECOMPRESSORS:
                with closing(DECOMPRESSORS[ending](raw)) as stream:
                    _skip(stream, at.at)
                    yield from cut_stream(stream, file, at, cut, raw.tell)
            else:
                raw.seek(at.at)
                yield from cut_stream(raw, file, at, cut, raw.tell)
        except DAMAGED as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the disk or the network, not of the content
            raise UserError(f"{file.url} cannot be decompressed, it is damaged: {error}") from error


# Exceptions of the decompressors; Arrow raises an OSError without errno.
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, OSError)


def _skip(stream: ByteStream, count: int) -> None:
    while count and (data := stream.read(min(count, 1 << 20))):
        count -= len(data)


def _zstandard(file: IO[bytes]) -> ByteStream:
    import pyarrow as pa

    return pa.CompressedInputStream(file, "zstd")  # detects a truncated file


DECOMPRESSORS: dict[str, Callable[[IO[bytes]], ByteStream]] = {
    ".gz": lambda file: io.BufferedReader(gzip.GzipFile(fileobj=file), 1 << 20),
    ".xz": lzma.open,
    ".zst": _zstandard,
}


def _after_blank_line(data: bytes) -> int:
    ends = [data.rfind(blank) + len(blank) for blank in (b"\n\n", b"\n\r\n") if blank in data]
    return max(ends, default=0)


# Document boundaries: (bytes) -> end of the last document that is known to be whole, or 0.
CUTS: dict[str, Callable[[bytes], int]] = {
    "file": lambda data: 0,
    "line": lambda data: data.rfind(b"\n") + 1,
    "paragraph": _after_blank_line,
}


def _decoded(block: TextBlock) -> str:
    data = block.data or b""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        offset = block.start + error.start
        raise UserError(
            f"{block.file.url} is not UTF-8 text: bad byte at offset {offset}"
        ) from error
    # A byte order mark at the start of a file is not part of its text.
    return text.removeprefix("\ufeff") if block.start == 0 else text


def _text(source: TextSource, block: TextBlock) -> Iterator[str]:
    text = _decoded(block)
    if source.document == "file":
        yield text
        return
    paragraph = ""
    for line in io.StringIO(text, newline="\n"):
        blank = not line.strip()
        if source.document == "line" and not blank:
            yield line.rstrip("\r\n")
        elif source.document == "paragraph" and not blank:
            paragraph += line
        elif paragraph:
            yield paragraph
            paragraph = ""
    yield paragraph


def _jsonl_records(
    source: JsonlSource, block: TextBlock, fields: tuple[str, ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_decoded(block).split("\n"), block.line):
        if not line.strip():
            continue
        where = f"{block.file.url} line {number}"
        record = parse_json(line, where)
        if not isinstance(record, dict):
            raise UserError(f"{where} is not a JSON object: {line.strip()[:60]}")
        if source.field not in record:
            has = ", ".join(record)
            raise UserError(f"{where} has no field '{source.field}'; it has: {has}")
        text = record[source.field]
        if not isinstance(text, str):
            kind = type(text).__name__
            raise UserError(f"{where}: field '{source.field}' is {kind}, not a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
            raise UserError(f"{where} has a character that is not Unicode") from error
        yield text, record


def _chat(source: Any, block: TextBlock) -> Iterator[str]:
    return (record.chat_text() for record, _ in chat_records(source, block))


def chat_records(
    source: ChatSource | PreferenceSource, block: TextBlock
) -> Iterator[tuple[Record, str]]:
    """Return the conversations or preferences of a block, each with its file and line."""
    read = preferences if source.name == "preference" else conversations
    return read(_decoded(block), block.file.url, block.line)


def _code(source: CodeSource, block: TextBlock) -> Iterator[str]:
    try:
        text = _decoded(block)
    except UserError:
        return
    if text.strip() and "\0" not in text:
        header = source.header
        yield text if header is None else header.replace("{path}", block.file.name) + "\n" + text


def _parquet_blocks(source: Any, file: File, at: Position) -> Iterator[TextBlock]:
    metadata = _parquet_file(source, file).metadata
    sent = current_cluster() is not None and is_local(file.url)
    footer = read_footer(file) if sent else b""
    groups = metadata.num_row_groups
    for group in range(at.at, groups):
        stored = at.stored + (file.size or 0) * (group + 1) // groups
        rows = metadata.row_group(group)
        after = Position(at.file, group + 1, 1, stored)
        data = read_row_group(file, rows, footer) if sent else None
        yield TextBlock(file, 1, group, rows.total_byte_size, None, after, data)


def _parquet_records(
    source: Any, block: TextBlock, fields: tuple[str, ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    table = _parquet_of(source, block)
    there = [field for field in fields if field in table.schema_arrow.names]
    batches = table.iter_batches(row_groups=[block.start], columns=[source.column, *there])
    while records := _whole(block.file, lambda: next(batches, None)):
        for record in _whole(block.file, records.to_pylist):
            yield record[source.column], {field: record[field] for field in there}


def other_columns(source: Source, block: TextBlock) -> tuple[str, ...]:
    """Parquet columns other than the text. Empty for JSONL, whose records hold all fields."""
    if source.name != "parquet":
        return ()
    names = _parquet_of(source, block).schema_arrow.names
    return tuple(name for name in names if name != source.column)


def _parquet_of(source: Any, block: TextBlock) -> Any:
    """Open the `pyarrow.parquet.ParquetFile` of a block, from its own `row_group` if it has one."""
    if block.row_group is not None:
        return _whole(block.file, block.row_group.open)
    return _parquet_file(source, block.file)


TEXT_TYPES = ("string", "large_string", "string_view", "null")  # of Arrow


@lru_cache(maxsize=4)
def _parquet_file(source: Any, file: File) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    opened = file.url if is_local(file.url) else open_file(file)
    table = _whole(file, lambda: pq.ParquetFile(opened))
    schema = _whole(file, lambda: table.schema_arrow)
    if source.column not in schema.names:
        has = ", ".join(schema.names)
        raise UserError(f"{file.url} has no column '{source.column}'; it has: {has}")
    kind = schema.field(source.column).type
    stored = kind.value_type if pa.types.is_dictionary(kind) else kind
    if str(stored) not in TEXT_TYPES:
        raise UserError(f"{file.url}: column '{source.column}' is {kind}, not text")
    return table


def _whole[T](file: File, read: Callable[[], T]) -> T:
    """Call `read`, which reads a Parquet file. Raises UserError if the file is damaged."""
    import pyarrow as pa

    try:
        return read()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk or the network, not of the content
        reason = " ".join(str(error).split())
        raise UserError(f"{file.url} is not a Parquet file, or damaged: {reason}") from error


class SourceReader(NamedTuple):
    """The functions that read one kind of source: `blocks`, and `texts` or `records`."""

    blocks: Callable[[Any, File, Position], Iterator[TextBlock]]
    texts: Callable[[Any, TextBlock], Iterator[str]] = lambda source, block: iter(())
    records: Callable[..., Iterator[tuple[str, dict[str, Any]]]] | None = None  # with other fields


SOURCES: dict[str, SourceReader] = {
    "text": SourceReader(lambda s, file, at: blocks_of_file(file, at, CUTS[s.document]), _text),
    "jsonl": SourceReader(
        lambda s, file, at: blocks_of_file(file, at, CUTS["line"]), records=_jsonl_records
    ),
    "parquet": SourceReader(_parquet_blocks, records=_parquet_records),
    "code": SourceReader(lambda s, file, at: blocks_of_file(file, at, CUTS["file"]), _code),
    "chat": SourceReader(_chat_blocks, _chat),
    "preference": SourceReader(_chat_blocks, _chat),
}
