"""Safetensors files read and written one tensor at a time, never a whole file in memory.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and
byte range of each tensor), and the tensors' bytes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxtrain.settings import UserError, read_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
EXPONENTS = {
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F800000),
}
SHARD_BYTES = 5 * 10**9


class Stored(NamedTuple):
    """Where a tensor lies."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int


def read_headers(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint folder: one file, or the shards that its index names."""
    if (folder / INDEX).is_file():
        index = read_object(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(type(name) is str for name in index.values()):
            raise UserError(f"{folder / INDEX}: weight_map must be an object, tensor: file")
        tensors: dict[str, Stored] = {}
        for name in sorted(set(index.values())):
            if not (folder / name).is_file():
                raise UserError(f"{folder / INDEX} names the file {name}, which is missing")
            tensors |= read_header(folder / name)
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
    """What to do with weights that are not safetensors."""
    pickled = sorted(path.name for path in folder.glob("*_model*.bin"))
    if not pickled:
        return "other formats are not read"
    return (
        f"{pickled[0]} is pickled, which is not read: open it with transformers (an adapter with "
        "peft) and save it again by save_pretrained, which writes safetensors"
    )


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        start, end = 8 + length, path.stat().st_size
        tensors = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            tensors[name] = Stored(path, entry["dtype"], tuple(entry["shape"]), start + first)
            if start + last > end:
                raise UserError(f"{path} is cut off: {name} ends at byte {start + last} of {end}")
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; {other_formats(path.parent)}") from error
    except (OSError, ValueError, KeyError, AttributeError, MemoryError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error
    return tensors


def read(name: str, stored: Stored) -> np.ndarray:
    """The tensor, mapped from its file.

    Raises UserError for a dtype that is no plain floating-point number, and for NaN and infinity.
    """
    if stored.dtype not in DTYPES:
        raise UserError(
            f"{stored.file}: {name} is stored as {stored.dtype}: quantised checkpoints are not "
            f"read; take the one in bfloat16 (there are {', '.join(DTYPES)})"
        )
    x = mapped(stored)
    if not finite(x, stored.dtype):
        raise UserError(f"{stored.file}: {name} holds NaN or infinite values")
    return x


def mapped(stored: Stored) -> np.ndarray:
    """The tensor as its file's own pages; they leave memory with the last reference to it."""
    if 0 in stored.shape:
        return np.zeros(stored.shape, DTYPES[stored.dtype])
    return np.memmap(stored.file, DTYPES[stored.dtype], "r", stored.offset, stored.shape)


def finite(x: np.ndarray, dtype: str) -> bool:
    """Whether no exponent is all ones; in pieces, so that no mask of the whole is made."""
    if dtype not in EXPONENTS:
        return bool(np.isfinite(x).all())
    unsigned, mask = EXPONENTS[dtype]
    bits = x.reshape(-1).view(unsigned)
    step = 1 << 20
    return all(((bits[i : i + step] & mask) != mask).all() for i in range(0, bits.size, step))


def transposed(x: np.ndarray) -> np.ndarray:
    """A contiguous transpose; in blocks, and as integers where numpy is slow (bfloat16)."""
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
    """Write a file atomically: its table, then all bytes in the table's order, piece by piece."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in table.items():
        size = int(np.prod(shape)) * dtype.itemsize
        header[name] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            np.ascontiguousarray(piece).tofile(file)
        written = file.tell() - 8 - len(text)
    assert written == at, (path, written, at)
    part.replace(path)


def shards(
    table: Mapping[str, tuple[np.dtype, tuple[int, ...]]], limit: int = SHARD_BYTES
) -> Iterator[list[str]]:
    """The names in order, in groups of at most `limit` bytes (or of one tensor)."""
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
