import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data.packing import (
    PACKINGS,
    BestFit,
    BestFitConfig,
    Concat,
    ConcatConfig,
    PaddedConfig,
    Stream,
    assemble,
    best_fit,
    padded,
    permute,
)
from jaxtrain.settings import UserError

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda x: sum(x) > 0)
BOS = 0


def reference_stream(lengths):
    tokens = iter(range(1, sum(lengths) + 1))
    return [t for n in lengths for t in [BOS, *(next(tokens) for _ in range(n))]]


def size(row):
    return sum(piece.bos + piece.stop - piece.start for piece in row)


def test_every_packing_is_in_the_table():
    assert set(PACKINGS) == {"concat", "best_fit", "padded"}


@given(count=st.integers(1, 300), seed=st.integers(0, 2**40), epoch=st.integers(0, 9))
def test_permute_covers_everything_once(count, seed, epoch):
    assert sorted(permute(i, count, seed, epoch) for i in range(count)) == list(range(count))


def test_permute_depends_on_seed_and_epoch():
    orders = {tuple(permute(i, 50, s, e) for i in range(50)) for s in (0, 1) for e in (0, 1)}
    assert len(orders) == 4


@given(lengths=LENGTHS, start=st.integers(0, 2000), count=st.integers(1, 100))
def test_a_window_is_the_stream_read_in_a_circle(store_of, lengths, start, count):
    store, stream = store_of(lengths), reference_stream(lengths)
    row = Stream(store).window(start, count)
    batch = assemble(store, [row], count - 1, segments=False)
    want = [stream[(start + i) % len(stream)] for i in range(count)]
    assert [*batch.tokens_BT[0], batch.targets_BT[0, -1]] == want if count > 1 else True
    assert size(row) == count


@given(lengths=LENGTHS, length=st.integers(1, 30), epoch=st.integers(0, 2))
def test_concat_predicts_each_token_at_most_once_an_epoch(store_of, lengths, length, epoch):
    store = store_of(lengths)
    plan = Concat(store, ConcatConfig(), length, seed=3)
    rows = [plan.row(epoch * plan.rows_per_epoch + i) for i in range(plan.rows_per_epoch)]
    batch = assemble(store, rows, length, segments=False)
    targets = batch.targets_BT[batch.targets_BT != BOS]
    if plan.stream.size >= length:
        assert len(set(targets)) == len(targets)
        assert plan.stream.size - batch.targets_BT.size < length
    assert (batch.weights_BT == 1).all()


@settings(max_examples=60)
@given(
    lengths=LENGTHS,
    length=st.integers(1, 30),
    buffer=st.integers(1, 20),
    fill=st.booleans(),
    split=st.booleans(),
)
def test_best_fit_loses_only_what_it_counts(store_of, lengths, length, buffer, fill, split):
    store = store_of(lengths)
    plan = BestFit(store, buffer, length, seed=1, fill=fill, split=split)
    rows = [plan.next_row() for _ in range(25)]
    for row in rows:
        assert all(piece.bos for piece in row)
        assert size(row) == length + 1 if fill else 0 < size(row) <= length + 1
    # What was drawn is in the rows, was dropped, or still waits.
    count = int(plan.ends[-1])
    parts = [permute(i % count, count, 1, i // count) for i in range(plan.drawn)]
    drawn = sum(whole(plan, part) for part in parts)
    waiting = sum(whole(plan, part) for part in plan.get_state()["waiting"])
    assert plan.used == sum(map(size, rows))
    assert drawn == plan.used + plan.dropped + waiting
    if not fill and (split or max(lengths) <= length):
        assert plan.dropped == 0


def whole(plan, part):
    """Tokens of a part with its BOS, before anything is dropped."""
    piece, rest = plan._piece(part, plan.capacity)
    return 1 + piece.stop - piece.start + rest


@given(lengths=LENGTHS, length=st.integers(1, 30))
def test_split_parts_are_the_documents(store_of, lengths, length):
    store = store_of(lengths)
    plan = BestFit(store, 4, length, seed=0, fill=True, split=True)
    pieces = [plan._piece(part, plan.capacity)[0] for part in range(int(plan.ends[-1]))]
    batch = assemble(store, [[piece] for piece in pieces], length, segments=False)
    seen = [t for ids, n in zip(full_rows(batch), pieces) for t in ids[1 : 1 + n.stop - n.start]]
    assert seen == list(range(1, sum(lengths) + 1))


def full_rows(batch):
    return np.concatenate([batch.tokens_BT, batch.targets_BT[:, -1:]], axis=1)


def test_the_largest_that_fits_is_taken_and_the_shortest_is_cropped(store_of):
    plan = BestFit(store_of([4, 9, 2, 5]), 4, 9, seed=0, fill=True, split=False)
    # Sizes with BOS are 5, 10, 3, 6; the row holds 10. The buffer is never refilled with less.
    assert [piece.document for piece in plan.next_row()] == [1]
    plan.buffer_size = 0
    plan.buffer = sorted(plan._key(document) for document in (0, 2, 3))
    row = plan.next_row()  # 6, then 3 fits in 4, then 1 is left for the shortest, 5
    assert [piece.document for piece in row] == [3, 2, 0]
    assert row[2].stop - row[2].start == 0
    assert (plan.used, plan.dropped) == (20, 4)


def test_long_documents_do_not_wait_forever(store_of):
    lengths = [3] * 90 + [50 + i for i in range(10)]
    plan = BestFit(store_of(lengths), 20, 15, seed=0, fill=True, split=False)
    rows = [plan.next_row() for _ in range(60)]
    assert set(range(90, 100)) <= {piece.document for row in rows for piece in row}


@given(lengths=LENGTHS, length=st.integers(2, 30))
def test_segments_positions_and_weights(store_of, lengths, length):
    store = store_of(lengths)
    plan = padded(store_of([min(n, length) for n in lengths]), PaddedConfig(buffer=5), length, 0)
    rows = [plan.next_row() for _ in range(4)]
    batch = assemble(store, rows, length, segments=True)
    for row, segments, positions, weights in zip(
        rows, batch.segments_BT, batch.positions_BT, batch.weights_BT
    ):
        sizes = [1 + piece.stop - piece.start for piece in row]
        padding = [0] * (length + 1 - sum(sizes))
        want_segments = [i + 1 for i, n in enumerate(sizes) for _ in range(n)] + padding
        want_positions = [i for n in sizes for i in range(n)] + padding
        assert segments.tolist() == want_segments[:length]
        assert positions.tolist() == want_positions[:length]
        assert weights.tolist() == [float(i + 1 < sum(sizes)) for i in range(length)]


def test_a_window_that_begins_inside_a_document_has_segments_from_one(store_of):
    store = store_of([4, 3])
    batch = assemble(store, [Stream(store).window(2, 8)], 7, segments=True)
    assert batch.tokens_BT.tolist() == [[2, 3, 4, BOS, 5, 6, 7]]
    assert batch.targets_BT.tolist() == [[3, 4, BOS, 5, 6, 7, BOS]]
    assert batch.segments_BT.tolist() == [[1, 1, 1, 2, 2, 2, 2]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert [array.dtype for array in batch] == ["int32", "int32", "float32", "int32", "int32"]


def test_documents_much_longer_than_a_row_are_refused_where_they_would_be_cut(store_of):
    store = store_of([1000])
    for make, config in (
        (padded, PaddedConfig()),
        (best_fit, BestFitConfig(long_documents="crop")),
    ):
        with pytest.raises(UserError, match=r"would drop 90% of the tokens.*sequence_length 100"):
            make(store, config, 100, 0)
    assert size(best_fit(store, BestFitConfig(), 100, 0).next_row()) == 101
