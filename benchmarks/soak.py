"""Soak test of the loader at full speed for minutes: memory of this process and its children."""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

from benchmarks.loader import ROWS, SEQUENCE
from benchmarks.record import describe
from jaxtrain.config import load_config
from jaxtrain.data import make_augment, prepare, stores_of, train_batches
from jaxtrain.data.pool import cores
from jaxtrain.settings import UserError

EVERY = 2.0  # seconds between two memory samples
LOOKS = 6  # fewest samples that can be compared
EDGE = 60.0  # seconds at the start and the end that are compared; at most a third of the run
MIB = 2**20


def bench_loader(
    overrides: Sequence[str], variant: str | None = None, minutes: float = 10.0
) -> dict[str, Any]:
    """One row for the store of `data` (prepared if missing), read through the real loader.

    `rss_mib` has samples, at least EVERY seconds apart, of the resident memory in MiB of this
    process and all its children, at the times `seconds`. `first` and `last` are the medians of the
    first and last minute; `growth` is the least-squares slope after the first minute.
    Raises UserError for too few minutes to compare.
    """
    if minutes * 60 < LOOKS * EVERY:
        raise UserError(
            f"--minutes {minutes:g}: the memory is looked at every {EVERY:g} s, so that at least "
            f"{LOOKS * EVERY / 60:g} are needed"
        )
    workload: dict[str, Any] = {"cores": cores(), "load": os.getloadavg()[0]}
    config = load_config(None, ["data.validation.name=none", *overrides]).data
    prepared = prepare(config)
    stores = stores_of(prepared.train)
    total = sum(store.tokens + store.documents for store in stores.values())  # each with its BOS
    workload |= {"batch_size": ROWS, "sequence_length": SEQUENCE, "store_tokens": total}
    workload |= config.model_dump(include={"packing", "workers", "prefetch"})
    augment = make_augment(config.augment, prepared.tokenizer, config.seed)
    sizes = {"batch_size": ROWS, "sequence_length": SEQUENCE, "augment": augment}
    seconds, rss_mib = [], []
    with train_batches(prepared.train, config=config, **sizes) as batches:
        next(batches)
        begin, now, taken, due = time.perf_counter(), 0.0, 0, 0.0
        while now < minutes * 60 or len(seconds) < LOOKS:  # it may stall on a busy machine
            if now >= due:
                due = now + EVERY  # samples missed in a stall are not made up
                seconds.append(round(now, 2))
                rss_mib.append(round(resident_mib(), 2))
            next(batches)
            _ = batches.get_state(), batches.statistics()  # as the training loop asks for
            now, taken = time.perf_counter() - begin, taken + 1
    rate = taken * ROWS * SEQUENCE / now
    row = {
        "name": f"loader {config.packing.name}, {config.workers} workers",
        "shape": f"T={SEQUENCE}, {ROWS} rows, {now / 60:.3g} minutes",
        **flatness(seconds, rss_mib),
        "tokens_per_s": rate,
        "epochs": rate * now / total,
    }
    curve = {"seconds": seconds, "rss_mib": rss_mib}
    record = describe("loader", config.train.name, variant or "", workload=workload)
    return record | {"rows": [row], "curve": curve}


def resident_mib() -> float:
    """Resident MiB of this process and all its descendants; shared memory counts for each."""
    this = psutil.Process()
    total = this.memory_info().rss
    for child in this.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:  # ended since the list was made
            continue
    return total / MIB


def flatness(seconds: Sequence[float], rss_mib: Sequence[float]) -> dict[str, float]:
    """Medians of the first and last minute of a memory curve, and its growth after the first."""
    s, mib = np.asarray(seconds), np.asarray(rss_mib)
    edge = min(EDGE, s[-1] / 3)
    after = s >= edge
    after[-2:] = True  # the fit needs two samples, even if all but one came before a stall
    return {
        "first_mib": float(np.median(mib[~after])),
        "last_mib": float(np.median(mib[s >= s[-1] - edge])),
        "growth_mib_per_minute": float(np.polyfit(s[after] / 60, mib[after], 1)[0]),
    }
