"""Preferences: their shapes, what is learned of them, and pairs side by side in rows."""

import json

import numpy as np
import pytest
from chat_cases import PLAIN, SPECIALS, TEMPLATES, make_tokenizer, said, talk_config

from jaxtrain.data import DataConfig, fit_stores, prepare, train_batches, validation_pairs
from jaxtrain.data.batches.loader import stores_of
from jaxtrain.data.chat.chat import make_chat
from jaxtrain.data.preference.pairs import iterate_pairs, most_pairs
from jaxtrain.data.preference.preferences import encode_preferences, preferences
from jaxtrain.data.records import (
    DESIRABLE,
    PAIR,
    UNDESIRABLE,
    Conversation,
    KTOExample,
    PreferencePair,
)
from jaxtrain.data.show import show_rows
from jaxtrain.data.tokenizer.tokenizer import huggingface_tokenizer
from jaxtrain.settings import UserError

TOKENIZER = huggingface_tokenizer(make_tokenizer().encode())
ASKED, ANSWERED = [dict(role="user", content="q")], [dict(role="assistant", content="a")]
OTHER = [dict(role="assistant", content="b")]


def read(*records):
    text = "\n".join(json.dumps(record) for record in records)
    return [one for one, _ in preferences(text, "f", 1)]


# ---- shapes ------------------------------------------------------------------------------------


def test_all_shapes_of_pairs_become_two_conversations():
    expected = PreferencePair(ASKED, ANSWERED, OTHER)
    assert expected.texts == (ASKED + ANSWERED, ASKED + OTHER)
    for record in (
        {"prompt": "q", "chosen": "a", "rejected": "b", "score": 3},
        {"question": "q", "chosen": "a", "rejected": "b"},
        {"prompt": ASKED, "chosen": ANSWERED, "rejected": OTHER},
        {"prompt": "q", "chosen": ASKED + ANSWERED, "rejected": ASKED + OTHER},
        {"chosen": ASKED + ANSWERED, "rejected": ASKED + OTHER},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        {"messages": ASKED, "chosen": ANSWERED[0], "rejected": OTHER[0]},
        {"instruction": "q", "input": "", "output": "a", "chosen": "a", "rejected": "b"},
    ):
        assert read(record) == [expected]
    system = {"system": "s", "prompt": "q", "chosen": "a", "rejected": "b"}
    (one,) = read(system)
    assert len(one.prompt) == 2 and one.prompt[0] == {"role": "system", "content": "s"}
    (one,) = read({"instruction": "q", "input": "i", "chosen": "a", "rejected": "b"})
    assert one.prompt[0]["content"] == "q\n\ni"
    longer = said("q", "a", "r", "c")
    (one,) = read({"chosen": longer, "rejected": [*longer[:3], *OTHER]})
    assert len(one.prompt) == 3
    (one,) = read({"chosen": longer, "rejected": longer})  # nothing to learn, and no harm
    assert len(one.prompt) == 3


def test_a_judged_answer_has_the_next_one_beside_it():
    lines = [{"prompt": f"q{i}", "completion": f"a{i}", "label": i != 1} for i in range(3)]
    found = read(*lines)
    told = [{"messages": said(f"q{i}", f"a{i}"), "label": i != 1} for i in range(3)]
    assert read(*told) == found
    assert [one.label for one in found] == [True, False, True]
    for i, one in enumerate(found):
        assert isinstance(one, KTOExample)
        first, second = one.texts
        assert first[:1] == second[:1] == [{"role": "user", "content": f"q{i}"}]
        assert (first[1]["content"], second[1]["content"]) == (f"a{i}", f"a{(i + 1) % 3}")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "x"}, "f line 1 is no preference: expected prompt .*; it has text"),
        (3, "f line 1 is no preference: .*; it has int"),
        ({"chosen": "a", "rejected": "b"}, "is no preference: .*; it has chosen, rejected"),
        ({"prompt": "q", "chosen": "a"}, "is no preference: .*; it has prompt, chosen"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "f line 1, prompt is int, not a string"),
        ({"prompt": "q", "chosen": [], "rejected": "b"}, "f line 1, chosen is list, not a string"),
        ({"prompt": "q", "chosen": "a", "rejected": ASKED}, "rejected does not end with an answer"),
        ({"prompt": "q", "chosen": "a", "rejected": ASKED + OTHER}, "one of chosen and rejected"),
        ({"chosen": said("x", "a"), "rejected": said("y", "a")}, "do not begin with the same"),
        ({"prompt": "q", "chosen": "\ud800", "rejected": "b"}, "a character that is not Unicode"),
        ({"completion": "a", "label": True}, "is no preference"),
        ({"messages": ASKED, "label": True}, "is no preference: .* messages that end with an ans"),
        ({"messages": ANSWERED, "label": True}, "is no preference"),
        ({"prompt": "q", "label": True}, "is no preference"),
        ({"prompt": "q", "completion": "a", "label": "good"}, "the label is 'good'; it must be"),
        ({"prompt": "q", "completion": "a", "label": True}, "compared with the next one"),
    ],
)  # fmt: skip
def test_what_is_no_preference_is_named(record, reason):
    with pytest.raises(UserError, match=reason):
        read(record)


# ---- texts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_the_last_answers_are_learned(name):
    """Not those in the prompt, whatever the template; texts are those of conversations."""
    chat = make_chat(TEMPLATES[name], SPECIALS.get(name, PLAIN), TOKENIZER)
    before = said("q", "early", "r")
    record = {"prompt": before, "chosen": "the good", "rejected": "no"}
    ((pair, where),) = preferences(json.dumps(record), "f", 1)
    assert where == "f line 1"
    ((first, second),) = encode_preferences(chat, [pair])
    for document, answer in ((first, "the good"), (second, "no")):
        learned = TOKENIZER.decode(document.ids[document.marks])
        assert learned.strip().endswith(answer) and "early" not in learned and "r" not in learned
        assert document.ids[document.marks][-1] == chat.end
        messages = [*before, dict(role="assistant", content=answer)]
        whole = chat.documents([Conversation(messages)])[0][-1]
        np.testing.assert_array_equal(document.ids, whole.ids)
    assert pair.chat_text() == "q\n\nearly\n\nr\n\nthe good\n\nno"


# ---- rows --------------------------------------------------------------------------------------


def config_of(folder, records, **changes):
    source = {"name": "preference", "template": TEMPLATES["mistral"]}
    return talk_config(folder, records, **source | changes)


def pair(i, size=3):
    return {"prompt": f"q{i}", "chosen": f"{i}" * size, "rejected": "no" * size}


def test_rows_hold_whole_pairs_with_their_references(tmp_path):
    too_long = pair(0, 60)
    config = config_of(tmp_path, [too_long, *(pair(i, 2 + i % 3) for i in range(1, 9))])
    prepared = prepare(config)
    assert not isinstance(prepared.train, dict)
    references = {"train": np.arange(18, dtype=np.float32).reshape(9, 2)}
    options = dict(config=config, batch_size=4, sequence_length=64, references=references)
    seen = set()
    with train_batches(prepared.train, **options) as batches:
        assert batches.conversations["train"]["preferences"] == 9
        for _ in range(6):
            batch, position = next(batches), batches.get_state()
            for row in range(4):
                there = np.flatnonzero(batch.kto_labels_BP[row] >= 0)
                assert len(there) >= 1 and batch.segments_BT[row].max() == 2 * len(there)
                for slot in there:
                    number = int(batch.references_BP2[row, slot, 0]) // 2
                    seen.add(number)
                    assert batch.references_BP2[row, slot, 1] == 2 * number + 1
                    for i in (0, 1):
                        own = batch.segments_BT[row] == 2 * slot + i + 1
                        np.testing.assert_array_equal(
                            batch.positions_BT[row][own], range(own.sum())
                        )
                        size = 2 + number % 3
                        answer = f"{number}" * size if i == 0 else "no" * size
                        learned = own & (batch.weights_BT[row] > 0)
                        words = TOKENIZER.decode(batch.targets_BT[row][learned])
                        assert words.strip() == answer
                        text = TOKENIZER.decode(batch.tokens_BT[row][own])
                        assert f"q{number}" in text
        after = next(batches)
    assert seen == set(range(1, 9))
    with train_batches(prepared.train, **options, state=position) as again:
        for a, b in zip(next(again), after):
            np.testing.assert_array_equal(a, b)
    both = [
        next(train_batches(prepared.train, **options, process_index=i, process_count=2))
        for i in (0, 1)
    ]
    with train_batches(prepared.train, **options) as whole:
        for one, *parts in zip(next(whole), *both):
            np.testing.assert_array_equal(one, np.concatenate(parts))


@pytest.mark.parametrize("kto", [False, True])
def test_labels_are_a_column_of_the_store(tmp_path, kto):
    """The store has the texts alone; a label is no document, and no length."""
    lines = [{"prompt": f"q{i}", "completion": f"a{i}", "label": i != 1} for i in range(4)]
    config = config_of(tmp_path, lines if kto else [pair(i) for i in range(4)])
    store = prepare(config).train
    assert store.documents == 8 and store.lengths.min() > 2
    if kto:
        assert store.labels.tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    else:
        assert store.labels is None
    views, _ = fit_stores(stores_of(store), config, 64)
    expected = [DESIRABLE, UNDESIRABLE, DESIRABLE, DESIRABLE] if kto else [PAIR] * 4
    assert views["train"].pairs.kto_labels_P.tolist() == expected


def test_every_pair_comes_once(tmp_path):
    config = config_of(tmp_path, [pair(i, 2 + i % 3) for i in range(9)])
    views, _ = fit_stores(stores_of(prepare(config).train), config, 64)
    found = [
        list(iterate_pairs(views["train"], "train", batch_size=2, sequence_length=64, share=share))
        for share in (range(2), range(1), range(1, 2))
    ]
    numbers = [number for _, rows in found[0] for row in rows for number in row]
    assert sorted(numbers) == list(range(9))
    for whole, first, second in zip(*found):
        assert whole[1] == first[1] == second[1]
        assert [len(row) for row in whole[1]] == (whole[0].kto_labels_BP >= 0).sum(1).tolist()
        for a, b, c in zip(whole[0], first[0], second[0]):
            np.testing.assert_array_equal(a, np.concatenate([b, c]))


@pytest.mark.parametrize("rule", ["drop", "truncate"])
def test_long_pairs_are_dropped_or_cut_and_counted(tmp_path, rule):
    long, asked = pair(1, 40), pair(2) | {"prompt": "x" * 200}
    config = config_of(tmp_path, [pair(0), long, asked, pair(3)], too_long=rule)
    store = prepare(config).train
    views, counted = fit_stores(stores_of(store), config, 64)
    left = {"drop": [0, 3], "truncate": [0, 1, 3]}[rule]
    pairs = views["train"].pairs
    assert pairs is not None and pairs.numbers_P.tolist() == left
    assert counted["train"] == {
        "preferences": 4,
        "truncated": int(rule == "truncate"),
        "dropped": 2 * (rule == "drop"),
        "unanswered": int(rule == "truncate"),
        "refused": 0,
    }
    for batch, numbers in iterate_pairs(
        views["train"], "train", batch_size=1, sequence_length=64, share=range(1)
    ):
        assert (batch.segments_BT > 0).sum() <= 64 and batch.weights_BT.any()
        if numbers == [[1]]:
            used = [(batch.segments_BT == i).sum() for i in (1, 2)]
            assert sum(used) == 64 and abs(used[0] - used[1]) <= 1
    with pytest.raises(UserError, match="none of the 4 preferences is left: .* too_long is "):
        fit_stores(stores_of(store), config, 8)
    with pytest.raises(UserError, match="data.validation: none of the 4 preferences is left"):
        validation_pairs(store, config, 8)
    assert most_pairs(64) == 16


def test_show_has_both_texts(tmp_path):
    config = config_of(tmp_path, [pair(i) for i in range(3)])
    lines = "\n".join(show_rows(prepare(config), config, batch_size=1, sequence_length=128))
    assert "{+ 000</s>+}" in lines and "{+ nonono</s>+}" in lines
    assert "3 preferences: 0 lose their end" in lines


def test_preferences_are_not_mixed_with_other_text(tmp_path):
    tree = config_of(tmp_path, [pair(0)]).model_dump()
    both = {"a": {"source": tree["train"]}, "b": {"source": {"name": "text"}}}
    for changes, reason in (
        ({"train": {"name": "mixture", "sources": both}}, "not mixed with other sources"),
        ({"packing": {"name": "concat"}}, "set packing.name: padded"),
        ({"augment": {"name": "masking"}}, "are not augmented"),
        ({"stages": [{"tokens": None}]}, "have one stage"),
        (
            {"validation": {"name": "source", "source": {"name": "text"}}},
            "preferences need preferences",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            DataConfig.model_validate(tree | changes)
