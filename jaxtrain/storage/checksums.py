"""Checksums of what is written and read again: CRC-32 of each block of 16 MiB, in threads.

A CRC-32 finds every damage of up to 32 neighbouring bits, and misses one in 2**32 of all others.
zlib's takes 2 to 3 GB/s of one core (SHA-256: 0.9 to 1.5) and lets other threads run; blocks let
several cores work on one file: eight take 18 GB/s. It guards against faults of disks, memory and
networks, not against somebody who changes a file and its sum.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypedDict

import numpy as np

from jaxtrain.settings import UserError, read_object

LIST = "sums.json"  # of a folder: path in it -> Entry
BLOCK = 1 << 24  # bytes
THREADS = min(8, os.cpu_count() or 1)
DIGITS = 8  # of one sum, hexadecimal


class Entry(TypedDict):
    """A file of a folder, as its list of checksums has it."""

    bytes: int
    crc32: str


@cache
def workers() -> ThreadPoolExecutor:
    """The threads; what they do never waits for another of them."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="sums")


def in_blocks[T](x: np.ndarray, work: Callable[[np.ndarray], T]) -> Iterator[T]:
    """work(block) of each block of an array's bytes, in order."""
    data = x.reshape(-1).view(np.uint8)
    blocks = (data[i : i + BLOCK] for i in range(0, data.size, BLOCK))
    return workers().map(work, blocks)


def length(size: int) -> int:
    """Characters of the checksums of so many bytes."""
    return -(-size // BLOCK) * DIGITS


def crc32(x: np.ndarray) -> str:
    """The checksums of an array's bytes, 8 hexadecimal digits a block of 16 MiB."""
    return "".join(in_blocks(x, lambda block: f"{zlib.crc32(block):08x}"))


def file_bytes(path: Path) -> np.ndarray:
    """A file's pages, as bytes."""
    if not path.stat().st_size:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r")


def entry(path: Path) -> Entry:
    """A file's place in a list of checksums."""
    data = file_bytes(path)
    return {"bytes": data.size, "crc32": crc32(data)}


def files_below(folder: Path) -> dict[str, Path]:
    """Every file of a folder by its path in it."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in found}


def write_list(path: Path, files: dict[str, Path], known: dict[str, Entry]) -> None:
    """Write the checksums of some files beside those that are known, as JSON; atomically."""
    listed = known | {name: entry(file) for name, file in files.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(listed[name])}" for name in sorted(listed)]
    part = path.with_name(path.name + ".part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    part.replace(path)


def check_files(folder: Path, share: slice = slice(None)) -> None:
    """Compare the files of a folder with LIST in it.

    share: those of the list that this process looks at. Raises UserError for the first that is
    missing, of another size or of other bytes.
    """
    for name, wanted in sorted(read_object(folder / LIST).items())[share]:
        path, shown = folder / name, f"{folder.name}/{name}"
        if not path.is_file():
            raise UserError(f"{shown} is missing")
        size = path.stat().st_size
        if size != wanted["bytes"]:
            raise UserError(f"{shown} has {size:,} bytes, not {wanted['bytes']:,} as written")
        if crc32(file_bytes(path)) != wanted["crc32"]:
            raise UserError(f"{shown} is damaged: its bytes are not those written (CRC-32)")
