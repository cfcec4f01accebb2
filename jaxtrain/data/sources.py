"""Where text comes from: files, folders, globs and URLs, as streams of documents."""

import gzip
import hashlib
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import fsspec
import zstandard
from fsspec.implementations.local import LocalFileSystem
from pydantic import Field

from jaxtrain.settings import Settings, UserError

SHAKESPEARE = Path(__file__).parent / "tinyshakespeare.txt"
HASH_ALWAYS_BELOW = 1 << 24  # bytes; larger files are hashed again when size or time change
PATH = "A file, a folder, a glob such as data/*.gz, or a URL that fsspec can open"


class TextSource(Settings):
    """Plain UTF-8 text; .gz, .xz and .zst are read as they are."""

    name: Literal["text"] = "text"
    path: str = Field(
        default="tinyshakespeare", description=PATH + "; the bare name tinyshakespeare is built in"
    )
    document: Literal["file", "line", "paragraph"] = Field(
        default="file",
        description="What one document is: a file, a line, or the text between blank lines",
    )


class JsonlSource(Settings):
    """One JSON object a line; .gz, .xz and .zst are read as they are."""

    name: Literal["jsonl"] = "jsonl"
    path: str = Field(description=PATH)
    field: str = Field(default="text", description="The key that holds a document's text")


class ParquetSource(Settings):
    """Parquet files with a column of text."""

    name: Literal["parquet"] = "parquet"
    path: str = Field(description=PATH)
    column: str = Field(default="text", description="The column that holds a document's text")


Source = Annotated[TextSource | JsonlSource | ParquetSource, Field(discriminator="name")]
SUFFIXES = {
    "text": (".txt", ".md"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
}
DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".xz": lzma.LZMAFile,
    ".zst": lambda file: zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True),
}


def documents(source: Source) -> Iterator[str]:
    """Yields the documents of every file of `source` in the order of the file names, streamed.

    Raises UserError for a missing or empty file, text that is not UTF-8, and bad records.
    """
    for filesystem, path in find_files(source):
        found = False
        for text in SOURCES[source.name](source, filesystem, path):
            if text:
                found = True
                yield text
        if not found:
            raise UserError(f"{path} holds no text")


def content_hash(source: Source, cache_dir: Path) -> str:
    """SHA-256 over the contents of the files of `source`; a remote file counts by its version tag.

    The hashes of large local files are remembered in `cache_dir` by path, size and time.
    """
    total = hashlib.sha256()
    for filesystem, path in find_files(source):
        if isinstance(filesystem, LocalFileSystem):
            total.update(_file_hash(Path(path), cache_dir / "hashes").encode())
        else:
            total.update(str(filesystem.ukey(path)).encode())
    return total.hexdigest()


def find_files(source: Source) -> list[tuple[Any, str]]:
    """(filesystem, path) of each file of `source`, sorted by path."""
    where = source.path
    if source.name == "text" and where == "tinyshakespeare":
        where = str(SHAKESPEARE)
    try:
        filesystem, path = fsspec.url_to_fs(where)
    except (ImportError, ValueError) as error:
        raise UserError(f"cannot open {where}: {error}") from error
    if filesystem.isfile(path):
        return [(filesystem, path)]
    if filesystem.isdir(path):
        endings = SUFFIXES[source.name]
        endings += tuple(s + c for s in endings for c in DECOMPRESSORS if source.name != "parquet")
        found = [f for f in sorted(filesystem.find(path)) if f.lower().endswith(endings)]
        if not found:
            raise UserError(f"the folder {where} has no file that ends in {', '.join(endings)}")
    elif any(letter in path for letter in "*?["):
        found = [f for f in sorted(filesystem.glob(path)) if filesystem.isfile(f)]
        if not found:
            raise UserError(f"no file matches {where}")
    else:
        raise UserError(f"there is no file or folder {where}")
    return [(filesystem, file) for file in found]


def cut_text(lines: Iterable[str], document: str) -> Iterator[str]:
    """Cuts text, given as lines with their newlines, into documents (see TextSource.document)."""
    if document == "file":
        yield "".join(lines)
        return
    paragraph = ""
    for line in lines:
        blank = not line.strip()
        if document == "line" and not blank:
            yield line.rstrip("\r\n")
        elif document == "paragraph" and not blank:
            paragraph += line
        elif paragraph:
            yield paragraph
            paragraph = ""
    if paragraph:
        yield paragraph


def _read_text(source: TextSource, filesystem: Any, path: str) -> Iterator[str]:
    return cut_text(_lines(filesystem, path), source.document)


def _read_jsonl(source: JsonlSource, filesystem: Any, path: str) -> Iterator[str]:
    for number, line in enumerate(_lines(filesystem, path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not valid JSON: {error}") from error
        if not isinstance(record, dict):
            raise UserError(f"{path} line {number} is not a JSON object: {line.strip()[:60]}")
        if source.field not in record:
            has = ", ".join(record)
            raise UserError(f"{path} line {number} has no field '{source.field}'; it has: {has}")
        text = record[source.field]
        if not isinstance(text, str):
            kind = type(text).__name__
            raise UserError(f"{path} line {number}: field '{source.field}' is {kind}, not a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
            raise UserError(f"{path} line {number} has a character that is no Unicode") from error
        yield text


def _read_parquet(source: ParquetSource, filesystem: Any, path: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with filesystem.open(path, "rb") as file:
        try:
            table = pq.ParquetFile(file)
        except pa.ArrowInvalid as error:
            raise UserError(f"{path} is not a Parquet file: {error}") from error
        schema = table.schema_arrow
        if source.column not in schema.names:
            has = ", ".join(schema.names)
            raise UserError(f"{path} has no column '{source.column}'; it has: {has}")
        kind = schema.field(source.column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UserError(f"{path}: column '{source.column}' is {kind}, not string")
        for batch in table.iter_batches(batch_size=1024, columns=[source.column]):
            yield from (text for text in batch.column(0).to_pylist() if text)


# One row a kind of source: (config, filesystem, path) -> the documents of one file.
SOURCES: dict[str, Callable[[Any, Any, str], Iterator[str]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}


def _lines(filesystem: Any, path: str) -> Iterator[str]:
    """The lines of a file with their newlines, decompressed by its ending."""
    offset = 0
    with filesystem.open(path, "rb") as file, _decompress(file, path) as stream:
        try:
            for line in stream:
                yield line.decode()
                offset += len(line)
        except UnicodeDecodeError as error:
            at = offset + error.start
            raise UserError(f"{path} is not UTF-8 text: bad byte at offset {at}") from error
        except (gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError, EOFError) as error:
            raise UserError(f"{path} cannot be decompressed, it is damaged: {error}") from error


def _decompress(file: Any, path: str) -> Any:
    open_as = DECOMPRESSORS.get(Path(path).suffix.lower())
    return io.BufferedReader(open_as(file), 1 << 20) if open_as else file


def _file_hash(path: Path, cache_dir: Path) -> str:
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    note = cache_dir / hashlib.sha256(identity.encode()).hexdigest()
    if stat.st_size >= HASH_ALWAYS_BELOW and note.exists():
        return note.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stat.st_size >= HASH_ALWAYS_BELOW:
        cache_dir.mkdir(parents=True, exist_ok=True)
        note.write_text(digest)
    return digest
