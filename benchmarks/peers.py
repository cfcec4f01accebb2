"""Peers in other frameworks, measured in the same call by scripts that run as processes."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtrain_kernels.shapes import AttentionShape

from benchmarks.record import BENCHMARKS
from jaxtrain.config import Config, find_config, load_config
from jaxtrain.config.resolve import vocab_size_of
from jaxtrain.settings import UserError

FLASH_ATTENTION, QUACK = "FA4 (torch)", "QuACK (torch)"
VOCABULARY = 32768  # of peer_nanochat.py


def rows_of(script: str, *arguments: str, needs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines that a script prints, as they come; nothing if it cannot run.

    needs: required packages. A failing script ends the rows, and prints the reason itself.
    """
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    path = BENCHMARKS / script
    if missing or not path.exists():
        print(f"  no peer: {', '.join(missing) or script} is missing", file=sys.stderr)
        return
    # -P: otherwise the script would import benchmarks/profile.py as Python's `profile`.
    line = [sys.executable, "-P", str(path), *arguments]
    folders = [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]  # for `peer_timing.py`
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=env) as peer:
        yield from (json.loads(row) for row in peer.stdout or () if row.startswith("{"))


def nanochat_step(checkout: Path, name: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """nanochat's own train step at a configuration's depth, batch size and sequence length.

    Runs on one GPU, before JAX allocates its memory. Raises UserError as `check_nanochat` does, and
    for a batch of several microbatches.
    """
    c = load_config(find_config(name), overrides)
    check_nanochat(checkout, name, c)
    rows = c.train.device_batch_size
    if c.train.batch_size not in (None, rows):
        raise UserError(f"--peer: train.batch_size is {c.train.batch_size}, of one step of {rows}")
    sizes = map(str, (c.model.depth, rows, c.train.sequence_length))
    more = ("fp8",) if c.model.fp8 else ()
    path = str(checkout.resolve())
    return list(rows_of("peer_nanochat.py", path, *sizes, *more, needs=("torch",)))


def flash_attention(shapes: Sequence[AttentionShape]) -> Iterator[dict[str, Any]]:
    """Milliseconds of FlashAttention 4 for each shape: forward, and forward with backward."""
    settings = [
        s._asdict() | {"lengths": lengths(s) if s.documents else None}
        for s in shapes
        if s.softcap is None
    ]
    needs = ("torch", "flash_attn")
    yield from rows_of("peer_attention.py", json.dumps(settings), needs=needs)


def quack(op: str, shape: str, *sizes: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of QuACK's kernels for an op, forward and backward; sizes: see the script."""
    asked = json.dumps([{"op": op, "shape": shape, "sizes": sizes}])
    yield from rows_of("peer_quack.py", asked, needs=("torch", "quack"))


def lengths(s: AttentionShape) -> list[list[int]]:
    """Lengths of the documents (and of the padding after them) in each row."""
    ids_BT = s.segment_ids_BT()
    assert ids_BT is not None
    return [np.diff(np.flatnonzero(np.diff(row, prepend=-1, append=-1))).tolist() for row in ids_BT]


def check_nanochat(checkout: Path, name: str, c: Config) -> None:
    """Raise UserError if the folder is no checkout of github.com/karpathy/nanochat, or if
    nanochat's model cannot match the configuration."""
    if not (checkout / "nanochat" / "gpt.py").is_file():
        raise UserError(f"{checkout}: no checkout of nanochat, it has no nanochat/gpt.py")
    if c.model.ffn != "relu2" or not c.train.device_batch_size:
        raise UserError(f"{name} is no gpt with train.device_batch_size, as nanochat has")
    if (vocab_size := vocab_size_of(c.data)) != VOCABULARY or c.model.width:
        raise UserError(
            f"{name} has a vocabulary of {vocab_size} or a width of its own; nanochat's "
            f"script takes {VOCABULARY} and the width that follows from model.depth"
        )
