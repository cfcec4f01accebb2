import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import loader as bench
from jaxtrain.data import DataConfig, train_batches, validation_batches
from jaxtrain.settings import UserError

LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 60, 40)]
PACKINGS = [
    {"name": "concat"},
    {"name": "best_fit", "buffer": 7},
    {"name": "best_fit", "buffer": 7, "long_documents": "crop"},
    {"name": "best_fit", "buffer": 7, "carry_tails": False},
    {"name": "padded", "buffer": 7},
]
each_packing = pytest.mark.parametrize(
    "packing", PACKINGS, ids=lambda p: "-".join(map(str, p.values()))
)


def loader(store, packing, *, seed=0, workers=1, **options):
    config = DataConfig(packing=packing, seed=seed, prefetch=3, workers=workers)
    settings = {"batch_size": 4, "sequence_length": 16, **options}
    return train_batches(store, config=config, **settings)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


@each_packing
@pytest.mark.quick("concat", "best_fit-7", "padded-7")
def test_resumed_is_uninterrupted(store_of, packing):
    store = store_of(LENGTHS)
    with loader(store, packing) as whole:
        want = take(whole, 30)
    with loader(store, packing) as first:
        assert_same(take(first, 11), want[:11])
        state = json.loads(json.dumps(first.get_state()))
    with loader(store, packing, state=state) as second:
        assert second.get_state() == state
        assert_same(take(second, 19), want[11:])


@each_packing
@pytest.mark.quick("concat", "best_fit-7-False")
def test_processes_hold_parts_of_the_same_batches(store_of, packing):
    store = store_of(LENGTHS)
    with loader(store, packing) as one:
        want = take(one, 12)
        state = one.get_state()
        want_next = next(one)
    for count in (2, 4):
        parts, resumed = [], []
        for index in range(count):
            here = {"process_index": index, "process_count": count}
            with loader(store, packing, **here) as part:
                parts.append(take(part, 12))
                assert part.get_state() == state
            with loader(store, packing, state=state, **here) as part:
                resumed.append(next(part))
        for step in range(12):
            assert_same([want[step]], [joined([part[step] for part in parts])])
        assert_same([want_next], [joined(resumed)])


@each_packing
@pytest.mark.quick("concat", "best_fit-7")
def test_workers_change_nothing(store_of, packing):
    store = store_of(LENGTHS)
    want = None
    for workers in (0, 1, 4):
        with loader(store, packing, workers=workers, segments=True) as batches:
            got = take(batches, 8), batches.get_state()
        want = want or got
        assert_same(got[0], want[0])
        assert got[1] == want[1]


def joined(batches):
    return [None if a[0] is None else np.concatenate(a) for a in zip(*batches)]


@each_packing
@pytest.mark.quick("best_fit-7-crop")
def test_seeds_and_epochs_differ(store_of, packing):
    store = store_of(LENGTHS)
    tokens = []
    for seed in (0, 1):
        with loader(store, packing, seed=seed) as batches:
            tokens.append(np.stack([b.tokens_BT for b in take(batches, 40)]))
    assert (tokens[0] != tokens[1]).any()
    assert (tokens[0][:20] != tokens[0][20:]).any()


@each_packing
@pytest.mark.quick("best_fit-7", "concat")
def test_no_token_is_left_out_in_the_long_run(store_of, packing):
    lengths = [n % 15 for n in LENGTHS]
    with loader(store_of(lengths), packing) as batches:
        seen = set(np.concatenate([b.targets_BT for b in take(batches, 150)]).ravel())
    assert set(range(1, sum(lengths) + 1)) <= seen


def test_segments_come_when_asked_for_and_always_with_padding(store_of):
    for packing in PACKINGS:
        for segments in (False, True):
            with loader(store_of(LENGTHS), packing, segments=segments) as batches:
                batch = next(batches)
            expected = segments or packing["name"] == "padded"
            assert (batch.segments_BT is not None) == expected
            assert (batch.positions_BT is not None) == expected


def test_what_packing_drops_is_reported_as_the_consumer_saw_it(store_of):
    crop = {"name": "best_fit", "buffer": 4, "long_documents": "crop"}
    with loader(store_of([31] * 20), crop, sequence_length=15) as batches:
        assert batches.statistics()["data_crop"] == 0
        take(batches, 3)
        assert 0 < batches.wait_s < 60
        assert batches.get_state()["position"]["sources"]["train"]["counts"][0] == 3 * 4 * 16
        figures = batches.statistics()
        assert (figures["data_crop"], figures["data_fill"]) == (0.5, 1.0)
        assert figures["data_epochs"] == 12 / 20 and "data_epoch_crop" not in figures
        take(batches, 2)
        assert batches.ended() == ["train: epoch 1: 50.0% of tokens cropped, 0.0% padding"]
        figures = batches.statistics()
        assert figures["data_epoch_crop"] == 0.5 and figures["data_epoch_cropped"] == 20
        take(batches, 1)
        assert batches.ended() == []
    with loader(store_of([11] * 20), {"name": "padded"}, sequence_length=15) as batches:
        take(batches, 3)
        figures = batches.statistics()
        assert (figures["data_crop"], figures["data_fill"]) == (0.0, 0.75)
    for packing in PACKINGS:
        with loader(store_of(LENGTHS), packing) as batches:
            filled = np.mean([b.weights_BT.mean() for b in take(batches, 5)])
            figures = batches.statistics()
            crop, fill = figures["data_crop"], figures["data_fill"]
        assert abs(filled - fill) < 0.05
        loses = packing["name"] == "padded" or packing.get("long_documents") == "crop"
        assert (crop > 0) == (loses or not packing.get("carry_tails", True))


def test_a_closed_loader_ends_and_keeps_its_state(store_of):
    for packing in PACKINGS:
        batches = loader(store_of(LENGTHS), packing)
        take(batches, 2)
        state = batches.get_state()
        batches.close()
        batches.close()
        assert list(batches) == [] and batches.get_state() == state


def test_bad_requests_are_refused(store_of):
    store = store_of(LENGTHS)
    with pytest.raises(UserError, match="batch of 4 rows does not divide over 3 processes"):
        loader(store, PACKINGS[0], process_count=3)
    with pytest.raises(UserError, match="has 5 tokens, fewer than one row of sequence_length 16"):
        loader(store_of([5]), PACKINGS[0])
    with loader(store, PACKINGS[0]) as batches:
        state = batches.get_state()
    for change, words in (
        ({"seed": 1}, "seed 0, but this run has 1"),
        ({"sequence_length": 8}, "sequence_length 16, but this run has 8"),
        ({"batch_size": 8}, "batch_size 4, but this run has 8"),
    ):
        with pytest.raises(UserError, match=f"data position was saved with {words}"):
            loader(store, PACKINGS[0], state=state, **change)
    with pytest.raises(UserError, match="saved with packing"):
        loader(store, PACKINGS[1], state=state)
    other = store_of(LENGTHS[1:])
    with pytest.raises(UserError, match="saved with data"):
        loader(other, PACKINGS[0], state=state)
    left = replace(other, skipped={"/cache/train/00001.array_record": 1})
    with pytest.raises(
        UserError, match="cannot resume without .*00001.array_record; delete /cache"
    ):
        loader(left, PACKINGS[0], state=state)


@pytest.mark.parametrize("count, length", [(1, 16), (2, 7), (4, 100), (1, 3000)])
def test_validation_predicts_every_token_once(store_of, count, length):
    store = store_of(LENGTHS)
    parts = []
    for index in range(count):
        options = {"process_index": index, "process_count": count}
        parts.append(
            list(validation_batches(store, batch_size=4, sequence_length=length, **options))
        )
    rows = [row for step in zip(*parts, strict=True) for b in step for row in zip(*b[:3])]
    inputs, targets = [], []
    for tokens, target, weights in rows:
        real = weights == 1
        assert (weights[~real] == 0).all()
        inputs += tokens[real].tolist()
        targets += target[real].tolist()
    stream = []
    for stop, n in zip(np.cumsum(LENGTHS), LENGTHS):
        stream += [0, *range(stop - n + 1, stop + 1)]
    assert inputs == stream[:-1] and targets == stream[1:]


def test_validation_may_be_left_early_and_has_segments(store_of):
    batches = validation_batches(store_of(LENGTHS), batch_size=2, sequence_length=16, segments=True)
    batch = next(batches)
    assert batch.segments_BT[0, 0] == 1 and batch.positions_BT.max() < 16
    batches.close()


def test_the_bench_measures_every_packing(monkeypatch, tmp_path):
    for name, value in (("DOCUMENTS", 300), ("SEQUENCE", 1024), ("ROWS", 2), ("REPEATS", 1)):
        monkeypatch.setattr(bench, name, value)
    rows = bench.loader_rows()
    assert [row["name"] for row in rows] == [f"loader {name}" for name in bench.PACKINGS]
    for row in rows:
        assert min(row["tokens_per_s"], row["plan_tokens_per_cpu_s"], row["tokens_per_cpu_s"]) > 0
        assert 0 <= row["crop"] < 1 and 0.5 < row["fill"] <= 1
