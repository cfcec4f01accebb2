"""The token store: the tokens of a corpus on disk, with random access to every document.

A store is a directory of ArrayRecord shards (token ids, little-endian, without BOS), `lengths.npy`
(uint32, tokens of each document) and `manifest.json` (counts, the tokenizer's fingerprint, sizes
and checksums); a source with sample_by adds `weights.npy` (float64), examples of KTO `labels.npy`
(uint8, 1 for desirable). A document longer than RECORD_TOKENS takes several records, so that
reading a few tokens from the middle of a book stays cheap. A store never changes: reading it needs
no lock.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from jaxtrain.data.store.blocks import RECORD_TOKENS, first_records, record_counts
from jaxtrain.data.store.encode import Encoded, token_type
from jaxtrain.data.tokenizer.tokenizer import Tokenizer
from jaxtrain.settings import UserError, read_object

FORMAT = 3
SHARD_TOKENS = 1 << 27
# Columns of the documents, and their types; not every store has the last two.
COLUMNS = {
    "lengths": np.dtype("<u4"),
    "weights": np.dtype("<f8"),
    "labels": np.dtype("u1"),
}


class Pairs(NamedTuple):
    """Pairs of texts that replace the documents in a view of a store of preferences."""

    store: "TokenStore"  # of the texts, two documents per preference
    numbers_P: np.ndarray  # int64, the number of the preference in the store
    lengths_P2: np.ndarray  # int64, tokens that are used of its two texts
    kto_labels_P: np.ndarray  # int32, `records.PAIR`, DESIRABLE or UNDESIRABLE


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
    records: "Records"
    dtype: np.dtype
    skipped: dict[str, int] = field(default_factory=dict)  # path of a damaged shard: its documents
    weights: np.ndarray | None = None  # float64 [documents], sampling weights; None: equal
    labels: np.ndarray | None = None  # uint8 [documents], 1 for desirable; of examples of KTO
    marked: bool = False  # the highest bit of a token is its loss mask
    left_out: dict[str, int] = field(default_factory=dict)  # conversations left out, by reason
    pairs: Pairs | None = None

    @property
    def documents(self) -> int:
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop of a document, without BOS: uint16 or uint32 [stop - start].

        Tokens of a marked store include the bit of the loss mask (`encode.unpack_loss_mask`).

        Raises UserError, which names the shard, for a record that is damaged.
        """
        return next(self.read_many([(document, start, stop)]))

    def read_many(self, parts: Iterable[tuple[int, int, int]]) -> Iterator[np.ndarray]:
        """`read` for each (document, start, stop); reads all before it yields the first.

        ArrayRecord finds a record more slowly in a larger shard, but many records at once: it takes
        131 us for one of 120,000, and 6 us each for 1,000 of them.
        """
        found = []
        for document, start, stop in parts:
            low = start // RECORD_TOKENS
            count = -(-stop // RECORD_TOKENS) - low if start < stop else 0
            found.append((start - low * RECORD_TOKENS, stop - start, count))
            found[-1] += (int(self.first_record[document]) + low,)
        numbers = [first + i for _, _, count, first in found for i in range(count)]
        data = iter(self.records.read(numbers))
        for start, length, count, _ in found:
            tokens = np.frombuffer(b"".join(islice(data, count)), self.dtype)
            yield tokens[start : start + length]


class Records:
    """The records of all shards, numbered consecutively."""

    urls: Sequence[str] = ()  # of the remote stores that hold the records

    def __init__(self, paths: list[Path], counts: list[int]):
        self.paths, self.counts = paths, counts
        self._source = ArrayRecordDataSource([str(path) for path in paths])

    def read(self, records: Sequence[int]) -> Sequence[bytes]:
        """Read records by number. Raises UserError, which names the shard, for a damaged record."""
        try:
            return self._source.__getitems__(records) if records else []
        except RuntimeError:
            return [self._one(record) for record in records]

    def _one(self, record: int) -> bytes:
        try:
            return self._source[record]
        except RuntimeError as error:  # a wrong checksum inside the file, or a missing file
            path = self.paths[np.searchsorted(np.cumsum(self.counts), record, side="right")]
            reason = str(error).splitlines()[0][:120]
            raise UserError(f"{path} is damaged; {_remedy(path.parent)} ({reason})") from error


class JoinedRecords(Records):
    """The records of several stores, one after the other."""

    def __init__(self, parts: Sequence[Records]):
        self.parts = parts
        self.counts = [sum(part.counts) for part in parts]
        self.paths = [path for part in parts for path in part.paths]
        self.urls = [url for part in parts for url in part.urls]

    def read(self, records: Sequence[int]) -> Sequence[bytes]:
        ends = np.cumsum(self.counts)
        which = np.searchsorted(ends, records, side="right")
        found: dict[int, bytes] = {}
        for number in np.unique(which).tolist():
            mine = np.asarray(records)[which == number].tolist()
            begin = int(ends[number]) - self.counts[number]
            found |= zip(mine, self.parts[number].read([record - begin for record in mine]))
        return [found[record] for record in records]


def join_records(parts: Sequence[Records]) -> Records:
    """Number the records of several stores consecutively."""
    if any(part.urls for part in parts):
        return JoinedRecords(parts)
    paths = [path for part in parts for path in part.paths]
    return Records(paths, [count for part in parts for count in part.counts])


def open_store(
    directory: Path,
    *,
    tokenizer: str | None = None,
    verify: bool = False,
    skip_damaged: bool = False,
) -> TokenStore:
    """Opens a store and checks its sizes, and the checksums of files that are newer than the store.

    `verify` compares all checksums, which reads the whole store. `skip_damaged` does so too, and
    leaves out the documents of damaged shards. Raises UserError for a missing or damaged store, and
    for one that was written with another tokenizer than the fingerprint `tokenizer`.
    """
    text, manifest = _read_manifest(directory, tokenizer)
    damaged = _damaged(directory, manifest, verify or skip_damaged)
    shards = {n: e for n, e in manifest["files"].items() if n.endswith(".array_record")}
    for name, reason in damaged.items():
        if skip_damaged and name not in shards:
            raise UserError(f"{directory / name} is {reason}; {_again(directory)}")
        if not skip_damaged:
            raise UserError(f"{directory / name} is {reason}; {_remedy(directory)}")
    if len(damaged) == len(shards):
        raise UserError(
            f"every shard of {directory} is damaged, no document would be left; {_again(directory)}"
        )
    left = [name for name in shards if name not in damaged]
    # The processes of a host share the pages of the file.
    lengths = np.load(directory / "lengths.npy", mmap_mode=None if damaged else "r")
    ends = np.cumsum([entry["documents"] for entry in shards.values()])

    def left_of(numbers: np.ndarray) -> np.ndarray:
        if not damaged:
            return numbers
        parts = dict(zip(shards, np.split(numbers, ends[:-1])))
        return np.concatenate([parts[name] for name in left])

    lengths = left_of(lengths)
    weights, labels = (
        left_of(np.load(directory / name)) if name in manifest["files"] else None
        for name in ("weights.npy", "labels.npy")
    )
    first_record = first_records(lengths)
    return TokenStore(
        directory=directory,
        lengths=lengths,
        tokens=int(lengths.sum(dtype=np.int64)),
        bytes=sum(shards[name]["text_bytes"] for name in left),
        bos_id=manifest["bos_id"],
        vocab_size=manifest["vocab_size"],
        tokenizer=manifest["tokenizer"],
        fingerprint=hashlib.sha256((text + "".join(damaged)).encode()).hexdigest(),
        first_record=first_record,
        records=Records([directory / n for n in left], [shards[n]["records"] for n in left]),
        dtype=np.dtype(manifest["dtype"]),
        skipped={str(directory / name): shards[name]["documents"] for name in damaged},
        weights=weights,
        labels=labels,
        marked=manifest.get("marked", False),
        left_out=manifest.get("left_out", {}),
    )


def _read_manifest(directory: Path, tokenizer: str | None) -> tuple[str, dict[str, Any]]:
    try:
        text = (directory / "manifest.json").read_text(errors="replace")
    except FileNotFoundError as error:
        raise UserError(f"{directory} is not a token store: it has no manifest.json") from error
    again = _again(directory)
    manifest: dict[str, Any] = {}
    with suppress(UserError):
        manifest = read_object(directory / "manifest.json")
    if (written := manifest.get("format", FORMAT)) != FORMAT:
        raise UserError(f"{directory} has format {written}, not {FORMAT}; {again}")
    whole = manifest.get("sha256") in (None, manifest_sum(manifest))
    if not whole or not {"tokenizer", "files"} <= manifest.keys():
        raise UserError(f"{directory / 'manifest.json'} is damaged; {again}")
    if tokenizer is not None and manifest["tokenizer"] != tokenizer:
        raise UserError(
            f"{directory} was written with tokenizer {manifest['tokenizer'][:12]}, but this run "
            f"uses {tokenizer[:12]}: one of them is damaged; delete {directory.parent} to have "
            "both prepared again"
        )
    return text, manifest


def _damaged(directory: Path, manifest: dict[str, Any], verify: bool) -> dict[str, str]:
    """The files that differ from the manifest, each with the reason."""
    written = (directory / "manifest.json").stat().st_mtime_ns
    damaged, changed = {}, False
    for name, expected in manifest["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            damaged[name] = "missing or cut short"
            continue
        newer = path.stat().st_mtime_ns > written
        changed |= newer
        if (verify or newer) and _sha256(path) != expected["sha256"]:
            damaged[name] = "damaged"
    if changed and not damaged:
        with suppress(OSError):  # a copied store: remember, if possible, that it was verified
            os.utime(directory / "manifest.json")
    return damaged


def _remedy(directory: Path) -> str:
    return f"{_again(directory)}, or leave its documents out with data.skip_damaged=true"


def _again(directory: Path) -> str:
    return f"delete {directory} to have it prepared again"


class Writer:
    """Writes the shards of a store.

    Each commit writes a numbered part of the open shard, so that an interrupted preparation loses
    no committed document. `directory` already holds the first `shards` shards and `parts` parts of
    the next one. Raises UserError if it does not.
    """

    def __init__(self, directory: Path, dtype: np.dtype, shards: int = 0, parts: int = 0):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.dtype = directory, dtype
        self.shards, self.parts = shards, parts  # finished shards; parts of the open shard
        self.fresh: list[Encoded] = []  # since the last commit
        self.clean()
        self.tokens = sum(int(part["lengths"].sum()) for part in self._read_parts())

    def add(self, encoded: Encoded) -> None:
        """Appends documents to the open shard."""
        if len(encoded.lengths):
            self.fresh.append(encoded)
            self.tokens += int(encoded.lengths.sum())

    def commit(self) -> None:
        """Writes what was added, and waits until it is on the disk."""
        if self.fresh:
            ids = np.frombuffer(b"".join(one.ids for one in self.fresh), self.dtype)
            columns = {
                name: np.concatenate([getattr(one, name) for one in self.fresh])
                for name in ("sizes", *COLUMNS)
                if getattr(self.fresh[0], name) is not None
            }
            path = self._part(self.parts)
            np.savez(path, allow_pickle=False, ids=ids, **columns)
            sync(path)
            self.parts, self.fresh = self.parts + 1, []
        sync(self.directory)

    def close(self) -> None:
        """Finishes the open shard; the next has a new number. `clean` removes its parts."""
        self.commit()
        if self.parts:
            path = self.directory / f"{self.shards:05d}.array_record"
            columns = self._write_records(path)
            lengths, sizes = columns["lengths"], columns.pop("sizes")
            columns = {name: x.astype(COLUMNS[name]) for name, x in columns.items()}
            np.savez(path.with_suffix(".npz"), allow_pickle=False, **columns)
            entry = describe_file(path) | {
                "documents": len(lengths),
                "records": int(record_counts(lengths).sum()),
                "text_bytes": int(sizes.sum()),
            }
            path.with_suffix(".json").write_text(json.dumps(entry))
            for suffix in (".array_record", ".npz", ".json"):
                sync(path.with_suffix(suffix))
        self.shards, self.parts, self.tokens = self.shards + 1, 0, 0

    def clean(self) -> None:
        """Removes parts of finished shards, and files written after the last commit."""
        parts = {self._part(number) for number in range(self.parts)}
        for path in self.directory.iterdir():
            whole = "-" not in path.name and int(path.name[:5]) < self.shards
            if path not in parts and not whole:
                path.unlink()

    def _write_records(self, path: Path) -> dict[str, np.ndarray]:
        """Writes the documents of all parts; returns their columns."""
        writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        columns: dict[str, list[np.ndarray]] = {}
        for part in self._read_parts():
            for ids in np.split(part.pop("ids"), np.cumsum(part["lengths"])[:-1]):
                for start in range(0, len(ids), RECORD_TOKENS):
                    writer.write(ids[start : start + RECORD_TOKENS].tobytes())
            for name, column in part.items():
                columns.setdefault(name, []).append(column)
        writer.close()
        return {name: np.concatenate(some) for name, some in columns.items()}

    def _read_parts(self) -> Iterator[dict[str, np.ndarray]]:
        for path in map(self._part, range(self.parts)):
            try:
                with path.open("rb") as file, np.load(file) as arrays:
                    yield dict(arrays)
            except (OSError, ValueError, KeyError, BadZipFile) as error:
                again = _again(self.directory.parent)
                raise UserError(f"{path} is missing or cut short; {again}") from error

    def _part(self, number: int) -> Path:
        return self.directory / f"{self.shards:05d}-{number:05d}.npz"


def publish(
    partial: Path,
    directory: Path,
    tokenizer: Tokenizer,
    start: int | None = None,
    left_out: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Writes the manifest of the shards in `partial`, and renames the folder to `directory`.

    start: the token before every document of a marked store, in place of BOS. left_out: the number
    of conversations that are not in it, by reason. Raises UserError if there are no documents.
    """
    names = sorted(path.stem for path in partial.glob("*.array_record"))
    if not names:
        shutil.rmtree(partial, ignore_errors=True)  # the next try starts afresh
        raise UserError(f"the {directory.name} split has no documents; check data.{directory.name}")
    entries = {f"{n}.array_record": json.loads((partial / f"{n}.json").read_text()) for n in names}
    shards = [dict(np.load(partial / f"{name}.npz")) for name in names]
    columns = [f"{name}.npy" for name in COLUMNS if name in shards[0]]
    for column in columns:
        whole = np.concatenate([shard[column.removesuffix(".npy")] for shard in shards])
        np.save(partial / column, whole)
    lengths = np.load(partial / "lengths.npy")
    manifest = {
        "format": FORMAT,
        "dtype": token_type(tokenizer.vocab_size, start is not None).str,
        "documents": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "bytes": sum(entry["text_bytes"] for entry in entries.values()),
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id if start is None else start,
        **({} if start is None else {"marked": True, "left_out": dict(left_out)}),
        "files": {kind: describe_file(partial / kind) for kind in columns} | entries,
    }
    manifest["sha256"] = manifest_sum(manifest)
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for name in (*columns, "manifest.json", "."):
        sync(partial / name)
    partial.rename(directory)
    sync(directory.parent)
    for path in directory.iterdir():
        if path.name[0].isdigit() and path.suffix != ".array_record":
            path.unlink()


def write_store(directory: Path, texts: Iterable[str], tokenizer: Tokenizer) -> None:
    """Tokenizes `texts` in this process into a store, which appears when it is complete."""
    dtype = token_type(tokenizer.vocab_size)
    writer = Writer(directory.with_name(f"{directory.name}.partial"), dtype)
    for text in texts:
        ids = tokenizer.encode(text).astype(dtype)
        size = np.array([len(text.encode())])
        writer.add(Encoded(ids.tobytes(), np.array([len(ids)]), size))
        if writer.tokens >= SHARD_TOKENS:
            writer.close()
    writer.close()
    publish(writer.directory, directory, tokenizer)


def manifest_sum(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own checksum."""
    said = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
