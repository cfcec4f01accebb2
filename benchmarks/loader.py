"""Benchmark of the loader, from token store to packed batches: tokens/s of one process on one core.

The corpus is random: documents with log-normal lengths, as in web text, in a store on disk.
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from jaxtrain.data import DataConfig, TokenStore, open_store, train_batches
from jaxtrain.data.batches.loader import make_batch_plan
from jaxtrain.data.store.store import write_store
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer

DOCUMENTS, MEDIAN, SPREAD = 20_000, 400, 1.1  # count, median tokens, sigma of log tokens
SEQUENCE, ROWS = 2048, 256
REPEATS, STEPS = 5, 4
PACKINGS: dict[str, dict[str, Any]] = {
    "concat": {"name": "concat"},
    "best_fit": {"name": "best_fit"},
    "best_fit, buffer 10000": {"name": "best_fit", "buffer": 10_000},
    "best_fit, cropping": {"name": "best_fit", "carry_tails": False},
    "best_fit, crop": {"name": "best_fit", "long_documents": "crop"},
    "padded": {"name": "padded"},
}


def loader_rows(packings: list[str] | None = None) -> list[dict[str, Any]]:
    """A row per packing: median tokens per second, in wall-clock and CPU time, of planning alone
    and of whole batches read in the calling thread; and the cropped and padded shares."""
    with tempfile.TemporaryDirectory() as folder:
        store = random_store(Path(folder) / "train", DOCUMENTS)
        shape = f"T={SEQUENCE}, {ROWS} rows, {store.tokens / store.documents:.0f} tokens/document"
        return [
            {"name": f"loader {name}", "shape": shape, "backend": "1 thread"}
            | measure(store, PACKINGS[name], segments=name == "padded")
            for name in packings or PACKINGS
        ]


def random_store(directory: Path, documents: int) -> TokenStore:
    """A store of random text with one byte per token."""
    random = np.random.default_rng(0)
    lengths = np.maximum(random.lognormal(np.log(MEDIAN), SPREAD, documents), 1).astype(int)
    letters = random.integers(97, 123, lengths.max(), np.uint8).tobytes().decode()
    write_store(directory, (letters[:length] for length in lengths.tolist()), byte_tokenizer())
    return open_store(directory)


def measure(store: TokenStore, packing: dict[str, Any], *, segments: bool) -> dict[str, float]:
    config = DataConfig.model_validate({"packing": packing, "workers": 0})
    plan = make_batch_plan({"train": store}, config, ROWS, SEQUENCE)
    sizes = {"batch_size": ROWS, "sequence_length": SEQUENCE, "segments": segments}
    with train_batches(store, config=config, **sizes) as batches:
        next(plan)
        next(batches)
        planned, read = zip(
            *((_rates(plan.__next__), _rates(batches.__next__)) for _ in range(REPEATS))
        )
        figures = batches.statistics()
    return {
        "tokens_per_s": median(rate for rate, _ in read),
        "tokens_per_cpu_s": median(rate for _, rate in read),
        "plan_tokens_per_cpu_s": median(rate for _, rate in planned),
        "crop": figures["data_crop"],
        "fill": figures["data_fill"],
    }


def _rates(take: Any) -> tuple[float, float]:
    """Tokens per second of wall-clock and of CPU time, over STEPS batches."""
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        take()
    tokens = STEPS * ROWS * SEQUENCE
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    return tokens / clock, tokens / processor
