"""Each document is used once before any is used twice: in every packing, at every step."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import DataConfig, train_batches
from jaxtrain.data.batches.loader import make_batch_plan

PACKINGS = [
    {"name": "concat"},
    {"name": "best_fit"},
    {"name": "best_fit", "long_documents": "crop"},
    {"name": "best_fit", "carry_tails": False},
    {"name": "best_fit", "long_documents": "crop", "carry_tails": False},
    {"name": "padded"},
]
MOST = 0.7  # of a corpus that may be cropped away, or the packing refuses it
T, B, STEPS = 24, 4, 8
LENGTHS = st.lists(st.integers(0, 70), min_size=3, max_size=60).filter(
    lambda lengths: T < sum(lengths) and sum(max(n - T, 0) for n in lengths) < MOST * sum(lengths)
)


def config_of(packing, buffer, workers=0, stages=(), **more):
    packing = packing if packing["name"] == "concat" else packing | {"buffer": buffer}
    fields = {"packing": packing, "workers": workers, "stages": stages, "prefetch": 2}
    return DataConfig.model_validate(fields | more)


def batches_of(stores, config, *, processes, middle, steps=STEPS):
    """The tokens of each step's rows, those that are only targets too, on so many processes, the
    run being stopped and resumed after step `middle`."""
    parts = []
    for index in range(processes):
        here = {"process_index": index, "process_count": processes}
        sizes = {"config": config, "batch_size": B, "sequence_length": T}
        with train_batches(stores, **sizes, **here) as first:
            mine = [tokens_of(next(first), config) for _ in range(middle)]
            state = json.loads(json.dumps(first.get_state()))
        with train_batches(stores, **sizes, **here, state=state) as second:
            mine += [tokens_of(next(second), config) for _ in range(steps - middle)]
        parts.append(mine)
    return [np.concatenate(step) for step in zip(*parts)]


def tokens_of(batch, config):
    """Of a window the last token is the first of another; of a packed row it is its last one."""
    last = batch.targets_BT[:, -1:]
    rows = [batch.tokens_BT] if config.packing.name == "concat" else [batch.tokens_BT, last]
    return np.concatenate([part.ravel() for part in rows])


def must_be_even(lengths, packing, length=T):
    """The tokens, numbered from 1, that an epoch has to use: all, or where ends are cropped the
    first of each document, or of each of its parts."""
    whole = packing["name"] == "concat" or packing.get("carry_tails", packing["name"] != "padded")
    split = packing.get("long_documents", "split") == "split" and packing["name"] != "padded"
    tokens, first = [], 1
    for count in lengths:
        own = np.arange(first, first + count)
        kept = own if split or packing["name"] == "concat" else own[:length]
        tokens += (kept if whole else kept[::length]).tolist()
        first += count
    return np.array(tokens)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    lengths=LENGTHS,
    packing=st.sampled_from(PACKINGS),
    buffer=st.integers(1, 70),
    workers=st.sampled_from([0, 0, 0, 2]),
    processes=st.sampled_from([1, 1, 2]),
    middle=st.integers(0, STEPS),
    seed=st.integers(0, 3),
)
def test_uses_differ_by_at_most_one_at_every_step(
    store_of, lengths, packing, buffer, workers, processes, middle, seed
):
    config = config_of(packing, buffer, workers, seed=seed)
    watched = must_be_even(lengths, packing)
    uses = np.zeros(sum(lengths) + 1, int)
    for tokens in batches_of(store_of(lengths), config, processes=processes, middle=middle):
        np.add.at(uses, tokens, 1)
        assert np.ptp(uses[watched]) <= 1


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.tuples(LENGTHS, LENGTHS),
    packing=st.sampled_from(PACKINGS),
    buffer=st.integers(1, 70),
    weights=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    middle=st.integers(0, STEPS),
)
def test_in_a_mixture_with_stages_too(store_of, lengths, packing, buffer, weights, middle):
    """Also while rows are short; only the tokens are watched that short rows do not crop."""
    stages = [{"tokens": 4 * B * T, "sequence_length": 8}, {"weights": {"a": 1, "b": 2}}]
    part = lambda weight: {"source": {"name": "text"}, "weight": weight}
    train = {"name": "mixture", "sources": dict(zip("ab", map(part, weights)))}
    config = config_of(packing, buffer, stages=stages, train=train)
    stores = {name: store_of(own) for name, own in zip("ab", lengths)}
    plan = make_batch_plan(stores, config, B, T)
    uses = {name: np.zeros(sum(own) + 1, int) for name, own in zip("ab", lengths)}
    starts = {name: np.cumsum([1, *own]) for name, own in zip("ab", lengths)}
    loses = packing["name"] == "padded" or not packing.get("carry_tails", True)
    seen = packing | {"long_documents": "crop"} if loses else packing
    watched = {n: must_be_even(own, seen, T if loses else 8) for n, own in zip("ab", lengths)}
    for step in range(STEPS):
        if step == middle:
            state = json.loads(json.dumps(plan.get_state()))
            plan = make_batch_plan(stores, config, B, T)
            plan.set_state(state)
        for name, row in next(plan).rows:
            last = len(row) - 1 if config.packing.name == "concat" else None
            for i, piece in enumerate(row):
                first = starts[name][piece.document]
                stop = piece.stop - (i == last and piece.stop > piece.start)
                uses[name][first + piece.start : first + stop] += 1
        assert all(np.ptp(uses[name][watched[name]]) <= 1 for name in "ab")


@pytest.mark.parametrize("documents", [30, 300])
def test_documents_drawn_by_weight_have_what_is_due_to_them(store_of, documents):
    """After twenty epochs each has been trained on as often as its share, to within two times."""
    random = np.random.default_rng(0)
    lengths = random.integers(3, 60, documents).tolist()
    weights = random.lognormal(0, 1.5, documents)
    store = replace(store_of(lengths), weights=weights)
    config = config_of({"name": "padded"}, 1000)
    plan = make_batch_plan({"train": store}, config, B, 64)
    uses = Counter()
    while plan.get_state()["sources"]["train"]["whole"] < 20:
        uses.update(piece.document for _, row in next(plan).rows for piece in row)
    due = 20 * documents * weights / weights.sum()
    drawn = np.array([uses[i] for i in range(documents)])
    one_step = B * 64 / np.mean(lengths)
    assert np.abs(drawn - due).max() < 2 + one_step * weights.max() / weights.sum()
