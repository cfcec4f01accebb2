"""The token store: the tokens of a corpus on disk, with random access to every document.

A store is a directory of ArrayRecord shards (token ids, little-endian, without BOS), `lengths.npy`
(uint32, tokens of each document) and `manifest.json` (counts, the tokenizer's fingerprint, sizes
and checksums). A document longer than RECORD_TOKENS takes several records, so that reading a few
tokens from the middle of a book stays cheap.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.settings import UserError

FORMAT = 1
RECORD_TOKENS = 8192
SHARD_TOKENS = 1 << 27  # a preparation that was interrupted goes on after the last whole shard
BATCH_CHARACTERS = 1 << 22  # of text, tokenized at a time by all cores


@dataclass(frozen=True)
class TokenStore:
    """An opened store; `lengths` is uint32 [documents], without BOS."""

    directory: Path | None
    lengths: np.ndarray
    tokens: int
    bytes: int
    bos_id: int
    vocab_size: int
    tokenizer: str
    fingerprint: str
    first_record: np.ndarray
    records: Any  # an ArrayRecordDataSource: record number -> bytes
    dtype: np.dtype

    @property
    def documents(self) -> int:
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop of a document, without BOS: uint16 or uint32 [stop - start]."""
        if start >= stop:
            return np.empty(0, self.dtype)
        low, high = start // RECORD_TOKENS, (stop - 1) // RECORD_TOKENS
        record = int(self.first_record[document]) + low
        parts = [self.records[record + i] for i in range(high - low + 1)]
        tokens = np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)
        return tokens[start - low * RECORD_TOKENS : stop - low * RECORD_TOKENS]


def write_store(
    directory: Path,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    report: Callable[[int], object] = lambda _: None,
) -> None:
    """Tokenizes `texts` into a store at `directory`, which appears only when it is complete.

    `report(n)` is called with the UTF-8 bytes done so far. Documents that an interrupted call
    already wrote into whole shards are skipped. Raises UserError if there is no document.
    """
    partial = directory.with_name(f"{directory.name}.{tokenizer.fingerprint[:12]}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    counts = [np.load(path) for path in sorted(partial.glob("*.counts"))]
    done = sum(map(len, counts))
    bytes_done = sum(int(part[:, 1].sum()) for part in counts)
    encoded = _encoded(islice(texts, done, None), tokenizer, bytes_done, report)
    while len(part := _write_shard(partial, len(counts), encoded, dtype)):
        counts.append(part)
    if not counts:
        shutil.rmtree(partial)
        raise UserError(f"the {directory.name} split has no documents; check data.{directory.name}")
    lengths, sizes = np.concatenate(counts).T
    np.save(partial / "lengths.npy", lengths.astype(np.uint32))
    names = ["lengths.npy", *(f"{index:05d}.array_record" for index in range(len(counts)))]
    manifest = {
        "format": FORMAT,
        "dtype": dtype.str,
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "bytes": int(sizes.sum()),
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "files": {name: _describe(partial / name) for name in names},
    }
    _publish(partial, directory, manifest)


def open_store(
    directory: Path, *, tokenizer: str | None = None, verify: bool = False
) -> TokenStore:
    """Opens a store and checks its sizes; `verify` also compares the checksums of all its files.

    Raises UserError for a missing or damaged store, and for one that was written with another
    tokenizer than the fingerprint `tokenizer`.
    """
    try:
        text = (directory / "manifest.json").read_text()
    except FileNotFoundError as error:
        raise UserError(f"{directory} is not a token store: it has no manifest.json") from error
    again = f"delete {directory} to have it prepared again"
    try:
        manifest = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{directory / 'manifest.json'} is damaged; {again}") from error
    if manifest["format"] != FORMAT:
        raise UserError(f"{directory} has format {manifest['format']}, not {FORMAT}; {again}")
    if tokenizer is not None and manifest["tokenizer"] != tokenizer:
        raise UserError(
            f"{directory} was written with tokenizer {manifest['tokenizer'][:12]}, but this run "
            f"uses {tokenizer[:12]}; {again}"
        )
    for name, expected in manifest["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            raise UserError(f"{path} is missing or cut short; {again}")
        if verify and _sha256(path) != expected["sha256"]:
            raise UserError(f"{path} is damaged; {again}")
    lengths = np.load(directory / "lengths.npy")
    first_record = np.concatenate([[0], np.cumsum(_records_of(lengths))])
    shards = sorted(str(directory / n) for n in manifest["files"] if n.endswith(".array_record"))
    return TokenStore(
        directory=directory,
        lengths=lengths,
        tokens=manifest["tokens"],
        bytes=manifest["bytes"],
        bos_id=manifest["bos_id"],
        vocab_size=manifest["vocab_size"],
        tokenizer=manifest["tokenizer"],
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        first_record=first_record,
        records=ArrayRecordDataSource(shards),
        dtype=np.dtype(manifest["dtype"]),
    )


def _encoded(texts, tokenizer: Tokenizer, bytes_done: int, report) -> Iterator:
    """(token ids, UTF-8 bytes) of each text, encoded in batches."""
    texts = iter(texts)
    while batch := _take(texts, BATCH_CHARACTERS):
        sizes = [len(text.encode()) for text in batch]
        yield from zip(tokenizer.encode_batch(batch), sizes)
        bytes_done += sum(sizes)
        report(bytes_done)


def _take(texts: Iterator[str], characters: int) -> list[str]:
    batch = []
    while characters > 0 and (text := next(texts, None)) is not None:
        batch.append(text)
        characters -= len(text)
    return batch


def _write_shard(partial: Path, index: int, encoded: Iterator, dtype: np.dtype) -> np.ndarray:
    """Writes one shard; returns int64 [documents, 2] of (tokens, bytes)."""
    path = partial / f"{index:05d}.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    counts, tokens = [], 0
    try:
        while tokens < SHARD_TOKENS and (document := next(encoded, None)):
            ids, size = document
            for start in range(0, len(ids), RECORD_TOKENS):
                writer.write(ids[start : start + RECORD_TOKENS].astype(dtype).tobytes())
            counts.append((len(ids), size))
            tokens += len(ids)
    finally:
        writer.close()
    if not counts:
        path.unlink()
        return np.empty((0, 2), np.int64)
    _sync(path)
    unnamed = path.with_suffix(".tmp")  # the .counts file marks a whole shard
    with unnamed.open("wb") as file:
        np.save(file, np.array(counts, np.int64))
    _sync(unnamed)
    unnamed.rename(path.with_suffix(".counts"))
    return np.array(counts, np.int64)


def _publish(partial: Path, directory: Path, manifest: dict) -> None:
    """Gives a complete store its name, in one step and after its data is on the disk."""
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for path in [partial / "lengths.npy", partial / "manifest.json", partial]:
        _sync(path)
    partial.rename(directory)
    _sync(directory.parent)
    for path in directory.glob("*.counts"):
        path.unlink()


def _describe(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _records_of(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths.astype(np.int64) // RECORD_TOKENS)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
