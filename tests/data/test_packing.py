import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data.batches.concat import TokenStream
from jaxtrain.data.batches.one_document import OneDocumentConfig, make_one_document
from jaxtrain.data.batches.order import shuffled_index
from jaxtrain.data.batches.packing import (
    PACKINGS,
    BestFitConfig,
    ConcatConfig,
    PaddedConfig,
    assemble,
    make_best_fit,
    make_padded,
)
from jaxtrain.data.batches.planning import (
    BestFit,
    Concat,
    Fragment,
    Piece,
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
    assert set(PACKINGS) == {"concat", "best_fit", "padded", "one_document"}


@given(count=st.integers(1, 300), seed=st.integers(0, 2**40), epoch=st.integers(0, 9))
def test_permute_covers_everything_once(count, seed, epoch):
    assert sorted(shuffled_index(i, count, seed, epoch) for i in range(count)) == list(range(count))


def test_permute_depends_on_seed_and_epoch():
    orders = {tuple(shuffled_index(i, 50, s, e) for i in range(50)) for s in (0, 1) for e in (0, 1)}
    assert len(orders) == 4


@given(lengths=LENGTHS, start=st.integers(0, 2000), count=st.integers(1, 100))
def test_a_window_is_the_stream_read_in_a_circle(store_of, lengths, start, count):
    store, stream = store_of(lengths), reference_stream(lengths)
    row = TokenStream(store).window(start, count)
    batch = assemble([(store, row)], count - 1, segments=False)
    want = [stream[(start + i) % len(stream)] for i in range(count)]
    assert [*batch.tokens_BT[0], batch.targets_BT[0, -1]] == want if count > 1 else True
    assert size(row) == count


@given(lengths=LENGTHS, length=st.integers(1, 30), epoch=st.integers(0, 2))
def test_concat_predicts_each_token_once_an_epoch(store_of, lengths, length, epoch):
    store = store_of(lengths)
    plan = Concat(store, length, 3)
    units = -(-(epoch + 1) * plan.tape // length)
    rows = [row for _ in range(units) for row in plan.unit()]
    batch = assemble([(store, row) for row in rows], length, segments=False)
    for tokens in (batch.tokens_BT, batch.targets_BT):
        uses = np.bincount(tokens.ravel(), minlength=sum(lengths) + 1)[1:]
        assert epoch + 1 <= uses.min() and uses.max() <= -(-units * length // plan.tape)
    assert (batch.weights_BT == 1).all()


PLANS = {
    "length": st.integers(1, 30),
    "buffer": st.integers(1, 20),
    "fill": st.booleans(),
    "split": st.booleans(),
    "carry": st.booleans(),
    "cuts": st.lists(st.sampled_from([1, 2, 3]), min_size=3, max_size=9),
}


def tokens_in(fragments):
    """Tokens of fragments without BOS, and what they lost before."""
    return sum(f.stop - f.start + f.lost for f in fragments)


@settings(max_examples=80)
@given(lengths=LENGTHS, **PLANS)
def test_best_fit_loses_only_what_it_counts(
    store_of, lengths, length, buffer, fill, split, carry, cuts
):
    length *= 6  # rows of a third or half of it come out even
    make = lambda: BestFit(
        store_of(lengths), buffer, length, 1, fill=fill, split=split, carry=carry
    )
    plan, rows = make(), []
    for cut in cuts:
        unit = plan.unit(cut)
        capacity = length // cut + 1
        assert len(unit) == cut and all(piece.bos for row in unit for piece in row)
        assert all(size(row) == capacity if fill else 0 < size(row) <= capacity for row in unit)
        rows += unit
    # What was drawn is in the rows, was dropped, or still waits.
    source, drawn = make(), []
    while source.drawn < plan.drawn:
        drawn += drawn_one(source)
    placed = sum(piece.stop - piece.start for row in rows for piece in row)
    assert plan.used == sum(map(size, rows))
    assert tokens_in(drawn) == placed + plan.dropped + tokens_in(plan.waiting.values())
    assert plan.used + plan.padding == sum(length + cut for cut in cuts)
    if split and (carry or not fill):
        assert plan.dropped == 0


@settings(max_examples=60)
@given(lengths=LENGTHS, length=st.integers(1, 30), buffer=st.integers(1, 20), carry=st.booleans())
def test_the_bits_place_as_a_linear_scan_does(store_of, lengths, length, buffer, carry):
    make = lambda: BestFit(store_of(lengths), buffer, length, 1, fill=True, split=True, carry=carry)
    plan, source = make(), make()
    count = min(buffer, plan.count)
    waiting = []  # in the order in which they came
    for _ in range(20):
        room, want = length + 1, []
        while room:
            if len(waiting) <= plan.low:
                while len(waiting) < count and not (waiting and source.drawn % source.count == 0):
                    waiting += drawn_one(source)
            sizes = [1 + f.stop - f.start for f in waiting]
            best = chosen(sizes, room, length + 1)
            document, start, stop, _ = waiting[sizes.index(best)]
            end = min(stop, start + room - 1)
            want.append((document, True, start, end))
            if room > 1 or best == 1:
                waiting.pop(sizes.index(best))
                if carry and end < stop:
                    waiting.append(Fragment(document, end, stop, 0))
            room -= 1 + end - start
        assert plan.unit() == [want]


def drawn_one(source):
    """The next part of the order of a plan whose buffer is empty, which it is again."""
    source.buffer_size = 1
    source._refill()
    found = list(source.waiting.values())
    source._empty()
    return found


def chosen(sizes, room, row):
    """Which size is placed: `BestFit`'s rules, as they are said."""
    oldest, fitting = sizes[0], [n for n in sizes if n <= room]
    if not fitting:
        return min(sizes)
    if oldest <= room and room / 2 > sum(sizes) / len(sizes):
        return oldest
    if room in sizes and (room < row or oldest == row):
        return room
    pairs = [a for i, a in enumerate(sizes) for b in sizes[:i] + sizes[i + 1 :] if a + b == room]
    return max(pairs) if pairs else oldest if oldest <= room else max(fitting)


@given(lengths=LENGTHS, length=st.integers(1, 30))
def test_split_parts_are_the_documents(store_of, lengths, length):
    store = store_of(lengths)
    plan = BestFit(store, 4, length, 0, fill=True, split=True)
    plan.buffer_size = plan.count
    plan._refill()
    pieces = [Piece(d, True, start, stop) for d, start, stop, _ in sorted(plan.waiting.values())]
    batch = assemble([(store, [piece]) for piece in pieces], length, segments=False)
    seen = [t for ids, n in zip(full_rows(batch), pieces) for t in ids[1 : 1 + n.stop - n.start]]
    assert seen == list(range(1, sum(lengths) + 1))


def full_rows(batch):
    return np.concatenate([batch.tokens_BT, batch.targets_BT[:, -1:]], axis=1)


@pytest.mark.parametrize("carry", [False, True])
def test_rows_are_filled_exactly_or_the_shortest_is_cut(store_of, carry):
    plan = BestFit(store_of([9] * 20), 20, 9, 0, fill=True, split=False, carry=carry)

    def row_of(*lengths):
        plan._empty()
        plan._put([Fragment(i, 0, length, 0) for i, length in enumerate(lengths)])
        plan.low = -1  # nothing is drawn
        return [(piece.document, piece.stop) for piece in plan.unit()[0]]

    # A row holds 10 tokens, and each document has a BOS.
    assert row_of(5, 6, 2) == [(1, 6), (2, 2)]  # two that fill it
    assert row_of(1, 9, 2, 7, 8) == [(3, 7), (0, 1)]  # before one that does, which waits its turn
    assert row_of(2, 1, 4, 1) == [(0, 2), (1, 1), (2, 4)]  # small ones as they came; an exact one
    assert row_of(8, 9, 9) == [(0, 8), (1, 0)]  # one place: a BOS, and nothing is lost
    assert plan.dropped == 0 and len(plan.waiting) == 2
    assert row_of(6, 8, 7) == [(0, 6), (2, 2)]  # the shortest of those that do not fit
    assert plan.dropped == (0 if carry else 5)
    assert [f.stop - f.start for f in plan.waiting.values()] == ([8, 5] if carry else [8])


def test_long_documents_do_not_wait_forever(store_of):
    lengths = [3] * 90 + [50 + i for i in range(10)]
    plan = BestFit(store_of(lengths), 20, 15, 0, fill=True, split=False)
    rows = [plan.unit()[0] for _ in range(60)]
    assert set(range(90, 100)) <= {piece.document for row in rows for piece in row}


@pytest.mark.parametrize("buffer", [3, 1000])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.quick("concat-3", "best_fit-3", "padded-3", "one_document-3")
def test_the_epochs_of_a_corpus_may_be_limited(store_of, packing, buffer):
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 60, 40)]
    config = {
        "concat": ConcatConfig(),
        "best_fit": BestFitConfig(buffer=buffer, carry_tails=True),
        "padded": PaddedConfig(buffer=buffer),
        "one_document": OneDocumentConfig(),
    }[packing]
    plan = PACKINGS[packing](store_of(lengths), config, 64, 0, max_epochs=1.5)
    rows = [row for unit in iter(plan.unit, None) for row in unit]
    of = lambda row: [
        (p.document, t) for p in row for t in [-1] * p.bos + [*range(p.start, p.stop)]
    ]
    again = packing == "concat"  # the last token of a window is the first of another
    tokens = [token for row in rows for token in (of(row)[:-1] if again else of(row))]
    tokens = [token for token in tokens if token[1] >= 0]
    counts = [tokens.count(token) for token in set(tokens)]
    assert max(counts) == 2 and plan.unit() is None
    whole = {(d, t) for d, length in enumerate(lengths) for t in range(length)}
    assert len(whole - set(tokens)) <= (0 if packing in ("padded", "one_document") else 64)
    assert abs(len(tokens) - 1.5 * len(whole)) < 0.1 * len(whole)


@given(lengths=LENGTHS, length=st.integers(2, 30), split=st.booleans())
def test_one_document_a_row_and_the_padding_is_counted(store_of, lengths, length, split):
    """An epoch has each document once, in parts of at most T tokens or without its end."""
    config = OneDocumentConfig(long_documents="split" if split else "crop")
    if not split and sum(max(n - length, 0) for n in lengths) > 0.75 * sum(lengths):
        return
    plan = make_one_document(store_of(lengths), config, length, 0, max_epochs=1.0)
    rows = [row for unit in iter(plan.unit, None) for row in unit]
    assert all(len(row) == 1 and row[0].bos and size(row) <= length + 1 for row in rows)
    pieces = [(row[0].document, row[0].start, row[0].stop) for row in rows]
    stops = lambda n: range(0, max(n, 1), length) if split else [0]
    assert sorted(pieces) == [
        (d, start, min(start + length, n)) for d, n in enumerate(lengths) for start in stops(n)
    ]
    assert plan.counts.padding == sum(length + 1 - size(row) for row in rows)
    assert plan.counts.used == sum(map(size, rows))
    assert plan.counts.dropped == (0 if split else sum(max(n - length, 0) for n in lengths))


def test_one_document_rows_are_in_random_order(store_of):
    plan = make_one_document(store_of([5] * 40), OneDocumentConfig(), 8, 0, max_epochs=1.0)
    order = [row[0].document for unit in iter(plan.unit, None) for row in unit]
    assert sorted(order) == list(range(40)) != order


def test_a_corpus_larger_than_the_list_is_covered_once_too(store_of, monkeypatch):
    monkeypatch.setattr("jaxtrain.data.batches.order.LISTED", 10)
    plan = BestFit(store_of([3] * 50), 5, 15, 0, fill=False, split=False, max_epochs=1.0)
    documents = [p.document for unit in iter(plan.unit, None) for row in unit for p in row]
    assert sorted(documents) == list(range(50)) != documents


@given(lengths=LENGTHS, length=st.integers(2, 30))
def test_segments_positions_and_weights(store_of, lengths, length):
    store = store_of(lengths)
    plan = make_padded(
        store_of([min(n, length) for n in lengths]), PaddedConfig(buffer=5), length, 0
    )
    rows = [plan.unit()[0] for _ in range(4)]
    batch = assemble([(store, row) for row in rows], length, segments=True)
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
    batch = assemble([(store, TokenStream(store).window(2, 8))], 7, segments=True)
    assert batch.tokens_BT.tolist() == [[2, 3, 4, BOS, 5, 6, 7]]
    assert batch.targets_BT.tolist() == [[3, 4, BOS, 5, 6, 7, BOS]]
    assert batch.segments_BT.tolist() == [[1, 1, 1, 2, 2, 2, 2]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert batch.reference_BT is None
    assert [array.dtype for array in batch[:5]] == ["int32", "int32", "float32", "int32", "int32"]


def test_documents_much_longer_than_a_row_are_refused_where_they_would_be_cut(store_of):
    store = store_of([1000])
    for make, config in (
        (make_padded, PaddedConfig()),
        (make_one_document, OneDocumentConfig(long_documents="crop")),
        (make_best_fit, BestFitConfig(long_documents="crop")),
    ):
        with pytest.raises(UserError, match=r"would drop 90% of the tokens.*sequence_length 100"):
            make(store, config, 100, 0)
    assert size(make_best_fit(store, BestFitConfig(), 100, 0).unit()[0]) == 101
