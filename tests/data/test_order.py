"""The order of an epoch by blocks: every item once, well mixed, each block needed for a while."""

import numpy as np
import pytest

from jaxtrain.data import DataConfig, train_batches
from jaxtrain.data.batches.order import BlockOrder
from jaxtrain.data.store import blocks


def edges_of(count: int, most: int = 30) -> np.ndarray:
    sizes = np.random.default_rng(count).integers(0, most, count)
    return np.concatenate([[0], np.cumsum(sizes)])


@pytest.mark.parametrize(
    ("count", "window"), [(1, 4), (3, 2), (7, 7), (50, 8), (300, 64), (5, 256)]
)
def test_every_item_has_one_place(count, window):
    edges = edges_of(count)
    order, total = BlockOrder(edges, window), int(edges[-1])
    whole = order.take(0, total, 5, 0)
    assert sorted(whole.tolist()) == list(range(total))
    fresh = BlockOrder(edges, window)
    np.testing.assert_array_equal(fresh.take(total // 3, total, 5, 0), whole[total // 3 :])
    assert total < 9 or (order.take(0, total, 5, 1) != whole).any()


def test_a_slot_mixes_the_blocks_of_a_window_and_needs_no_other():
    edges = np.arange(0, 100_001, 1000)
    order = BlockOrder(edges, 10)
    for slot in (0, 5, 99):
        items = order.take(slot * 1000, (slot + 1) * 1000, 0, 0)
        assert order.slot(slot * 1000, 0, 0) == slot
        counts = np.bincount(items // 1000, minlength=100)
        assert (counts[order.needed(slot, 0, 0)] == 100).all()
        firsts = items // 1000
        assert len({*firsts[:100].tolist()}) == 10  # not one block after the other
    one, two = order.needed(50, 0, 0), order.needed(51, 0, 0)
    assert one[1:] == two[:-1]


def test_blocks_are_of_whole_documents_and_cover_all_records():
    random = np.random.default_rng(0)
    lengths = random.integers(0, 3000, 5000).astype(np.uint32)
    lengths[[7, 8, 4999]] = (3 << 20) + 5, 1 << 20, 9
    records = -(-lengths.astype(np.int64) // blocks.RECORD_TOKENS)
    first_record = np.concatenate([[0], np.cumsum(records)])
    found = blocks.blocks_of(lengths, first_record)
    assert found.tokens[0] == 0 and found.tokens[-1] == lengths.sum(dtype=np.int64)
    assert found.records[-1] == first_record[-1]
    sizes = np.diff(found.tokens)
    assert (sizes > 0).all() and sizes.max() < 2 * blocks.BLOCK_TOKENS
    offsets = [
        blocks.record_offsets(lengths, first_record, *found.records[i : i + 2].tolist())
        for i in range(len(sizes))
    ]
    assert [int(one[-1]) for one in offsets] == sizes.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concat", "best_fit", "padded", "one_document"])
@pytest.mark.quick("best_fit")
def test_a_run_by_blocks_goes_on_where_it_was(store_of, monkeypatch, packing):
    for module in ("store.blocks", "batches.concat"):
        monkeypatch.setattr(f"jaxtrain.data.{module}.BLOCK_TOKENS", 1 << 13)
    store = store_of(np.random.default_rng(0).integers(1, 60, 3000))
    config = DataConfig.model_validate(
        {"packing": {"name": packing}, "shuffle": {"name": "blocks", "window": 3}}
    )
    sizes = {"batch_size": 8, "sequence_length": 64}
    with train_batches(store, config=config, **sizes) as loader:
        whole = [np.stack(next(loader)[:3]) for _ in range(90)]
    with train_batches(store, config=config, **sizes) as loader:
        for _ in range(30):
            next(loader)
        state = loader.get_state()
    with train_batches(store, config=config, **sizes, state=state) as loader:
        for before in whole[30:]:
            np.testing.assert_array_equal(before, np.stack(next(loader)[:3]))
