"""Safetensors files read and written one tensor at a time, never a whole file in memory.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and
byte range of each tensor), and the tensors' bytes. Files written here have a checksum of each
tensor in the header's metadata; files written by other software have none.
"""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxtrain.settings import UserError, is_text, parse_json, read_object
from jaxtrain.storage import checksums as sums

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Integer and float8 dtypes of quantized matrices.
PACKED = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
KNOWN = DTYPES | PACKED
EXPONENTS = {
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F800000),
}
MOST_HEADER = 10**8  # bytes, the format's own limit
SHARD_BYTES = 5 * 10**9
SUMS = "crc32"  # metadata key of a JSON object: tensor name -> `sums.crc32` of its bytes


class Stored(NamedTuple):
    """Location of a tensor in a file, with its dtype and shape."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int
    crc32: str | None = None  # `sums.crc32` of its bytes, if the file has one


def read_headers(folder: Path) -> dict[str, Stored]:
    """Headers of all tensors of a checkpoint folder: of one file, or of the shards in its index."""
    if (folder / INDEX).is_file():
        index = read_object(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(type(name) is str for name in index.values()):
            raise UserError(f"{folder / INDEX}: weight_map must be an object, tensor: file")
        tensors: dict[str, Stored] = {}
        for name in sorted(set(index.values())):
            if Path(name).name != name or name in ("", "..") or not is_text(name):
                raise UserError(
                    f"{folder / INDEX} names {name!r}, which is not a file in that folder"
                )
            if not (folder / name).is_file():
                raise UserError(f"{folder / INDEX} names the file {name}, which is missing")
            found = read_header(folder / name)
            if twice := sorted(found.keys() & tensors.keys()):
                raise UserError(
                    f"{folder}: {tensors[twice[0]].file.name} and {name} have {twice[0]}"
                )
            tensors |= found
        missing = sorted(set(index) - set(tensors))
        if missing:
            raise UserError(
                f"{folder / INDEX} names {missing[0]}, but {index[missing[0]]} has none"
            )
        return tensors
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    raise UserError(f"{folder} has no {WEIGHTS} and no {INDEX}; {other_formats(folder)}")


def other_formats(folder: Path) -> str:
    """Advice for weights that are not safetensors."""
    pickled = sorted(path.name for path in folder.glob("*_model*.bin"))
    if not pickled:
        return "other formats are not read"
    return (
        f"{pickled[0]} is pickled, which is not read: open it with transformers (an adapter with "
        "peft) and save it again by save_pretrained, which writes safetensors"
    )


def read_header(path: Path) -> dict[str, Stored]:
    """Headers of the tensors of one file. Raises UserError unless they cover it without overlap."""
    header, start = open_header(path)
    crc32 = checksums(header.pop("__metadata__", {}), path)
    tensors, places = {}, list[tuple[int, int, str]]()
    for name, entry in header.items():
        dtype, shape, first, last = checked_entry(path, name, entry)
        places.append((first, last, name))
        tensors[name] = Stored(path, dtype, shape, start + first, crc32.get(name))
    end, reached, before = path.stat().st_size - start, 0, "the header"
    for first, last, name in sorted(places):
        if last > end:
            raise UserError(
                f"{path} is cut off: {name} ends at byte {start + last} of {start + end}"
            )
        if first != reached:
            what = "overlap" if first < reached else "have a gap between them"
            raise UserError(f"{path} is damaged: {before} and {name} {what}")
        reached, before = last, name
    if reached != end:
        raise UserError(f"{path} is damaged: {end - reached} bytes follow its last tensor")
    return tensors


def checked_entry(path: Path, name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and byte range of a header entry. Raises UserError if they are malformed."""
    facts = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (
        facts.get("dtype"),
        counts(facts, "shape"),
        counts(facts, "data_offsets"),
    )
    if isinstance(dtype, str) and shape is not None and offsets is not None and len(offsets) == 2:
        size = math.prod(shape) * KNOWN[dtype].itemsize if dtype in KNOWN else None
        if offsets[0] <= offsets[1] and size in (None, offsets[1] - offsets[0]):
            return dtype, tuple(shape), offsets[0], offsets[1]
    raise UserError(
        f"{path} is damaged: its header has {json.dumps(entry)[:200]} for {name}; there must be "
        "dtype, shape and data_offsets that agree"
    )


def counts(facts: dict[str, Any], key: str) -> list[int] | None:
    """The value of `key` if it is a list of integers >= 0, else None."""
    given = facts.get(key)
    fits = isinstance(given, list) and all(type(n) is int and n >= 0 for n in given)
    return given if fits else None


def checksums(metadata: object, path: Path) -> dict[str, Any]:
    """Checksums by tensor name; empty for a file written by other software."""
    if not isinstance(metadata, dict) or not all(type(x) is str for x in metadata.values()):
        raise UserError(f"{path} is damaged: __metadata__ of its header must be texts by names")
    found = parse_json(metadata.get(SUMS, "{}"), f"{path}: {SUMS} of its header")
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: {SUMS} of its header are no sums by names")
    return found


def metadata_of(path: Path) -> dict[str, str]:
    """The `__metadata__` of a file."""
    return open_header(path)[0].get("__metadata__") or {}


def open_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and the byte at which the tensors begin."""
    try:
        with path.open("rb") as file:
            length, end = int.from_bytes(file.read(8), "little"), path.stat().st_size
            if 8 + length > min(end, 8 + MOST_HEADER):
                raise UserError(
                    f"{path} cannot be read as safetensors: a header of {length} bytes is said to "
                    f"be in a file of {end}"
                )
            text = file.read(length)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; {other_formats(path.parent)}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error
    header = parse_json(text, f"{path} cannot be read as safetensors: its header", once)
    if not isinstance(header, dict):
        raise UserError(f"{path} cannot be read as safetensors: its header is no object")
    return header, 8 + length


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict. Raises ValueError for a duplicate name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is in it twice")
    return found


def read(name: str, stored: Stored, packed: bool = False) -> np.ndarray:
    """The tensor, memory-mapped from its file. packed: allow the dtypes of quantized matrices.

    Raises UserError for any other dtype than plain floating point (see `packed`), for bytes that
    differ from the checksum in the file, and for NaN or infinity.
    """
    if stored.dtype not in (KNOWN if packed else DTYPES):
        raise UserError(
            f"{stored.file}: {name} is stored as {stored.dtype}: quantised checkpoints are not "
            f"read; take the one in bfloat16 (there are {', '.join(DTYPES)})"
        )
    x = mapped(stored)

    def look(block: np.ndarray) -> tuple[str, bool]:
        return f"{zlib.crc32(block):08x}" if stored.crc32 else "", finite(block, stored.dtype)

    seen = list(sums.in_blocks(x, look))  # both checks in one pass: the disk may be slow
    if stored.crc32 and "".join(crc32 for crc32, _ in seen) != stored.crc32:
        raise UserError(
            f"{stored.file}: {name} is damaged: its bytes are not those that were written (CRC-32)"
        )
    if not all(fine for _, fine in seen):
        raise UserError(f"{stored.file}: {name} holds NaN or infinite values")
    return x


def mapped(stored: Stored) -> np.ndarray:
    """The tensor as a memory map of its file; it is unmapped with its last reference."""
    if 0 in stored.shape:
        return np.zeros(stored.shape, KNOWN[stored.dtype])
    return np.memmap(stored.file, KNOWN[stored.dtype], "r", stored.offset, stored.shape)


def finite(x: np.ndarray, dtype: str) -> bool:
    """Whether no exponent is all ones; checked in chunks, so that no full-size mask is allocated.

    x: the values, or their bytes.
    """
    if dtype in PACKED:
        return True  # float8's NaN is a code that no method writes; integers have none
    if dtype not in EXPONENTS:
        return bool(np.isfinite(x.view(DTYPES[dtype])).all())
    unsigned, mask = EXPONENTS[dtype]
    bits = x.reshape(-1).view(unsigned)
    step = 1 << 20
    return all(((bits[i : i + step] & mask) != mask).all() for i in range(0, bits.size, step))


def transposed(x: np.ndarray) -> np.ndarray:
    """A contiguous transpose, copied in blocks as integers, since numpy is slow for bfloat16."""
    bits = x.view(f"u{x.itemsize}")
    out, step = np.empty(x.shape[::-1], bits.dtype), 256
    for i in range(0, x.shape[0], step):
        for j in range(0, x.shape[1], step):
            out[j : j + step, i : i + step] = bits[i : i + step, j : j + step].T
    return out.view(x.dtype)


def write(
    path: Path,
    table: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    pieces: Iterable[np.ndarray],
    metadata: dict[str, str],
) -> None:
    """Write a file atomically: its header, then all bytes in the table's order, piece by piece.

    The same arguments give the same bytes. The checksums are filled into the header last.
    """
    places: dict[str, slice] = {}
    at = 0
    for name, (dtype, shape) in table.items():
        size = int(np.prod(shape)) * dtype.itemsize
        places[name] = slice(at, at + size)
        at += size
    blank = {name: "0" * sums.length(x.stop - x.start) for name, x in places.items()}
    head = header_of(table, places, metadata, blank)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w+b") as file:
            file.write(head)
            for piece in pieces:  # `tofile` would not report a full disk
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            written = file.tell() - len(head)
            assert written == at, (path, written, at)
            file.flush()
            data = sums.file_bytes(part)[len(head) :]
            found = {name: sums.crc32(data[span]) for name, span in places.items()}
            file.seek(0)
            file.write(header_of(table, places, metadata, found))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def header_of(
    table: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    places: Mapping[str, slice],
    metadata: Mapping[str, str],
    crc32: Mapping[str, str],
) -> bytes:
    """The header of a file as bytes, preceded by its length."""
    names = {dtype: name for name, dtype in KNOWN.items()}
    said = dict(metadata) | {SUMS: json.dumps(crc32, separators=(",", ":"))}
    header: dict[str, object] = {"__metadata__": dict(sorted(said.items()))}
    for name, (dtype, shape) in table.items():
        at = places[name]
        entry = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [at.start, at.stop]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shards(
    table: Mapping[str, tuple[np.dtype, tuple[int, ...]]], limit: int = SHARD_BYTES
) -> Iterator[list[str]]:
    """Yield the names in order, in groups of at most `limit` bytes (or of one larger tensor)."""
    group: list[str] = []
    filled = 0
    for name, (dtype, shape) in table.items():
        size = int(np.prod(shape)) * dtype.itemsize
        if group and filled + size > limit:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += size
    yield group
