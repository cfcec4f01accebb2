"""A token store at a URL: written once, read by ranges of its objects through a local cache.

Below its URL are `tokens/00000`, `tokens/00001`, ... (token ids, little-endian, document after
document, OBJECT_BLOCKS blocks an object), `lengths.npy` and the other columns of a store, and
`manifest.json` with the checksum of every block, which is written last: a store without it does not
exist. ArrayRecord suits only files on a disk: its readers open no ranges, and the document offsets
are at the end of a shard. Here the offsets follow from the lengths.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.store.block_cache import BlockCache, crc32_of
from jaxtrain.data.store.block_source import (
    FETCHERS,
    OBJECT_BLOCKS,
    BlockSource,
    OpenBlock,
    object_name,
)
from jaxtrain.data.store.blocks import blocks_of, first_records
from jaxtrain.data.store.progress import Progress
from jaxtrain.data.store.store import COLUMNS, Records, TokenStore, manifest_sum
from jaxtrain.settings import UserError
from jaxtrain.storage.objects import RemoteFolder

FORMAT = 1
AT_ONCE = 1 << 24  # bytes of a range request of a column
TRIES = 3  # downloads of a column whose checksum is wrong


def publish_store(store: TokenStore, remote: RemoteFolder, progress: Progress) -> None:
    """Uploads a store to a URL. Objects that exist with the same size are not written again, so an
    interrupted upload resumes."""
    blocks = blocks_of(store.lengths, store.first_record)
    size, total, sums = store.dtype.itemsize, int(blocks.tokens[-1]), []
    for first in range(0, len(blocks.tokens) - 1, OBJECT_BLOCKS):
        last = min(first + OBJECT_BLOCKS, len(blocks.tokens) - 1)
        parts = []
        for block in range(first, last):
            records = range(int(blocks.records[block]), int(blocks.records[block + 1]))
            parts.append(b"".join(store.records.read(records)))
            sums.append(crc32_of(parts[-1]))
        name, data = object_name(first), b"".join(parts)
        if remote.size(name) != len(data):
            remote.write(name, data)
        progress("upload", int(blocks.tokens[last]) * size, total * size)
    columns = {name: getattr(store, name) for name in COLUMNS}
    files = {}
    for name, column in columns.items():
        if column is not None:
            data = _npy(column)
            files[f"{name}.npy"] = {"bytes": len(data), "crc32": crc32_of(data)}
            remote.write(f"{name}.npy", data)
    names = ("tokens", "bytes", "bos_id", "vocab_size", "tokenizer", "fingerprint", "marked")
    manifest = {
        "format": FORMAT,
        "documents": store.documents,
        "dtype": store.dtype.str,
        **{name: getattr(store, name) for name in names},
        "left_out": dict(store.left_out),
        "files": files,
        "blocks": "".join(sums),
    }
    manifest["sha256"] = manifest_sum(manifest)
    remote.write("manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())


def open_remote(
    remote: RemoteFolder, folder: Path, max_bytes: int, tokenizer: str | None = None
) -> TokenStore:
    """Open a store at a URL; its blocks are cached in `folder`. Raises UserError if it is damaged,
    or was written with another tokenizer than the fingerprint `tokenizer`."""
    manifest = _read_manifest(remote)
    if tokenizer is not None and manifest["tokenizer"] != tokenizer:
        raise UserError(
            f"{remote.url} was written with tokenizer {manifest['tokenizer'][:12]}, but this run "
            f"uses {tokenizer[:12]}: one of them is damaged; {_again(remote)}"
        )
    name = hashlib.sha256(f"{remote.url} {manifest['sha256']}".encode()).hexdigest()[:24]
    columns = {
        column.removesuffix(".npy"): _column(remote, folder / "columns" / name, column, entry)
        for column, entry in manifest["files"].items()
    }
    lengths = columns["lengths"]
    first_record = first_records(lengths)
    sums = manifest["blocks"]
    dtype = np.dtype(manifest["dtype"])
    cache = BlockCache(folder / "blocks", max_bytes)
    source = BlockSource(remote, name, lengths, first_record, dtype, sums, cache)
    return TokenStore(
        directory=None,
        lengths=lengths,
        first_record=first_record,
        records=RemoteRecords(source),
        dtype=dtype,
        weights=columns.get("weights"),
        labels=columns.get("labels"),
        **{
            name: manifest[name]
            for name in ("tokens", "bytes", "bos_id", "vocab_size", "tokenizer", "fingerprint")
        },
        marked=manifest["marked"],
        left_out=manifest["left_out"],
    )


class RemoteRecords(Records):
    """Records of a store at a URL, numbered as in its local form."""

    def __init__(self, source: BlockSource):
        self.source, self.urls = source, [source.remote.url]
        self.paths, self.counts = [], [int(source.blocks.records[-1])]

    def read(self, records: Sequence[int]) -> Sequence[bytes]:
        if not len(records):
            return []
        edges = self.source.blocks.records
        numbers = (np.searchsorted(edges, records, side="right") - 1).tolist()
        blocks = self.source.read(sorted({*numbers}))
        return [blocks[number].record(record) for number, record in zip(numbers, records)]

    def prefetch(self, first: int, last: int) -> Iterator[Future[OpenBlock]]:
        """Start to fetch the missing blocks of records first..last, one by one."""
        edges = self.source.blocks.records
        low = int(np.searchsorted(edges, first, side="right")) - 1
        high = int(np.searchsorted(edges, last, side="left"))
        for number in range(low, high):
            if self.source.is_here(number):
                continue
            if (future := self.source.prefetch(number)) is not None:
                yield future


def _read_manifest(remote: RemoteFolder) -> dict[str, Any]:
    text = remote.read("manifest.json")
    if text is None:
        raise UserError(f"{remote.url} is not a token store: it has no manifest.json")
    try:
        manifest = json.loads(text)
        whole = manifest["sha256"] == manifest_sum(manifest)
    except (ValueError, LookupError, TypeError):
        manifest, whole = {}, False
    if not whole:
        raise UserError(f"{remote.url}/manifest.json is damaged; {_again(remote)}")
    if manifest["format"] != FORMAT:
        raise UserError(
            f"{remote.url} has format {manifest['format']}, not {FORMAT}; {_again(remote)}"
        )
    return manifest


def _column(remote: RemoteFolder, folder: Path, name: str, entry: dict[str, Any]) -> np.ndarray:
    """Load a column of the documents. The processes of a host share the pages of its file."""
    path = folder / name
    for _ in range(TRIES):
        if path.is_file() and crc32_of(path.read_bytes()) == entry["crc32"]:
            return np.load(path, mmap_mode="r")
        starts = range(0, entry["bytes"], AT_ONCE)
        ends = (min(start + AT_ONCE, entry["bytes"]) for start in starts)
        with ThreadPoolExecutor(FETCHERS) as pool:
            parts = pool.map(partial(remote.read_range, name), starts, ends)
            data = b"".join(parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{name}.{os.getpid()}")
        part.write_bytes(data)
        part.replace(path)
    raise UserError(
        f"{remote.url}/{name} is not as it was written (CRC-32): it was changed or is damaged; "
        f"{_again(remote)}"
    )


def _npy(column: np.ndarray) -> bytes:
    found = io.BytesIO()
    np.save(found, column, allow_pickle=False)
    return found.getvalue()


def _again(remote: RemoteFolder) -> str:
    return f"delete {remote.url} to have it prepared again"
