"""Benchmark of the data pipeline: tokenizers, preparation, reading the store, packing.

Measured in wall-clock and in CPU time; the latter is more reliable on a shared machine.
"""

import os
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import batched, islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from benchmarks.loader import loader_rows
from benchmarks.record import describe
from jaxtrain.config import load_config
from jaxtrain.data import DataConfig, Tokenizer, TokenStore, prepare, read_documents
from jaxtrain.data.files.sources import CHAT_TEMPLATE_SOURCES
from jaxtrain.data.pool import cores, process_pool
from jaxtrain.data.store.splits import training_texts
from jaxtrain.data.tokenizer.tokenizer import build_tokenizer
from jaxtrain.settings import UserError

VOCABULARY = 32768
BYTES_A_PIECE = 400  # fewest text bytes per vocabulary entry; it would memorize a short text
TRAIN_BYTES = 200_000_000
RAW_BYTES = 64_000_000  # bytes of text that the libraries are measured on
READS = 100_000  # documents read from the store in random order
TOKENIZERS: tuple[dict[str, Any], ...] = (
    {"name": "sentencepiece", "across_words": False},
    {"name": "huggingface"},
)


def bench_data(overrides: Sequence[str], variant: str | None = None) -> dict[str, Any]:
    """Rows for the text of `data.train`: training each tokenizer, its library's batch encoding, our
    encoding, a full preparation, random reads of the store; then the loader on random documents.

    MB are of UTF-8 text. `of_raw` is our speed over the library's, which is measured before and
    after ours; the faster counts. Raises UserError for a mixture and for conversations.
    """
    workload = {"cores": cores(), "load": os.getloadavg()[0]}  # before our own load
    config = load_config(None, [*overrides, "data.validation.name=none"]).data
    if config.train.name == "mixture" or config.train.name in CHAT_TEMPLATE_SOURCES:
        raise UserError(f"data.train is a {config.train.name}: name one source of text to measure")
    texts = _first(read_documents(config.train), RAW_BYTES)
    rows = []
    for kind in TOKENIZERS:
        rows += tokenizer_rows(config, kind, texts)
    rows += loader_rows(["best_fit", "concat"])
    return describe("data", config.train.name, variant or "", workload=workload) | {"rows": rows}


def tokenizer_rows(
    config: DataConfig, kind: dict[str, Any], texts: list[str]
) -> list[dict[str, Any]]:
    assert config.train.name != "mixture"
    size, text = _size(texts), Path(config.train.path).name.partition(".")[0]
    vocab_size = min(VOCABULARY, max(600, size // BYTES_A_PIECE))
    name = f"{kind['name']} {vocab_size}"
    settings = {**kind, "vocab_size": vocab_size, "train_bytes": TRAIN_BYTES}
    whole = DataConfig.model_validate(config.model_dump() | {"tokenizer": settings})
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        with timed_row(rows, f"{name}: train") as row, process_pool(cores()) as mapped:
            sample = training_texts(whole, TRAIN_BYTES, mapped)
            tokenizer = build_tokenizer(whole.tokenizer, sample)
        row["mb"] = _size(sample) / 1e6
        with timed_row(rows, f"{name}: the library's batch") as before:
            before |= {"mb": size / 1e6, "tokens": raw_encode(tokenizer, texts)}
        with timed_row(rows, f"{name}: ours, a batch") as row:
            row |= {"mb": size / 1e6, "tokens": sum(map(len, tokenizer.encode_batch(texts)))}
        tokenizer.save(Path(folder))
        ready = {"name": kind["name"], "path": folder}
        update = {"tokenizer": ready, "cache_dir": folder}
        with timed_row(rows, f"{name}: prepare") as row:
            prepared = prepare(DataConfig.model_validate(config.model_dump() | update))
        assert isinstance(prepared.train, TokenStore)
        row |= {"mb": prepared.train.bytes / 1e6, "tokens": prepared.train.tokens}
        with timed_row([], f"{name}: the library's batch") as after:
            after |= {"mb": size / 1e6, "tokens": raw_encode(tokenizer, texts)}
        rows[1] = min(before, after, key=lambda row: row["seconds"])
        with timed_row(rows, f"{name}: read at random") as row:
            row["tokens"] = read_at_random(prepared.train)
    for row in rows:
        seconds, processor = row["seconds"], row.pop("cpu_s")
        tokens, mb = row.pop("tokens", None), row.pop("mb", None)
        row["shape"] = f"{text}, {mb:.0f} MB" if mb else f"{text}, {READS:,} documents"
        if mb:
            row |= {"mb_per_s": mb / seconds, "mb_per_cpu_s": mb / processor}
        if tokens:
            row |= {"tokens_per_s": tokens / seconds, "tokens_per_cpu_s": tokens / processor}
    for row in rows[2:4]:
        row["of_raw"] = row["mb_per_s"] / rows[1]["mb_per_s"]
    return rows


def raw_encode(tokenizer: Tokenizer, texts: list[str]) -> int:
    """Number of tokens of `texts`, by the library's own batch encoding with one thread per core."""
    if tokenizer.name == "sentencepiece":
        processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
        return sum(map(len, processor.encode(texts, num_threads=cores())))
    inner = tokenizers.Tokenizer.from_str(tokenizer.model.decode())
    return sum(len(one.ids) for one in inner.encode_batch_fast(texts, add_special_tokens=False))


def read_at_random(store: TokenStore) -> int:
    """Read READS random whole documents, 1,000 at a time as for a batch; returns their tokens."""
    order = np.random.default_rng(0).integers(store.documents, size=READS).tolist()
    parts = ((i, 0, int(store.lengths[i])) for i in order)
    return sum(len(ids) for some in batched(parts, 1000) for ids in store.read_many(some))


def _size(texts: list[str]) -> int:
    """Size in UTF-8 bytes."""
    return sum(len(text.encode()) for text in texts)


def _first(texts: Iterator[str], size: int) -> list[str]:
    taken = []
    while size > 0 and (some := list(islice(texts, 100))):
        taken += some
        size -= _size(some)
    return taken


@contextmanager
def timed_row(rows: list[dict[str, Any]], name: str, shape: str = "") -> Iterator[dict[str, Any]]:
    """Add a row that times the body: wall-clock seconds, and CPU seconds of all processes."""
    row: dict[str, Any] = {"name": name, "shape": shape}
    clock, processor = time.perf_counter(), _processor()
    yield row
    row |= {"seconds": time.perf_counter() - clock, "cpu_s": _processor() - processor}
    rows.append(row)


def _processor() -> float:
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
