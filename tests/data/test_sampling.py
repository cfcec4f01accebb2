"""Documents drawn with a probability proportional to a score: exact, and resumed exactly."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain.data import DataConfig, prepare, stores_of, train_batches
from jaxtrain.data.batches.planning import BestFit
from jaxtrain.settings import UserError

WEIGHTS = [3.0, 0, 0.5, 1, 7.5, 0, 2]


def config(folder, train, **options):
    rest = {"validation": {"name": "none"}, "tokenizer": {"name": "bytes"}, "workers": 0}
    rest |= {
        "packing": {"name": "best_fit", "buffer": 3, "carry_tails": False},
        "cache_dir": str(folder / "cache"),
    }
    return DataConfig(**{"train": train, **rest, **options})


def jsonl(folder, weights, name="w"):
    path = folder / f"{name}.jsonl"
    rows = [{"text": chr(97 + i) * (5 + i), "w": weight} for i, weight in enumerate(weights)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "jsonl", "path": str(path), "sample_by": "w"}


@pytest.mark.parametrize("listed", [1 << 16, 4])
@pytest.mark.quick("65536")
def test_an_epoch_has_each_part_its_share_of_times(store_of, monkeypatch, listed):
    """Also of documents that are split into parts, and whichever way the order is made."""
    monkeypatch.setattr("jaxtrain.data.batches.order.LISTED", listed)
    lengths = [3, 9, 25, 4, 7, 12, 10]
    store = dataclasses.replace(store_of(lengths), weights=np.array(WEIGHTS))
    plan = BestFit(store, 1, 10, 5, fill=False, split=True)
    parts = np.maximum(-(-np.array(lengths) // 10), 1)
    assert plan.count == parts.sum() == 10
    totals, orders = Counter(), []
    for _ in range(40):
        drawn = []
        while len(drawn) < plan.count:
            plan._look_up()
            drawn += [(f.document, f.start) for f in plan._next]
            plan.drawn += len(plan._next)
            plan._next.clear()
        counts = Counter(drawn)
        for document, weight in enumerate(WEIGHTS):
            for part in range(parts[document]):
                share = plan.count * weight / float(np.dot(WEIGHTS, parts))
                assert counts[document, 10 * part] - share < 1
                assert share - counts[document, 10 * part] < 1
        totals += counts
        orders.append(tuple(drawn))
    assert len(set(orders)) > 30  # the epochs differ
    for document, weight in enumerate(WEIGHTS):
        for part in range(parts[document]):
            share = 400 * weight / float(np.dot(WEIGHTS, parts))
            assert abs(totals[document, 10 * part] - share) < 12


def test_batches_have_the_shares_and_go_on_exactly(tmp_path):
    train = jsonl(tmp_path, [4, 1, None, 0, 3])
    c = config(tmp_path, train)
    stores = stores_of(prepare(c).train)
    assert stores["train"].weights.tolist() == [4, 1, 0, 0, 3]
    make = lambda state=None: train_batches(
        stores, config=c, batch_size=2, sequence_length=9, segments=True, state=state
    )
    with make() as loader:
        batches, state = [], None
        for step in range(120):
            batches.append(next(loader))
            state = loader.get_state() if step == 59 else state
    with make(json.loads(json.dumps(state))) as again:
        for batch in batches[60:]:
            np.testing.assert_array_equal(next(again).tokens_BT, batch.tokens_BT)
    starts = Counter()
    for batch in batches:
        first = batch.positions_BT == 0
        starts.update(batch.targets_BT[first & (batch.segments_BT > 0)].tolist())
    total = sum(starts.values())
    for letter, weight in zip("abcde", [4, 1, 0, 0, 3]):
        assert abs(starts[ord(letter)] / total - weight / 8) < 0.03


def test_parquet_filters_and_a_mixture(tmp_path):
    table = pa.table({"text": list("abcdefghijklmnop"), "w": [float(i) for i in range(16)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=3)
    best = {"name": "exact_duplicates"}, {"name": "score", "field": "w", "minimum": 4}
    parquet = {"name": "parquet", "path": str(tmp_path / "t.parquet"), "sample_by": "w"}
    plain = jsonl(tmp_path, [1] * 16) | {"sample_by": None}
    sources = {"a": {"source": parquet | {"filters": best}}, "b": {"source": plain}}
    held_out = {"name": "documents", "fraction": 0.3}
    for validation in ({"name": "none"}, held_out):
        c = config(tmp_path, {"name": "mixture", "sources": sources}, validation=validation)
        prepared = prepare(c)
        stores = stores_of(prepared.train)
        assert stores["b"].weights is None
        read = lambda store, i: chr(store.read(i, 0, 1)[0])
        letters = [read(stores["a"], i) for i in range(stores["a"].documents)]
        assert stores["a"].weights.tolist() == [ord(letter) - 97.0 for letter in letters]
    assert prepared.validation is not None and set(letters) < set("efghijklmnop")


def test_bad_weights_are_one_line(tmp_path):
    for weight in (-1, "high", float("nan"), float("inf")):
        with pytest.raises(UserError, match="w.jsonl: data.train.sample_by needs a number"):
            prepare(config(tmp_path, jsonl(tmp_path, [1, weight])))
    with pytest.raises(ValueError, match="source train draws whole documents: set packing.name"):
        config(tmp_path, jsonl(tmp_path, [1]), packing={"name": "concat"})
    c = config(tmp_path, jsonl(tmp_path, [1, 2]) | {"sample_by": "other"})
    with pytest.raises(UserError, match="w.jsonl has a number above 0 in 'other'"):
        prepare(c)
