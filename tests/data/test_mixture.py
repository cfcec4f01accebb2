import cProfile
import json
import pstats

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.config import Config, load_config, validate
from jaxtrain.data import DataConfig, prepare, stores_of, train_batches
from jaxtrain.data.batches.mixture import Stage, next_source, spans
from jaxtrain.settings import UserError

NAMES = ("web", "books", "code")
LENGTHS = {"web": range(5, 40), "books": range(100, 140, 3), "code": range(1, 30)}
T, B = 24, 4


@pytest.fixture(scope="module")
def stores(store_of):
    return {name: store_of(list(LENGTHS[name])) for name in NAMES}


def config_of(packing="concat", stages=(), weights=(3, 2, 1), epochs=(None, None, None), **more):
    sources = {
        name: {"source": {"name": "text", "path": name}, "weight": weight, "max_epochs": limit}
        for name, weight, limit in zip(NAMES, weights, epochs)
    }
    train = {"name": "mixture", "sources": sources}
    fields = {"train": train, "stages": stages, "packing": {"name": packing}, "seed": 3}
    return DataConfig.model_validate(fields | more)


def loader(stores, config, **options):
    return train_batches(stores, config=config, batch_size=B, sequence_length=T, **options)


def rows_by_source(state):
    return state["position"]["units"]


# ---- turns -----------------------------------------------------------------------------------


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_every_share_is_kept_to_within_a_turn_at_any_time(weights):
    shares = {str(i): weight for i, weight in enumerate(weights)}
    counts, total = dict.fromkeys(shares, 0), sum(weights)
    for turns in range(1, 200):
        counts[next_source(shares, counts)] += 1
        for name, weight in shares.items():
            assert abs(counts[name] - turns * weight / total) < 1


def test_proportions_are_exact_after_every_step(stores):
    with loader(stores, config_of()) as batches:
        for step in range(1, 30):
            next(batches)
            units = rows_by_source(batches.get_state())
            for name, share in zip(NAMES, (3 / 6, 2 / 6, 1 / 6)):
                assert abs(units[name] - step * B * share) < 1
        figures = batches.statistics()
        assert abs(figures["data_share_web"] - 0.5) < 1 / 100 and figures["data_fill"] == 1.0
        assert figures["data_epochs_code"] == pytest.approx(units["code"] * T / 464, abs=0.1)


def test_a_source_keeps_its_order_whatever_it_is_mixed_with(stores):
    def rows_of(config, name):
        with loader(stores, config) as batches:
            plan = batches._plan
        return [row for _ in range(40) for of, row in next(plan).rows if of == name][:10]

    assert rows_of(config_of(), "web") == rows_of(config_of(weights=(1, 5, 9)), "web")
    assert rows_of(config_of(), "web") != rows_of(config_of(), "code")


# ---- stages ----------------------------------------------------------------------------------

STAGES = (
    {"tokens": 3 * T * B, "sequence_length": 8},
    {"tokens": 4 * T * B, "sequence_length": 12, "weights": {"web": 1}},
    {"weights": {"books": 1, "code": 1}},
)


def test_stages_have_their_mixtures_and_lengths(stores):
    with loader(stores, config_of("best_fit", STAGES)) as batches:
        shapes, shares, before = [], [], dict.fromkeys(NAMES, 0)
        for _ in range(10):
            shapes.append(next(batches).tokens_BT.shape)
            units = rows_by_source(batches.get_state())
            shares.append([units[name] - before[name] for name in NAMES])
            before = units
    assert shapes == 3 * [(12, 8)] + 4 * [(8, 12)] + 3 * [(4, 24)]
    assert np.sum(shares[:3], 0).tolist() == [6, 4, 2]
    assert shares[3:7] == 4 * [[4, 0, 0]]
    assert shares[7:] == 3 * [[0, 2, 2]]


@pytest.mark.parametrize("packing", ["concat", "best_fit", "padded"])
def test_short_rows_see_what_long_rows_would(stores, packing):
    """The same documents in the same order of drawing, and each token once in an epoch."""
    store = stores["code"]
    seen = {}
    for length in (24, 12, 8):
        stage = [{"sequence_length": length}]
        config = DataConfig.model_validate(
            {"packing": {"name": packing, **({} if packing == "concat" else {"buffer": 6})}}
            | {"stages": stage}
        )
        with loader(store, config) as batches:
            steps = 2 if packing == "padded" else 4  # which drops what is longer than a row
            tokens = np.concatenate([next(batches).tokens_BT.ravel() for _ in range(steps)])
        tokens = tokens[tokens > 0]
        assert len(set(tokens)) == len(tokens)
        seen[length] = set(tokens.tolist())
    if packing == "concat":
        assert seen[24] == seen[12] == seen[8]
    elif packing == "best_fit":
        assert len(seen[24] & seen[8]) > 0.7 * len(seen[24])


def test_stage_steps_are_the_nearest_to_their_tokens():
    weights = {"a": 1.0, "b": 0.0}
    stages = [Stage(tokens=149), Stage(tokens=150), Stage(sequence_length=5, weights={"b": 2.0})]
    found = spans(stages, weights, 10, 10)
    assert found == [(0, {"a": 1.0}, 1, 10), (1, {"a": 1.0}, 1, 10), (3, {"b": 2.0}, 2, 10)]
    assert spans([], weights, 10, 10) == [(0, {"a": 1.0}, 1, 10)]
    with pytest.raises(UserError, match="stage 1 has sequence_length 7, which does not divide"):
        spans([Stage(sequence_length=7)], weights, 10, 10)


# ---- epochs ----------------------------------------------------------------------------------


def test_the_others_take_the_share_of_a_source_that_has_had_its_epochs(stores):
    with loader(stores, config_of(epochs=(None, None, 2))) as batches:
        while not batches.get_state()["position"]["spent"]:
            next(batches)
        at_end = rows_by_source(batches.get_state())
        assert at_end["code"] == 2 * 465 // T
        for _ in range(20):
            next(batches)
        later = rows_by_source(batches.get_state())
        assert later["code"] == at_end["code"]
        assert batches.statistics()["data_epochs_code"] == 2 * 465 // T * T / 465
    gained = {name: later[name] - at_end[name] for name in ("web", "books")}
    assert sum(gained.values()) == 20 * B and abs(gained["web"] - 20 * B * 3 / 5) < 2


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_of_a_source_is_told_with_the_batch_where_it_happens(stores, workers):
    """Once; not early by a loader that reads ahead, nor again by one that goes on from there."""
    config, told = config_of(epochs=(None, 1, 2.5), workers=workers), []
    with loader(stores, config) as batches:
        assert batches.ended() == []
        for step in range(1, 120):
            next(batches)
            told += [(step, line) for line in batches.ended() if "max_epochs" in line]
            spent = batches.get_state()["position"]["spent"]
            assert len(spent) == len(told)
            if told and told[-1][0] == step:
                state = batches.get_state()
    (first, one), (second, other) = told
    assert 1 < first < second
    assert one == "source books has had its max_epochs, 1; the others take its share"
    assert other == "source code has had its max_epochs, 2.5; the others take its share"
    with loader(stores, config, state=json.loads(json.dumps(state))) as batches:
        for _ in range(3):
            assert not any("max_epochs" in line for line in batches.ended())
            next(batches)


def test_when_all_have_had_their_epochs_the_step_is_named(stores):
    config = config_of("best_fit", epochs=(1, 1, 1))
    with (
        loader(stores, config) as batches,
        pytest.raises(UserError, match=r"step \d+: all sources .* max_epochs .web, books, code"),
    ):
        for _ in range(1000):
            next(batches)


# ---- resume, processes and workers -----------------------------------------------------------


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_resumed_on_any_number_of_processes_is_uninterrupted(stores, packing):
    config = config_of(packing, STAGES, epochs=(None, None, 3), workers=0)
    with loader(stores, config) as whole:
        states, want = [whole.get_state()], []
        for _ in range(14):
            want.append(next(whole))
            states.append(json.loads(json.dumps(whole.get_state())))
    for at in (0, 2, 3, 5, 7, 12):
        for count in (1, 2, 4):
            parts = []
            for index in range(count):
                here = {"process_index": index, "process_count": count, "state": states[at]}
                with loader(stores, config, **here) as batches:
                    parts.append([next(batches) for _ in range(2)])
                    assert batches.get_state() == states[at + 2]
            for step, pieces in enumerate(zip(*parts)):
                for got, one in zip(zip(*pieces), want[at + step]):
                    assert one is None or (np.concatenate(got) == one).all()


def test_workers_change_nothing(stores):
    config = config_of("best_fit", STAGES)
    runs = []
    for workers in (0, 1, 4):
        with loader(stores, config.model_copy(update={"workers": workers})) as batches:
            runs.append([next(batches) for _ in range(9)])
    for batch in zip(*runs):
        assert all((a == b).all() for one in batch[1:] for a, b in zip(one[:3], batch[0][:3]))


def test_another_mixture_does_not_take_the_position(stores):
    with loader(stores, config_of(stages=STAGES)) as batches:
        state = batches.get_state()
    for change, words in (
        ({"weights": (1, 1, 1)}, "saved with weights"),
        ({"epochs": (None, 1, None)}, "saved with max_epochs"),
        ({"stages": ()}, "saved with stages"),
    ):
        with pytest.raises(UserError, match=words):
            loader(stores, config_of(**{"stages": STAGES, **change}), state=state)


def test_a_late_position_is_as_fast_as_an_early_one(store_of):
    """A hundred epochs of a hundred thousand documents; nothing is read or planned again."""
    store = store_of([3] * 100_000)
    options = {"packing": {"name": "best_fit", "buffer": 2000}, "workers": 0}
    config = DataConfig.model_validate(options)

    def work(state):
        """Calls of Python functions in this thread, which does it all, and the last position."""
        profile = cProfile.Profile()
        with profile, loader(store, config, state=state) as batches:
            for _ in range(12):  # the buffer is filled up again
                next(batches)
            state = json.loads(json.dumps(batches.get_state()))
        return pstats.Stats(profile).total_calls, state

    early, state = work(None)
    assert len(json.dumps(state)) < 50_000
    source = state["position"]["sources"]["train"]
    source["drawn"] += 10_000_000
    state["position"]["step"] += 1_000_000
    late, after = work(state)
    assert after["position"]["sources"]["train"]["drawn"] > source["drawn"]
    assert late < 1.5 * early


# ---- configuration and preparation -----------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": [{}, {}]}, "stage 1 of 2 needs tokens: it is not the last"),
        ({"stages": [{"weights": {"wiki": 1}}]}, "'wiki', but the sources are web, books, code"),
        ({"stages": [{"weights": {"web": 0}}]}, "stage 1 gives every source the weight 0"),
        ({"stages": [{"weights": {"web": -1}}]}, "gives 'web' the weight -1.0, below 0"),
        ({"weights": (0, 0, 0)}, "every source has the weight 0"),
    ],
)
def test_stages_that_cannot_be_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        config_of(**change)


def test_a_mixture_is_written_in_yaml_and_overridden_by_name(tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text(
        "data:\n  train:\n    name: mixture\n    sources:\n"
        "      shakespeare: {source: {name: text}}\n"
        "      web: {source: {name: jsonl, path: web.jsonl}, weight: 2}\n"
        "  stages: [{tokens: 1000, weights: {web: 1}}, {}]\n"
    )
    config = load_config(path, ["data.train.sources.web.weight=3"])
    sources = config.data.train.sources
    assert sources["shakespeare"].source.name == "text" and sources["web"].weight == 3
    assert config.data.stages[0].weights == {"web": 1.0}
    with pytest.raises(UserError, match=r"data.train.sources.web.wieght: no such field; did you"):
        load_config(path, ["data.train.sources.web.wieght=3"])
    again = validate(Config, config.model_dump(mode="json"))
    assert again == config


def test_each_source_has_its_store_and_is_prepared_once(tmp_path):
    for name, text in (("a", "aaaa bbbb "), ("b", "cccc dddd "), ("c", "eeee ffff ")):
        (tmp_path / f"{name}.txt").write_text("".join(f"{text * 9}{i}\n" for i in range(60)))
    stages = []
    note = lambda stage, done, total: stages.append(stage)

    def prepared(*names, **more):
        source = lambda name: {"name": "text", "path": f"{tmp_path}/{name}.txt", "document": "line"}
        train = {"name": "mixture", "sources": {name: {"source": source(name)} for name in names}}
        fields = {"train": train, "cache_dir": str(tmp_path), "tokenizer": {"name": "bytes"}}
        fields["validation"] = {"name": "documents", "fraction": 0.2}
        stages.clear()
        return prepare(DataConfig.model_validate(fields | more), progress=note)

    two = prepared("a", "b")
    assert {"a: tokens", "b: tokens"} <= set(stages)
    three = prepared("a", "b", "c")
    assert {stage[0] for stage in stages} == {"c"}
    stores = stores_of(three.train)
    assert list(stores) == ["a", "b", "c"] and stores["a"].lengths.sum() == stores["a"].tokens
    # The held-out documents of all sources, one after the other.
    held_out = three.validation
    assert held_out.documents > two.validation.documents > 0
    texts = [
        three.tokenizer.decode(held_out.read(i, 0, int(n))) for i, n in enumerate(held_out.lengths)
    ]
    assert [text[0] for text in texts] == sorted(text[0] for text in texts)
    assert {text[0] for text in texts} == {"a", "c", "e"}
    assert held_out.documents + sum(store.documents for store in stores.values()) == 180
    # A tokenizer that is trained has seen every source.
    trained = {"name": "sentencepiece", "vocab_size": 300}
    learned = prepared("a", "c", tokenizer=trained, validation={"name": "none"})
    assert learned.validation is None
    assert all(len(learned.tokenizer.encode(word)) < 4 for word in ("aaaa", "eeee"))
    assert prepared("a", "c", tokenizer=trained, validation={"name": "none"}) and not stages
    own = {"name": "source", "source": {"name": "text", "path": f"{tmp_path}/b.txt"}}
    assert prepared("a", "c", validation=own).validation.documents == 1
