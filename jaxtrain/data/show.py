"""Human-readable rows of a run: the decoded documents of each row, and the shares of the sources.

In conversations, {+ and +} enclose the learned tokens, and special tokens appear as their names.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import groupby

import numpy as np

from jaxtrain.data.batches.augment import Augment, make_augment
from jaxtrain.data.batches.loader import make_batch_plan, stores_of
from jaxtrain.data.batches.mixture import BatchPlan, last_epoch, shares_of
from jaxtrain.data.batches.packing import Batch, assemble
from jaxtrain.data.batches.planning import Counts, PlannedRow
from jaxtrain.data.chat.conversations import counts_phrase, fit_stores
from jaxtrain.data.config import DataConfig
from jaxtrain.data.preference.pairs import texts_of_pairs
from jaxtrain.data.store.prepare import Prepared, damaged_shards
from jaxtrain.data.store.store import TokenStore
from jaxtrain.data.tokenizer.tokenizer import Tokenizer, text_of
from jaxtrain.settings import visible

PLANNED = 20_000_000  # tokens of the largest source for which a whole epoch is planned


def show_rows(
    prepared: Prepared,
    config: DataConfig,
    *,
    batch_size: int,
    sequence_length: int,
    step: int = 0,
    rows: int = 4,
    characters: int = 400,
    augment: Augment | None = None,
) -> Iterator[str]:
    """Yield lines about the first packed rows of a step, and about each source up to that step.

    At most `characters` of each document are shown, half from its beginning and half from its end.
    augment: replaces `data.augment`.
    """
    stores, counted = fit_stores(stores_of(prepared.train), config, sequence_length)
    plan = make_batch_plan(stores, config, batch_size, sequence_length)
    for _ in range(step):
        next(plan)
    planned = next(plan)
    length = sequence_length // planned.cut
    yield (
        f"step {step}: {len(planned.rows)} rows of {length} tokens, "
        f"packing {config.packing.name}, seed {config.seed}"
    )
    augment = augment or make_augment(config.augment, prepared.tokenizer, config.seed)
    tokenizer = _with_specials(prepared.tokenizer)
    names = {i: name for name, i in prepared.tokenizer.specials.items()}
    for number, (name, row) in enumerate(planned.rows[:rows]):
        change = None if augment is None else partial(augment, step, number)
        texts, row = texts_of_pairs(stores[name], row)
        batch = assemble([(texts, row)], length, segments=True, change=change)
        yield ""
        yield f"== row {number}, {name}: {_fill(batch)}"
        yield from _row(texts, row, batch, tokenizer, names, characters)
    state = plan.get_state()
    figures = plan.statistics(state)
    yield ""
    steps = f"{step + 1} step{'s' * (step > 0)}"
    yield f"== {steps}: crop {figures['data_crop']:.2%}, fill {figures['data_fill']:.2%}"
    wide = max(len("source"), *map(len, stores))
    yield (
        f"{'source':{wide}}  {'share':>6}  {'epochs':>8}  {'documents':>11}  {'tokens':>15}  "
        + "bytes/token  median tokens"
    )
    total = sum(state["units"].values())
    for name, store in stores.items():
        drawn = plan.planners[name].epochs(state["sources"][name])
        yield (
            f"{name:{wide}}  {state['units'][name] / total:6.1%}  {drawn:8.4f}  "
            f"{store.documents:11,}  {store.tokens:15,}  {store.bytes / store.tokens:11.2f}  "
            f"{int(np.median(store.lengths)):13,}"
        )
    yield from _epochs(make_batch_plan(stores, config, batch_size, sequence_length), stores)
    yield from damaged_shards(prepared)
    for name, count in counted.items():
        mine = [texts_of_pairs(stores[name], row) for of, row in planned.rows if of == name]
        if mine:
            share = _learned(assemble(mine, length, segments=True))
            yield f"{name}: of the tokens of this step {share:.1%} are learned"
        yield f"{name}: {counts_phrase(count)}"


def _epochs(plan: BatchPlan, stores: dict[str, TokenStore]) -> Iterator[str]:
    """Yield one epoch's packing losses, by small source (PLANNED), at the last stage's length."""
    for name, planner in plan.planners.items():
        if stores[name].tokens > PLANNED:
            continue
        rows = planner.unit(plan.spans[-1].cut)
        while rows is not None and not planner.get_state()["whole"]:
            rows = planner.unit(plan.spans[-1].cut)
        if planner.get_state()["whole"]:
            epoch = last_epoch(planner.get_state())
            yield f"{name}: of an epoch's documents {_packing(epoch)}"


def _packing(counts: Counts) -> str:
    """Packing losses as a phrase: documents, tokens and rows."""
    share = shares_of(counts)
    return (
        f"{counts.cropped:,} cropped ({share['crop']:.2%} of the tokens), "
        f"{counts.left_out:,} left out, {1 - share['fill']:.2%} of the rows is padding"
    )


def _learned(batch: Batch) -> float:
    assert batch.segments_BT is not None
    return float(batch.weights_BT.sum() / (batch.segments_BT > 0).sum())


def _with_specials(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that decodes special tokens, except BOS, to their names."""
    pieces = list(tokenizer.pieces)
    for name, index in tokenizer.specials.items():
        pieces[index] = b"" if index == tokenizer.bos_id else name.encode()
    decode = partial(text_of, pieces)
    return dataclasses.replace(tokenizer, pieces=tuple(pieces), decode_ids=decode)


def _fill(batch: Batch) -> str:
    assert batch.segments_BT is not None
    documents, size = int(batch.segments_BT.max()), batch.tokens_BT.size
    padding, masked = int((batch.segments_BT == 0).sum()), int((batch.weights_BT == 0).sum())
    words = [f"{documents} document{'s' * (documents != 1)}", f"{size - padding} tokens"]
    words += [f"{padding} of padding"] * bool(padding) + [f"{masked} without label"] * bool(masked)
    return ", ".join(words)


def _row(
    store: TokenStore,
    row: PlannedRow,
    batch: Batch,
    tokenizer: Tokenizer,
    names: dict[int, str],
    characters: int,
) -> Iterator[str]:
    """Yield the documents of a row: number, token range, and the text decoded from the batch."""
    assert batch.segments_BT is not None
    for segment, (document, bos, start, stop) in enumerate(row, 1):
        inside = batch.segments_BT[0] == segment
        ids = batch.tokens_BT[0][inside]
        length = int(store.lengths[document])
        cut = ["begins inside"] * (start > 0) + ["end not in this row"] * (stop < length)
        note = f" ({', '.join(cut)})" if cut else ""
        yield f"-- [{segment}] document {document:,}, tokens {start}..{stop} of {length:,}{note}"
        if store.marked:
            learned = np.append(False, batch.weights_BT[0][:-1] > 0)[inside]
            yield visible(shorten(_marked(ids, learned, tokenizer, names), characters))
        else:
            yield ("<bos>" if bos else "") + visible(shorten(tokenizer.decode(ids), characters))


def _marked(ids: np.ndarray, learned: np.ndarray, tokenizer: Tokenizer, names: dict) -> str:
    """Decode tokens with special tokens by name, and {+ +} around the learned ones."""
    text = ""
    for mark, group in groupby(zip(learned.tolist(), ids.tolist()), lambda pair: pair[0]):
        pieces = (names.get(i, "").encode() or tokenizer.pieces[i] for _, i in group)
        inner = b"".join(pieces).decode(errors="replace")
        text += "{+" + inner + "+}" if mark else inner
    return text


def shorten(text: str, characters: int) -> str:
    """Shorten a text to its beginning and end, with the number of characters left out."""
    left = len(text) - characters
    if left <= 0:
        return text
    half = characters // 2
    return f"{text[:half]} [... {left:,} characters ...] {text[len(text) - (characters - half) :]}"
