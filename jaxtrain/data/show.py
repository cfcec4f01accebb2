"""What a model will read, for people: decoded rows, where documents begin, and shares by source."""

from collections.abc import Iterator

import numpy as np

from jaxtrain.data.config import DataConfig
from jaxtrain.data.loader import make_plan, stores_of
from jaxtrain.data.packing import Batch, Row, assemble
from jaxtrain.data.prepare import Prepared
from jaxtrain.data.store import TokenStore
from jaxtrain.data.tokenizer import Tokenizer


def show(
    prepared: Prepared,
    config: DataConfig,
    *,
    batch_size: int,
    sequence_length: int,
    step: int = 0,
    rows: int = 4,
    characters: int = 400,
) -> Iterator[str]:
    """Lines about the first rows of a step, as they are packed, and about each source up to there.

    Of every document at most `characters` are shown, half from its beginning and half from its end.
    """
    stores = stores_of(prepared.train)
    plan = make_plan(stores, config, batch_size, sequence_length)
    for _ in range(step):
        plan.next_batch()
    planned = plan.next_batch()
    length = sequence_length // planned.cut
    yield (
        f"step {step}: {len(planned.rows)} rows of {length} tokens, "
        f"packing {config.packing.name}, seed {config.seed}"
    )
    for number, (name, row) in enumerate(planned.rows[:rows]):
        batch = assemble([(stores[name], row)], length, segments=True)
        yield ""
        yield f"== row {number}, {name}: {_fill(batch)}"
        yield from _row(stores[name], row, batch, prepared.tokenizer, characters)
    state, epochs = plan.get_state(), {name: p.count for name, p in plan.planners.items()}
    figures = plan.statistics(state)
    yield ""
    yield f"== {step + 1} steps: crop {figures['data_crop']:.2%}, fill {figures['data_fill']:.2%}"
    names = max(len("source"), *map(len, stores))
    yield (
        f"{'source':{names}}  {'share':>6}  {'epochs':>8}  {'documents':>11}  {'tokens':>15}  "
        + ("bytes/token  median tokens")
    )
    total = sum(state["units"].values())
    for name, store in stores.items():
        drawn = state["sources"][name]["drawn"] / epochs[name]
        yield (
            f"{name:{names}}  {state['units'][name] / total:6.1%}  {drawn:8.4f}  "
            f"{store.documents:11,}  {store.tokens:15,}  {store.bytes / store.tokens:11.2f}  "
            f"{int(np.median(store.lengths)):13,}"
        )


def _fill(batch: Batch) -> str:
    assert batch.segments_BT is not None
    documents, size = int(batch.segments_BT.max()), batch.tokens_BT.size
    padding, masked = int((batch.segments_BT == 0).sum()), int((batch.weights_BT == 0).sum())
    words = [f"{documents} document{'s' * (documents != 1)}", f"{size - padding} tokens"]
    words += [f"{padding} of padding"] * bool(padding) + [f"{masked} without label"] * bool(masked)
    return ", ".join(words)


def _row(
    store: TokenStore, row: Row, batch: Batch, tokenizer: Tokenizer, characters: int
) -> Iterator[str]:
    """Each document of a row: which part of which, and its text as the batch has it."""
    assert batch.segments_BT is not None
    for segment, (document, bos, start, stop) in enumerate(row, 1):
        ids = batch.tokens_BT[0][batch.segments_BT[0] == segment]
        length = int(store.lengths[document])
        cut = ["begins inside"] * (start > 0) + ["end not in this row"] * (stop < length)
        note = f" ({', '.join(cut)})" if cut else ""
        yield f"-- [{segment}] document {document:,}, tokens {start}..{stop} of {length:,}{note}"
        yield ("<bos>" if bos else "") + shorten(tokenizer.decode(ids), characters)


def shorten(text: str, characters: int) -> str:
    """The beginning and the end of a text, and how much was left out."""
    left = len(text) - characters
    if left <= 0:
        return text
    half = characters // 2
    return f"{text[:half]} [... {left:,} characters ...] {text[len(text) - (characters - half) :]}"
