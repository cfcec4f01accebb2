"""Training runs of peers on our rows: our loader writes the rows, the peer's script trains on them.

The resulting run directory works with `race` like ours: config.yaml, env.json, metrics.jsonl.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.peers import rows_of
from jaxtrain.config import Config, save_yaml
from jaxtrain.config.resolve import Resolved, resolve
from jaxtrain.data.batches.loader import train_batches, validation_batches
from jaxtrain.data.batches.packing import Batch
from jaxtrain.data.preference.pairs import PairBatch
from jaxtrain.data.store.prepare import Prepared, prepare
from jaxtrain.data.store.store import TokenStore
from jaxtrain.runs.environment import environment
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_json

SKIPPED = 5  # first steps that are not timed, since they compile
Write = Callable[[Path, Resolved, int], None]  # (folder, configuration, vocabulary)


class Peer(NamedTuple):
    """A peer. settings: (configuration, vocabulary size) -> settings of its script."""

    name: str
    script: str
    needs: tuple[str, ...]  # packages
    settings: Callable[[Resolved, int], dict[str, Any]]
    arguments: tuple[str, ...] = ()  # arguments of the script, before the folder


def train_peer(peer: Peer, c: Config, write_more: Write | None = None) -> Path:
    """Train a peer on the data of a configuration; returns the run directory.

    write_more: writes what the script needs besides rows and settings. Raises UserError if the run
    directory exists, if no text is held out, and if the script ends before its first step.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the peer needs the GPU's memory
    if (folder := c.run_dir).exists():
        raise UserError(f"run.name: {folder} is there already; name another run")
    prepared = prepare(c.data)
    if (held_out := prepared.validation) is None:
        raise UserError("data.validation is none: name a split or a source to compare on")
    vocab_size = prepared.tokenizer.vocab_size
    resolved = resolve(c, vocab_size, jax.devices()[:1])
    settings = common_settings(resolved) | peer.settings(resolved, vocab_size)
    with tempfile.TemporaryDirectory() as temporary:
        rows = Path(temporary)
        write_json(rows / "settings.json", settings)
        write_rows(rows, resolved, prepared, held_out)
        if write_more:
            write_more(rows, resolved, vocab_size)
        folder.mkdir(parents=True)
        save_yaml(folder / "config.yaml", resolved)
        lines = rows_of(peer.script, *peer.arguments, str(rows), needs=peer.needs)
        facts = follow(folder / "metrics.jsonl", lines, peer.name)
    if not facts:
        raise UserError(f"{peer.name}'s training has ended before its first step; see above")
    write_json(folder / "env.json", environment() | {"peer": {"name": peer.name} | facts})
    return folder


def common_settings(c: Resolved) -> dict[str, Any]:
    """Settings that every peer's script gets."""
    sizes = c.train.model_dump(
        include={"steps", "batch_size", "device_batch_size", "sequence_length"}
    )
    return sizes | {
        "seed": c.run.seed,
        "log_every": c.metrics.every,
        "eval_every": c.eval.every,
        "skip_steps": SKIPPED,
    }


def write_rows(folder: Path, c: Resolved, prepared: Prepared, validation: TokenStore) -> None:
    """Write the rows of every step in the loader's order, and the validation split once."""
    batch, T = c.train.batch_size, c.train.sequence_length
    loader = train_batches(prepared.train, config=c.data, batch_size=batch, sequence_length=T)
    shape = (c.train.steps * batch, T + 1)
    with loader:
        rows = np.lib.format.open_memmap(folder / "train.npy", "w+", np.uint16, shape)
        for i, one in enumerate(islice(loader, c.train.steps)):
            rows[i * batch : (i + 1) * batch] = whole_rows(one)
        rows.flush()
    rows_each = c.train.device_batch_size
    held_out = list(validation_batches(validation, batch_size=rows_each, sequence_length=T))
    np.save(folder / "validation.npy", np.concatenate([whole_rows(one) for one in held_out]))
    labels = [one.weights_BT.sum(axis=1) for one in held_out]
    np.save(folder / "labels.npy", np.concatenate(labels).astype(np.int32))
    np.save(folder / "bytes.npy", np.asarray(prepared.tokenizer.token_bytes(), np.int32))


def whole_rows(batch: Batch | PairBatch) -> np.ndarray:
    """Rows [B, T+1] of token ids: inputs, then the last target."""
    return np.concatenate([batch.tokens_BT, batch.targets_BT[:, -1:]], axis=1).astype(np.uint16)


def follow(path: Path, lines: Iterable[dict[str, Any]], name: str) -> dict[str, Any]:
    """Write the peer's metrics as they arrive; returns the facts it reports about itself."""
    facts: dict[str, Any] = {}
    with path.open("w", encoding="utf-8") as file:
        for row in lines:
            if row["kind"] == "peer":
                facts |= {key: value for key, value in row.items() if key != "kind"}
                continue
            print(json.dumps(row), file=file, flush=True)
            if row["kind"] == "validation":
                line = f"  {name}  step {row['step']}  {row['bpb']:.4f} bits per byte"
                print(line, file=sys.stderr, flush=True)
    return facts
