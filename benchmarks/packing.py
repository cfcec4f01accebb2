"""Benchmark of packing: cropped, cut, padded and unused documents, compared with nanochat's packer.

Only lengths are used. The documents of `data.train`, or random ones with log-normal lengths, are
packed in three groups: short ones (at most 512 tokens), all, and long ones (more than 1024).
"""

import time
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

import numpy as np

from benchmarks.record import describe
from jaxtrain.config import load_config
from jaxtrain.data import DataConfig, TokenStore, prepare, stores_of
from jaxtrain.data.batches.loader import make_batch_plan
from jaxtrain.data.chat.conversations import fit_stores
from jaxtrain.data.store.store import Records
from jaxtrain.settings import UserError

DOCUMENTS, MEDIAN, SPREAD = 20_000, 400, 1.1  # count, median tokens, sigma of log tokens
SHORT, LONG = 512, 1024  # most tokens of a short document; a long one has more than LONG
LENGTHS = (512, 1024, 2048)  # row lengths in tokens
EPOCHS = 3.0  # epochs of the documents to pack, at most MOST_ROWS rows
MOST_ROWS = 40_000
REPEATS, TIMED = 5, 1000  # repeats of the timed planning, and rows of each
FEW = 300  # documents
PACKINGS: dict[str, dict[str, Any]] = {
    "best_fit": {"name": "best_fit"},
    "best_fit, cropping": {"name": "best_fit", "carry_tails": False},
    "padded": {"name": "padded"},
    "concat": {"name": "concat"},
}
BUFFER, CHUNK = 1000, 128  # fewest documents in nanochat's buffer, and documents read at a time


def bench_packing(overrides: Sequence[str], variant: str | None = None) -> dict[str, Any]:
    """A row for each kind of documents, row length and packing; and one for documents drawn by
    weight. Raises UserError for a mixture.

    `crop`, `padding`: shares of the tokens, and of the rows. `cuts`: cut documents per row.
    `unused`: share of the documents without any token in a row after one epoch of tokens,
    `unused_3` after three; `uses` after one, by fifths of the documents from short to long.
    `farthest`: largest difference between a document's uses and its due uses after 20 epochs.
    """
    given = any(override.startswith("data.train") for override in overrides)
    config = load_config(None, ["data.validation.name=none", *overrides]).data
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        store = _store(config, length) if given else lengths_only(random_lengths())
        lengths = store.lengths.astype(np.int64)
        kinds = {"all": lengths}
        if not store.marked:
            few = np.random.default_rng(0).permutation(lengths)[:FEW]
            kinds = {"short": lengths[lengths <= SHORT], **kinds, "long": lengths[lengths > LONG]}
            kinds[f"{FEW} of all"] = few
        for kind, some in kinds.items():
            if some.sum() + len(some) <= length:
                continue
            shape = f"T={length}, {kind}: {len(some):,} documents of {some.mean():.0f} tokens"
            if not store.marked:
                rows.append({"name": "nanochat's, simulated", "shape": shape} | peer(some, length))
            for name in ["padded"] if store.marked else PACKINGS:
                rows.append({"name": name, "shape": shape} | ours(some, PACKINGS[name], length))
    rows.append({"name": "padded, sample_by", "shape": f"T={SHORT}, {FEW} documents"} | weighted())
    workload = {"epochs": EPOCHS, "most_rows": MOST_ROWS, "seed": config.seed}
    name = config.train.name if given else "random"
    return describe("packing", name, variant or "", workload=workload) | {"rows": rows}


def ours(lengths: np.ndarray, packing: dict[str, Any], length: int) -> dict[str, Any]:
    """The figures of one of our packings."""
    fields = {"packing": packing, "workers": 0}
    config, store = DataConfig.model_validate(fields), lengths_only(lengths)
    try:
        plan = make_batch_plan({"train": store}, config, 1, length)
    except UserError:  # the packing refuses to crop most of the text
        return {"crop": float(np.maximum(lengths - length, 0).sum() / lengths.sum())}
    epoch = (int(lengths.sum()) + len(lengths)) // (length + 1)
    count = max(1, min(int(EPOCHS * epoch), MOST_ROWS))
    uses, cuts, unused = np.zeros(len(lengths), np.int64), 0, {}
    found: dict[str, Any] = {}
    for at in range(1, count + 1):
        for _, row in next(plan).rows:
            pieces = [p for p in row if p.stop > p.start or not lengths[p.document]]
            np.add.at(uses, [p.document for p in pieces if p.start == 0], 1)
            cuts += sum(p.stop < lengths[p.document] and p.stop % length > 0 for p in pieces)
        if at in (epoch, 3 * epoch):
            unused["unused" if at == epoch else "unused_3"] = float((uses == 0).mean())
        if at == epoch:
            order = np.argsort(lengths, kind="stable")
            found["uses"] = [float(part.mean()) for part in np.array_split(uses[order], 5)]
    figures = plan.statistics(plan.get_state())
    rates = []
    for _ in range(REPEATS):
        begin = time.process_time()
        for _ in range(TIMED):
            next(plan)
        rates.append(TIMED * length / (time.process_time() - begin))
    found |= {"crop": figures["data_crop"], "padding": 1 - figures["data_fill"]}
    return found | unused | {"cuts": cuts / count, "plan_tokens_per_cpu_s": median(rates)}


def weighted() -> dict[str, float]:
    """Largest difference between actual and due uses of documents drawn by weight."""
    random = np.random.default_rng(0)
    lengths, weights = random_lengths()[:FEW], random.lognormal(0, 1.5, FEW)
    config = DataConfig.model_validate({"packing": PACKINGS["padded"], "workers": 0})
    store = replace(lengths_only(lengths), weights=weights)
    plan = make_batch_plan({"train": store}, config, 1, SHORT)
    uses, epochs = np.zeros(FEW, np.int64), 20
    while uses.sum() < epochs * FEW:
        for _, row in next(plan).rows:
            np.add.at(uses, [piece.document for piece in row], 1)
    due = epochs * FEW * weights / weights.sum()
    worst = int(np.abs(uses - due).argmax())
    return {"farthest": abs(float(uses[worst] - due[worst])), "due": float(due[worst])}


def peer(lengths: np.ndarray, length: int) -> dict[str, Any]:
    """nanochat's packer: take the largest document of a buffer that fits. If none fits, take the
    shortest and crop it. The buffer is refilled CHUNK documents at a time."""
    rows = max(1, min(int(EPOCHS * lengths.sum() / length), MOST_ROWS))
    sizes, buffer, used, dropped = _again_and_again(lengths + 1), [], 0, 0
    for _ in range(rows):
        room = length + 1
        while room:
            while len(buffer) < BUFFER:
                for size in islice(sizes, CHUNK):
                    insort(buffer, size)
            index = bisect_right(buffer, room) - 1
            size = buffer.pop(max(index, 0))
            taken = min(size, room)
            used, dropped, room = used + taken, dropped + size - taken, room - taken
    return {"crop": dropped / (used + dropped), "padding": 0.0}


def _again_and_again(sizes: np.ndarray) -> Iterator[int]:
    random = np.random.default_rng(0)
    while True:
        yield from sizes[random.permutation(len(sizes))].tolist()


def random_lengths() -> np.ndarray:
    random = np.random.default_rng(0)
    return np.maximum(random.lognormal(np.log(MEDIAN), SPREAD, DOCUMENTS), 1).astype(np.int64)


def _store(config: DataConfig, length: int) -> TokenStore:
    """The training store of the only source, for rows of this length."""
    if config.train.name == "mixture":
        raise UserError("data.train is a mixture: name one source of text to measure")
    stores, _ = fit_stores(stores_of(prepare(config).train), config, length)
    return stores["train"]


class NoRecords(Records):
    """Empty records, for a store that is planned but never read."""

    def __init__(self) -> None:
        self.paths, self.counts = [], []


def lengths_only(lengths: np.ndarray, first_record: np.ndarray | None = None) -> TokenStore:
    """A store with lengths only: it can be planned but not read."""
    total = int(lengths.sum(dtype=np.int64))
    return TokenStore(
        directory=None,
        lengths=lengths.astype(np.uint32, copy=False),
        tokens=total,
        bytes=total,
        bos_id=0,
        vocab_size=1,
        tokenizer="",
        fingerprint="",
        first_record=np.zeros(0, np.int64) if first_record is None else first_record,
        records=NoRecords(),
        dtype=np.dtype("<u4"),
    )
